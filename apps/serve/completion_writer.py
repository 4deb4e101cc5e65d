"""CompletionWriter: formats answers for OpenAI's completions API, streamed or not."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from transformers import PreTrainedTokenizerBase

from oscar_mm.apps.serve.answer_set import Choice
from oscar_mm.apps.serve.completions_body import CompletionBody, Prompt
from oscar_mm.apps.serve.logprobs import LegacyLogprobs, prompt_logprobs_body
from oscar_mm.apps.serve.refusals import Refusal
from oscar_mm.engine.logprobs import TokenLogprob
from oscar_mm.tool_parsers.parser import Piece

_JSON = json.JSONEncoder(ensure_ascii=False)


class CompletionWriter:
    """Formats the answers to one completions request; see ``AnswerFormat``.

    Args:
        body: the request.
        prompts: the prompts of the request; each has ``n`` answers.
        model: model name to show to clients.
        tokenizer: tokenizer of the model.
    """

    def __init__(
        self,
        body: CompletionBody,
        prompts: Sequence[Prompt],
        model: str,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._body, self._prompts, self._tokenizer = body, prompts, tokenizer
        head = {"id": f"cmpl-{uuid4().hex}", "object": "text_completion"}
        self._header = {**head, "created": int(time.time()), "model": model}
        self._logprobs: dict[int, LegacyLogprobs] = {}

    def whole(self, choices: Sequence[Choice], usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        written = [self._whole_choice(index, choice) for index, choice in enumerate(choices)]
        if self._body.max_tokens == 0:
            usage = {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return {**self._header, "choices": written, "usage": usage}

    def begin(self, index: int) -> Iterator[str]:
        """Yield the events before the first piece of an answer."""
        if self._body.echo:
            yield self._event(index, self._prompt(index).text)

    def piece(
        self, index: int, piece: Piece, found: Sequence[TokenLogprob] | None
    ) -> Iterator[str]:
        """Yield the events for a piece of text."""
        if self._body.max_tokens != 0:
            yield self._event(index, str(piece), self._legacy(index, found))

    def end(self, index: int, choice: Choice) -> Iterator[str]:
        """Yield the events after the last piece of an answer."""
        reason, found = self._reason(choice), choice.logprobs
        yield self._event(index, "", self._legacy(index, found), reason)

    def close(self, usage: Mapping[str, Any]) -> Iterator[str]:
        """Yield the events after all answers."""
        if self._body.has_usage:
            yield _event({**self._header, "choices": [], "usage": usage})

    def failed(self, refusal: Refusal) -> Iterator[str]:
        """Yield the events for answers that cannot be completed."""
        yield _event(refusal.body)

    def last(self) -> Iterator[str]:
        """Yield the final events, after the answers' slots have been freed."""
        yield "data: [DONE]\n\n"

    def _prompt(self, index: int) -> Prompt:
        return self._prompts[index // (self._body.n or 1)]

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        body, answer, prompt = self._body, choice.completed.answer, self._prompt(index)
        writes = body.max_tokens != 0
        text = (prompt.text if body.echo else "") + (answer.text if writes else "")
        found, first = list(choice.logprobs or ()) * writes, None
        of_prompt = answer.prompt_logprobs or ()
        if body.echo:
            found, first = [*of_prompt, *found], prompt.ids[0]
        asked = body.prompt_logprobs
        listed = None if asked is None else prompt_logprobs_body(self._tokenizer, of_prompt, asked)
        return {
            "index": index,
            "text": text,
            "logprobs": self._legacy(index, found, first),
            "finish_reason": self._reason(choice),
            "prompt_logprobs": listed,
        }

    def _reason(self, choice: Choice) -> str:
        return "length" if self._body.max_tokens == 0 else choice.completed.answer.finish_reason

    def _legacy(
        self, index: int, found: Sequence[TokenLogprob] | None, first: int | None = None
    ) -> dict[str, list[Any]] | None:
        if self._body.logprobs is None:
            return None
        if index not in self._logprobs:
            self._logprobs[index] = LegacyLogprobs(self._tokenizer, self._body.logprobs)
        return self._logprobs[index].body(found or (), first)

    def _event(
        self,
        index: int,
        text: str,
        logprobs: dict[str, list[Any]] | None = None,
        reason: str | None = None,
    ) -> str:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return _event({**self._header, "choices": [choice]})


def _event(data: dict[str, Any]) -> str:
    return f"data: {_JSON.encode(data)}\n\n"
