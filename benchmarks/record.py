"""Record: what a benchmark measured, where, when and with what command; tables on the terminal."""

from __future__ import annotations

import argparse
import json
import logging
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import oscar_mm

RESULTS = Path("benchmarks") / "results"
_CPU_INFO = Path("/proc/cpuinfo")
_PLAIN_WIDTH = 150
"""Columns where the output is no terminal: rows must not wrap in a log."""


def device_name(device: str) -> str:
    """Name of the processor that did the work: "cpu" or "cuda"."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    if _CPU_INFO.is_file():
        found = re.search(r"^model name\s*:\s*(.+)$", _CPU_INFO.read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    found = {
        "oscar_mm": oscar_mm.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def now() -> str:
    """Date and time of a measurement."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass
class Record:
    """Result of one benchmark on one machine; the file is this as JSON.

    Attributes:
        benchmark: module name below ``benchmarks``.
        command: repeats the run.
        device: name of the processor or GPU.
        rows: one dict per line of the table.
        notes: what a reader must know to read the rows.
        extra: numbers of the whole run, such as the copy bandwidth.
    """

    benchmark: str
    command: str
    device: str
    rows: list[dict[str, Any]]
    notes: list[str]
    extra: dict[str, Any] = field(default_factory=dict)
    date: str = field(default_factory=now)
    versions: dict[str, str] = field(default_factory=versions)

    def path(self, folder: Path) -> Path:
        """``<benchmark>-<device>.json``."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")
        return folder / f"{self.benchmark}-{slug}.json"

    def write(self, folder: Path) -> Path:
        """Write the file, replacing an earlier run on such a machine."""
        folder.mkdir(parents=True, exist_ok=True)
        path = self.path(folder)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return path

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read what ``write`` wrote."""
        return cls(**json.loads(path.read_text()))


def command(module: str, arguments: Sequence[str]) -> str:
    """The command line of a run, without ``--out``: that names a folder of one machine."""
    kept = list(arguments)
    if "--out" in kept:
        place = kept.index("--out")
        del kept[place : place + 2]
    return shlex.join(["python", "-m", module, *kept])


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Command line of a benchmark, with ``--out``."""
    made = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    made.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON files")
    return made


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; the first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console().print(table)


def console() -> Console:
    """Where tables go."""
    return Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)


def finish(record: Record, folder: Path) -> None:
    """Print the notes and the file's name, and write it."""
    for note in record.notes:
        print(f"- {note}")
    print(f"{record.device}, {record.date}: {record.write(folder)}\n")


class Said(logging.Handler):
    """Keeps what the library warns of, such as operations that are not done by their kernels."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger("oscar_mm").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def close(self) -> None:
        logging.getLogger("oscar_mm").removeHandler(self)
        super().close()
