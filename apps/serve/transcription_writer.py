"""TranscriptionWriter: formats an answer for OpenAI's audio API, streamed or not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from oscar_mm.apps.serve.answer_set import Choice
from oscar_mm.apps.serve.refusals import Refusal
from oscar_mm.engine.answer import Reasoning
from oscar_mm.tool_parsers.parser import Piece

_JSON = json.JSONEncoder(ensure_ascii=False)


class TranscriptionWriter:
    """Formats a transcription, without reasoning; see ``AnswerFormat``.

    Args:
        plain: whether a response that is not streamed is plain text rather than JSON.
    """

    def __init__(self, *, plain: bool) -> None:
        self._plain = plain

    def whole(self, choices: Sequence[Choice], usage: Mapping[str, Any]) -> dict[str, Any] | str:
        """Return the body of a response that is not streamed: JSON, or plain text."""
        text = choices[0].completed.answer.text
        return text if self._plain else {"text": text, "usage": audio_usage(usage)}

    def begin(self, _: int) -> Iterator[str]:
        """Yield nothing: the stream begins with the first piece."""
        return iter(())

    def piece(self, _: int, piece: Piece, __: object) -> Iterator[str]:
        """Yield the event for a piece of text."""
        if isinstance(piece, str) and not isinstance(piece, Reasoning):
            yield _event("transcript.text.delta", delta=piece)

    def end(self, _: int, choice: Choice) -> Iterator[str]:
        """Yield the event after the last piece, which contains the full text."""
        completed = choice.completed
        usage = audio_usage(completed.usage)
        yield _event("transcript.text.done", text=completed.answer.text, usage=usage)

    def close(self, _: Mapping[str, Any]) -> Iterator[str]:
        """Yield nothing: the last event of the answer contains the usage."""
        return iter(())

    def failed(self, refusal: Refusal) -> Iterator[str]:
        """Yield the event for an answer that cannot be completed."""
        yield f"data: {_JSON.encode(refusal.body)}\n\n"

    def last(self) -> Iterator[str]:
        """Yield nothing: the stream ends with the answer."""
        return iter(())


def audio_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the usage of a chat completion to that of a transcription."""
    heard = usage["prompt_tokens_details"]["audio_tokens"]
    return {
        "type": "tokens",
        "input_tokens": usage["prompt_tokens"],
        "input_token_details": {
            "audio_tokens": heard,
            "text_tokens": usage["prompt_tokens"] - heard,
        },
        "output_tokens": usage["completion_tokens"],
        "total_tokens": usage["total_tokens"],
    }


def _event(kind: str, **fields: Any) -> str:
    return f"data: {_JSON.encode({'type': kind, **fields})}\n\n"
