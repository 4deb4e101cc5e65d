"""What commands write: an answer, its reasoning, and warnings as lines of the command."""

import sys
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


def written(pieces: Iterable[str]) -> Iterator[str]:
    """Write an answer as it comes: text on stdout, a model's reasoning dimly on stderr.

    Args:
        pieces: as ``AnswerStream.with_reasoning`` gives them.

    Returns:
        The pieces, each once it is written.
    """
    from oscar_mm.generation.reasoning import Reasoning

    reasons = False
    for piece in pieces:
        if isinstance(piece, Reasoning):
            _write_dimly(piece)
        else:
            if reasons:
                print("\n", file=sys.stderr, flush=True)
            print(harmless(piece) if sys.stdout.isatty() else piece, end="", flush=True)
        reasons = isinstance(piece, Reasoning)
        yield piece
    if reasons:
        print(file=sys.stderr, flush=True)


def _write_dimly(piece: str) -> None:
    on_terminal = sys.stderr.isatty()
    shown = f"\033[2m{harmless(piece)}\033[0m" if on_terminal else piece
    print(shown, end="", file=sys.stderr, flush=True)


def harmless(text: str) -> str:
    """Without the control characters by which text in a picture could command a terminal."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}"
        if unicodedata.category(one) == "Cc" and one not in "\n\t"
        else one
        for one in text
    )


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Warnings inside are one line each on stderr."""
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        yield


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    print("oscar-mm: warning:", message, file=sys.stderr)
