"""WholePrompt: generates the answer to a request that does not continue a stored conversation.

Such requests are prompts without a chat template, and conversations with template options,
``prompt_logprobs`` or a spoken answer. The model reads the full prompt, except for its prefix in
the prefix cache.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from oscar_mm.apps.serve.completed import CompletedAnswer
from oscar_mm.apps.serve.protocol import ApiRequest, FieldError
from oscar_mm.engine.prompt import Prompt
from oscar_mm.engine.request import Request
from oscar_mm.engine.speech import Speech
from oscar_mm.errors import Cancelled
from oscar_mm.tool_parsers.parser import Piece

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline

MAX_PROMPT_LOGPROBS = 1 << 18
"""Maximum number of prompt log-probabilities in a response, about 20 MB of JSON."""


class WholePrompt:
    """The running answer to a request whose full prompt is read; any thread can call ``cancel``.

    Args:
        pipe: pipeline that generates the answer.
        request: request without earlier turns.

    Attributes:
        client: names that identify the client; see ``Request``.
        answering: running generation; None before generation starts.
    """

    def __init__(self, pipe: Pipeline, request: ApiRequest) -> None:
        self._pipe, self._request = pipe, request
        self.client: tuple[str, ...] = ()
        self.answering: Request | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """End the answer, for example because its client has disconnected."""
        self._cancelled = True
        if (answering := self.answering) is not None:
            answering.cancel()

    def answer_steps(
        self,
    ) -> Generator[WholePrompt | Piece | Speech | Request | CompletedAnswer, None, None]:
        """Answer like ``Conversations.answer_steps``, but yield this object instead of a chat."""
        start, pipe, tools = perf_counter(), self._pipe, self._request.tools
        options = pipe.family.with_calls(self._request.sampling, tools)
        sampling = pipe.sampling(options, ())
        yield self
        prompt = self._prompt()
        if sampling.prompt_logprobs is not None:
            _check_prompt_logprobs(prompt.tokens, sampling.prompt_logprobs)
        max_new_tokens = pipe.admission.longest_answer(prompt, sampling.max_new_tokens)
        sampling = replace(sampling, max_new_tokens=max_new_tokens)
        self.answering = running_request = pipe.new_request(
            prompt, sampling, start, tools, **self._speech()
        )
        running_request.client = self.client
        try:
            if self._cancelled:
                running_request.cancel()
            else:
                pipe.engine.submit(running_request)
                yield running_request
            yield from running_request
        finally:
            running_request.cancel()
        if running_request.cancelled and not running_request.written.says:
            raise Cancelled("the answer was cancelled before its first word")
        answer = running_request.answer()
        yield CompletedAnswer(answer, answer.cached_tokens, answer.prompt_tokens)

    def _speech(self) -> dict[str, Any]:
        """Return the arguments of ``Pipeline.new_request`` for speech."""
        if (spoken := self._request.spoken) is None:
            return {}
        text = self._request.script
        script = None if text is None else self._pipe.script("input", text)
        return {"speaker": spoken.speaker, "script": script}

    def _prompt(self) -> Prompt:
        pipe, request = self._pipe, self._request
        if request.raw is not None:
            prompt = pipe.text_prompt(request.raw)
        else:
            messages, template = [*request.messages()], request.template
            prompt = pipe.read_request(
                messages, 1, request.tools, template, cancelled=lambda: self._cancelled
            )
        return replace(prompt, salt=request.cache_salt, adapter=request.adapter)


def _check_prompt_logprobs(tokens: int, top: int) -> None:
    if (count := tokens * (top + 1)) > MAX_PROMPT_LOGPROBS:
        raise FieldError(
            f"the prompt's {tokens:,} tokens have {count:,} log-probabilities, more than the "
            f"limit of {MAX_PROMPT_LOGPROBS:,}: shorten the prompt, or request fewer",
            "prompt_logprobs",
        )
