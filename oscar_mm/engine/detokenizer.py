"""Detokenizer: conversion of tokens to text as they arrive, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

CONTEXT = 8
"""Number of tokens decoded again with every new token, except by byte-level tokenizers; more while
the newest tokens have no text yet."""


class Detokenizer:
    """Streaming detokenizer of one text.

    Args:
        tokenizer: tokenizer of the model.
        stop: stop strings.
        lead: characters to strip from the beginning of the text.
        before: ids of preceding tokens, whose text is continued.
        keeps_stop: whether to include the stop string in the text.
        min_tokens: number of tokens before stop strings are looked for.

    Attributes:
        stop_text: the stop string that occurred; None if none has occurred so far.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: tuple[str, ...] = (),
        lead: str = "",
        before: Sequence[int] = (),
        *,
        keeps_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._decode = _decoding(tokenizer)
        self._stop, self._lead, self._keeps_stop = stop, lead, keeps_stop
        self._min_tokens = min_tokens
        """Number of further tokens before stop strings are looked for."""
        self._pending = ""
        """Text that is decoded but not returned yet."""
        # Bytes mean the same wherever decoding begins; other tokenizers may strip the leading space
        # of the first token that they decode.
        self._context = 0 if _is_byte_level(tokenizer) else CONTEXT
        # Tokens that are decoded again with the next ones. _known is the text of the first _decoded
        # of them, which has been taken already.
        self._recent = list(before)
        self._decoded, self._known = len(before), self._decode(self._recent)
        self.stop_text: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has occurred."""
        return self.stop_text is not None

    def push(self, *tokens: int) -> str:
        """Add tokens and return the text that has become final, perhaps empty.

        Tokens that are added together are decoded together, unless there are stop strings or
        invalid bytes, whose text depends on which tokens are decoded together.
        """
        if len(tokens) > 1 and self._stop:
            return self._push_each(tokens)
        self._recent += tokens
        text = self._decode(self._recent)
        if len(tokens) > 1 and "\ufffd" in text[len(self._known) :]:
            del self._recent[-len(tokens) :]
            return self._push_each(tokens)
        new = self._without_lead(self._new_text(text, whole_characters=True))
        if not self._stop:
            return new
        self._pending += new
        self._min_tokens -= 1
        if self._min_tokens >= 0:
            return self._give(len(self._pending))
        last = self._up_to_stop()
        if last is not None:
            return last
        return self._give(len(self._pending) - self._possible_stop())

    def _push_each(self, tokens: Sequence[int]) -> str:
        return "".join(self.push(token) for token in tokens if not self.stopped)

    def finish(self) -> str:
        """Return the withheld text, including incomplete characters."""
        if self.stopped:
            return ""
        text = self._decode(self._recent)
        self._pending += self._without_lead(self._new_text(text, whole_characters=False))
        last = self._up_to_stop()
        return self._give(len(self._pending)) if last is None else last

    def _up_to_stop(self) -> str | None:
        """Return the final text up to the first stop string; None if there is none."""
        found = [
            (place, place + len(stop) * self._keeps_stop, stop)
            for stop in self._stop
            if (place := self._pending.find(stop)) >= 0
        ]
        if not found:
            return None
        _, end, self.stop_text = min(found)
        return self._give(end, drop_rest=True)

    def _without_lead(self, text: str) -> str:
        if self._lead and text:
            text = text.lstrip(self._lead)
            self._lead = "" if text else self._lead
        return text

    def _new_text(self, text: str, *, whole_characters: bool) -> str:
        """Return what tokens have added to the text since the last call.

        Args:
            text: text of ``_recent``.
            whole_characters: whether to return "" while the text ends with an incomplete character.
        """
        known = self._known
        # tokenizers.DecodeStream is not an option: it raises if invalid UTF-8 changes the decoding
        # of the bytes before it, as with the byte fallback of Llama and Mistral.
        if len(text) <= len(known) or (whole_characters and text.endswith("\ufffd")):
            return ""
        self._known = text
        if not self._context:
            self._recent, self._known = [], ""
        elif len(self._recent) >= self._context:
            del self._recent[: self._decoded]
            self._known = self._decode(self._recent)
        self._decoded = len(self._recent)
        return text[len(known) :]

    def _possible_stop(self) -> int:
        """Return the number of trailing characters that may begin a stop string."""
        return max(
            (
                size
                for stop in self._stop
                if self._pending[-1:] in stop
                for size in range(1, min(len(stop), len(self._pending) + 1))
                if self._pending.endswith(stop[:size])
            ),
            default=0,
        )

    def _give(self, size: int, drop_rest: bool = False) -> str:
        piece, self._pending = self._pending[:size], "" if drop_rest else self._pending[size:]
        return piece


def _decoding(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Return a function that decodes tokens, without special tokens."""
    if (backend := _backend(tokenizer)) is not None:
        return partial(backend.decode, skip_special_tokens=True)
    return cast(
        Callable[[list[int]], str],  # A list only for batches.
        partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False),
    )


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the bytes of a text are the bytes of its tokens, one token after the other."""
    backend = _backend(tokenizer)
    return backend is not None and isinstance(backend.decoder, ByteLevel)


def _backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """Return the tokenizer of ``tokenizers`` that decodes like this one, if there is one.

    Transformers' own methods take several times as long as the decoding of a few tokens, so they
    are bypassed where no subclass or object changes them.
    """
    fast, kind = PreTrainedTokenizerFast, cast(Any, type(tokenizer))
    unchanged = issubclass(kind, fast) and "decode" not in vars(tokenizer)
    if unchanged and (kind.decode, kind._decode) == (fast.decode, fast._decode):
        return cast(PreTrainedTokenizerFast, tokenizer).backend_tokenizer
    return None
