"""Logit edits: biases, penalties, bans and masks, each applied to all rows in one pass.

An edit covers the rows that request it and tracks their tokens on the device, so the host never
waits. Edits are applied in the same order as in transformers: bias, repetition penalty, presence
and frequency penalties (which transformers lacks), bans, grammar masks, and finally the end of the
reasoning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from oscar_mm.engine.grammar import GrammarMask
from oscar_mm.ops.decode_tables import upload

if TYPE_CHECKING:
    from oscar_mm.engine.sampling import SamplingState

_ANY = -1
"""Wildcard that pads the beginnings of bad words to the same length."""
_NONE = -2
"""Padding before the first token of an answer."""


class LogitEdit(Protocol):
    """Change to the logits of some rows of a batch."""

    def apply_(self, scores: torch.Tensor) -> None:
        """Change (rows, vocabulary) float32 logits in place."""
        ...

    def note(self, tokens: torch.Tensor) -> None:
        """Record the (rows,) sampled tokens."""
        ...


def logit_edits(samplers: Sequence[SamplingState], device: torch.device) -> list[LogitEdit]:
    """Create the edits that the rows of a batch request, in order of application.

    Args:
        samplers: sampling states of the rows.
        device: device of the logits.
    """
    rows = [(row, one, one.sampling) for row, one in enumerate(samplers)]
    biased = [(row, one) for row, one, x in rows if x.logit_bias]
    repeating = [(row, one) for row, one, x in rows if x.repetition_penalty != 1.0]
    counted = [(row, one) for row, one, x in rows if x.presence_penalty or x.frequency_penalty]
    lasting = [(row, one) for row, one, x in rows if x.min_tokens > len(one.chosen)]
    banned = [(row, one) for row, one, _ in rows if one.bad_words]
    guided = [(row, one) for row, one, _ in rows if one.grammar is not None]
    bounded = [(row, one) for row, one, x in rows if x.bounds_reasoning and one.thinks is not None]
    made: list[tuple[Callable[[Rows, torch.device], LogitEdit], Rows]] = [
        (LogitBias, biased),
        (RepetitionPenalty, repeating),
        (CountPenalty, counted),
        (MinLength, lasting),
        (BadWords, banned),
        (GrammarMask, guided),
        (ReasoningEnd, bounded),
    ]
    return [make(affected, device) for make, affected in made if affected]


Rows = Sequence[tuple[int, "SamplingState"]]
"""Rows that request an edit, with their index in the batch."""


class LogitBias:
    """Bias added to logits, from ``logit_bias``."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        biases = [
            (row, token, float(bias))
            for row, one in rows
            for token, bias in (one.sampling.logit_bias or {}).items()
        ]
        places, tokens, values = zip(*biases, strict=True)
        self._places = _ids(places, device), _ids(tokens, device)
        self._values = upload(np.array(values, np.float32), device)

    def apply_(self, scores: torch.Tensor) -> None:
        """Add the biases."""
        scores.index_put_(self._places, self._values, accumulate=True)

    def note(self, tokens: torch.Tensor) -> None:
        """Do nothing: biases do not depend on tokens."""


class RepetitionPenalty:
    """Penalty on tokens of the prompt and the output: divides positive logits, multiplies negative
    logits."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        self._rows = _ids([row for row, _ in rows], device)
        self._penalties = _column([one.sampling.repetition_penalty for _, one in rows], device)
        self._seen = [
            torch.cat([one.prompt.to(device), _ids(one.chosen, device)]) for _, one in rows
        ]
        self._is_seen: torch.Tensor | None = None
        """(rows, vocabulary) bool; None until the vocabulary size is known."""

    def apply_(self, scores: torch.Tensor) -> None:
        """Penalize the tokens that have occurred."""
        if self._is_seen is None:
            self._is_seen = _zeros(self._rows, scores, torch.bool)
            for row, seen in enumerate(self._seen):
                self._is_seen[row].index_fill_(0, seen, True)
            self._seen.clear()
        found = scores[self._rows]
        lower = torch.where(found < 0, found * self._penalties, found / self._penalties)
        scores[self._rows] = torch.where(self._is_seen, lower, found)

    def note(self, tokens: torch.Tensor) -> None:
        """Record that the tokens have occurred."""
        if self._is_seen is not None:
            self._is_seen.scatter_(1, tokens[self._rows, None], True)


class CountPenalty:
    """Penalty on tokens of the output, from ``presence_penalty`` and ``frequency_penalty``."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        self._rows = _ids([row for row, _ in rows], device)
        self._presence = _column([one.sampling.presence_penalty for _, one in rows], device)
        self._frequency = _column([one.sampling.frequency_penalty for _, one in rows], device)
        self._chosen = [_ids(one.chosen, device) for _, one in rows]
        self._counts: torch.Tensor | None = None
        """(rows, vocabulary) float32; None until the vocabulary size is known."""

    def apply_(self, scores: torch.Tensor) -> None:
        """Penalize the tokens of the output."""
        if self._counts is None:
            self._counts = _zeros(self._rows, scores, torch.float32)
            for row, chosen in enumerate(self._chosen):
                self._counts[row].index_add_(
                    0, chosen, torch.ones_like(chosen, dtype=torch.float32)
                )
            self._chosen.clear()
        present = self._counts > 0
        scores[self._rows] -= self._frequency * self._counts + self._presence * present

    def note(self, tokens: torch.Tensor) -> None:
        """Count the tokens."""
        if self._counts is not None:
            chosen = tokens[self._rows, None]
            self._counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float32))


class MinLength:
    """Ban on end tokens before ``min_tokens``."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        bans = [
            (row, token, one.sampling.min_tokens - len(one.chosen))
            for row, one in rows
            for token in sorted(one.end_tokens)
        ]
        places, tokens, left = zip(*bans, strict=True) if bans else ((), (), ())
        self._places, self._tokens = _ids(places, device), _ids(tokens, device)
        self._left = _ids(left, device)
        self._max_steps, self._steps = max(left, default=0), 0

    def apply_(self, scores: torch.Tensor) -> None:
        """Ban the end tokens of answers below their minimum length."""
        if self._steps < self._max_steps:
            _ban(scores, self._places, self._tokens, self._left > self._steps)

    def note(self, tokens: torch.Tensor) -> None:
        """Count the step."""
        self._steps += 1


class BadWords:
    """Bans the last token of a bad word when the word's other tokens have just been generated."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        words = [(place, word) for place, (_, one) in enumerate(rows) for word in one.bad_words]
        size = max(len(word) for _, word in words) - 1
        self._rows = _ids([row for row, _ in rows], device)
        self._word_rows = _ids([place for place, _ in words], device)
        self._places = self._rows[self._word_rows]
        self._ends = _ids([word[-1] for _, word in words], device)
        beginnings = [[_ANY] * (size + 1 - len(word)) + list(word[:-1]) for _, word in words]
        self._beginnings = _ids(beginnings, device)
        latest = [([_NONE] * size + one.chosen)[len(one.chosen) :] for _, one in rows]
        self._latest = _ids(latest, device)
        """(rows, longest word - 1) latest tokens of each row."""

    def apply_(self, scores: torch.Tensor) -> None:
        """Ban the last tokens of words whose beginnings match the latest tokens."""
        same = self._latest[self._word_rows] == self._beginnings
        _ban(scores, self._places, self._ends, (same | (self._beginnings == _ANY)).all(1))

    def note(self, tokens: torch.Tensor) -> None:
        """Append the sampled tokens to the latest tokens and drop the oldest."""
        if self._latest.shape[1]:
            self._latest = torch.cat([self._latest[:, 1:], tokens[self._rows, None]], dim=1)


class ReasoningEnd:
    """Limit on the reasoning: forces the closing token after ``thinking_token_budget`` tokens."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        marks = [one.thinks for _, one in rows if one.thinks is not None]
        openings = [mark.opening for mark in marks]
        closings = [mark.closing for mark in marks]
        begun = [
            one.reasons or one.chosen[:1] == [opening]
            for (_, one), opening in zip(rows, openings, strict=True)
        ]
        open_ = [
            is_begun and closing not in one.chosen
            for (_, one), is_begun, closing in zip(rows, begun, closings, strict=True)
        ]
        left = [
            (one.sampling.thinking_token_budget or 0) - len(one.chosen) + (not one.reasons)
            for _, one in rows
        ]
        self._rows = _ids([row for row, _ in rows], device)
        self._openings, self._closings = _ids(openings, device), _ids(closings, device)
        self._open, self._left = upload(np.array(open_), device), _ids(left, device)
        first = [not (one.reasons or one.chosen) for _, one in rows]
        self._first = upload(np.array(first), device)
        """Rows whose next token may open the reasoning; that token does not count."""

    def apply_(self, scores: torch.Tensor) -> None:
        """Allow only the closing token in rows that have used up their budget."""
        over = (self._open & (self._left <= 0))[:, None]
        found = scores[self._rows].masked_fill(over, -math.inf)
        closing = self._closings[:, None]
        found.scatter_(1, closing, found.gather(1, closing).masked_fill(over, 0.0))
        scores[self._rows] = found

    def note(self, tokens: torch.Tensor) -> None:
        """Count the tokens of the reasoning."""
        own = tokens[self._rows]
        begins = self._first & (own == self._openings)
        # In rows whose answer opens the reasoning itself, ``_left`` started one higher.
        self._left -= (self._open | self._first).long()
        self._open = (self._open | begins) & (own != self._closings)
        self._first = torch.zeros_like(self._first)


def _ban(
    scores: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, banned: torch.Tensor
) -> None:
    """Set logits to minus infinity where ``banned`` is True; row-token pairs may repeat.

    Ids beyond the vocabulary, which tokenizers and checkpoints may list, are ignored.
    """
    vocabulary = scores.shape[1]
    bounds = torch.where(banned & (tokens < vocabulary), -math.inf, math.inf)
    flat = rows * vocabulary + tokens.clamp(max=vocabulary - 1)
    scores.view(-1).scatter_reduce_(0, flat, bounds, "amin")


def _ids(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    return upload(np.array(values, np.int64), device)


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return upload(np.array(values, np.float32), device)[:, None]


def _zeros(rows: torch.Tensor, scores: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros((len(rows), scores.shape[1]), dtype=dtype, device=scores.device)
