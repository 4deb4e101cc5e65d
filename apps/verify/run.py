"""Verification: run the questions, timings and tasks, and keep the JSON file up to date."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from oscar_mm.apps.audio_qa.results import error_line
from oscar_mm.apps.audio_qa.rows import Row, contains_answer
from oscar_mm.apps.machine import device_name, versions
from oscar_mm.apps.terminal import print_progress
from oscar_mm.apps.verify import lmms_tasks
from oscar_mm.compare.decoded_answers import AnswerComparison, DecodedAnswer
from oscar_mm.engine.message import first_turn
from oscar_mm.engine.prompt import Prompt
from oscar_mm.errors import InputError
from oscar_mm.files import whole_file, writing
from oscar_mm.media.part import media_parts
from oscar_mm.modality import Modality
from oscar_mm.pipelines.pipeline import Pipeline
from oscar_mm.policy import KVPolicy

SCHEMA = 1
"""Version of the JSON file, which docs/results.md describes."""
_MODALITY = {"images": Modality.IMAGE, "videos": Modality.VIDEO, "audio": Modality.AUDIO}


def supported(pipe: Pipeline, rows: Iterable[Row]) -> list[Row]:
    """Return the rows whose media a pipeline's model supports."""
    reads = pipe.family.reads
    return [row for row in rows if all(_MODALITY[kind] in reads for kind in row.media)]


class Verification:
    """Measurements of one model, written to a JSON file after each question.

    Args:
        pipe: pipeline of the model, with a 16-bit cache.
        name: name of the model: hub id, bundled model or last part of a folder.
        source: name of the file with the questions.
        policies: policies to compare with the 16-bit cache, by name.
        max_new_tokens: maximum number of tokens of an answer.
        path: JSON file to write or replace.

    Attributes:
        record: content of the file.

    Raises:
        InputError: if the file cannot be written.
    """

    def __init__(
        self,
        pipe: Pipeline,
        name: str,
        source: str,
        policies: Mapping[str, KVPolicy],
        max_new_tokens: int,
        path: Path,
    ) -> None:
        self.pipe, self.path = pipe, path
        self._max_new_tokens = max_new_tokens
        self._comparison = AnswerComparison(pipe, policies, max_new_tokens)
        self._longest: Prompt | None = None
        self.record: dict[str, Any] = {
            "schema": SCHEMA,
            "complete": False,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "device": device_name(pipe.family.device.type),
            "dtype": str(pipe.model.dtype).removeprefix("torch."),
            "model": _about(pipe, name),
            "policies": {name: asdict(policy) for name, policy in policies.items()},
            "source": source,
            "max_new_tokens": max_new_tokens,
            "asked": 0,
            "failed": 0,
            "rows": [],
            "speed": None,
            "tasks": None,
            "answers": [],
        }
        self._write()

    def ask(self, rows: list[Row]) -> None:
        """Compare the formats on each question; a question that fails does not stop the others.

        Raises:
            InputError: if all questions failed, or the file cannot be written.
        """
        for number, row in enumerate(rows, 1):
            self.record["answers"].append({"id": row.id} | self._answer(row))
            self.record["asked"] = number
            self.record["rows"] = self._comparison.rows()
            self._write()
            print_progress(number, len(rows), "questions")
        if self._longest is None:
            raise InputError(
                f"none of the {len(rows)} questions in {self.record['source']} could be answered"
            )

    def _answer(self, row: Row) -> dict[str, Any]:
        """Return the entry of a question; if it failed, print its error."""
        try:
            prompt = self._prompt(row)
            is_right = partial(contains_answer, row) if row.answer else None
            found = self._comparison.add(prompt, is_right)
        except Exception as error:  # Running out of memory, too, concerns one question.
            return {"error": self._failure(row.where, error)}
        if self._longest is None or prompt.tokens > self._longest.tokens:
            self._longest = prompt
        return _entry(prompt, found)

    def _prompt(self, row: Row) -> Prompt:
        if row.error:
            raise InputError(row.error)
        media: dict[str, Any] = dict(row.media)
        asked = first_turn(row.question, media_parts(**media))
        return self.pipe.read_request(asked, self._max_new_tokens)

    def measure_speed(self, repeats: int) -> None:
        """Measure the formats' speeds on the longest prompt, and add them to their rows.

        Args:
            repeats: number of measured answers per format.
        """
        prompt = self._longest
        assert prompt is not None
        answers, numbers = (1 + repeats) * len(self.record["rows"]), itertools.count(1)
        self.record["speed"] = {
            "prompt_tokens": prompt.tokens,
            "new_tokens": self._max_new_tokens,
            "repeats": repeats,
            "error": None,
        }
        try:
            speeds = self._comparison.speeds(
                prompt, repeats, lambda: print_progress(next(numbers), answers, "timings")
            )
        except Exception as error:
            self.record["speed"]["error"] = self._failure("speed", error)
            return
        for row in self.record["rows"]:
            row |= speeds[row["method"]]
        self._write()

    def run_tasks(self, names: list[str], limit: int | None) -> None:
        """Run tasks of lmms-eval with the 16-bit cache and with each format.

        Args:
            names: names of the tasks, checked by ``lmms_tasks.check``.
            limit: maximum number of questions of each task; None for all.
        """
        results: dict[str, Any] = {}
        self.record["tasks"] = {"limit": limit, "results": results, "error": None}
        for name, pipe in self._comparison.pipes.items():
            try:
                results[name] = lmms_tasks.run(pipe, names, limit)
            except Exception as error:  # such as a data set that cannot be downloaded
                self.record["tasks"]["error"] = self._failure(f"--tasks with {name}", error)
                return
            self._write()

    def finish(self) -> None:
        """Mark the file as complete."""
        self.record["complete"] = True
        self._write()

    def _failure(self, what: str, error: Exception) -> str:
        """Count and print an error, and return its text."""
        self.record["failed"] += 1
        line = error_line(error)
        print(f"oscar-mm: {what}: {line}", file=sys.stderr)
        return line

    def _write(self) -> None:
        with writing(self.path), whole_file(self.path) as part:
            part.write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")


def _about(pipe: Pipeline, name: str) -> dict[str, Any]:
    """Describe a model: its id, its commit on the hub, its weights and its size."""
    outer = pipe.family.outer_model
    return {
        "id": name,
        "revision": getattr(outer.config, "_commit_hash", None),
        "fingerprint": pipe.fingerprint,
        "family": pipe.family.name,
        "parameters": outer.num_parameters(),
    }


def _entry(prompt: Prompt, found: Mapping[str, DecodedAnswer]) -> dict[str, Any]:
    formats = {name: judged.to_dict() for name, judged in found.items()}
    return {"prompt_tokens": prompt.tokens, "formats": formats}
