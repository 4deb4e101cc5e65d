"""Results of a run: the output file, the summary, and samples in lmms-eval's format."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from oscar_mm.apps.audio_qa.rows import Row, is_correct, named_choice
from oscar_mm.cache.memory import MemoryReport
from oscar_mm.engine.answer import Answer
from oscar_mm.errors import InputError
from oscar_mm.files import whole_file, writing
from oscar_mm.pipelines.shared_media import Choice
from oscar_mm.sizes import format_bytes

Result = dict[str, Any]
"""Line of the output file, with these fields:

- id, group, question: as in the row. digest: ``Row.digest``. files: ``Row.files``.
- expected: list of the row's right answers; empty if they are unknown.
- answer: text of the answer or of the selected choice. choice: index of that choice, from 0.
- correct: whether the answer is right; null if the row has no known answer.
- scores: log-likelihood of each choice; null if a server answered, since it only names a choice.
- finish_reason: "stop", "length" or "choice".
- tokens: number of tokens of the prompt, including media, and of the answer.
- kv_bytes: size of these tokens' pages, blocks and tables in bytes, including those shared with
  other rows; 0 if a server answered. kv_ratio: size of the same tokens in 16-bit precision, divided
  by kv_bytes; null if a server answered.
- seconds: the row's share of the time to read the media and answer the batch.
- error: reason why there is no answer, or null.
"""
RUN = ".run.json"
"""Suffix of the file that contains the fingerprint of a run."""


def answer_result(row: Row, answer: Answer) -> Result:
    """Return the result of a free-form answer."""
    return _result(
        row,
        answer.memory,
        answer=answer.text,
        correct=is_correct(row, answer.text, None),
        finish_reason=answer.finish_reason,
        tokens=answer.prompt_tokens + len(answer.token_ids),
    )


def choice_result(row: Row, choice: Choice) -> Result:
    """Return the result of a multiple-choice row."""
    return _result(
        row,
        choice.memory,
        answer=row.choices[choice.best],
        choice=choice.best,
        correct=is_correct(row, "", choice.best),
        scores=[round(score, 4) for score in choice.scores],
        finish_reason="choice",
        tokens=choice.prompt_tokens,
    )


def reply_result(row: Row, text: str, finish_reason: str, tokens: int) -> Result:
    """Return the result of a server's reply, which is wrong if it names no choice of the row."""
    choice = named_choice(row, text)
    return _result(
        row,
        None,
        answer=text if choice is None else row.choices[choice],
        choice=choice,
        correct=is_correct(row, text, choice),
        finish_reason="choice" if row.choices else finish_reason,
        tokens=tokens,
    )


def error_result(row: Row, error: str) -> Result:
    """Return the result of a row that could not be answered."""
    return _result(row, None, error=error)


def error_line(error: Exception) -> str:
    """Describe an error in one line, with the error's type unless it is an InputError."""
    text = " ".join(str(error).split())
    return text if isinstance(error, InputError) else f"{type(error).__name__}: {text}"


def _result(row: Row, memory: MemoryReport | None, **values: Any) -> Result:
    empty = dict.fromkeys(("answer", "choice", "correct", "scores", "finish_reason", "error"))
    kv_bytes = 0 if memory is None else memory.kv_bytes - memory.by_kind["unused"]
    return {
        "id": row.id,
        "question": row.question,
        "files": row.files,
        "expected": list(row.answer),
        **empty,
        "tokens": 0,
        "kv_bytes": kv_bytes,
        "kv_ratio": round(memory.bf16_bytes / kv_bytes, 4) if memory and kv_bytes else None,
        "seconds": 0.0,
        "group": row.group,
        "digest": row.digest,
    } | values


@dataclass(frozen=True)
class Work:
    """Totals of a run, for this process or for all workers.

    Attributes:
        rows: number of rows that were answered or failed.
        seconds: time from the first row to the last, excluding the time to load the model.
        cpu_seconds: CPU time of all threads, in seconds.
        audio_seconds: total length of the recordings, in seconds; a shared recording counts once.
        kv_peak_bytes: peak size of a worker's pools, in bytes.
        process_peak_bytes: peak resident memory of a process, or, on a GPU, peak allocated GPU
            memory, in bytes.
    """

    rows: int
    seconds: float
    cpu_seconds: float
    audio_seconds: float
    kv_peak_bytes: int
    process_peak_bytes: int


def summarize(results: Iterable[Mapping[str, Any]], work: Work) -> dict[str, Any]:
    """Return a summary of all rows in an output file and of the speed of this run."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    rows = list(results)
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    hours = work.seconds / 3600
    return {
        **_counts(rows),
        "groups": {name: _counts(groups[name]) for name in sorted(groups) if name},
        "throughput": {
            "rows_per_s": _share(work.rows, work.seconds),
            "audio_hours_per_hour": _share(work.audio_seconds / 3600, hours),
        },
        "work": asdict(work),
        "failures": {row["id"]: row["error"] for row in rows if row["error"] is not None},
    }


def _counts(rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    answered = [row for row in rows if row["error"] is None]
    with_choices = [row for row in answered if row["finish_reason"] == "choice"]
    without_choices = [row for row in answered if row["finish_reason"] != "choice"]
    kv_bytes = sum(row["kv_bytes"] for row in answered)
    in_16_bit = sum(row["kv_bytes"] * (row["kv_ratio"] or 0) for row in answered)
    return {
        "rows": len(rows),
        "failed": len(rows) - len(answered),
        "accuracy": _accuracy(answered),
        "choice_accuracy": _accuracy(with_choices),
        "exact_match": _accuracy(without_choices),
        "marked": sum(row["correct"] is not None for row in answered),
        "mean_tokens": _share(sum(row["tokens"] for row in answered), len(answered)),
        "mean_kv_bytes": _share(kv_bytes, len(answered)),
        "kv_ratio": _share(in_16_bit, kv_bytes),
    }


def _accuracy(rows: list[Mapping[str, Any]]) -> float | None:
    """Return the fraction of right answers among rows with a known answer and no error."""
    marked = [row["correct"] for row in rows if row["correct"] is not None]
    return _share(sum(marked), len(marked))


def _share(part: float, total: float) -> float | None:
    return round(part / total, 4) if total else None


def print_summary(summary: Mapping[str, Any]) -> None:
    """Print a table of the groups, and a line about speed and memory."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE, pad_edge=False)
    for column in ("", "rows", "failed", "accuracy", "choices", "exact", "tokens", "KV", "ratio"):
        table.add_column(column, justify="right" if column else "left", no_wrap=bool(column))
    for name, counts in [*summary["groups"].items(), ("all", summary)]:
        table.add_row(
            # Print the name without markup, and unpaired surrogates as JSON escapes.
            Text(name.encode(errors="backslashreplace").decode()),
            f"{counts['rows']:,}",
            f"{counts['failed']:,}",
            *(_percent(counts[key]) for key in ("accuracy", "choice_accuracy", "exact_match")),
            f"{counts['mean_tokens'] or 0:,.0f}",
            # A server does not report bytes.
            format_bytes(counts["mean_kv_bytes"]) if counts["mean_kv_bytes"] else "",
            f"{counts['kv_ratio']:.2f}x" if counts["kv_ratio"] else "",
        )
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(table)
    work, rates = summary["work"], summary["throughput"]
    peaks = {"KV": work["kv_peak_bytes"], "process": work["process_peak_bytes"]}
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in peaks.items() if size)
    # A run that had no rows left to answer has no peaks.
    memory = f"; peak memory: {listed}" if listed else ""
    print(
        f"{work['rows']:,} rows in {work['seconds']:.1f} s, "
        f"{rates['audio_hours_per_hour'] or 0:.1f} hours of audio per hour{memory}"
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"


def write_samples(path: str | Path, rows: Iterable[Row], done: Mapping[str, Any]) -> int:
    """Write a line for each answered row, in the format of lmms-eval's ``--log_samples``.

    Each line contains doc_id, input, target, resps, filtered_resps, doc_hash, and a metric:
    ``acc`` for multiple choice, otherwise ``exact_match``. For scored choices, each entry of resps
    is a pair: the choice's log-likelihood, and whether it is the highest.

    Returns:
        The number of lines written.

    Raises:
        InputError: if the file cannot be written.
    """
    lines = [
        json.dumps(_sample(number, row, done[row.id]), ensure_ascii=False)
        for number, row in enumerate(rows)
        if row.id in done and done[row.id]["error"] is None
    ]
    with writing(path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with whole_file(Path(path)) as part:
            content = "".join(f"{line}\n" for line in lines)
            part.write_bytes(content.encode(errors="backslashreplace"))
    return len(lines)


def _sample(number: int, row: Row, result: Mapping[str, Any]) -> dict[str, Any]:
    document = {"id": row.id, "question": row.question, "choices": row.choices, **row.media}
    correct = result["correct"]
    sample = {
        "doc_id": number,
        "target": row.answer[0] if row.answer else "",
        "filtered_resps": [result["answer"]],
        "doc_hash": hashlib.sha256(json.dumps(document).encode()).hexdigest(),
        "input": row.question,
    }
    metric = "exact_match"
    if row.choices:
        metric = "acc"
    if result["scores"] is not None:
        best = result["choice"]
        pairs = [[score, index == best] for index, score in enumerate(result["scores"])]
        sample |= {"resps": [[pair] for pair in pairs], "filtered_resps": pairs}
    if correct is not None:
        sample[metric] = float(correct)
    return sample


class AnswerFile:
    """Output file to which rows are appended; each row is flushed to disk before the next.

    However the process ends, the file keeps all rows written before; resuming removes an incomplete
    last line. The file is locked, so that only one process can write to it. Unpaired surrogates,
    which UTF-8 cannot encode, are written as JSON escapes.

    Args:
        path: path of the JSONL file; its folder is created if it does not exist.
        fingerprint: fingerprint of the run, in which the model is None until it is known.
        overwrite: whether to discard the rows in the file, instead of keeping them, once the run is
            confirmed.

    Attributes:
        done: rows in the file, by id.

    Raises:
        InputError: if the file cannot be written, belongs to another run (the message names the
            difference), or is locked by another process.
    """

    def __init__(
        self, path: str | Path, fingerprint: Mapping[str, Any], *, overwrite: bool = False
    ) -> None:
        self.path, self._run = Path(path), Path(f"{path}{RUN}")
        self.done: dict[str, dict[str, Any]] = {}
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and not self.path.is_file():
                raise InputError(f"{self.path}: cannot be written: is not a regular file")
            self._file = self._open()
        self._begins_anew = overwrite
        try:
            if not os.fstat(self._file.fileno()).st_size:
                # The run described by this file no longer has any rows.
                self._run.unlink(missing_ok=True)
            elif not overwrite:
                self._check(fingerprint)
                self.done = {row["id"]: row for row in self._rows()}
        except BaseException:
            self._file.close()
            raise

    def confirm(self, fingerprint: Mapping[str, Any]) -> None:
        """Check the complete fingerprint of the run, or write it to a new file.

        Call this before the first row is written.

        Raises:
            InputError: if the file's rows belong to another run, or the file cannot be written.
        """
        if self._begins_anew:
            with writing(self.path):
                self._file.truncate(0)
                self._run.unlink(missing_ok=True)
            self._begins_anew = False
        if self._run.is_file():
            self._check(fingerprint)
        else:
            with writing(self._run), whole_file(self._run) as part:
                part.write_text(json.dumps(fingerprint, indent=1) + "\n", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row and flush it to disk.

        Raises:
            InputError: if the disk is full; the file then remains unchanged.
        """
        with writing(self.path):
            self._append(_line(row))
        self.done[row["id"]] = dict(row)

    def resume(self, rows: Iterable[Row], *, retry_failed: bool = False) -> None:
        """Check the rows in the file and keep them.

        Args:
            rows: the questions of this run.
            retry_failed: whether to remove the rows with an error, so that they are answered again.

        Raises:
            InputError: if the question of a row in the file has changed; the message names the row.
        """
        done = self.done
        if retry_failed:
            done = {row_id: row for row_id, row in done.items() if row["error"] is None}
        for row in rows:
            there = done.get(row.id)
            if there is not None and there["digest"] != row.digest:
                retry = "" if there["error"] is None else "--retry-failed, "
                raise InputError(
                    f"{self.path}: row {row.id!r} was answered for a different question than the "
                    f"question in {row.where}; pass {retry}a different --out, or --overwrite"
                )
        self._replace(done)

    def sort(self, rows: Iterable[Row]) -> None:
        """Sort the file into the order of the questions, followed by rows without a question.

        Raises:
            InputError: if the disk is full; the file then remains unchanged.
        """
        in_order = {row.id: self.done[row.id] for row in rows if row.id in self.done}
        self._replace(in_order | self.done)

    def close(self) -> None:
        """Unlock and close the file."""
        self._file.close()

    def _open(self) -> FileIO:
        """Open the file and lock it for this process."""
        while True:
            file = _locked(self.path, self.path)
            # Meanwhile, another process may have replaced the file and locked the new file.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), self.path.stat()):
                    return file
            file.close()

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
        """Replace all rows of the file atomically."""
        if list(rows) == list(self.done):
            return
        with writing(self.path):
            new: FileIO | None = None
            try:
                with whole_file(self.path) as part:
                    part.write_bytes(b"".join(map(_line, rows.values())))
                    if os.name == "nt":  # Windows cannot replace an open file.
                        self._file.close()
                    else:
                        # Lock the new file before renaming it, so that no other process can.
                        new = _locked(part, self.path)
            except BaseException:
                if new is not None:
                    new.close()
                raise
            self._file.close()
            self._file = new or self._open()
        self.done = rows

    def _check(self, fingerprint: Mapping[str, Any]) -> None:
        refused = f"{self.path}: pass another --out, or --overwrite; this file "
        try:
            there = json.loads(self._run.read_bytes())
        except (OSError, ValueError, RecursionError):
            there = None
        if not isinstance(there, dict):
            raise InputError(
                f"{refused}was not written by audio-qa: {self._run.name} is missing"
            ) from None
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
        """Read the rows in the file, and remove an incomplete last line."""
        content = self.path.read_bytes()
        end = content.rfind(b"\n") + 1
        self._file.truncate(end)
        rows = []
        for number, line in enumerate(content[:end].splitlines(), 1):
            try:
                row = json.loads(line)
                hash((row["id"], row["error"], row["digest"]))
            except (ValueError, LookupError, TypeError, RecursionError):
                raise InputError(
                    f"{self.path}, line {number}: is not a row written by audio-qa; pass another "
                    "--out"
                ) from None
            rows.append(row)
        return rows


def _line(row: Mapping[str, Any]) -> bytes:
    # Python's backslash escape for a surrogate is also valid JSON.
    return (json.dumps(row, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def _locked(file: Path, path: Path) -> FileIO:
    """Open a file and lock it for this process.

    Args:
        file: path of the file.
        path: current or future path of the file, for error messages.
    """
    opened = FileIO(file, "ab+")
    try:
        _lock_file(opened.fileno(), path)
    except BaseException:
        opened.close()
        raise
    return opened


def _lock_file(file: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{path}: another process is writing to this file") from None
