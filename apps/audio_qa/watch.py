"""Watch: the progress bar of a run, on stderr where somebody looks at it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from oscar_mm.sizes import format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


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
