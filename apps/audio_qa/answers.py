"""Answers: the output file of a run, one JSON object a line, and what run it belongs to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from oscar_mm.apps.audio_qa.rows import Row
from oscar_mm.errors import InputError
from oscar_mm.whole_file import whole_file

RUN = ".run.json"
"""Suffix of the file beside the answers that holds the fingerprint."""


class Answers:
    """Appends rows to a file, each flushed to the disk before the next.

    Whenever the process ends, the file holds all rows that were written; a line that was cut off
    is taken out when the run is resumed. Only one process at a time writes to a file.

    Args:
        path: JSONL file; its folder is made.
        fingerprint: of the run, what is known of it.
        overwrite: begin anew; else go on with what is there.

    Attributes:
        done: the rows that are there, by id.

    Raises:
        InputError: the file cannot be written, is another run's (the difference is named), or is
            being written just now.
    """

    def __init__(
        self, path: str | Path, fingerprint: Mapping[str, Any], *, overwrite: bool = False
    ) -> None:
        self.path, self._run = Path(path), Path(f"{path}{RUN}")
        self.done: dict[str, dict[str, Any]] = {}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written ({error.strerror})") from None
        try:
            _lock(self._file, self.path)
            if overwrite:
                os.ftruncate(self._file, 0)
                self._run.unlink(missing_ok=True)
            if os.fstat(self._file).st_size:
                self._check(fingerprint)
                self.done = {row["id"]: row for row in self._rows()}
            else:
                # Whatever run that was, nothing of it is left.
                self._run.unlink(missing_ok=True)
        except BaseException:
            os.close(self._file)
            raise

    def confirm(self, fingerprint: Mapping[str, Any]) -> None:
        """The run's whole fingerprint, before the first row is written.

        Raises:
            InputError: the rows that are there are of another one.
        """
        if self._run.is_file():
            self._check(fingerprint)
        else:
            with whole_file(self._run) as part:
                part.write_text(json.dumps(fingerprint, indent=1) + "\n", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row and wait until it is on the disk."""
        self._append(row)
        os.fsync(self._file)
        self.done[row["id"]] = dict(row)

    def check_questions(self, rows: Iterable[Row]) -> None:
        """Refuse to go on if a row that was answered asks something else now.

        Raises:
            InputError: names it.
        """
        for row in rows:
            there = self.done.get(row.id)
            if there is not None and there["digest"] != row.digest:
                raise InputError(
                    f"{self.path}: row {row.id!r} was answered, but to another question than "
                    f"{row.where} asks: give another --out, or --overwrite"
                )

    def drop_failed(self) -> None:
        """Take the rows with an error out, so that they are asked again."""
        kept = {row_id: row for row_id, row in self.done.items() if row["error"] is None}
        if len(kept) == len(self.done):
            return
        lines = "".join(_line(row) for row in kept.values())
        # In place of the old file in one go; the lock goes over to the new one.
        with whole_file(self.path) as part:
            part.write_text(lines, encoding="utf-8")
        os.close(self._file)
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND)
        _lock(self._file, self.path)
        self.done = kept

    def close(self) -> None:
        """Give up the file."""
        os.close(self._file)

    def _append(self, row: Mapping[str, Any]) -> None:
        line = _line(row).encode()
        while line:
            line = line[os.write(self._file, line) :]

    def _check(self, fingerprint: Mapping[str, Any]) -> None:
        refused = f"{self.path}: give another --out, or --overwrite; it "
        try:
            there = json.loads(self._run.read_text())
        except (OSError, ValueError):
            raise InputError(f"{refused}is not of audio-qa: {self._run.name} is missing") from None
        wanted = json.loads(json.dumps(fingerprint))
        names = [name for name in wanted if wanted[name] is not None or name != "model"]
        others = [
            f"{name} was {there.get(name)!r} and is {wanted[name]!r}"
            for name in names
            if there.get(name) != wanted[name]
        ]
        if others:
            raise InputError(f"{refused}belongs to another run: {', '.join(others)}")

    def _rows(self) -> list[dict[str, Any]]:
        """What is there; a last line that was cut off is taken out."""
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        os.ftruncate(self._file, whole)
        rows = []
        for number, line in enumerate(content[:whole].splitlines(), 1):
            try:
                row = json.loads(line)
                row["id"], row["error"], row["digest"]
            except (ValueError, LookupError, TypeError):
                raise InputError(f"{self.path}, line {number}: is no row of audio-qa") from None
            rows.append(row)
        return rows


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _lock(file: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{path}: another process writes to it") from None
