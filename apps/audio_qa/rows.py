"""Rows: what is to be asked about which media, from JSONL, CSV or a folder of recordings."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oscar_mm.errors import InputError
from oscar_mm.media.source import is_address
from oscar_mm.media.suffixes import KIND

MEDIA = ("audio", "images", "videos")
_SINGULAR = {"image": "images", "video": "videos"}
_RARE = {".aiff": "audio", ".aif": "audio", ".wma": "audio", ".amr": "audio", ".caf": "audio"}
_KIND = KIND | _RARE | {".tif": "images"}


@dataclass(frozen=True)
class Row:
    """One question.

    Attributes:
        id: names it in the answers.
        question: text.
        audio, images, videos: paths, made absolute, or addresses.
        choices: texts of which one is to be chosen; empty for a free answer.
        answer: texts that are right; empty if that is not known.
        group: rows of one group are added up in the summary; "" for none.
        where: file and line, for messages.
        error: why the row cannot be asked; "" if it can.
    """

    id: str
    question: str
    audio: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    videos: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()
    group: str = ""
    where: str = ""
    error: str = ""

    @property
    def media(self) -> dict[str, list[str]]:
        """Arguments of ``Pipeline.read_media``."""
        return {kind: list(getattr(self, kind)) for kind in MEDIA if getattr(self, kind)}

    @property
    def recording(self) -> tuple[tuple[str, ...], ...]:
        """Rows of which this is equal are about the same media."""
        return tuple(getattr(self, kind) for kind in MEDIA)

    @property
    def digest(self) -> str:
        """Tells whether a row asks the same as one that was answered before."""
        asked = [self.question, self.choices, [Path(one).name for one in sum(self.recording, ())]]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def read_rows(
    source: str | Path | Iterable[Mapping[str, Any]],
    *,
    question: str | None = None,
    group_by: str = "group",
) -> list[Row]:
    """Rows of a file or folder, or of dicts with the same fields.

    Args:
        source: a JSONL file (a JSON object on each line), a CSV file with a header, a folder whose
            recordings, pictures and videos are asked about one by one, or dicts. Fields are id,
            question, audio, images, videos (a path or a list of them, relative to the file),
            choices and answer; in CSV a list is a JSON list. Other fields are left alone.
        question: of rows that have none; needed for a folder.
        group_by: field whose value groups the rows of the summary.

    Returns:
        in the order of the source. A row whose fields cannot be used has an ``error``.

    Raises:
        InputError: nothing there, a line that is no JSON object, or an id that occurs twice; names
            the file and the line.
    """
    if isinstance(source, str | Path):
        path = Path(source)
        if path.is_dir():
            rows = _in_folder(path, question)
        elif not path.is_file():
            raise InputError(f"{path}: no such file or folder")
        else:
            records = _csv(path) if path.suffix.lower() in (".csv", ".tsv") else _jsonl(path)
            base = path.absolute().parent
            rows = [_row(one, base, where, question, group_by) for one, where in records]
    else:
        named = ((one, f"row {number}") for number, one in enumerate(source, 1))
        rows = [_row(one, Path.cwd(), where, question, group_by) for one, where in named]
    if not rows:
        raise InputError(f"{source}: there are no questions in it")
    first: dict[str, Row] = {}
    for row in rows:
        if row.id in first:
            raise InputError(f"{row.where}: id {row.id!r} occurs already at {first[row.id].where}")
        first[row.id] = row
    return rows


def by_recording(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows about the same media together, groups in the order of their first rows."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.recording, []).append(row)
    return list(groups.values())


def _jsonl(path: Path) -> Iterator[tuple[Any, str]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise InputError(f"{path}, line {number}: is no JSON: {error}") from None
                yield record, f"{path}, line {number}"
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is no UTF-8 text: {error}") from None


def _csv(path: Path) -> Iterator[tuple[Any, str]]:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter=delimiter, strict=True)
            for record in reader:
                where = f"{path}, line {reader.line_num}"
                if None in record or None in record.values():
                    count = len(reader.fieldnames or ())
                    raise InputError(f"{where}: has not the {count} columns of the header")
                yield {name: _cell(cell, where) for name, cell in record.items() if cell}, where
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"{path}: is no CSV file in UTF-8: {error}") from None


def _cell(cell: str, where: str) -> Any:
    if not cell.lstrip().startswith("["):
        return cell
    try:
        return json.loads(cell)
    except ValueError:
        raise InputError(f'{where}: {cell!r} is no JSON list such as ["a", "b"]') from None


def _in_folder(folder: Path, question: str | None) -> list[Row]:
    if question is None:
        raise InputError(f"{folder}: is a folder; give the question to ask about what is in it")
    found = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in _KIND]
    return [
        Row(
            id=path.relative_to(folder).as_posix(),
            question=question,
            where=str(path),
            **{_KIND[path.suffix.lower()]: (str(path.absolute()),)},
        )
        for path in found
        if path.is_file()
    ]


def _row(record: Any, base: Path, where: str, question: str | None, group_by: str) -> Row:
    if not isinstance(record, Mapping):
        raise InputError(f"{where}: must be an object with fields, not {type(record).__name__}")
    given = {_SINGULAR.get(name, name): value for name, value in record.items()}
    # A number is a good id, and of a missing one the place is.
    row_id = given.get("id")
    row_id = where.rpartition(" ")[2] if row_id is None else str(row_id)
    asked = given.get("question", question)
    about = {"id": row_id, "where": where, "group": str(given.get(group_by, ""))}
    try:
        if not isinstance(asked, str) or not asked.strip():
            raise InputError("question must be text that is not empty")
        texts = {name: _texts(name, given.get(name)) for name in ("choices", "answer", *MEDIA)}
        if len(texts["choices"]) == 1 or len(set(texts["choices"])) < len(texts["choices"]):
            raise InputError("choices must be several texts, all different")
        for kind in MEDIA:
            texts[kind] = tuple(_place(base, one) for one in texts[kind])
    except InputError as error:
        return Row(question=str(asked), error=str(error), **about)
    return Row(question=asked, **texts, **about)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """One text or a list of texts; numbers are taken as they are written."""
    if value is None or value == "":
        return ()
    values = list(value) if isinstance(value, list | tuple) else [value]
    if name not in MEDIA:
        values = [str(one) if type(one) in (int, float) else one for one in values]
    else:
        values = [str(one) if isinstance(one, Path) else one for one in values]
    if not all(isinstance(one, str) and one.strip() for one in values):
        raise InputError(f"{name} must be text, or a list of texts")
    return tuple(values)


def _place(base: Path, source: str) -> str:
    return source if is_address(source) else str(base / source)
