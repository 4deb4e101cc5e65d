"""Watch: the progress bar of a run, on stderr where somebody looks at it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from oscar_mm.sizes import format_bytes


class Bar:
    """Shows rows, hours of audio per hour and KV memory; nothing where stderr is no terminal."""

    def __init__(self, progress: object, task: object) -> None:
        self._progress, self._task = progress, task

    def update(self, rows: int, audio_seconds: float, seconds: float, kv_bytes: int) -> None:
        """Of this run so far."""
        if self._progress is None:
            return
        rate = audio_seconds / seconds if seconds else 0.0
        note = f"{rate:.1f} h audio/h, KV {format_bytes(kv_bytes)}"
        self._progress.update(self._task, completed=rows, note=note)


@contextmanager
def bar(rows: int) -> Iterator[Bar]:
    """A bar over so many rows."""
    if not sys.stderr.isatty():
        yield Bar(None, None)
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
        yield Bar(progress, progress.add_task("", total=rows, note=""))
