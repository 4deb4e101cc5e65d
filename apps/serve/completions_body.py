"""Requests of OpenAI's completions API: prompts without a chat template.

A prompt may contain control tokens, because its client writes all of it. Fields that are unknown or
do not change the answer are ignored, and unsupported ones are refused, as in ``protocol``.
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
"""All prompts of a request together have at most this many times the tokens of the context."""
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
"""Unsupported fields, and their values, in addition to null, that do not change the answer."""


class CompletionBody(SampledBody):
    """The JSON of a request; ``prompts`` checks its prompt."""

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
                "must equal n in a stream, because the best answers are known only at its end",
                "best_of",
            )
        if self.stream and self.echo and self.logprobs is not None:
            raise FieldError(
                "cannot be combined with logprobs in a stream: leave one of them out", "echo"
            )
        return self

    @property
    def count(self) -> int:
        """Number of answers that are generated for each prompt."""
        return max(self.n or 1, self.best_of or 1)

    def prompts(self, pipe: Pipeline, max_answers: int) -> list[Prompt]:
        """Tokenize and check the prompts.

        Args:
            pipe: provides the tokenizer and the limits.
            max_answers: maximum number of answers to all prompts together.

        Raises:
            RequestTooLarge: if a prompt is longer than the context.
            InputError: if the field has no valid prompts, or too many.
        """
        given = self.prompt
        if isinstance(given, str) or (_is_list(given) and all(map(_is_token, given))):
            given = [given]
        if not _is_list(given) or not all(_is_prompt(one) for one in given):
            raise FieldError(
                "must be a string, a list of strings, a list of token ids or a list of such lists, "
                "and not empty",
                "prompt",
            )
        if len(given) * self.count > max_answers:
            asked = f"{len(given):,} prompts with {self.count} answers each"
            raise FieldError(
                f"{asked} are more than the {max_answers} answers that this server runs at once",
                "prompt",
            )
        prompts, tokens = [], 0
        for one in given:
            prompts.append(Prompt.of(one, pipe, self.add_special_tokens is not False))
            tokens += len(prompts[-1].ids)
            if tokens > (limit := _TOGETHER * pipe.max_context):
                raise FieldError(
                    f"all prompts together have more than {limit:,} tokens: send fewer", "prompt"
                )
        return prompts

    def requests(self, prompts: Sequence[Prompt]) -> list[ApiRequest]:
        """Return one request for each prompt."""
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
            )
            for prompt in prompts
        ]


class Prompt:
    """A prompt as text and as token ids.

    Args:
        text: the text, for ``echo``.
        ids: the token ids.
    """

    def __init__(self, text: str, ids: Sequence[int]) -> None:
        self.text, self.ids = text, tuple(ids)

    @classmethod
    def of(cls, given: str | list[int], pipe: Pipeline, special: bool) -> Prompt:
        """A prompt from its text or its token ids.

        Args:
            given: the text or the ids.
            pipe: provides the tokenizer and the limits.
            special: whether to put the tokenizer's own tokens at the beginning of a text.

        Raises:
            RequestTooLarge: if it is longer than the context.
            InputError: if it has no tokens, or tokens that the model cannot read.
        """
        tokenizer = pipe.processor.tokenizer
        if not isinstance(given, str):
            pipe.family.check_ids("prompt", given)
            return cls(str(tokenizer.decode(given)), given)
        pipe.admission.check_text_length("prompt", given)
        ids = tokenizer(given, add_special_tokens=special)["input_ids"]
        if not ids:
            raise FieldError("is empty: give some text", "prompt")
        pipe.family.check_ids("prompt", ids)
        return cls(given, ids)


def _is_list(given: Any) -> bool:
    return isinstance(given, list) and bool(given)


def _is_token(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


def _is_prompt(given: Any) -> bool:
    return isinstance(given, str) or (_is_list(given) and all(map(_is_token, given)))
