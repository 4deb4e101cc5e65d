"""What commands write: pieces of an answer, and warnings as lines of the command."""

import sys
import unicodedata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def write(piece: str) -> None:
    """Part of an answer on stdout, at once."""
    print(harmless(piece) if sys.stdout.isatty() else piece, end="", flush=True)


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
