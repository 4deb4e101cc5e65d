"""The output file of a run, one JSON object a line, and the fingerprint of the run beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from oscar_mm.apps.audio_qa.rows import Row
from oscar_mm.errors import InputError
from oscar_mm.files import whole_file, writing

RUN = ".run.json"
"""Suffix of the file with the fingerprint."""


class AnswerFile:
    """Appends rows to a file, each flushed to the disk before the next.

    Whenever the process ends, the file has all rows that were written; resuming removes an
    incomplete last line. Only one process at a time writes to a file. Half of a surrogate pair, for
    which UTF-8 has no bytes, becomes JSON's escape.

    Args:
        path: JSONL file; its folder is made.
        fingerprint: fingerprint of the run, without the model while that is unknown.
        overwrite: begin anew; else go on with the rows of the file.

    Attributes:
        done: rows of the file, by id.

    Raises:
        InputError: the file cannot be written, is another run's (the message names the
            difference), or another process writes to it.
    """

    def __init__(
        self, path: str | Path, fingerprint: Mapping[str, Any], *, overwrite: bool = False
    ) -> None:
        self.path, self._run = Path(path), Path(f"{path}{RUN}")
        self.done: dict[str, dict[str, Any]] = {}
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and not self.path.is_file():
                raise InputError(f"{self.path}: cannot be written: is no regular file")
            self._file = self._open()
        try:
            if overwrite:
                self._file.truncate(0)
                self._run.unlink(missing_ok=True)
            if os.fstat(self._file.fileno()).st_size:
                self._check(fingerprint)
                self.done = {row["id"]: row for row in self._rows()}
            else:
                # Nothing is left of the run that this describes.
                self._run.unlink(missing_ok=True)
        except BaseException:
            self._file.close()
            raise

    def confirm(self, fingerprint: Mapping[str, Any]) -> None:
        """Check or write the complete fingerprint of the run, before the first row.

        Raises:
            InputError: the rows of the file are another run's, or nothing can be written.
        """
        if self._run.is_file():
            self._check(fingerprint)
        else:
            with writing(self._run), whole_file(self._run) as part:
                part.write_text(json.dumps(fingerprint, indent=1) + "\n", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row and wait until it is on the disk.

        Raises:
            InputError: the disk is full; the file has nothing of the row.
        """
        with writing(self.path):
            self._append(_line(row))
        self.done[row["id"]] = dict(row)

    def resume(self, rows: Iterable[Row], *, retry_failed: bool = False) -> None:
        """Go on with the rows of the file.

        Args:
            rows: the questions of this run.
            retry_failed: remove rows with an error, so that the model answers them again.

        Raises:
            InputError: a row of the file asks something else now; the message names it.
        """
        done = self.done
        if retry_failed:
            done = {row_id: row for row_id, row in done.items() if row["error"] is None}
        for row in rows:
            there = done.get(row.id)
            if there is not None and there["digest"] != row.digest:
                retry = "" if there["error"] is None else "--retry-failed, "
                raise InputError(
                    f"{self.path}: row {row.id!r} was answered, but to another question than "
                    f"{row.where} asks: give {retry}another --out, or --overwrite"
                )
        self._replace(done)

    def sort(self, rows: Iterable[Row]) -> None:
        """Put the file into the order of the questions, rows without a question last.

        Raises:
            InputError: the disk is full; the file does not change.
        """
        in_order = {row.id: self.done[row.id] for row in rows if row.id in self.done}
        self._replace(in_order | self.done)

    def close(self) -> None:
        """Unlock and close the file."""
        self._file.close()

    def _open(self) -> FileIO:
        """Open the file and lock it for this process."""
        file = FileIO(self.path, "ab+")
        try:
            _lock_file(file.fileno(), self.path)
        except BaseException:
            file.close()
            raise
        return file

    def _append(self, line: bytes) -> None:
        before = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except OSError:
            with suppress(OSError):
                self._file.truncate(before)
            raise

    def _replace(self, rows: dict[str, dict[str, Any]]) -> None:
        """Replace the rows of the file at once."""
        if list(rows) == list(self.done):
            return
        with writing(self.path):
            with whole_file(self.path) as part:
                part.write_bytes(b"".join(map(_line, rows.values())))
                self._file.close()  # Windows does not replace an open file.
            self._file = self._open()
        self.done = rows

    def _check(self, fingerprint: Mapping[str, Any]) -> None:
        refused = f"{self.path}: give another --out, or --overwrite; it "
        try:
            there = json.loads(self._run.read_bytes())
        except (OSError, ValueError, RecursionError):
            there = None
        if not isinstance(there, dict):
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
        """Read the rows of the file, and remove an incomplete last line."""
        content = self.path.read_bytes()
        end = content.rfind(b"\n") + 1
        self._file.truncate(end)
        rows = []
        for number, line in enumerate(content[:end].splitlines(), 1):
            try:
                row = json.loads(line)
                hash((row["id"], row["error"], row["digest"]))
            except (ValueError, LookupError, TypeError, RecursionError):
                raise InputError(f"{self.path}, line {number}: is no row of audio-qa") from None
            rows.append(row)
        return rows


def _line(row: Mapping[str, Any]) -> bytes:
    # Python's backslash escape of a surrogate is JSON's too.
    return (json.dumps(row, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def _lock_file(file: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{path}: another process writes to it") from None
