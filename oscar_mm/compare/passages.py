"""Comparison of methods on passages of a text, by any causal language model."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from oscar_mm.cache.cache import OscarCache
from oscar_mm.compare.divergence import Scores, ratio
from oscar_mm.compare.forced import Forced, ForcedCache, LayerStates, Recorder, as_recorded
from oscar_mm.compare.methods import PUBLISHED, REFERENCE, Method, StoredPast, bits_per_value
from oscar_mm.compare.paged import Paged
from oscar_mm.errors import InputError
from oscar_mm.pages.layout import PAGE_TOKENS
from oscar_mm.policy import KVPolicy

JUDGED = 64
"""Tokens after a passage that are judged."""
TAIL = 37
"""Tokens that a passage is longer than the one before it: pages end anywhere in it."""
ONE_BY_ONE = "{}, one by one"
"""Name of a policy's row whose tokens are stored one at a time."""
_CHARACTERS = 8
"""Of a token, at most on average, where a long text is cut to tokens."""


def longest(tokens: int, judged: int = JUDGED) -> int:
    """Tokens of the longest passage of ``passages``, what is judged included."""
    return tokens + PAGE_TOKENS - 1 + judged + 1


def passages(
    tokenizer: Any, texts: Mapping[str, str], tokens: int, count: int, judged: int = JUDGED
) -> Iterator[Tensor]:
    """Passages from all over the texts in turn, each a little longer than ``tokens``.

    They overlap where the texts are short.

    Args:
        tokenizer: of the model.
        texts: by a name for errors.
        tokens: least length of what is stored; up to ``PAGE_TOKENS - 1`` more.
        count: of passages.
        judged: tokens after what is stored, of which there is one more.

    Yields:
        (1, tokens and a tail and what is judged) int64 ids on the CPU.

    Raises:
        InputError: a text is too short for one passage.
    """
    names = list(texts)
    turns = -(-count // len(names))
    for number in range(count):
        name = names[number % len(names)]
        length = tokens + number * TAIL % PAGE_TOKENS + judged + 1
        yield _passage(tokenizer, name, texts[name], length, number // len(names), turns)


def _passage(tokenizer: Any, name: str, text: str, length: int, number: int, count: int) -> Tensor:
    """(1, length) ids, from the line that begins after ``number / count`` of a text."""

    def ids(start: int, stop: int) -> Tensor:
        return tokenizer(text[start:stop], return_tensors="pt").input_ids

    reach = length * _CHARACTERS
    if reach > len(text):  # Then by what tokens have here.
        there = max(1, ids(0, len(text)).shape[1])
        reach = min(len(text), math.ceil(len(text) * length / there))
    start = (len(text) - reach) * number // count
    if reach < len(text):
        start = max(start, text.find("\n", start, start + reach))
    stop = start + length * _CHARACTERS
    while (found := ids(start, stop)).shape[1] < length:
        if stop < len(text):
            stop += length * _CHARACTERS
        elif start:  # The end of a text may have longer tokens than the rest.
            start = max(0, start - length)
        else:
            raise InputError(
                f"{name}: the text of {found.shape[1]:,} tokens is too short for a passage of "
                f"{length:,}; give a longer text or fewer tokens"
            )
    return found[:, :length]


@dataclass
class _Row:
    """Sums of one method; of each passage one entry.

    Attributes:
        losses: by the method and by the 16-bit cache: nats of the text itself over judged tokens.
        pages: bytes and values of what is in few bits.
        held: bytes and values of all that a cache holds.
        same: tokens written freely before the first that 16 bit does not write.
        equal: tokens written freely that 16 bit writes at this place.
    """

    scores: Scores = field(default_factory=Scores)
    losses: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    pages: list[tuple[int, int]] = field(default_factory=list)
    held: list[tuple[int, int]] = field(default_factory=list)
    same: list[int] = field(default_factory=list)
    equal: list[int] = field(default_factory=list)

    def add(self, forced: Forced, exact: Tensor, logits: Tensor) -> None:
        """Judge a passage: logits (judged tokens, vocabulary) in 16 bit and of the method."""
        self.scores.add(forced, exact, logits)
        own, other = (
            cross_entropy(x, forced.targets[0], reduction="sum").double().cpu()
            for x in (logits, exact)
        )
        self.losses.append((own, other))

    def add_written(self, written: Sequence[int], expected: Sequence[int]) -> None:
        """Judge ids that were written freely, by those that 16 bit writes."""
        agree = [one == other for one, other in zip(written, expected, strict=True)]
        self.same.append(next((i for i, good in enumerate(agree) if not good), len(agree)))
        self.equal.append(sum(agree))

    def summary(self, generated: int) -> dict[str, Any]:
        """See ``PassageComparison.rows``."""
        tokens = torch.cat(self.scores.tokens).double().cpu()
        loss, exact = (torch.stack(column) for column in zip(*self.losses, strict=True))
        (nats, error), (rise, rise_error) = ratio(loss, tokens), ratio(loss - exact, tokens)
        pages, held = (_bits(counts) for counts in (self.pages, self.held))
        about = self.scores.summary()
        # Whether the text itself is the likeliest throughout says nothing.
        for key in ("answers", "exact", "exact_error"):
            del about[key]
        found: dict[str, Any] = {"page_bits": pages, "held_bits": held} | about
        found |= {"perplexity": math.exp(nats), "perplexity_error": math.exp(nats) * error}
        found |= {"perplexity_ratio": math.exp(rise)}
        found |= {"perplexity_ratio_error": math.exp(rise) * rise_error}
        if self.same:
            every = torch.full((len(self.same),), 1.0).double()
            found["same"], found["same_error"] = ratio(torch.tensor(self.same).double(), every)
            found["greedy"], found["greedy_error"] = ratio(
                torch.tensor(self.equal).double(), every * generated
            )
        return found


def _bits(counts: Sequence[tuple[int, int]]) -> float | None:
    if not counts:
        return None
    return bits_per_value(*(sum(column) for column in zip(*counts, strict=True)))


class PassageComparison:
    """Adds up what methods lose on real text, passage by passage.

    A passage is read once in 16 bit. Each method stores its keys and values; then the next tokens
    of the text are read with what the method gives back as the past (teacher forcing), and the
    next-token distributions are compared with those over the 16-bit past.

    Args:
        model: causal language model with attention "oscar".
        methods: to compare.
        judged: tokens after a passage.
        stepwise: names of policies that can also read and write through the packed cache itself.
        generated: tokens that these write.
    """

    def __init__(
        self,
        model: Any,
        methods: Sequence[Method],
        judged: int = JUDGED,
        stepwise: Collection[str] = (),
        generated: int = 0,
    ) -> None:
        self.model, self.methods, self.judged, self.generated = model, methods, judged, generated
        self._rows = {method.name: _Row() for method in methods}
        self._missing: dict[str, str] = {}
        self._stepwise = [x for x in methods if x.name in stepwise and isinstance(x, Paged)]
        self._alone = {method.name: _Row() for method in self._stepwise}

    @torch.inference_mode()
    def add(self, ids: Tensor, *, stepwise: bool = False) -> None:
        """Compare on one passage.

        Args:
            ids: (1, tokens), the last ``judged + 1`` of which come after what is stored.
            stepwise: also token by token through the packed cache, and writing freely, by the
                policies that were named for it: each token is stored before the next is read.
        """
        ids = ids.to(self.model.device)
        past, forced = ids[:, : -self.judged - 1], _forced(ids, self.judged)
        recorder, length = Recorder(), past.shape[1]
        self.model(past, past_key_values=recorder.cache, use_cache=True, logits_to_keep=1)
        layers, kinds = recorder.layers, torch.zeros(length, dtype=torch.int8)
        exact = self._logits(as_recorded(layers), length, forced)
        for method in self.methods:
            if reason := method.missing(layers, kinds):
                self._missing[method.name] = reason
                continue
            self._add(method, layers, kinds, forced, exact)
        if stepwise and self._stepwise:
            self._add_stepwise(past, forced, exact)

    def _add(
        self,
        method: Method,
        layers: Sequence[LayerStates],
        kinds: Tensor,
        forced: Forced,
        exact: Tensor,
    ) -> None:
        stored, row = StoredPast(method, layers, kinds), self._rows[method.name]
        row.add(forced, exact, self._logits(stored, len(kinds), forced))
        row.pages.append((stored.stored_bytes, stored.stored_values))
        if (report := method.memory(layers, kinds)) is not None:
            row.held.append((report.kv_bytes, report.values))

    def _logits(self, past: Any, length: int, forced: Forced) -> Tensor:
        """(judged tokens, vocabulary) float32, by the model's own head, over a given past."""
        output = self.model(
            input_ids=forced.ids,
            position_ids=forced.positions,
            past_key_values=ForcedCache(past, length),
            use_cache=True,
        )
        return output.logits[0].float()

    def _add_stepwise(self, past: Tensor, forced: Forced, exact: Tensor) -> None:
        expected = self._written(past, KVPolicy.preset("bf16"))
        for method in self._stepwise:
            if method.name in self._missing:
                continue
            row, cache = self._alone[method.name], OscarCache(method.policy)
            self.model(past, past_key_values=cache, use_cache=True, logits_to_keep=1)
            steps = [
                self.model(one, past_key_values=cache, use_cache=True).logits[0].float()
                for one in forced.ids.split(1, dim=1)
            ]
            row.add(forced, exact, torch.cat(steps))
            report = cache.memory()
            row.held.append((report.kv_bytes, report.values))
            if self.generated:
                row.add_written(self._written(past, method.policy), expected)

    def _written(self, past: Tensor, policy: KVPolicy) -> list[int]:
        """Ids that the model writes on greedily."""
        if not self.generated:
            return []
        whole = self.model.generate(
            past,
            attention_mask=torch.ones_like(past),
            past_key_values=OscarCache(policy),
            pad_token_id=0,
            max_new_tokens=self.generated,
            min_new_tokens=self.generated,
            do_sample=False,
        )
        return whole[0, past.shape[1] :].tolist()

    def rows(self) -> list[dict[str, Any]]:
        """One for each method, then one for each policy that was also taken token by token.

        Of a method that says nothing about the passages, "method" and "missing": why. Else bits
        per value ("page_bits" of full pages, "held_bits" of all that is held, None where not
        known), ``Scores.summary``, and, each with its standard error over passages ("..._error"):
        "perplexity" of the text itself; "perplexity_ratio" to the 16-bit cache's, passage by
        passage; "kl_ratio" to the published recipe's KL, where that was measured; of those that
        wrote freely "same", tokens before the first that 16 bit does not write, and "greedy",
        share of tokens that are those of 16 bit.
        """
        found = []
        for method in self.methods:
            if method.name in self._missing or not self._rows[method.name].losses:
                reason = self._missing.get(method.name, "there were no passages")
                found.append({"method": method.name, "missing": reason})
            else:
                found.append({"method": method.name} | self._summary(self._rows, method.name))
        return found + [
            {"method": ONE_BY_ONE.format(name)} | self._summary(self._alone, name)
            for name, row in self._alone.items()
            if row.losses
        ]

    def _summary(self, rows: Mapping[str, _Row], name: str) -> dict[str, Any]:
        row, published = rows[name], rows.get(PUBLISHED)
        found = row.summary(self.generated)
        if published is not None and published.losses and name not in (PUBLISHED, REFERENCE):
            own, other = (torch.cat(x.scores.divergence).double().cpu() for x in (row, published))
            if other.sum() > 0:
                found["kl_ratio"], found["kl_ratio_error"] = ratio(own, other)
        return found


def _forced(ids: Tensor, judged: int) -> Forced:
    """The end of a passage: every token is judged by the one that really follows."""
    length = ids.shape[1] - judged - 1
    given = ids[:, length:-1]
    return Forced(
        ids=given,
        positions=torch.arange(length, length + judged, device=ids.device)[None],
        targets=ids[:, length + 1 :],
        answers=torch.zeros_like(given),
    )
