"""Results: lines of the output."""

from __future__ import annotations

from typing import Any

from oscar_mm.apps.audio_qa.marking import correct
from oscar_mm.apps.audio_qa.rows import Row
from oscar_mm.cache.memory import MemoryReport
from oscar_mm.errors import InputError
from oscar_mm.generation.answer import Answer
from oscar_mm.pipelines.multiple_choice import Choice

Result = dict[str, Any]
"""A line of the output:

- id, group: of the row. digest: of what it asks.
- answer: text; of a row with choices, the one that was chosen. choice: its place, from 0.
- correct: true, false, or null where no answer was given.
- scores: log-likelihood of each choice. finish_reason: "stop", "length" or "choice".
- tokens: of prompt and answer, media included.
- kv_bytes: bytes of the pages, blocks and tables of these tokens, those included that it shares
  with other rows; kv_ratio: bytes of as many tokens in 16 bit, divided by them.
- seconds: its share of reading the media and of its batch.
- error: why there is no answer, else null.
"""


def answered(row: Row, answer: Answer) -> Result:
    """Of a free answer."""
    return _result(
        row,
        answer.memory,
        answer=answer.text,
        correct=correct(row, answer.text, None),
        finish_reason=answer.finish_reason,
        tokens=answer.prompt_tokens + len(answer.token_ids),
    )


def chosen(row: Row, choice: Choice) -> Result:
    """Of a row with choices."""
    return _result(
        row,
        choice.memory,
        answer=row.choices[choice.best],
        choice=choice.best,
        correct=correct(row, "", choice.best),
        scores=[round(score, 4) for score in choice.scores],
        finish_reason="choice",
        tokens=choice.prompt_tokens,
    )


def failed(row: Row, error: str) -> Result:
    """Of a row that got no answer."""
    return _result(row, None, error=error)


def told(error: Exception) -> str:
    """One line about an error; only those of bad input speak for themselves."""
    text = " ".join(str(error).split())
    return text if isinstance(error, InputError) else f"{type(error).__name__}: {text}"


def _result(row: Row, memory: MemoryReport | None, **values: Any) -> Result:
    empty = dict.fromkeys(("answer", "choice", "correct", "scores", "finish_reason", "error"))
    held = 0 if memory is None else memory.kv_bytes - memory.by_kind["unused"]
    return {
        "id": row.id,
        **empty,
        "tokens": 0,
        "kv_bytes": held,
        "kv_ratio": round(memory.bf16_bytes / held, 4) if memory and held else None,
        "seconds": 0.0,
        "group": row.group,
        "digest": row.digest,
    } | values
