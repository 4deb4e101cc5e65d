"""Lines that a user types: Tab completion of commands and paths, history, quiet while one waits."""

import glob
import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


def typed_lines(commands: Iterable[str]) -> Iterator[str]:
    """Yield lines of the input until its end; on a terminal Ctrl-C empties the line.

    Args:
        commands: words that a line may begin with, which Tab completes.
    """
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    # Python on Windows has no readline: its console edits lines itself.
    with suppress(ImportError):
        _complete_by_tab(sorted(commands))
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()


def _complete_by_tab(commands: list[str]) -> None:
    import readline  # also keeps the history

    def complete(line: str, number: int) -> str | None:
        found = completions(line, commands)
        return found[number] if number < len(found) else None

    readline.set_completer(complete)
    # The whole line is one word, so that the completer sees where a path begins.
    readline.set_completer_delims("")
    libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")


def completions(line: str, commands: Iterable[str]) -> list[str]:
    """The lines that a line may become: a command, or a command's last path with more letters."""
    if not line.startswith("/"):
        return []
    command, *words = line.split(" ")
    if not words:
        return [f"{name} " for name in commands if name.startswith(line)]
    # Names may have spaces: the longest end of the line that a path begins with.
    for first in range(len(words)):
        path = " ".join(words[first:]).lstrip("'\"").replace("\\ ", " ")
        before = " ".join([command, *words[:first]])
        if found := sorted(glob.glob(glob.escape(os.path.expanduser(path)) + "*")):
            return [
                f"{before} {name}/" if os.path.isdir(name) else f"{before} {shlex.quote(name)}"
                for name in found
            ]
    return []


def paths_of(text: str) -> list[str]:
    """The paths in the rest of a line: quoted ones, several, and those of a pattern (*.png).

    A file whose name has spaces needs no quotes where it is alone.
    """
    text = text.strip()
    if os.path.isfile(os.path.expanduser(text)):
        return [text]
    try:
        words = shlex.split(text)
    except ValueError:  # an apostrophe in a name
        words = [text]
    paths = []
    for word in words:
        matches = [] if os.path.exists(word) else sorted(glob.glob(os.path.expanduser(word)))
        paths += matches or [word]
    return paths


@contextmanager
def no_echo() -> Iterator[None]:
    """Keep what is typed inside off the screen; the next line that is read begins with it."""
    if not sys.stdin.isatty():
        yield
        return
    try:
        import termios
    except ImportError:  # Windows
        yield
        return
    terminal = sys.stdin.fileno()
    before: list[Any] = termios.tcgetattr(terminal)
    silent = list(before)
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
