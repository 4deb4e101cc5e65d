"""ThinkTokens: the tokens between which a model reasons before it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_OPENING, _CLOSING = "<think>", "</think>"
_END_OF_PROMPT = 8
"""Tokens at the end of a prompt among which the opening one is, if the template writes it."""


@dataclass(frozen=True)
class ThinkTokens:
    """Ids of the tokens between which a model reasons.

    Attributes:
        opening: written by the chat template at the end of a prompt, or by the model at first.
        closing: written by the model before its answer.
    """

    opening: int
    closing: int

    @classmethod
    def of(cls, tokenizer: Any) -> ThinkTokens | None:
        """The think tokens of a tokenizer; None if it has none."""
        added = tokenizer.get_added_vocab()
        if _OPENING not in added or _CLOSING not in added:
            return None
        return cls(added[_OPENING], added[_CLOSING])

    def opened(self, prompt: torch.Tensor) -> int:
        """How many tokens at the end of a prompt, (tokens,) ids, have the model reason; or 0."""
        end = prompt[-_END_OF_PROMPT:].tolist()
        if self.opening not in end or self.closing in end:
            return 0
        return end[::-1].index(self.opening) + 1
