"""Rows: read questions from JSONL, CSV or a folder of media, and check answers."""

from __future__ import annotations

import codecs
import csv
import hashlib
import itertools
import json
import os
import re
import unicodedata
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from oscar_mm.errors import InputError
from oscar_mm.media.kinds import KIND, kind_of
from oscar_mm.media.limits import MediaLimits
from oscar_mm.media.source import describe, has_scheme, is_address

MEDIA = ("audio", "images", "videos")
_SINGULAR = {"image": "images", "video": "videos"}
_CHOSEN = ("choices", "answer")
_EXAMPLE = '{"images": ["a.png"], "question": "What is it?"}'
_LONGEST_LINE = MediaLimits.max_file_bytes
"""Maximum size of a line in bytes; a line may contain media as data URLs."""
_Record = tuple[Mapping[str, Any] | InputError, str]
"""Fields of a row, or the error if they cannot be read; and the file and line of the row."""


@dataclass(frozen=True)
class Row:
    """Question with its media, choices and known answers.

    Attributes:
        id: id of the row in the output.
        question: text of the question.
        audio, images, videos: absolute paths or URLs.
        choices: texts to choose from; empty for a free-form answer.
        answer: correct answers; empty if unknown.
        group: group of the row in the summary; "" for none.
        where: file and line of the row, for error messages.
        error: reason why the row cannot be answered; "" if it can.
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
        """Media of the row as arguments for ``Pipeline.read_media``."""
        return {kind: list(getattr(self, kind)) for kind in MEDIA if getattr(self, kind)}

    @property
    def files(self) -> list[str]:
        """Paths and URLs of the row's media, without the content of data URIs."""
        return [describe(source, kind) for kind, given in self.media.items() for source in given]

    @property
    def recording(self) -> tuple[tuple[str, ...], ...]:
        """Key of the row's media, which is the same for all rows about the same media."""
        return tuple(getattr(self, kind) for kind in MEDIA)

    @property
    def digest(self) -> str:
        """Digest of the row's question and media."""
        content = [
            self.question,
            self.choices,
            [Path(path).name for path in sum(self.recording, ())],
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def read_rows(
    source: str | Path | Iterable[Mapping[str, Any]],
    *,
    question: str | None = None,
    group_by: str = "group",
) -> list[Row]:
    """Read the rows of a file or folder, or convert dicts to rows.

    Args:
        source: a JSONL file (a JSON object on each line), a CSV file with a header, a folder of
            recordings, images and videos (each file becomes a row), or dicts. The fields are id,
            question, audio, images, videos (each a path or a list of paths, relative to the file),
            choices and answer; CSV cells contain lists as JSON. Other fields are ignored. A row
            without an id gets its line number as id, or "line 7" if another row has the id "7".
        question: question for rows that have no question; required for a folder.
        group_by: name of the field by which the summary groups the rows.

    Returns:
        Rows in the order of the source. A row with unusable fields has an ``error``. So has a line
        that is not a JSON object, with an id such as "line 7", and a row with the id "5" of an
        earlier row, with an id such as "5 (line 7)".

    Raises:
        InputError: if there are no rows, no line is a JSON object, or a CSV file has unbalanced
            quotes; the message names the file and the line.
    """
    if isinstance(source, str | Path):
        path = Path(source)
        if path.is_dir():
            rows = _in_folder(path, question)
        elif not path.is_file():
            raise InputError(f"{path}: no such file or folder")
        else:
            base = path.absolute().parent
            try:
                is_csv = path.suffix.lower() in (".csv", ".tsv")
                records = list(_csv(path) if is_csv else _jsonl(path))
            except OSError as error:
                raise InputError(f"{path}: cannot be read: {error.strerror}") from None
            rows = _rows(records, base, question, group_by)
    else:
        records = [(_fields(record), f"row {number}") for number, record in enumerate(source, 1)]
        rows = _rows(records, Path.cwd(), question, group_by)
    if not rows:
        raise InputError(f"{source}: contains no questions")
    return _with_own_ids(rows)


def _with_own_ids(rows: Sequence[Row]) -> list[Row]:
    """Turn each row whose id an earlier row has into an error with an id of its own."""
    first: dict[str, Row] = {}
    taken, checked = {row.id for row in rows}, list[Row]()
    for row in rows:
        earlier = first.setdefault(row.id, row)
        if earlier is not row:
            place = row.where.rpartition(", ")[2]
            error = f"id {row.id!r} already occurs at {earlier.where}; give each row its own id"
            row = replace(row, id=_unused_id(taken, f"{row.id} ({place})"), error=error)
            taken.add(row.id)
        checked.append(row)
    return checked


def check_overwrites(
    files: Mapping[str, str | Path | None], rows: Iterable[Row], questions: str | Path | None
) -> None:
    """Refuse output files that would overwrite the questions, their media or each other.

    Args:
        files: output files by what they are for; None for one that is not written.
        rows: the questions.
        questions: file with the questions, if there is one.

    Raises:
        InputError: if an output file is one of these; the message names it.
    """
    taken = {} if questions is None else {_file_identity(questions): "the file with the questions"}
    where = {medium: row.where for row in rows for medium in sum(row.recording, ())}
    for medium, line in where.items():
        if not is_address(medium):
            taken.setdefault(_file_identity(medium), f"the media file that {line} asks about")
    for name, path in files.items():
        if path is None:
            continue
        if (file := _file_identity(path)) in taken:
            raise InputError(f"{path}: is {taken[file]}; choose another file for the {name}")
        taken[file] = f"the file for the {name}"


def _file_identity(path: str | Path) -> tuple[int, int] | str:
    """Return a key that is the same for all paths to a file, including hard and symbolic links."""
    try:
        status = os.stat(path)
        return status.st_dev, status.st_ino
    except OSError:
        return os.path.realpath(path)
    except ValueError:  # Not a valid path.
        return str(path)


def by_recording(rows: Iterable[Row]) -> list[list[Row]]:
    """Group rows about the same media; return the groups in the order of their first rows."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.recording, []).append(row)
    return list(groups.values())


def _jsonl(path: Path) -> Iterator[_Record]:
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file), 1):
            if number == 1 and not isinstance(line, InputError):
                line = line.removeprefix(codecs.BOM_UTF8)
            if isinstance(line, InputError):
                yield line, f"{path}, line {number}"
            elif line.strip():
                yield _record(_parse_line, line), f"{path}, line {number}"


def _lines(file: BinaryIO) -> Iterator[bytes | InputError]:
    """Yield the lines of a file; instead of one that is too long for memory, an error."""
    most = _LONGEST_LINE
    while line := file.readline(most + 1):
        if len(line) <= most:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(most)
        yield InputError(f"has more than {most:,} bytes; name media by path instead")


def _csv(path: Path) -> Iterator[_Record]:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)
        try:
            columns = len(reader.fieldnames or ())
            for cells in reader:
                record = _record(partial(_parse_cells, columns), cells)
                yield record, f"{path}, line {reader.line_num}"
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: is not valid UTF-8 text: {error}") from None
        except csv.Error as error:
            # Stop here, because it is unknown where the next row starts.
            raise InputError(
                f"{path}, after line {reader.line_num}: not valid CSV: {error}"
            ) from None


def _record(parse: Callable[[Any], Any], raw: Any) -> Mapping[str, Any] | InputError:
    """Return the fields of a row, or the error if they cannot be read."""
    try:
        return _fields(parse(raw))
    except InputError as error:
        return error
    except RecursionError:
        return InputError("is nested too deeply")


def _fields(record: Any) -> Mapping[str, Any] | InputError:
    if not isinstance(record, Mapping):
        return InputError(
            f"must be an object with fields, not {type(record).__name__}; for example {_EXAMPLE}"
        )
    return record


def _parse_line(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except json.JSONDecodeError as error:
        raise InputError(
            f"is not valid JSON: {error.msg} at character {error.pos + 1}; a line must be an "
            f"object such as {_EXAMPLE}"
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(f"is not valid UTF-8 text: {error}; save the file as UTF-8") from None
    except ValueError as error:  # such as a number with thousands of digits
        raise InputError(f"is not valid JSON: {error}") from None


def _parse_cells(columns: int, cells: Mapping[Any, Any]) -> dict[str, Any]:
    if None in cells or None in cells.values():
        raise InputError(f"does not have the {columns} columns of the header")
    return {name: _cell(name, cell) for name, cell in cells.items() if cell}


def _cell(name: str, cell: str) -> Any:
    """Return the value of a CSV cell, or an InputError if the cell is not valid.

    The error is not raised here, so that the row keeps its id.
    """
    if name not in (*_CHOSEN, *MEDIA, *_SINGULAR) or not cell.lstrip().startswith("["):
        return cell
    try:
        return json.loads(cell)
    except (ValueError, RecursionError):
        # File names may also start with this character.
        wrong = InputError(f'{name}: {cell[:80]!r} is not a JSON list such as ["a", "b"]')
        return wrong if name in _CHOSEN else cell


def _in_folder(folder: Path, question: str | None) -> list[Row]:
    if question is None:
        raise InputError(f"{folder} is a folder: pass the question to ask about its files")

    def medium(path: Path) -> dict[str, Any]:
        return {kind_of(path) or "images": (str(path.absolute()),)}

    paths = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in KIND]
    return [
        Row(
            id=path.relative_to(folder).as_posix(),
            question=question,
            where=str(path),
            **medium(path),
        )
        for path in paths
        if path.is_file()
    ]


def _rows(records: Sequence[_Record], base: Path, question: str | None, group_by: str) -> list[Row]:
    """Convert records to rows; raise an error if none of the records is valid."""
    if records and all(isinstance(record, InputError) for record, _ in records):
        record, where = records[0]
        raise InputError(f"{where}: {record}")
    taken = {_given_id(record) for record, _ in records}
    return [_row(record, base, where, question, group_by, taken) for record, where in records]


def _row(
    record: Mapping[str, Any] | InputError,
    base: Path,
    where: str,
    question: str | None,
    group_by: str,
    taken: Container[str | None],
) -> Row:
    place = where.rpartition(", ")[2]
    if isinstance(record, InputError):
        return Row(id=_unused_id(taken, place), question="", where=where, error=str(record))
    given = {_SINGULAR.get(name, name): value for name, value in record.items()}
    content = given.get("question", question)
    about: dict[str, Any] = {
        "id": _unused_id(taken, place.rpartition(" ")[2], place),
        "where": where,
    }
    try:
        about |= {
            name: _label(name, given[field])
            for name, field in (("id", "id"), ("group", group_by))
            if given.get(field) is not None
        }
        if not isinstance(content, str) or not content.strip():
            raise InputError("question must be non-empty text")
        texts: dict[str, Any] = {name: _texts(name, given.get(name)) for name in (*_CHOSEN, *MEDIA)}
        if len(texts["choices"]) == 1 or len(set(texts["choices"])) < len(texts["choices"]):
            raise InputError("choices must be two or more different texts")
        for kind in MEDIA:
            texts[kind] = tuple(_medium_path(base, source) for source in texts[kind])
    except InputError as error:
        return Row(question=content if isinstance(content, str) else "", error=str(error), **about)
    return Row(question=content, **texts, **about)


def _given_id(record: Mapping[str, Any] | InputError) -> str | None:
    if isinstance(record, InputError) or record.get("id") is None:
        return None
    try:
        return _label("id", record["id"])
    except InputError:
        return None


def _unused_id(taken: Container[str | None], *names: str) -> str:
    """Return an id for a row without an id: the first of ``names`` that no other row uses."""
    more = (f"{names[-1]} ({count})" for count in itertools.count(2))
    return next(name for name in itertools.chain(names, more) if name not in taken)


def _label(name: str, value: Any) -> str:
    try:
        # A round trip through JSON, as in the output file, joins surrogate pairs into characters.
        return json.loads(json.dumps(str(value)))
    except (RecursionError, ValueError):
        raise InputError(f"{name} must be text or a number") from None


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """Convert a string or a list of strings to a tuple of strings; numbers become strings."""
    if isinstance(value, InputError):
        raise value
    if value is None or value == "":
        return ()
    values = list(value) if isinstance(value, list | tuple) else [value]
    if name not in MEDIA:
        values = [str(item) if type(item) in (int, float) else item for item in values]
    else:
        values = [str(item) if isinstance(item, Path) else item for item in values]
    if not all(isinstance(item, str) and item.strip() for item in values):
        raise InputError(f"{name} must be text, or a list of texts")
    return tuple(values)


def _medium_path(base: Path, source: str) -> str:
    return source if is_address(source) or has_scheme(source) else str(base / source)


def right_choices(row: Row) -> set[int]:
    """Return the indices of the right choices, matched by text, or else by letter (A for index 0).

    Raises:
        InputError: if the row's answer is not among its choices.
    """
    texts = [normal_form(choice) for choice in row.choices]
    right = set()
    for answer in row.answer:
        matches = [index for index, text in enumerate(texts) if text == normal_form(answer)]
        if not matches and re.fullmatch("[A-Za-z]", answer) and _place(answer) < len(texts):
            matches = [_place(answer)]
        if not matches:
            raise InputError(
                f"answer {answer!r} is not one of the choices; use a choice's text or letter"
            )
        right.update(matches)
    return right


_LETTER = (
    # Match only a separate letter: "A bird", "A's" and "A.M." start with a word.
    r"([A-Z])(?=\s*$|[)\]}<>*_`\"”】」』:;!?,。、]|'(?!\w)|\.(?![A-Z]\b)|\s+[-\u2013\u2014]\s"
    r"|\s+(?:because|since|as|is (?:the )?(?:correct|right|best|answer))\b)"
)
_MARKED = re.compile(
    rf"(?:^|\b(?:or|and)\b|或|和)(?:[^\w\n]|_)*{_LETTER}", re.MULTILINE | re.IGNORECASE
)
"""Pattern of a letter at the start of a line, or of a later letter in the same format: "(B) white",
"A. brown or B. white"."""
_CLAIMED = re.compile(
    r"(?:\b(?:answer|option|choice|correct|choose|pick|select|letter|boxed|it is|it's)"
    r"|答案|正确|选)"
    r"(?:[^\w.,;?!]|_|is|was|would|should|must|be|the|one|text|option|choice|letter|answer|correct"
    rf"|[是为应该项择的]){{0,16}}?(?<![A-Za-z]){_LETTER}",
    re.MULTILINE | re.IGNORECASE,
)
"""Pattern of a letter that a sentence names as the answer: "The correct answer is B.", "选择B"."""
_SEVERAL = re.compile(
    r"(?<![A-Za-z])[A-Z](?![A-Za-z])[^\w\s,]*"
    r"(?:\s*(?:,(?!\s*[AI]\s+[a-z])|[/&+、或和与及]|\b(?:or|and|nor)\b)+[\s(\[*]*"
    r"(?:(?:option|choice) )?[\s(\[*]*[A-Z](?![A-Za-z'])[^\w\s,]*)+"
)
"""Pattern of several letters named together, which do not choose one: "A or B", "(A) and (C)"."""


def named_choice(row: Row, reply: str) -> int | None:
    """Return the index of the choice that a reply names; None if it names no or several choices.

    A reply names a choice by its text, by a letter at the start of a line ("B", "b.", "(B) white"),
    or by a sentence that names a letter as the answer ("The answer is B.", "Option B"). If several
    lines start with different letters, such a sentence decides.
    """
    texts = [normal_form(choice) for choice in row.choices]
    if (text := normal_form(reply)) in texts:
        return texts.index(text)
    plain = unicodedata.normalize("NFKC", reply).replace("\u2019", "'")
    plain = _SEVERAL.sub(" ", plain)
    marked, claimed = (
        {place for letter in pattern.findall(plain) if (place := _place(letter)) < len(texts)}
        for pattern in (_MARKED, _CLAIMED)
    )
    named = claimed or marked
    return named.pop() if len(named) == 1 and named <= (marked or named) else None


def _place(letter: str) -> int:
    """Return the index of the choice that a letter from A to Z names."""
    return ord(letter.upper()) - ord("A")


def contains_answer(row: Row, text: str) -> bool:
    """Return whether a free-form text contains one of the row's answers."""
    return any(normal_form(answer) in normal_form(text) for answer in row.answer)


def is_correct(row: Row, text: str, choice: int | None) -> bool | None:
    """Return whether the choice, or the text if there is no choice, is right; None if unknown."""
    if not row.answer:
        return None
    if choice is not None:
        return choice in right_choices(row)
    return normal_form(text) in {normal_form(answer) for answer in row.answer}


def normal_form(text: str) -> str:
    """Return a text with normalized case, white space and surrounding punctuation."""
    plain = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return plain.strip(".,;:!?\"'` ") or plain
