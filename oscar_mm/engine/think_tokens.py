"""ThinkTokens: the tokens that delimit a model's reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_OPENING, _CLOSING = "<think>", "</think>"
_END_OF_PROMPT = 8
"""Number of last prompt tokens in which to look for an opening token written by the template."""


@dataclass(frozen=True)
class ThinkTokens:
    """Ids of the tokens that delimit a model's reasoning.

    Attributes:
        opening: token that begins the reasoning; written by the chat template at the end of a
            prompt, or by the model as its first token.
        closing: token that ends the reasoning; written by the model before its answer.
    """

    opening: int
    closing: int

    @classmethod
    def of(cls, tokenizer: Any) -> ThinkTokens | None:
        """Return the think tokens of a tokenizer; None if it does not have both."""
        added = tokenizer.get_added_vocab()
        if _OPENING not in added or _CLOSING not in added:
            return None
        return cls(added[_OPENING], added[_CLOSING])

    def opened(self, prompt: torch.Tensor) -> int:
        """Return the number of tokens from the opening token to the end of a prompt; 0 if the
        prompt does not open the reasoning.

        Args:
            prompt: (tokens,) token ids.
        """
        end = prompt[-_END_OF_PROMPT:].tolist()
        if self.opening not in end or self.closing in end:
            return 0
        return end[::-1].index(self.opening) + 1
