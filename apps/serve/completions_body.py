"""Requests of OpenAI's completions API: prompts without a chat template.

A prompt may contain control tokens, because the client writes the full prompt. As in ``protocol``,
fields that are unknown or do not change the answer are ignored; other unsupported fields are
refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from oscar_mm.apps.serve.protocol import (
    MAX_ANSWERS,
    ApiRequest,
    FieldError,
    SampledBody,
    check_top,
    refuse_unsupported,
)

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline

_USUAL_LENGTH = 16
"""Default of ``max_tokens``, as in OpenAI's API."""
_TOGETHER = 8
"""Maximum total tokens of a request's prompts, in multiples of the context length."""
_REFUSED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "prompt_embeds": (),
    "repetition_detection": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Unsupported fields, and the values (besides null) that do not change the answer."""


class CompletionBody(SampledBody):
    """JSON body of a request; ``prompts`` checks the prompt."""

    prompt: Any = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: int | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _check_supported(self) -> CompletionBody:
        refuse_unsupported(self.model_extra or {}, _REFUSED)
        check_top("logprobs", self.logprobs)
        if self.max_tokens == 0 and not self.echo:
            raise FieldError("must be at least 1, or 0 with echo", "max_tokens")
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise FieldError(f"must be at least n, which is {self.n}", "best_of")
        if self.stream and (self.best_of or 1) > (self.n or 1):
            raise FieldError(
                "must equal n in a stream, because the best answers are known only at the end",
                "best_of",
            )
        if self.stream and self.echo and self.logprobs is not None:
            raise FieldError(
                "cannot be combined with logprobs in a stream: leave out echo or logprobs", "echo"
            )
        return self

    @property
    def count(self) -> int:
        """Number of answers to generate for each prompt."""
        return max(self.n or 1, self.best_of or 1)

    def prompts(self, pipe: Pipeline, max_answers: int) -> list[Prompt]:
        """Tokenize and check the prompts.

        Args:
            pipe: pipeline, for its tokenizer and limits.
            max_answers: maximum total number of answers to all prompts.

        Raises:
            RequestTooLarge: if a prompt is longer than the context.
            InputError: if ``prompt`` does not contain valid prompts, or contains too many.
        """
        given = self.prompt
        if isinstance(given, str) or (_is_list(given) and all(map(_is_token, given))):
            given = [given]
        if not _is_list(given) or not all(_is_prompt(one) for one in given):
            raise FieldError(
                "must be a string, a list of strings, a list of token ids or a list of such lists, "
                "and must not be empty",
                "prompt",
            )
        if len(given) * self.count > max_answers:
            asked = f"{len(given):,} prompts with {self.count} answers each"
            raise FieldError(
                f"{asked} are too many: this server runs at most {max_answers} answers at once",
                "prompt",
            )
        prompts, tokens = [], 0
        for one in given:
            prompts.append(Prompt.of(one, pipe, self.add_special_tokens is not False))
            tokens += len(prompts[-1].ids)
            if tokens > (limit := _TOGETHER * pipe.max_context):
                raise FieldError(
                    f"all prompts together have more than {limit:,} tokens: send less", "prompt"
                )
        return prompts

    def requests(self, prompts: Sequence[Prompt]) -> list[ApiRequest]:
        """Return one validated request per prompt."""
        sampling = self.sampling()
        longest = _USUAL_LENGTH if self.max_tokens is None else self.max_tokens
        sampling["max_new_tokens"] = max(
            1, longest
        )  # The model always generates at least one token.
        if self.logprobs is not None:
            sampling["logprobs"] = self.logprobs
            if self.echo:
                of_prompt = sampling.get("prompt_logprobs", 0)
                sampling["prompt_logprobs"] = max(of_prompt, self.logprobs)
        return [
            ApiRequest(
                model=self.model,
                system=None,
                past=(),
                question=(),
                sampling=dict(sampling),
                stream=bool(self.stream),
                usage=self.has_usage,
                cache_salt=self.cache_salt or "",
                n=self.n or 1,
                best_of=self.best_of or 1,
                raw=prompt.ids,
                user=self.sender,
            )
            for prompt in prompts
        ]


class Prompt:
    """A prompt, as both text and token ids.

    Args:
        text: text of the prompt, returned for ``echo``.
        ids: token ids of the prompt.
    """

    def __init__(self, text: str, ids: Sequence[int]) -> None:
        self.text, self.ids = text, tuple(ids)

    @classmethod
    def of(cls, given: str | list[int], pipe: Pipeline, special: bool) -> Prompt:
        """Create a prompt from its text or its token ids.

        Args:
            given: text or token ids of the prompt.
            pipe: pipeline, for its tokenizer and limits.
            special: whether the tokenizer adds its special tokens to a text.

        Raises:
            RequestTooLarge: if the prompt is longer than the context.
            InputError: if the prompt has no tokens, or contains invalid token ids.
        """
        tokenizer = pipe.processor.tokenizer
        if not isinstance(given, str):
            pipe.family.check_ids("prompt", given)
            return cls(str(tokenizer.decode(given)), given)
        pipe.admission.check_text_length("prompt", given)
        ids = tokenizer(given, add_special_tokens=special)["input_ids"]
        if not ids:
            raise FieldError("must not be empty", "prompt")
        pipe.family.check_ids("prompt", ids)
        return cls(given, ids)


def _is_list(given: Any) -> bool:
    return isinstance(given, list) and bool(given)


def _is_token(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


def _is_prompt(given: Any) -> bool:
    return isinstance(given, str) or (_is_list(given) and all(map(_is_token, given)))
