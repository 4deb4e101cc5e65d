"""Detokenizer: tokens to text in pieces of whole characters, without stop texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTEXT = 8
"""Tokens that are decoded once more with every new token, unless they have no text yet."""


class Detokenizer:
    """Text of one answer as its tokens come.

    Args:
        tokenizer: of the model.
        stop: text that ends it.
        lead: characters that are left out at its beginning.

    Attributes:
        token_ids: all tokens so far.
        text: the text given out so far.
        stopped: whether a stop text has occurred.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...] = (), lead: str = ""
    ) -> None:
        self._tokenizer = tokenizer
        self._stop, self._lead = stop, lead
        self._pending = ""
        # Text of tokens [0, _decoded) is known. Those from _context on, whose text is _known, are
        # decoded once more with every new token, because the first token of a text may lose its
        # leading space.
        self._context = self._decoded = 0
        self._known = ""
        self.token_ids: list[int] = []
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Take a token; the text that is now certain, perhaps empty."""
        self.token_ids.append(token)
        self._take(self._new_text(whole_characters=True))
        places = [place for stop in self._stop if (place := self._pending.find(stop)) >= 0]
        if places:
            self.stopped = True
            return self._give(min(places), drop_rest=True)
        return self._give(len(self._pending) - self._possible_stop())

    def finish(self) -> str:
        """The end of the answer: text that waited, and characters that stay incomplete."""
        if self.stopped:
            return ""
        self._take(self._new_text(whole_characters=False))
        return self._give(len(self._pending))

    def _take(self, text: str) -> None:
        self._pending += text
        if not self.text:
            self._pending = self._pending.lstrip(self._lead)

    def _new_text(self, whole_characters: bool) -> str:
        """Text of the tokens since the last text; none if it may end within a character."""
        text, known = self._decode(self.token_ids[self._context :]), self._known
        # Not DecodeStream of tokenizers: it raises where bytes that are no UTF-8 change how those
        # before them are read, as with the byte fallback of Llama and Mistral.
        if len(text) <= len(known) or (whole_characters and text.endswith("\ufffd")):
            return ""
        self._known = text
        if len(self.token_ids) - self._context >= _CONTEXT:
            self._context = self._decoded
            self._known = self._decode(self.token_ids[self._context :])
        self._decoded = len(self.token_ids)
        return text[len(known) :]

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return cast(str, text)  # of one row

    def _possible_stop(self) -> int:
        """Characters at the end that may be the beginning of a stop text."""
        return max(
            (
                size
                for stop in self._stop
                for size in range(1, min(len(stop), len(self._pending) + 1))
                if self._pending.endswith(stop[:size])
            ),
            default=0,
        )

    def _give(self, size: int, drop_rest: bool = False) -> str:
        piece, self._pending = self._pending[:size], "" if drop_rest else self._pending[size:]
        self.text += piece
        return piece
