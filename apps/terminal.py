"""What commands write to a terminal: answers, reasoning, warnings and progress bars."""

from __future__ import annotations

import sys
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from oscar_mm.sizes import format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def written(pieces: Iterable[str]) -> Iterator[str]:
    """Write an answer as it comes: text on stdout, a model's reasoning dimly on stderr.

    Args:
        pieces: as ``AnswerStream.with_reasoning`` gives them.

    Returns:
        The pieces, each once it is written.
    """
    from oscar_mm.decoding.reasoning import Reasoning

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


def on_loading() -> None:
    """From now on transformers' own bar over the weights; nothing if stderr is no terminal."""
    from transformers.utils import logging

    # stdout and stderr are the command's own: errors are shown by the command line.
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


@contextmanager
def prefill(model: Any) -> Iterator[None]:
    """A bar over the decoder's layers during the first forward pass, on a terminal.

    Args:
        model: a model of transformers that generates.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress

    # Some language models name them otherwise: then there is no bar.
    layers = getattr(model.get_decoder(), "layers", ())
    if not len(layers):
        yield
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading images and prompt", total=len(layers))

        def advance(*_: object) -> None:
            bar.advance(task)

        hooks = [layer.register_forward_hook(advance) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class Bar:
    """Shows rows, hours of audio per hour and KV memory; nothing where stderr is no terminal."""

    def __init__(self, shown: tuple[Progress, TaskID] | None) -> None:
        self._shown = shown

    def update(self, rows: int, audio_seconds: float, seconds: float, kv_bytes: int) -> None:
        """Of this run so far."""
        if self._shown is None:
            return
        progress, task = self._shown
        rate = audio_seconds / seconds if seconds else 0.0
        note = f"{rate:.1f} h audio/h, KV {format_bytes(kv_bytes)}"
        progress.update(task, completed=rows, note=note)


@contextmanager
def bar(rows: int) -> Iterator[Bar]:
    """A bar over so many rows."""
    if not sys.stderr.isatty():
        yield Bar(None)
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
        yield Bar((progress, progress.add_task("", total=rows, note="")))
