"""Sampling: sampling options of a request; Sampler: choice of the next token of every row.

Tokens are available on the device at once and on the host later; only ``SampledTokens.listed``
makes the host wait for the device.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from oscar_mm.engine.grammar import Grammar, GrammarState
from oscar_mm.engine.logit_edits import logit_edits
from oscar_mm.engine.logprobs import AskedLogprobs, StepLogprobs, TokenLogprob
from oscar_mm.engine.think_tokens import ThinkTokens
from oscar_mm.errors import InputError, shown
from oscar_mm.ops.decode_tables import upload
from oscar_mm.tensor_parallel import TPGroup

MAX_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 256
MAX_STOP_TOKENS = 256
MAX_LOGPROBS = 20
_UNBOUNDED = -1
"""Value of ``thinking_token_budget`` for no limit, as in vLLM."""


class SamplingOptions(TypedDict, total=False):
    """Sampling options of a user; options that are None or missing default to the checkpoint's.

    Attributes:
        max_new_tokens: maximum number of tokens of the answer; by default 256, plus 8,192 for the
            reasoning of a thinking model (at most half of the context).
        temperature: 0 takes the most likely token, a higher value samples. By default, the
            checkpoint's generation_config decides, which may mean sampling.
        do_sample: as in transformers: False takes the most likely token, True samples with the
            checkpoint's temperature, or 1.
        top_p, top_k, min_p, repetition_penalty: see ``Sampling``; by default from the checkpoint,
            but off if a temperature is given. In a chat, the penalty also counts earlier turns.
        presence_penalty, frequency_penalty, logit_bias, bad_words, min_tokens: see ``Sampling``.
        ignore_eos, stop_token_ids, include_stop_str_in_output, grammar: see ``Sampling``.
        logprobs, prompt_logprobs: see ``Sampling``.
        thinking_token_budget: maximum number of tokens of the reasoning, see ``Sampling``; by
            default, only ``max_new_tokens`` limits the reasoning.
        seed, stop: see ``Sampling``. In a chat, a stop string's tokens stay in the history.
        deterministic: see ``Sampling``; False by default.
    """

    max_new_tokens: int | None
    temperature: float | None
    do_sample: bool | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    bad_words: Sequence[str] | None
    seed: int | None
    min_tokens: int | None
    ignore_eos: bool | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool | None
    grammar: Grammar | None
    logprobs: int | None
    prompt_logprobs: int | None
    thinking_token_budget: int | None
    deterministic: bool | None


@dataclass(frozen=True)
class Sampling:
    """Checked sampling options.

    Attributes:
        max_new_tokens: maximum number of tokens of the answer including its reasoning, at least 1.
        temperature: 0 takes the most likely token; a higher value samples.
        top_p: sample from the most likely tokens with this total probability, in (0, 1].
        top_k: number of most likely tokens to sample from; 0 for all.
        min_p: sample from tokens with at least this probability relative to the most likely token;
            0 for all.
        repetition_penalty: factor that divides positive logits, and multiplies negative logits, of
            tokens that have occurred in the prompt or the answer; 1 turns it off.
        presence_penalty: value subtracted from the logits of tokens that have occurred in the
            answer.
        frequency_penalty: value subtracted once for each occurrence in the answer.
        logit_bias: token id -> value added to its logit.
        bad_words: texts that must not occur as token sequences in the answer, with or without a
            leading space.
        seed: sampling seed; the same seed gives the same answer on the same machine when batched
            with the same other answers.
        min_tokens: number of tokens before which only ``max_new_tokens`` ends the answer.
        ignore_eos: whether to continue the answer after the checkpoint's end tokens.
        stop: one or several strings that end the answer and are not part of it.
        stop_token_ids: tokens that end the answer and are not part of it.
        include_stop_str_in_output: whether the stop string or stop token is part of the answer.
        grammar: constraint on the text after the reasoning; overrides other options that would rule
            out every token that the grammar allows.
        logprobs: number of most likely alternatives reported with the log-probability of each
            token, from the model's unchanged logits; None for no log-probabilities.
        prompt_logprobs: as logprobs, for each prompt token except the first; the prompt then
            bypasses the prefix cache.
        thinking_token_budget: maximum number of tokens of the reasoning; at this limit, the
            reasoning is closed and the text begins. None or -1 means no limit.
        deterministic: whether to decode the request in its own batch. Otherwise it shares a batch
            with the other running requests, whose number affects the answer through rounding.

    Raises:
        InputError: if a value is invalid.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    seed: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    grammar: Grammar | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    thinking_token_budget: int | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words", "stop_token_ids"):
            object.__setattr__(self, name, _as_tuple(getattr(self, name)))
        if self.logit_bias is None:
            object.__setattr__(self, "logit_bias", {})
        if self.thinking_token_budget == _UNBOUNDED:
            object.__setattr__(self, "thinking_token_budget", None)
        for name, (valid, allowed) in (self._numbers() | self._collections()).items():
            if not valid:
                raise InputError(f"{name}={shown(getattr(self, name))}: must be {allowed}")

    def _numbers(self) -> dict[str, tuple[bool, str]]:
        """Return, for each numeric option, whether its value is valid, and the allowed values."""
        penalty, top = "a number from -2 to 2", f"None or a whole number from 0 to {MAX_LOGPROBS}"
        return {
            "max_new_tokens": (_whole(self.max_new_tokens, 1), "a whole number, at least 1"),
            # Logits would overflow with a smaller divisor.
            "temperature": (
                _within(self.temperature, 0) and not 0 < self.temperature < 1e-6,
                "0 or a number, at least 1e-6",
            ),
            "top_p": (
                _within(self.top_p, 0, 1) and self.top_p > 0,
                "a number above 0, at most 1",
            ),
            "top_k": (_whole(self.top_k, 0), "a whole number, at least 0 (0: all tokens)"),
            "min_p": (_within(self.min_p, 0, 1), "a number from 0 to 1"),
            # Logits would overflow with a smaller divisor or a larger factor.
            "repetition_penalty": (
                _within(self.repetition_penalty, 1e-3, 1e6),
                "a number from 0.001 to 1,000,000",
            ),
            "presence_penalty": (_within(self.presence_penalty, -2, 2), penalty),
            "frequency_penalty": (_within(self.frequency_penalty, -2, 2), penalty),
            "seed": (
                self.seed is None or (_whole(self.seed, 0) and self.seed < 1 << 63),
                "None or a whole number from 0 to 2^63 - 1",
            ),
            "min_tokens": (
                _whole(self.min_tokens, 0) and self.min_tokens < 1 << 63,
                "a whole number from 0 to 2^63 - 1",
            ),
            "logprobs": (_is_top(self.logprobs), top),
            "prompt_logprobs": (_is_top(self.prompt_logprobs), top),
            "thinking_token_budget": (
                self.thinking_token_budget is None or _whole(self.thinking_token_budget, 0),
                "None, -1 (no limit) or a whole number, at least 0",
            ),
        }

    def _collections(self) -> dict[str, tuple[bool, str]]:
        """Return, for each switch and collection, whether it is valid, and the allowed values."""
        stop, words, ends = map(_as_tuple, (self.stop, self.bad_words, self.stop_token_ids))
        return {
            "logit_bias": (
                isinstance(self.logit_bias, Mapping)
                and len(self.logit_bias) <= MAX_BIASES
                and all(map(_is_id, self.logit_bias))
                and all(_within(bias, -100, 100) for bias in self.logit_bias.values()),
                f"numbers from -100 to 100 by token ids, at most {MAX_BIASES:,}",
            ),
            "bad_words": (
                len(words) <= MAX_BAD_WORDS
                and all(
                    isinstance(word, str) and word.strip() and len(word) <= MAX_BAD_WORD_CHARACTERS
                    for word in words
                ),
                f"a list of at most {MAX_BAD_WORDS} texts that are not blank, each of at most "
                f"{MAX_BAD_WORD_CHARACTERS} characters",
            ),
            "ignore_eos": (isinstance(self.ignore_eos, bool), "True or False"),
            "stop": (
                all(isinstance(text, str) and text for text in stop),
                "text that is not empty, or a list of such texts",
            ),
            "stop_token_ids": (
                len(ends) <= MAX_STOP_TOKENS and all(map(_is_id, ends)),
                f"a list of at most {MAX_STOP_TOKENS} token ids",
            ),
            "include_stop_str_in_output": (
                isinstance(self.include_stop_str_in_output, bool),
                "True or False",
            ),
            "grammar": (
                self.grammar is None or isinstance(self.grammar, Grammar),
                "a Grammar, such as Grammar.json_schema({...})",
            ),
            "deterministic": (isinstance(self.deterministic, bool), "True or False"),
        }

    def check_ids(self, vocabulary: int) -> None:
        """Reject token ids beyond a model's vocabulary.

        Raises:
            InputError: if an id is outside the vocabulary.
        """
        for name in ("logit_bias", "stop_token_ids"):
            unknown = [token for token in getattr(self, name) if token >= vocabulary]
            if unknown:
                raise InputError(
                    f"{name}={shown(unknown[0])}: must be token ids below {vocabulary:,}, the "
                    "vocabulary size of this model"
                )

    def end_tokens(self, usual: frozenset[int]) -> frozenset[int]:
        """Return the ids that end the answer, given the model's own end tokens."""
        return frozenset(_as_tuple(self.stop_token_ids)) | (
            frozenset() if self.ignore_eos else usual
        )

    def includes(self, token: int) -> bool:
        """Return whether a token that ends the answer is part of it."""
        return self.include_stop_str_in_output and token in _as_tuple(self.stop_token_ids)

    @cached_property
    def edits_logits(self) -> bool:
        """Whether logits are changed before tokens are sampled."""
        penalties = self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty
        others = self.logit_bias, self.bad_words, self.min_tokens, self.grammar
        return any((*penalties, *others)) or self.bounds_reasoning

    @property
    def bounds_reasoning(self) -> bool:
        """Whether the reasoning has its own token limit."""
        return self.thinking_token_budget is not None

    @cached_property
    def changes_logits(self) -> bool:
        """Whether the next token may differ from the token with the highest logit."""
        return self.temperature > 0 or self.edits_logits

    @property
    def rules(self) -> tuple[float, ...]:
        """Options that rows must share to be sampled together."""
        return self.temperature, self.top_p, self.top_k, self.min_p

    def processors(self) -> LogitsProcessorList:
        """Return the sampling steps after the logit edits, in the order of transformers."""
        processors = LogitsProcessorList()
        if self.temperature > 0:
            if self.temperature != 1.0:
                processors.append(TemperatureLogitsWarper(float(self.temperature)))
            if self.top_k:
                processors.append(TopKLogitsWarper(self.top_k))
            if self.top_p < 1.0:
                processors.append(TopPLogitsWarper(float(self.top_p)))
            if self.min_p > 0.0:
                processors.append(MinPLogitsWarper(float(self.min_p)))
        return processors

    def generator(self, device: torch.device) -> torch.Generator | None:
        """Return the random generator of a seeded request; None for a greedy or unseeded
        request."""
        if self.seed is None or not self.temperature:
            return None
        return torch.Generator(device).manual_seed(self.seed)


class SamplingState:
    """Sampling state of one row.

    Args:
        sampling: options of the row.
        prompt: (tokens,) ids of the prompt, without padding, for the repetition penalty.
        end_tokens: ids that end the row, for ``min_tokens``.
        bad_words: token ids of each bad word, see ``token_sequences``.
        thinks: tokens that delimit the reasoning; None if the model does not reason. If the prompt
            opens the reasoning, a grammar begins after its closing token.

    Attributes:
        chosen: ids of the answer so far.
        reasons: whether the prompt opens the reasoning.
        grammar: grammar state of the row; None if it has no grammar.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: torch.Tensor,
        end_tokens: frozenset[int] = frozenset(),
        bad_words: Sequence[Sequence[int]] = (),
        thinks: ThinkTokens | None = None,
    ) -> None:
        self.sampling, self.prompt = sampling, prompt
        self.thinks = thinks
        self.reasons = thinks is not None and thinks.opened(prompt) > 0
        until = thinks.closing if thinks is not None and self.reasons else None
        grammar = sampling.grammar
        self.grammar = None if grammar is None else GrammarState(grammar, until)
        self.end_tokens, self.bad_words = end_tokens, bad_words
        self.chosen: list[int] = []
        self._generator: torch.Generator | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the next token is always the most likely one, without log-probabilities."""
        return not self.sampling.changes_logits and self.sampling.logprobs is None

    def note(self, token: int) -> None:
        """Record a sampled token."""
        self.chosen.append(token)
        if self.grammar is not None:
            self.grammar.note(token)

    def restart(self) -> None:
        """Forget a first token that was sampled but not recorded."""
        self._generator = None

    def generator(self, device: torch.device) -> torch.Generator | None:
        """Return the random generator of a seeded row, which keeps its state between steps.

        Returns None for a greedy or unseeded row.
        """
        if self._generator is None:
            self._generator = self.sampling.generator(device)
        return self._generator


class SamplerGroup:
    """Sampler for several rows; the tokens of a row do not depend on the other rows.

    Args:
        samplers: sampling states of the rows.
        device: device of the logits.
    """

    def __init__(self, samplers: Sequence[SamplingState], device: torch.device) -> None:
        self._edits = logit_edits(samplers, device)
        by_rules: dict[tuple[float, ...], list[int]] = {}
        for row, sampler in enumerate(samplers):
            samples = sampler.sampling.temperature > 0
            by_rules.setdefault(sampler.sampling.rules if samples else (), []).append(row)
        self._draws = [
            (
                # None selects all rows without a copy.
                None if len(by_rules) == 1 else upload(np.array(rows), device),
                RandomDraw([samplers[x] for x in rows], device) if rules else _likeliest,
            )
            for rules, rows in by_rules.items()
        ]

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Sample (rows,) tokens from (rows, vocabulary) logits, and record them in the edits."""
        # Rows with NaN get an arbitrary token; the host receives ``BROKEN`` instead.
        scores = logits.float().nan_to_num(0.0, math.inf, -math.inf)
        for edit in self._edits:
            edit.apply_(scores)
        tokens = torch.empty(len(scores), dtype=torch.long, device=scores.device)
        for rows, draw in self._draws:
            if rows is None:
                tokens = draw(scores)
            else:
                tokens[rows] = draw(scores[rows])
        for edit in self._edits:
            edit.note(tokens)
        return tokens


def _likeliest(scores: torch.Tensor) -> torch.Tensor:
    return scores.argmax(-1)


class RandomDraw:
    """Random sampling for rows with the same rules.

    Args:
        samplers: sampling states of the rows; their seeds may differ.
        device: device of the logits.
    """

    def __init__(self, samplers: Sequence[SamplingState], device: torch.device) -> None:
        self._processors: Callable[..., torch.Tensor] = samplers[0].sampling.processors()
        self._generators = [one.generator(device) for one in samplers]
        self._no_ids = torch.zeros((len(samplers), 0), dtype=torch.long, device=device)

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """Sample (rows,) tokens from (rows, vocabulary) float32 scores."""
        scores = self._processors(self._no_ids, scores).softmax(-1)
        return scores.div_(self._noise(scores)).argmax(-1)

    def _noise(self, scores: torch.Tensor) -> torch.Tensor:
        """Return exponential variates e, for which p / e is largest at i with probability p_i.

        ``torch.multinomial`` draws single samples in the same way.
        """
        noise = torch.empty_like(scores)
        if None in self._generators:
            noise.exponential_()
        for row, generator in enumerate(self._generators):
            if generator is not None:
                noise[row].exponential_(generator=generator)
        return noise


def token_sequences(tokenizer: Any, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, at the beginning of a text and after a space."""
    texts = [text for word in words for text in (word.lstrip(), f" {word.lstrip()}")]
    found = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    return tuple(dict.fromkeys(ids for ids in found if ids))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _whole(value: Any, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _is_top(value: Any) -> bool:
    return value is None or (_whole(value, 0) and value <= MAX_LOGPROBS)


def _is_id(value: Any) -> bool:
    return _whole(value, 0) and value < 1 << 31


def _within(value: Any, minimum: float, maximum: float = math.inf) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and minimum <= value <= min(maximum, sys.float_info.max)


BROKEN = -1
"""Token id on the host that marks a row whose logits were NaN."""
NAN = "the model's logits are NaN: its weights or inputs are broken"


@dataclass(frozen=True)
class SampledTokens:
    """Sampled tokens of one step.

    Attributes:
        tokens: (batch,) int64 ids on the device; valid ids even where logits are NaN.
        sent: (batch,) int64 ids on the host, or being copied to the host.
        arrived: event recorded after the copies of ``sent`` and ``step_logprobs``; None if they are
            done.
        step_logprobs: log-probabilities of the rows that request them; None if no row does.
    """

    tokens: torch.Tensor
    sent: torch.Tensor
    arrived: torch.cuda.Event | None
    step_logprobs: StepLogprobs | None = None

    def listed(self) -> list[int]:
        """Wait for the tokens and return them; ``BROKEN`` for a row whose logits are NaN."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.sent.tolist()

    def logprobs(self, tokens: list[int]) -> dict[int, TokenLogprob]:
        """Return the log-probabilities of the rows that request them, by row.

        Args:
            tokens: result of ``listed``, which has also waited for the log-probabilities.
        """
        return {} if self.step_logprobs is None else self.step_logprobs.by_row(tokens)


class Sampler:
    """Chooses the next token of every row, step by step.

    Args:
        samplers: sampling state of each row; a row with None gets the most likely token.
        device: device of the logits.
        ranks: tensor-parallel group; all ranks use the tokens of rank 0, since ranks would round
            and sample differently.

    Attributes:
        is_plain: whether ``SamplingState.is_plain`` is true for all rows.
    """

    def __init__(
        self, samplers: Sequence[SamplingState | None], device: torch.device, ranks: TPGroup
    ) -> None:
        self._ranks = ranks
        self.is_plain = all(sampler is None or sampler.is_plain for sampler in samplers)
        changed = [
            (row, sampler)
            for row, sampler in enumerate(samplers)
            if sampler is not None and sampler.sampling.changes_logits
        ]
        self._rows = upload(np.array([row for row, _ in changed], np.int64), device)
        self._chooser = (
            SamplerGroup([sampler for _, sampler in changed], device) if changed else None
        )
        tops = {
            row: sampler.sampling.logprobs
            for row, sampler in enumerate(samplers)
            if sampler is not None and sampler.sampling.logprobs is not None
        }
        self._asked = AskedLogprobs(tops, device) if tops else None

    def __call__(self, logits: torch.Tensor) -> SampledTokens:
        """Sample from (batch, vocabulary) logits, which may be overwritten afterwards."""
        # max treats NaN as the highest value.
        highest, tokens = logits.max(-1)
        if self._chooser is not None:
            tokens[self._rows] = self._chooser.choose(logits[self._rows])
        shared = tokens.masked_fill(highest.isnan(), BROKEN)
        self._ranks.broadcast(shared)
        if self._ranks.count > 1:
            tokens = shared.clamp(min=0)
        logprobs = StepLogprobs(self._asked, logits, tokens) if self._asked else None
        sent = shared.to("cpu", non_blocking=True)
        arrived = None
        if shared.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(shared.device))
        return SampledTokens(tokens, sent, arrived, logprobs)
