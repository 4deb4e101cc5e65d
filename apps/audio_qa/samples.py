"""Samples: answers as lmms-eval logs them (``--log_samples``), for tools that read its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from oscar_mm.apps.audio_qa.rows import Row
from oscar_mm.files import whole_file, writing


def write_samples(path: str | Path, rows: Iterable[Row], done: Mapping[str, Any]) -> int:
    """Write one line for each row that was answered; how many there are.

    A line has doc_id, input, target, resps, filtered_resps and doc_hash, and its metric:
    ``exact_match``, or of a row with choices ``acc``, whose resps are pairs of a log-likelihood
    and whether it is the highest.

    Raises:
        InputError: the file cannot be written.
    """
    lines = [
        json.dumps(_sample(number, row, done[row.id]), ensure_ascii=False)
        for number, row in enumerate(rows)
        if row.id in done and done[row.id]["error"] is None
    ]
    with writing(path), whole_file(Path(path)) as part:
        part.write_bytes("".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))
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
        metric, best = "acc", result["choice"]
        pairs = [[score, place == best] for place, score in enumerate(result["scores"])]
        sample |= {"resps": [[pair] for pair in pairs], "filtered_resps": pairs}
    if correct is not None:
        sample[metric] = float(correct)
    return sample
