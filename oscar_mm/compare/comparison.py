"""Comparison of methods by teacher forcing, on a model's own 16-bit answers or on text."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from oscar_mm.cache.cache import OscarCache, as_argument
from oscar_mm.compare.decoding import DecodedCache
from oscar_mm.compare.methods import PUBLISHED, REFERENCE, Method, StoredPast, bits_per_value
from oscar_mm.compare.paged import Paged
from oscar_mm.compare.teacher_forcing import (
    Forced,
    ForcedCache,
    LayerStates,
    Recorder,
    Scores,
    answer_logits,
    as_recorded,
    ratio,
)
from oscar_mm.engine.decode_runner import decode
from oscar_mm.engine.prompt import Prompt, forward
from oscar_mm.engine.sampling import Sampling
from oscar_mm.errors import InputError
from oscar_mm.modules import computing_device
from oscar_mm.pages.layout import PAGE_TOKENS
from oscar_mm.policy import KVPolicy

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline

JUDGED = 64
"""Number of judged tokens after a passage."""
TAIL = 37
"""Number of tokens (modulo the page size) by which each passage is longer than the previous one, so
that their last pages are filled to different degrees."""
ONE_BY_ONE = "{}, one by one"
"""Row name for a policy that stores tokens one at a time."""
_CHARACTERS = 8
"""Maximum average number of characters per token of a long text."""


class Comparison:
    """Compares methods on a model's own 16-bit answers, prompt by prompt.

    The model reads a prompt once, with exact attention, and answers with the 16-bit cache. Then,
    for each method, the model reads that answer (teacher forcing) over the prompt's keys and values
    as restored by the method, and the next-token distributions are compared with those of the
    16-bit cache.

    Args:
        pipe: pipeline of the model; its own policy is ignored.
        methods: methods to compare.
        max_new_tokens: maximum number of tokens of an answer.
    """

    def __init__(self, pipe: Pipeline, methods: Sequence[Method], max_new_tokens: int) -> None:
        self.pipe, self.methods = pipe, methods
        self._sampling = Sampling(max_new_tokens=max_new_tokens, temperature=0)
        self._scores = {method.name: Scores() for method in methods}
        self._missing: dict[str, str] = {}
        # Number of bytes and of values for each prompt, in pages and in a full cache.
        self._bytes: dict[str, tuple[list, list]] = {method.name: ([], []) for method in methods}
        self._right: dict[str, list[bool]] = {method.name: [] for method in methods}

    @torch.inference_mode()
    def add(self, prompt: Prompt, is_right: Callable[[str], bool] | None = None) -> bool:
        """Compare the methods on one prompt.

        Args:
            prompt: prompt of a single row, from ``Pipeline.prepare``.
            is_right: function that returns whether a text is a correct answer. If given, every
                method that is a policy also generates an answer over the packed cache.

        Returns:
            Whether the prompt was compared, which is impossible if the 16-bit answer is empty.
        """
        pipe = self.pipe
        recorder = Recorder(pipe.model)
        forward(pipe.model, prompt, recorder.cache)
        layers, ids = recorder.layers, prompt.modalities[0]
        answer = self._answer(prompt, KVPolicy.preset("bf16"))
        if not answer:
            return False
        forced = _forced_answer(prompt, answer)
        exact = answer_logits(pipe.model, as_recorded(layers), prompt.tokens, forced)
        # Targets are the 16-bit cache's most likely tokens, also after the last token.
        forced.targets.copy_(exact.argmax(-1)[None])
        for method in self.methods:
            if reason := method.missing(layers, ids):
                self._missing[method.name] = reason
                continue
            past = StoredPast(method, layers, ids)
            logits = answer_logits(pipe.model, past, prompt.tokens, forced)
            self._scores[method.name].add(forced, exact, logits)
            pages, cached = self._bytes[method.name]
            pages.append((past.stored_bytes, past.stored_values))
            if (report := method.memory(layers, ids)) is not None:
                cached.append((report.kv_bytes, report.values))
            if is_right is not None and isinstance(method, Paged) and not method.mixed:
                text = pipe.processor.tokenizer.decode(
                    self._answer(prompt, method.policy), skip_special_tokens=True
                )
                self._right[method.name].append(is_right(text))
        return True

    def _answer(self, prompt: Prompt, policy: KVPolicy) -> list[int]:
        """Generate an answer greedily over a packed cache; return its tokens without the end
        token."""
        pipe = self.pipe
        cache = OscarCache(policy, model=pipe.model)
        ends = pipe.family.end_tokens()

        def generate() -> list[int]:
            steps = decode(pipe.model, prompt, cache, self._sampling, end_tokens=ends)
            return [token for token, *_ in steps if token is not None]

        return pipe.engine.call(generate, runs_model=True)

    def rows(self) -> list[dict[str, Any]]:
        """Return a table with a row for each method: name, bits per value and ``Scores.summary``.

        For a method that does not apply to the prompts, the row has only "method" and "missing"
        (the reason).
        """
        rows = []
        for method in self.methods:
            if not self._scores[method.name].tokens:
                missing = self._missing.get(method.name, "no prompts were given")
                rows.append({"method": method.name, "missing": missing})
                continue
            pages, cached = (
                [sum(column) for column in zip(*counts, strict=True)]
                for counts in self._bytes[method.name]
            )
            right = self._right[method.name]
            rows.append(
                {
                    "method": method.name,
                    "page_bits": bits_per_value(*pages),
                    "held_bits": bits_per_value(*cached) if cached else None,
                    "right": sum(right) / len(right) if right else None,
                }
                | self._scores[method.name].summary()
            )
        return rows


def _forced_answer(prompt: Prompt, answer: list[int]) -> Forced:
    """Return the answer's tokens as text after the prompt; all are judged, and ``add`` fills in the
    targets."""
    device = prompt.positions.device
    ids = torch.tensor([answer], device=device)
    place = torch.arange(len(answer), device=device)
    positions = prompt.next_position.to(device)[:, None] + place
    return Forced(
        ids=ids,
        positions=positions.expand(*prompt.positions.shape[:-1], -1),
        targets=torch.zeros_like(ids),
        answers=torch.zeros_like(ids),
    )


def longest(tokens: int, judged: int = JUDGED) -> int:
    """Return the length in tokens of the longest passage, including judged tokens."""
    return tokens + PAGE_TOKENS - 1 + judged + 1


def passages(
    tokenizer: Any, texts: Mapping[str, str], tokens: int, count: int, judged: int = JUDGED
) -> Iterator[Tensor]:
    """Yield passages from each text in turn, each slightly longer than ``tokens``.

    Passages of short texts overlap.

    Args:
        tokenizer: tokenizer of the model.
        texts: texts by name, for error messages.
        tokens: minimum number of stored tokens; a passage has up to ``PAGE_TOKENS - 1`` more.
        count: number of passages.
        judged: number of judged tokens; ``judged + 1`` tokens follow the stored tokens.

    Yields:
        (1, stored tokens + judged + 1) int64 ids on the CPU.

    Raises:
        InputError: if a text is too short for one passage.
    """
    names = list(texts)
    turns = -(-count // len(names))
    for number in range(count):
        name = names[number % len(names)]
        length = tokens + number * TAIL % PAGE_TOKENS + judged + 1
        yield _passage(tokenizer, name, texts[name], length, number // len(names), turns)


def _passage(tokenizer: Any, name: str, text: str, length: int, number: int, count: int) -> Tensor:
    """Return (1, length) ids from a text, starting at the first line break after the fraction
    ``number / count`` of it."""

    def ids(start: int, stop: int) -> Tensor:
        return tokenizer(text[start:stop], return_tensors="pt").input_ids

    reach = length * _CHARACTERS
    if reach > len(text):  # a short text, so measure its tokens
        total = max(1, ids(0, len(text)).shape[1])
        reach = min(len(text), math.ceil(len(text) * length / total))
    start = (len(text) - reach) * number // count
    if reach < len(text):
        start = max(start, text.find("\n", start, start + reach))
    stop = start + length * _CHARACTERS
    while (passage := ids(start, stop)).shape[1] < length:
        if stop < len(text):
            stop += length * _CHARACTERS
        elif start:  # tokens at the end of the text may be longer than average
            start = max(0, start - length)
        else:
            raise InputError(
                f"{name}: the text of {passage.shape[1]:,} tokens is too short for a passage of "
                f"{length:,}; use a longer text or fewer tokens"
            )
    return passage[:, :length]


@dataclass
class _Row:
    """Results of a method, with one entry per passage.

    Attributes:
        losses: negative log-likelihood (nats) of the judged tokens of the text, with the method and
            with the 16-bit cache.
        pages: number of bytes and of values in low-bit pages.
        cached: number of bytes and of values in a full cache.
        same: number of generated tokens before the first that differs from the 16-bit cache's.
        equal: number of generated tokens equal to the 16-bit cache's token at the same index.
        quarters: (4,) mean divergence of each quarter of the judged tokens.
    """

    scores: Scores = field(default_factory=Scores)
    losses: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    pages: list[tuple[int, int]] = field(default_factory=list)
    cached: list[tuple[int, int]] = field(default_factory=list)
    same: list[int] = field(default_factory=list)
    equal: list[int] = field(default_factory=list)
    quarters: list[Tensor] = field(default_factory=list)

    def add(self, forced: Forced, exact: Tensor, logits: Tensor) -> None:
        """Judge a passage by the logits (judged tokens, vocabulary) of the 16-bit cache and of the
        method."""
        divergence = self.scores.add(forced, exact, logits)
        self.quarters.append(torch.stack([x.mean() for x in divergence.tensor_split(4)]))
        own, other = (
            cross_entropy(x, forced.targets[0], reduction="sum").double().cpu()
            for x in (logits, exact)
        )
        self.losses.append((own, other))

    def add_written(self, written: Sequence[int], expected: Sequence[int]) -> None:
        """Compare generated ids with those of the 16-bit cache."""
        agree = [new == old for new, old in zip(written, expected, strict=True)]
        self.same.append(next((i for i, good in enumerate(agree) if not good), len(agree)))
        self.equal.append(sum(agree))

    def summary(self, generated: int) -> dict[str, Any]:
        """Return the numbers in the method's row of ``PassageComparison.rows``."""
        tokens = torch.cat(self.scores.tokens).double().cpu()
        loss, exact = (torch.stack(column) for column in zip(*self.losses, strict=True))
        (nats, error), (rise, rise_error) = ratio(loss, tokens), ratio(loss - exact, tokens)
        pages, cached = (_bits(counts) for counts in (self.pages, self.cached))
        scores = self.scores.summary()
        # In a text, unlike in an answer, tokens need not be the most likely ones.
        for key in ("answers", "exact", "exact_error"):
            del scores[key]
        figures: dict[str, Any] = {"page_bits": pages, "held_bits": cached} | scores
        figures |= {"perplexity": math.exp(nats), "perplexity_error": math.exp(nats) * error}
        figures |= {"perplexity_ratio": math.exp(rise)}
        figures |= {"perplexity_ratio_error": math.exp(rise) * rise_error}
        if self.same:
            every = torch.full((len(self.same),), 1.0).double()
            figures["same"], figures["same_error"] = ratio(torch.tensor(self.same).double(), every)
            figures["greedy"], figures["greedy_error"] = ratio(
                torch.tensor(self.equal).double(), every * generated
            )
        return figures


def _bits(counts: Sequence[tuple[int, int]]) -> float | None:
    if not counts:
        return None
    return bits_per_value(*(sum(column) for column in zip(*counts, strict=True)))


class PassageComparison:
    """Compares methods on real text, passage by passage.

    The model reads a passage once in 16-bit precision, and each method stores the keys and values.
    Then the model reads the next tokens of the text over the restored keys and values (teacher
    forcing), and the next-token distributions are compared with those over the 16-bit past.

    Args:
        model: causal language model with attention "oscar".
        methods: methods to compare.
        judged: number of judged tokens after a passage.
        decoded: number of tokens after a passage that the model also reads as in decoding, where
            the method stores each token and later tokens attend to it as it is stored at that
            point; 0 for none.
        stepwise: names of the methods that ``add`` may also run token by token over the packed
            cache; each must be a policy.
        generated: number of tokens that these policies generate.
    """

    def __init__(
        self,
        model: Any,
        methods: Sequence[Method],
        judged: int = JUDGED,
        stepwise: Collection[str] = (),
        generated: int = 0,
        decoded: int = 0,
    ) -> None:
        self.model, self.methods, self.judged, self.generated = model, methods, judged, generated
        self.decoded = decoded
        self._rows = {method.name: _Row() for method in methods}
        self._decoded = {method.name: _Row() for method in methods}
        self._missing: dict[str, str] = {}
        self._stepwise = [x for x in methods if x.name in stepwise and isinstance(x, Paged)]
        self._alone = {method.name: _Row() for method in self._stepwise}

    @torch.inference_mode()
    def add(self, ids: Tensor, *, stepwise: bool = False) -> None:
        """Compare the methods on one passage.

        Args:
            ids: (1, tokens) ids: the stored tokens, then ``max(judged, decoded) + 1`` more.
            stepwise: whether the ``stepwise`` policies also read token by token over the packed
                cache, storing each token before the next is read, and generate tokens.
        """
        ids = ids.to(computing_device(self.model.get_input_embeddings()))
        length = ids.shape[1] - max(self.judged, self.decoded) - 1
        past, forced = ids[:, :length], _forced_after(ids, length, self.judged)
        recorder = Recorder(self.model)
        self.model(past, **as_argument(recorder.cache), use_cache=True, logits_to_keep=1)
        layers, kinds = recorder.layers, torch.zeros(length, dtype=torch.int8)
        exact = self._logits(ForcedCache(as_recorded(layers), length), forced)
        apply = [method for method in self.methods if self._applies(method, layers, kinds)]
        for method in apply:
            self._add(method, layers, kinds, forced, exact)
        if stepwise and self._stepwise:
            self._add_stepwise(past, forced, exact)
        if self.decoded:
            self._add_decoded(apply, layers, _forced_after(ids, length, self.decoded))

    def _applies(self, method: Method, layers: Sequence[LayerStates], kinds: Tensor) -> bool:
        if reason := method.missing(layers, kinds):
            self._missing[method.name] = reason
        return not reason

    def _add(
        self,
        method: Method,
        layers: Sequence[LayerStates],
        kinds: Tensor,
        forced: Forced,
        exact: Tensor,
    ) -> None:
        stored, row = StoredPast(method, layers, kinds), self._rows[method.name]
        row.add(forced, exact, self._logits(ForcedCache(stored, len(kinds)), forced))
        row.pages.append((stored.stored_bytes, stored.stored_values))
        if (report := method.memory(layers, kinds)) is not None:
            row.cached.append((report.kv_bytes, report.values))

    def _add_decoded(
        self, methods: Sequence[Method], layers: Sequence[LayerStates], forced: Forced
    ) -> None:
        def logits(method: Method) -> Tensor:
            return self._logits(DecodedCache(method, layers, kinds), forced)

        kinds = torch.zeros(layers[0].keys.shape[2] + forced.ids.shape[1], dtype=torch.int8)
        # The reference is decoded too, because here new tokens are rounded to 16 bits.
        exact = logits(Paged(REFERENCE, KVPolicy.preset("bf16")))
        for method in methods:
            self._decoded[method.name].add(forced, exact, logits(method))

    def _logits(self, cache: ForcedCache, forced: Forced) -> Tensor:
        """Return (judged tokens, vocabulary) float32 logits over a given past."""
        output = self.model(
            input_ids=forced.ids,
            position_ids=forced.positions,
            **as_argument(cache),
            use_cache=True,
        )
        return output.logits[0].float()

    def _add_stepwise(self, past: Tensor, forced: Forced, exact: Tensor) -> None:
        expected = self._written(past, KVPolicy.preset("bf16"))
        for method in self._stepwise:
            if method.name in self._missing:
                continue
            row, cache = self._alone[method.name], OscarCache(method.policy, model=self.model)
            self.model(past, **as_argument(cache), use_cache=True, logits_to_keep=1)
            steps = [
                self.model(token, **as_argument(cache), use_cache=True).logits[0].float()
                for token in forced.ids.split(1, dim=1)
            ]
            row.add(forced, exact, torch.cat(steps))
            report = cache.memory()
            row.cached.append((report.kv_bytes, report.values))
            if self.generated:
                row.add_written(self._written(past, method.policy), expected)

    def _written(self, past: Tensor, policy: KVPolicy) -> list[int]:
        """Generate ids greedily after ``past``."""
        if not self.generated:
            return []
        text = self.model.generate(
            past,
            attention_mask=torch.ones_like(past),
            **as_argument(OscarCache(policy, model=self.model)),
            pad_token_id=0,
            max_new_tokens=self.generated,
            min_new_tokens=self.generated,
            do_sample=False,
        )
        return text[0, past.shape[1] :].tolist()

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each method, then a row for each policy that also read token by token.

        For a method that does not apply to the passages, the row has only "method" and "missing"
        (the reason). The other rows have "method", bits per value ("page_bits" in pages,
        "held_bits" in a full cache, None if not measured) and ``Scores.summary``. They also have,
        each with a standard error over passages ("..._error"), the "perplexity" of the text, its
        ratio to that of the 16-bit cache, passage by passage ("perplexity_ratio"), and, if the
        published recipe was measured, the ratio to its KL ("kl_ratio"). If a policy generated
        tokens, "same" is the number of tokens before the first that differs from the 16-bit
        cache's, and "greedy" is the share of tokens equal to the 16-bit cache's token at the same
        index. If tokens were also decoded, "decoded_..." are the results for these tokens, with the
        KL of each quarter.
        """
        rows = []
        for method in self.methods:
            if method.name in self._missing or not self._rows[method.name].losses:
                reason = self._missing.get(method.name, "no passages were given")
                rows.append({"method": method.name, "missing": reason})
            else:
                rows.append(
                    {"method": method.name}
                    | self._summary(self._rows, method.name)
                    | self._summary_of_decoded(method.name)
                )
        return rows + [
            {"method": ONE_BY_ONE.format(name)} | self._summary(self._alone, name)
            for name, row in self._alone.items()
            if row.losses
        ]

    def _summary(self, rows: Mapping[str, _Row], name: str) -> dict[str, Any]:
        row, published = rows[name], rows.get(PUBLISHED)
        figures = row.summary(self.generated)
        if published is not None and published.losses and name not in (PUBLISHED, REFERENCE):
            own, other = (torch.cat(x.scores.divergence).double().cpu() for x in (row, published))
            if other.sum() > 0:
                figures["kl_ratio"], figures["kl_ratio_error"] = ratio(own, other)
        return figures

    def _summary_of_decoded(self, name: str) -> dict[str, Any]:
        """Return the results for decoded tokens, "decoded_..."; empty if none were decoded."""
        if not (row := self._decoded[name]).losses:
            return {}
        figures = self._summary(self._decoded, name)
        figures["kl_quarters"] = torch.stack(row.quarters).double().mean(0).tolist()
        kinds = ("tokens", "kl", "agreement", "perplexity_ratio")
        return {f"decoded_{key}": value for key, value in figures.items() if key.startswith(kinds)}


def _forced_after(ids: Tensor, length: int, count: int) -> Forced:
    """Return the ``count`` tokens after the first ``length`` tokens of a passage, with the text's
    next token as the target of each."""
    given = ids[:, length : length + count]
    return Forced(
        ids=given,
        positions=torch.arange(length, length + count, device=ids.device)[None],
        targets=ids[:, length + 1 : length + count + 1],
        answers=torch.zeros_like(given),
    )
