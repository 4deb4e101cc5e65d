"""Answers: the output file of a run, one JSON object a line, and what run it belongs to."""

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
from oscar_mm.whole_file import whole_file, writing

RUN = ".run.json"
"""Suffix of the file beside the answers that holds the fingerprint."""


class Answers:
    """Appends rows to a file, each flushed to the disk before the next.

    Whenever the process ends, the file holds all rows that were written; a line that was cut off
    is taken out when the run is resumed. Only one process at a time writes to a file. Half of a
    surrogate pair, which UTF-8 has no bytes for, is written as JSON's escape.

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
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and not self.path.is_file():
                raise InputError(f"{self.path}: cannot be written: is no regular file")
            self._file = self._opened()
        try:
            if overwrite:
                self._file.truncate(0)
                self._run.unlink(missing_ok=True)
            if os.fstat(self._file.fileno()).st_size:
                self._check(fingerprint)
                self.done = {row["id"]: row for row in self._rows()}
            else:
                # Whatever run that was, nothing of it is left.
                self._run.unlink(missing_ok=True)
        except BaseException:
            self._file.close()
            raise

    def confirm(self, fingerprint: Mapping[str, Any]) -> None:
        """The run's whole fingerprint, before the first row is written.

        Raises:
            InputError: the rows that are there are of another one, or it cannot be written.
        """
        if self._run.is_file():
            self._check(fingerprint)
        else:
            with writing(self._run), whole_file(self._run) as part:
                part.write_text(json.dumps(fingerprint, indent=1) + "\n", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row and wait until it is on the disk.

        Raises:
            InputError: there is no room for it; nothing of it is left in the file.
        """
        with writing(self.path):
            self._append(_line(row))
        self.done[row["id"]] = dict(row)

    def resume(self, rows: Iterable[Row], *, retry_failed: bool = False) -> None:
        """Go on with the rows that are there.

        Args:
            rows: that are asked now.
            retry_failed: take those with an error out, so that they are asked again.

        Raises:
            InputError: a row that is there asks something else now; names it.
        """
        kept = self.done
        if retry_failed:
            kept = {row_id: row for row_id, row in kept.items() if row["error"] is None}
        for row in rows:
            there = kept.get(row.id)
            if there is not None and there["digest"] != row.digest:
                retry = "" if there["error"] is None else "--retry-failed, "
                raise InputError(
                    f"{self.path}: row {row.id!r} was answered, but to another question than "
                    f"{row.where} asks: give {retry}another --out, or --overwrite"
                )
        self._replace(kept)

    def sort(self, rows: Iterable[Row]) -> None:
        """Put what is there into the order of the questions, rows of no question last.

        Raises:
            InputError: there is no room for it; the file stays as it was.
        """
        asked = {row.id: self.done[row.id] for row in rows if row.id in self.done}
        self._replace(asked | self.done)

    def close(self) -> None:
        """Give up the file."""
        self._file.close()

    def _opened(self) -> FileIO:
        """The file, locked for this process."""
        file = FileIO(self.path, "ab+")
        try:
            _lock(file.fileno(), self.path)
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
        """Other rows in place of those that are there, in one go."""
        if list(rows) == list(self.done):
            return
        with writing(self.path):
            with whole_file(self.path) as part:
                part.write_bytes(b"".join(map(_line, rows.values())))
                self._file.close()  # Windows replaces no file that is open.
            self._file = self._opened()
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
        """What is there; a last line that was cut off is taken out."""
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        self._file.truncate(whole)
        rows = []
        for number, line in enumerate(content[:whole].splitlines(), 1):
            try:
                row = json.loads(line)
                hash((row["id"], row["error"], row["digest"]))
            except (ValueError, LookupError, TypeError, RecursionError):
                raise InputError(f"{self.path}, line {number}: is no row of audio-qa") from None
            rows.append(row)
        return rows


def _line(row: Mapping[str, Any]) -> bytes:
    # What Python makes of a surrogate is JSON's escape of it.
    return (json.dumps(row, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def _lock(file: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{path}: another process writes to it") from None
