"""Reasoning: what a thinking model writes to itself before its answer, and by what it is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_OPENING, _CLOSING = "<think>", "</think>"
_END_OF_PROMPT = 8
"""Tokens at the end of a prompt among which the opening one is, if the template writes it."""


class Reasoning(str):
    """A piece of a model's reasoning, among the pieces of its answer."""

    __slots__ = ()


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
        """Those of a tokenizer; None if it has none."""
        added = tokenizer.get_added_vocab()
        if _OPENING not in added or _CLOSING not in added:
            return None
        return cls(added[_OPENING], added[_CLOSING])

    def opened(self, prompt: torch.Tensor) -> int:
        """Tokens at the end of a prompt, (tokens,) ids, by which it has the model reason; or 0."""
        end = prompt[-_END_OF_PROMPT:].tolist()
        if self.opening not in end or self.closing in end:
            return 0
        return end[::-1].index(self.opening) + 1


@dataclass(frozen=True)
class Reasoned:
    """That an answer began with reasoning.

    Attributes:
        text: the reasoning, without line breaks around it.
        opened: tokens at the end of the prompt that begin it.
        tokens: at the beginning of the answer, with those that divide it from the text.
    """

    text: str
    opened: int
    tokens: int
