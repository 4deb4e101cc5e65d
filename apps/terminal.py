"""Terminal: print answers, reasoning, warnings and progress bars, and read lines of input."""

from __future__ import annotations

import glob
import os
import shlex
import sys
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from oscar_mm.apps.model_card import ModelCard
from oscar_mm.models import BUNDLED, description
from oscar_mm.sizes import format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from oscar_mm.cache.memory import MemoryReport
    from oscar_mm.pipelines.pipeline import Pipeline

_GAIN = 1.05
"""Minimum compression ratio at which messages call a cache smaller than in 16-bit precision."""


def model_description(model: str, pipe: Pipeline) -> str:
    """Describe a model in one line: its name, size and supported modalities."""
    if model in BUNDLED:
        return description(model)
    count = pipe.family.outer_model.num_parameters()
    size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"
    reads = ", ".join(["text", *sorted(modality.label for modality in pipe.family.reads)])
    return f"{model}, {pipe.family.name}, {size} parameters; it supports {reads}"


def print_hint(pipe: Pipeline, question: str) -> None:
    """Print a hint to stderr if a bundled model was not trained on a question."""
    if hint := ModelCard.of(pipe).hint(question):
        print(hint, file=sys.stderr, flush=True)


def headline(kv_bytes: int, bf16_bytes: int) -> str:
    """Describe the size of a cache in one line that starts with the compression ratio."""
    stored, plain = format_bytes(kv_bytes), format_bytes(bf16_bytes)
    if bf16_bytes < _GAIN * kv_bytes:
        return f"{stored} stored, against {plain} in 16-bit: only longer conversations save memory"
    return f"{bf16_bytes / kv_bytes:.1f}x smaller than 16-bit: {stored} instead of {plain}"


def memory_text(report: MemoryReport) -> str:
    """Format a memory report for the terminal: a line about the memory saved, then the table."""
    if any(report.by_kind.get(kind) for kind in ("codes", "scales")):
        return f"{headline(report.kv_bytes, report.bf16_bytes)}\n{report}"
    more = report.kv_bytes - report.bf16_bytes
    if more <= 0:
        return str(report)
    names = {"marks": "marks", "unused": "free slots"}
    others = ["tables", *(name for kind, name in names.items() if report.by_kind.get(kind))]
    listed = ", ".join(others[:-1]) + " and " * (len(others) > 1) + others[-1]
    return f"No token is packed; {listed} take {format_bytes(more)}.\n{report}"


def print_pieces(pieces: Iterable[str]) -> Iterator[str]:
    """Print an answer while it is generated, with text on stdout and dimmed reasoning on stderr.

    Args:
        pieces: pieces from ``AnswerStream.with_reasoning``.

    Yields:
        Each piece, after it has been printed.
    """
    from oscar_mm.engine.answer import Reasoning

    reasons = False
    for piece in pieces:
        if isinstance(piece, Reasoning):
            _print_dimly(piece)
        else:
            if reasons:
                print("\n", file=sys.stderr, flush=True)
            print(printable(piece) if sys.stdout.isatty() else piece, end="", flush=True)
        reasons = isinstance(piece, Reasoning)
        yield piece
    if reasons:
        print(file=sys.stderr, flush=True)


def _print_dimly(piece: str) -> None:
    on_terminal = sys.stderr.isatty()
    shown = f"\033[2m{printable(piece)}\033[0m" if on_terminal else piece
    print(shown, end="", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Replace control characters, so that an answer cannot manipulate the terminal."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}"
        if unicodedata.category(character) == "Cc" and character not in "\n\t"
        else character
        for character in text
    )


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Within the block, print warnings as single lines to stderr."""
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        yield


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    print("oscar-mm: warning:", message, file=sys.stderr)


def quiet_transformers() -> None:
    """Silence transformers, except for its progress bar for loading weights on a terminal."""
    from transformers.utils import logging

    # The command line reports errors itself.
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


@contextmanager
def prefill_bar(model: Any) -> Iterator[None]:
    """Within the block, show a progress bar over the decoder layers of the first forward pass.

    The bar is shown only on a terminal.

    Args:
        model: generative transformers model.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress

    # Some language models name their layers differently; no bar is shown for these models.
    layers = getattr(model.get_decoder(), "layers", ())
    if not len(layers):
        yield
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading media and prompt", total=len(layers))

        def advance(*_: object) -> None:
            bar.advance(task)

        hooks = [layer.register_forward_hook(advance) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class RowsBar:
    """Progress bar with rows, hours of audio per hour and KV memory; shown only on a terminal."""

    def __init__(self, shown: tuple[Progress, TaskID] | None) -> None:
        self._shown = shown

    def update(self, rows: int, audio_seconds: float, seconds: float, kv_bytes: int) -> None:
        """Show the progress of this run.

        Args:
            rows: number of rows finished.
            audio_seconds: total length of the recordings read.
            seconds: time since the start of the run.
            kv_bytes: current size of the KV cache in bytes.
        """
        if self._shown is None:
            return
        progress, task = self._shown
        rate = audio_seconds / seconds if seconds else 0.0
        note = f"{rate:.1f} h audio/h, KV {format_bytes(kv_bytes)}"
        progress.update(task, completed=rows, note=note)


@contextmanager
def rows_bar(rows: int) -> Iterator[RowsBar]:
    """Within the block, show a progress bar for ``rows`` rows."""
    if not sys.stderr.isatty():
        yield RowsBar(None)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("rows  {task.fields[note]}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        yield RowsBar((progress, progress.add_task("", total=rows, note="")))


def print_progress(number: int, count: int, what: str) -> None:
    """Show on stderr, if it is a terminal, how many of the things are done."""
    if sys.stderr.isatty():
        end = "\n" if number == count else ""
        print(f"\r{number} of {count} {what}", end=end, file=sys.stderr)


def typed_lines(commands: Iterable[str]) -> Iterator[str]:
    """Yield lines from stdin until stdin ends; on a terminal, Ctrl-C clears the current line.

    Args:
        commands: words at the start of a line that the Tab key completes.
    """
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    # Python on Windows has no readline, but the console itself supports line editing.
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
    import readline  # Also keeps the history.

    def complete(line: str, number: int) -> str | None:
        found = completions(line, commands)
        return found[number] if number < len(found) else None

    readline.set_completer(complete)
    # Without delimiters, the completer gets the full line and can tell where a path starts.
    readline.set_completer_delims("")
    libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")


def completions(line: str, commands: Iterable[str]) -> list[str]:
    """Return the completions of a line: of the command, or of the last path after the command."""
    if not line.startswith("/"):
        return []
    command, *words = line.split(" ")
    if not words:
        return [f"{name} " for name in commands if name.startswith(line)]
    # Names may contain spaces, so use the longest suffix that matches a path.
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
    """Return the paths in a text: plain or quoted paths, and matches of patterns such as *.png.

    A single file name with spaces needs no quotes.
    """
    text = text.strip()
    if os.path.isfile(os.path.expanduser(text)):
        return [text]
    try:
        words = shlex.split(text)
    except ValueError:  # Unbalanced quote, such as an apostrophe in a name.
        words = [text]
    paths = []
    for word in words:
        matches = [] if os.path.exists(word) else sorted(glob.glob(os.path.expanduser(word)))
        paths += matches or [word]
    return paths


@contextmanager
def no_echo() -> Iterator[None]:
    """Within the block, do not echo typed characters; they become the start of the next line."""
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
