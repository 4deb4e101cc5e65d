"""Record: results of a benchmark with machine, time and command line, and tables to print them."""

from __future__ import annotations

import argparse
import json
import logging
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from oscar_mm.apps.machine import device_name as device_name
from oscar_mm.apps.machine import versions
from oscar_mm.errors import InputError
from oscar_mm.files import whole_file

Row = dict[str, Any]
RESULTS = Path("benchmarks") / "results"
_PLAIN_WIDTH = 150
"""Width, in columns, of output that does not go to a terminal; rows must not wrap in a log."""


def now() -> str:
    """Return the current date and time in UTC, with a precision of one second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass
class Record:
    """Result of one benchmark on one machine, stored as JSON.

    Attributes:
        benchmark: name of the module in ``benchmarks``.
        command: command line that repeats the run.
        device: name of the processor or GPU.
        rows: list with one dict for each line of the table.
        notes: explanations that a reader needs to interpret the rows.
        extra: results that apply to the full run, such as the copy bandwidth.
    """

    benchmark: str
    command: str
    device: str
    rows: list[Row]
    notes: list[str]
    extra: dict[str, Any] = field(default_factory=dict)
    date: str = field(default_factory=now)
    versions: dict[str, str] = field(default_factory=versions)

    def path(self, folder: Path) -> Path:
        """Return the path of the record's file, ``<benchmark>-<device>.json``, in a folder."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")
        return folder / f"{self.benchmark}-{slug}.json"

    def write(self, folder: Path) -> Path:
        """Write the record's file, and return its path.

        The file replaces the one of an earlier run on the same kind of machine in one step, so an
        interruption leaves a complete file.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = self.path(folder)
        with whole_file(path) as part:
            part.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return path

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read a record from a file that ``write`` has written."""
        return cls(**json.loads(path.read_text()))

    def earlier(self, folder: Path) -> Record | None:
        """Return the record of an earlier run on the same kind of machine, or None."""
        path = self.path(folder)
        return Record.load(path) if path.is_file() else None

    def continuing(self, earlier: Record) -> Record:
        """Return this record, preceded by the command and the rows of an earlier record."""
        return replace(
            self,
            command=f"{earlier.command}; {self.command}",
            rows=[*earlier.rows, *self.rows],
        )


def merge_rows(
    rows: Iterable[Row],
    new: Iterable[Row],
    cell: Sequence[str],
    replaces: Callable[[Row, Row], bool],
) -> list[Row]:
    """Merge old and new rows, so that one row remains for each cell.

    Args:
        rows: rows of an earlier run.
        new: rows to add.
        cell: fields that identify a cell.
        replaces: function that returns whether a new row (first argument) replaces an old row
            (second argument) of the same cell.
    """
    cells = {tuple(row[name] for name in cell): row for row in rows}
    for row in new:
        place = tuple(row[name] for name in cell)
        if place not in cells or replaces(row, cells[place]):
            cells[place] = row
    return list(cells.values())


def command(module: str, arguments: Sequence[str]) -> str:
    """Return the command line of a run without the options whose folders differ by machine."""
    rest = list(arguments)
    for option in ("--out", "--packages"):
        if option in rest:
            place = rest.index(option)
            del rest[place : place + 2]
    return shlex.join(["python", "-m", module, *rest])


def exit_code(module: str, arguments: Sequence[str], run: Callable[[str], int | None]) -> int:
    """Run a benchmark and return its exit code; if its input is invalid, print why and return 2.

    Args:
        module: name of the benchmark, like "benchmarks.language".
        arguments: command line after the name.
        run: function that takes the command line to record and returns an exit code, None for 0.
    """
    try:
        return run(command(module, arguments)) or 0
    except InputError as error:
        print(f"{module}: {error}", file=sys.stderr)
        return 2


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Create the command-line parser of a benchmark, with the option ``--out``."""
    options = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    options.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON files")
    return options


def models_of(text: str, known: Collection[str]) -> list[str] | None:
    """Return the models in a comma-separated option.

    If a model is unknown, an error is printed to stderr and None is returned.
    """
    names = text.split(",")
    if unknown := set(names) - set(known):
        choices = f"choose from {', '.join(known)}"
        print(f"no such model: {', '.join(sorted(unknown))}; {choices}", file=sys.stderr)
        return None
    return names


def device_of(benchmark: str, *, tiny: bool) -> torch.device | None:
    """Return the device of a benchmark: a GPU for full-size models, any device for tiny models.

    If a GPU is needed but there is none, an error is printed to stderr and None is returned.
    """
    on_gpu = torch.cuda.is_available()
    if not (tiny or on_gpu):
        print(f"benchmarks.{benchmark} needs a CUDA device; --tiny runs anywhere", file=sys.stderr)
        return None
    return torch.device("cuda" if on_gpu else "cpu")


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table whose first column contains text and whose other columns contain numbers."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console().print(table)


def console() -> Console:
    """Return the console to which tables are printed."""
    return Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)


def finish(record: Record, folder: Path) -> None:
    """Write a record to a folder; print its notes and the path of the file."""
    for note in record.notes:
        print(f"- {note}")
    print(f"{record.device}, {record.date}: {record.write(folder)}\n")


class WarningLog(logging.Handler):
    """Handler that collects the library's warnings, such as those about missing kernels."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger("oscar_mm").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Add the message of a log record."""
        self.messages.append(record.getMessage())

    def close(self) -> None:
        """Stop collecting warnings."""
        logging.getLogger("oscar_mm").removeHandler(self)
        super().close()
