"""ChatWriter: formats answers for OpenAI's chat-completions API, streamed or not."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from transformers import PreTrainedTokenizerBase

from oscar_mm.apps.serve.answer_set import Choice
from oscar_mm.apps.serve.logprobs import logprobs_body, prompt_logprobs_body
from oscar_mm.apps.serve.refusals import Refusal
from oscar_mm.apps.serve.spoken import SpokenChoice
from oscar_mm.apps.serve.tools import call_body, delta_body
from oscar_mm.engine.answer import Reasoning
from oscar_mm.engine.logprobs import TokenLogprob
from oscar_mm.engine.sampling import MAX_LOGPROBS
from oscar_mm.engine.speech import Speech
from oscar_mm.tool_parsers.calls import ToolCallDelta
from oscar_mm.tool_parsers.parser import Piece

_JSON = json.JSONEncoder(ensure_ascii=False)
_REASONING = "reasoning", "reasoning_content"
"""Names of the reasoning field: vLLM's and OpenRouter's, then DeepSeek's; clients read either."""
_TEXT = "\0"
"""Placeholder for the text in the template of an answer's events."""


class ChatWriter:
    """Formats the answers to one chat-completions request; see ``AnswerFormat``.

    Args:
        model: model name to show to clients.
        tokenizer: tokenizer of the model.
        usage: whether the stream ends with the token usage.
        echo: text to prepend to each answer.
        reasoning: whether the response includes the reasoning.
        spoken: function that creates the audio of one answer; None for answers in text.
    """

    def __init__(
        self,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        usage: bool = False,
        echo: str = "",
        reasoning: bool = True,
        spoken: Callable[[], SpokenChoice] | None = None,
    ) -> None:
        self._tokenizer, self._usage = tokenizer, usage
        self._echo, self._reasoning = echo, reasoning
        created = int(time.time())
        self._header = {"id": f"chatcmpl-{uuid4().hex}", "created": created, "model": model}
        self._parts: dict[tuple[int, tuple[str, ...]], list[str]] = {}
        self._spoken = None if spoken is None else defaultdict[int, SpokenChoice](spoken)

    def whole(self, choices: Sequence[Choice], usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        written = [self._whole_choice(index, choice) for index, choice in enumerate(choices)]
        found = choices[0].completed.answer.prompt_logprobs
        listed = found and prompt_logprobs_body(self._tokenizer, found, MAX_LOGPROBS)
        return {
            **self._header,
            "object": "chat.completion",
            "choices": written,
            "usage": usage,
            "prompt_logprobs": listed,
        }

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        answer = choice.completed.answer
        text = self._echo + answer.text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if answer.tool_calls:
            message["content"] = text or None
            message["tool_calls"] = [call_body(call) for call in answer.tool_calls]
        speaks = answer.speech is not None and (len(answer.speech) or not answer.tool_calls)
        if self._spoken is not None and answer.speech is not None and speaks:
            assert answer.sample_rate is not None
            spoken = self._spoken[index].whole(text, answer.speech, answer.sample_rate)
            message |= {"content": None, "audio": spoken}
        if answer.reasoning is not None and self._reasoning:
            message |= dict.fromkeys(_REASONING, answer.reasoning)
        reason = answer.finish_reason
        return {
            "index": index,
            "message": message,
            "finish_reason": reason,
            "logprobs": logprobs_body(self._tokenizer, choice.logprobs),
        }

    def begin(self, index: int) -> Iterator[str]:
        """Yield the events before the first piece of an answer."""
        if self._spoken is None:
            yield self._event(index, {"role": "assistant", "content": self._echo})
        else:
            audio = self._spoken[index].delta(transcript=self._echo)
            yield self._event(index, {"role": "assistant", "content": None, **audio})

    def piece(
        self, index: int, piece: Piece, found: Sequence[TokenLogprob] | None
    ) -> Iterator[str]:
        """Yield the events for a piece of text, of reasoning or of a tool call."""
        logprobs = logprobs_body(self._tokenizer, found)
        if self._spoken is not None and not isinstance(piece, Reasoning | ToolCallDelta):
            delta = self._spoken[index].delta(transcript=piece)
            yield self._event(index, delta, logprobs=logprobs)
            return
        if isinstance(piece, ToolCallDelta):
            yield self._event(index, {"tool_calls": [delta_body(piece)]}, logprobs=logprobs)
            return
        if isinstance(piece, Reasoning) and not self._reasoning:
            return
        names = _REASONING if isinstance(piece, Reasoning) else ("content",)
        if logprobs is not None:
            yield self._event(index, dict.fromkeys(names, piece), logprobs=logprobs)
            return
        if (parts := self._parts.get((index, names))) is None:
            parts = self._event(index, dict.fromkeys(names, _TEXT)).split(_JSON.encode(_TEXT))
            self._parts[index, names] = parts
        yield _JSON.encode(piece).join(parts)

    def speech(self, index: int, speech: Speech) -> Iterator[str]:
        """Yield the event for a piece of speech."""
        if self._spoken is not None and (sent := self._spoken[index].sent(speech)):
            yield self._event(index, sent)

    def end(self, index: int, choice: Choice) -> Iterator[str]:
        """Yield the events after the last piece of an answer."""
        logprobs = logprobs_body(self._tokenizer, choice.logprobs)
        if self._spoken is not None:
            if rest := self._spoken[index].rest():
                yield self._event(index, rest)
            text = self._echo + choice.completed.answer.text
            yield self._event(index, self._spoken[index].end(text))
        yield self._event(index, {}, choice.completed.answer.finish_reason, logprobs)

    def close(self, usage: Mapping[str, Any]) -> Iterator[str]:
        """Yield the events after all answers."""
        if self._usage:
            yield self._chunk([], usage=usage)

    def failed(self, refusal: Refusal) -> Iterator[str]:
        """Yield the events for answers that cannot be completed."""
        yield _event(refusal.body)

    def last(self) -> Iterator[str]:
        """Yield the final events, after the answers' slots have been freed."""
        yield "data: [DONE]\n\n"

    def _event(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> str:
        choice = {"index": index, "delta": delta, "finish_reason": reason}
        if logprobs is not None:
            choice["logprobs"] = logprobs
        return self._chunk([choice])

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        head = {**self._header, "object": "chat.completion.chunk"}
        return _event({**head, "choices": choices, **more})


def _event(data: dict[str, Any]) -> str:
    return f"data: {_JSON.encode(data)}\n\n"
