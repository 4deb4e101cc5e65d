"""Tokenizing: requests of vLLM's ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from oscar_mm.apps.serve.protocol import ApiRequest, FieldError

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline


class TokenizeBody(BaseModel):
    """JSON body of a /tokenize request: a prompt, or the fields of a chat-completions request."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def answer(self, pipe: Pipeline, ids: list[int]) -> dict[str, Any]:
        """Return the body of the response.

        Args:
            pipe: pipeline, for its tokenizer.
            ids: token ids to return.
        """
        tokenizer, strings = pipe.processor.tokenizer, None
        if self.return_token_strs:
            strings = tokenizer.convert_ids_to_tokens(ids)
        counts = {"count": len(ids), "max_model_len": pipe.max_context}
        return {**counts, "tokens": ids, "token_strs": strings}


class DetokenizeBody(BaseModel):
    """JSON body of a /detokenize request."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    tokens: list[int]

    def text(self, pipe: Pipeline) -> str:
        """Return the text of the request's tokens.

        Raises:
            FieldError: if a token id is invalid, or there are more tokens than fit in the context.
        """
        tokenizer, context = pipe.processor.tokenizer, pipe.max_context
        if len(self.tokens) > context:
            count = f"{len(self.tokens):,} tokens exceed the context length of {context:,}"
            raise FieldError(count, "tokens")
        if unknown := [token for token in self.tokens if not 0 <= token < len(tokenizer)]:
            raise FieldError(f"{str(unknown[0])[:20]} is not a token id of this model", "tokens")
        return str(tokenizer.decode(self.tokens))


def text_ids(pipe: Pipeline, asked: TokenizeBody) -> list[int]:
    """Return the token ids of a prompt without a chat template.

    Raises:
        RequestTooLarge: if the prompt is longer than the context.
    """
    text = asked.prompt or ""
    pipe.admission.check_text_length("prompt", text)
    special = asked.add_special_tokens is not False
    return pipe.processor.tokenizer(text, add_special_tokens=special)["input_ids"]


def conversation_ids(pipe: Pipeline, request: ApiRequest) -> list[int]:
    """Return the token ids of a conversation as the model reads them, including media tokens.

    Raises:
        InputError: see ``Pipeline.read_request``.
    """
    messages, template = [*request.messages()], request.template
    prompt = pipe.read_request(messages, 1, request.tools, template)
    return prompt.inputs["input_ids"][0].tolist()
