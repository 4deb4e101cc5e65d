"""Sampling: how the next token is chosen; Choices: the next token of every row.

Tokens are on the device at once and on the host later: only ``SampledTokens.listed`` makes the host
wait for the device.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

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
from oscar_mm.tensor_parallel import TPGroup

MAX_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 256
MAX_STOP_TOKENS = 256
MAX_LOGPROBS = 20
_UNBOUNDED = -1
"""The ``thinking_token_budget`` that means no limit, as in vLLM."""


class SamplingOptions(TypedDict, total=False):
    """How a user has an answer generated; what is None or not given is the checkpoint's own.

    Attributes:
        max_new_tokens: longest answer, in tokens; by default 256, and 8,192 more for the reasoning
            of a thinking model (at most half of the context).
        temperature: 0 takes the likeliest token, above 0 samples. By default the checkpoint's
            generation_config says how tokens are chosen, which may be by sampling.
        top_p, top_k, min_p, repetition_penalty: see ``Sampling``; by default the checkpoint's too,
            but off beside a temperature. In a chat the penalty counts the tokens of earlier turns.
        presence_penalty, frequency_penalty, logit_bias, bad_words, min_tokens, ignore_eos,
            stop_token_ids, include_stop_str_in_output, grammar, logprobs, prompt_logprobs: see
            ``Sampling``.
        thinking_token_budget: most tokens of the reasoning, see ``Sampling``; by default only
            ``max_new_tokens`` limits them.
        seed, stop: see ``Sampling``. In a chat the model has read what it wrote of a stop text.
        deterministic: see ``Sampling``; by default False.
    """

    max_new_tokens: int | None
    temperature: float | None
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
    """How an answer is generated, checked.

    Attributes:
        max_new_tokens: longest answer, its reasoning included, at least 1.
        temperature: 0 takes the likeliest token; above 0 samples.
        top_p: sample from the likeliest tokens of this much probability, in (0, 1].
        top_k: sample from this many likeliest tokens; 0 for all.
        min_p: sample from tokens at least so likely, as a share of the likeliest one; 0 for all.
        repetition_penalty: divides positive logits of tokens that have occurred in the prompt or
            the answer, and multiplies negative ones; 1 is none.
        presence_penalty: is subtracted from the logits of tokens that have occurred in the answer.
        frequency_penalty: is subtracted once for each time that they have occurred.
        logit_bias: is added to the logits of tokens, by their ids.
        bad_words: texts whose tokens never follow each other in the answer, with a space in front
            or without.
        seed: of the sampling; the same seed gives the same answer on the same machine beside the
            same other answers.
        min_tokens: before so many tokens nothing but ``max_new_tokens`` ends the answer.
        ignore_eos: the checkpoint's end tokens do not end the answer.
        stop: text that ends the answer (not part of it): a string or several.
        stop_token_ids: tokens that end the answer (not part of it).
        include_stop_str_in_output: the stop text or stop token is part of the answer.
        grammar: what the text must match, after the reasoning; other options that would leave none
            of the tokens that it allows give way.
        logprobs: give the log-probability of each token, and of so many likeliest ones in its
            place, as the model's logits have them; None for none.
        prompt_logprobs: the same for each token of the prompt except the first; the prompt is then
            read without the prefix cache.
        thinking_token_budget: most tokens of the reasoning; at this limit the reasoning is closed
            and the text begins. None or -1 means no limit.
        deterministic: decode by itself. Else the answers that run at the same time decode in one
            batch, whose size changes an answer by rounding.

    Raises:
        InputError: a value that is not allowed.
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
        """Whether each number is valid, and what is allowed."""
        penalty, top = "a number from -2 to 2", f"None or a whole number from 0 to {MAX_LOGPROBS}"
        return {
            "max_new_tokens": (_whole(self.max_new_tokens, 1), "a whole number, at least 1"),
            # Logits divided by less overflow.
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
            # Logits divided by less overflow, or multiplied by more.
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
        """Whether each switch and each collection is valid, and what is allowed."""
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
                "text that is not empty, or a list of such",
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
        """Refuse ids that a model with so many tokens does not have.

        Raises:
            InputError: as above.
        """
        for name in ("logit_bias", "stop_token_ids"):
            unknown = [token for token in getattr(self, name) if token >= vocabulary]
            if unknown:
                raise InputError(
                    f"{name}={shown(unknown[0])}: must be token ids below {vocabulary:,}, which "
                    "is how many this model has"
                )

    def end_tokens(self, usual: frozenset[int]) -> frozenset[int]:
        """Ids that end the answer of a model whose own end tokens are ``usual``."""
        return frozenset(_as_tuple(self.stop_token_ids)) | (
            frozenset() if self.ignore_eos else usual
        )

    def includes(self, token: int) -> bool:
        """Whether a token that ends the answer is part of it."""
        return self.include_stop_str_in_output and token in _as_tuple(self.stop_token_ids)

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed before tokens are sampled."""
        penalties = self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty
        others = self.logit_bias, self.bad_words, self.min_tokens, self.grammar
        return any((*penalties, *others)) or self.bounds_reasoning

    @property
    def bounds_reasoning(self) -> bool:
        """Whether the reasoning has a token limit of its own."""
        return self.thinking_token_budget is not None

    @property
    def changes_logits(self) -> bool:
        """Whether the next token may differ from that of the highest logit."""
        return self.temperature > 0 or self.edits_logits

    @property
    def rules(self) -> tuple[float, ...]:
        """Rows with equal rules are sampled together."""
        return self.temperature, self.top_p, self.top_k, self.min_p

    def processors(self) -> LogitsProcessorList:
        """What sampling makes of edited logits, in the order of transformers."""
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
        """Random numbers of a seeded answer; None for a greedy or unseeded answer."""
        if self.seed is None or not self.temperature:
            return None
        return torch.Generator(device).manual_seed(self.seed)


class SamplingState:
    """How the tokens of one row are chosen, and what is remembered from one to the next.

    Args:
        sampling: the row's options.
        prompt: (tokens,) ids that the row has read, without padding, for the repetition penalty.
        end_tokens: ids that end the row, for ``min_tokens``.
        bad_words: token ids of each of ``bad_words``, see ``token_sequences``.
        thinks: the tokens that delimit the reasoning; None if the model does not reason. If the
            prompt opens the reasoning, a grammar begins after its closing token.

    Attributes:
        chosen: ids of the answer so far.
        reasons: whether the prompt opens the reasoning.
        grammar: how far they are in the row's grammar; None if it has none.
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

    def note(self, token: int) -> None:
        """Count a token that was chosen."""
        self.chosen.append(token)
        if self.grammar is not None:
            self.grammar.note(token)

    def generator(self, device: torch.device) -> torch.Generator | None:
        """Random numbers of a seeded answer, where the last token left them; None for a greedy or
        unseeded answer."""
        if self._generator is None:
            self._generator = self.sampling.generator(device)
        return self._generator


class SamplerGroup:
    """Next tokens of rows, each the same whatever rows stand beside it.

    Args:
        samplers: of the rows.
        device: of the logits.
    """

    def __init__(self, samplers: Sequence[SamplingState], device: torch.device) -> None:
        self._edits = logit_edits(samplers, device)
        alike: dict[tuple[float, ...], list[int]] = {}
        for row, sampler in enumerate(samplers):
            samples = sampler.sampling.temperature > 0
            alike.setdefault(sampler.sampling.rules if samples else (), []).append(row)
        self._draws = [
            (
                # All of them as they are: a copy takes time.
                None if len(alike) == 1 else torch.tensor(rows, device=device),
                RandomDraw([samplers[x] for x in rows], device) if rules else _likeliest,
            )
            for rules, rows in alike.items()
        ]

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """(rows,) next tokens from (rows, vocabulary) logits; from now on they have occurred."""
        # Rows with NaN get some token, which the host never sees.
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
    """Samples the next tokens of rows with the same rules.

    Args:
        samplers: of the rows; they may differ in their seeds.
        device: of the logits.
    """

    def __init__(self, samplers: Sequence[SamplingState], device: torch.device) -> None:
        self._processors: Callable[..., torch.Tensor] = samplers[0].sampling.processors()
        self._generators = [one.generator(device) for one in samplers]
        self._no_ids = torch.zeros((len(samplers), 0), dtype=torch.long, device=device)

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """(rows,) tokens from (rows, vocabulary) float32 scores."""
        scores = self._processors(self._no_ids, scores).softmax(-1)
        return scores.div_(self._noise(scores)).argmax(-1)

    def _noise(self, scores: torch.Tensor) -> torch.Tensor:
        """Exponential variates: the largest p / e is at i with probability p_i, which is how
        ``torch.multinomial`` draws one of many."""
        noise = torch.empty_like(scores)
        if None in self._generators:
            noise.exponential_()
        for row, generator in enumerate(self._generators):
            if generator is not None:
                noise[row].exponential_(generator=generator)
        return noise


def token_sequences(tokenizer: Any, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word, at the beginning of a text and after a space."""
    texts = [text for word in words for text in (word.lstrip(), f" {word.lstrip()}")]
    found = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    return tuple(dict.fromkeys(ids for ids in found if ids))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _whole(value: Any, all_min: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= all_min


def _is_top(value: Any) -> bool:
    return value is None or (_whole(value, 0) and value <= MAX_LOGPROBS)


def _is_id(value: Any) -> bool:
    return _whole(value, 0) and value < 1 << 31


def _within(value: Any, all_min: float, most: float = math.inf) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and all_min <= value <= min(most, sys.float_info.max)


BROKEN = -1
"""Stands on the host for a token that was chosen from NaN."""
NAN = "the model's logits are NaN: its weights or inputs are broken"


@dataclass(frozen=True)
class SampledTokens:
    """The tokens that were chosen from the logits of one step.

    Attributes:
        tokens: (batch,) int64 ids on the device, valid ids even where logits are NaN.
        sent: (batch,) int64 ids on the host, or on their way there.
        arrived: happens when ``sent`` and ``step_logprobs`` are complete; None if they are already.
        step_logprobs: of rows that ask for them; None if none does.
    """

    tokens: torch.Tensor
    sent: torch.Tensor
    arrived: torch.cuda.Event | None
    step_logprobs: StepLogprobs | None = None

    def listed(self) -> list[int]:
        """Wait for the tokens on the host; ``BROKEN`` for a row whose logits are NaN."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.sent.tolist()

    def logprobs(self, tokens: list[int]) -> dict[int, TokenLogprob]:
        """Log-probabilities of rows that ask for them, by row.

        Args:
            tokens: as of ``listed``, which has waited for them too.
        """
        return {} if self.step_logprobs is None else self.step_logprobs.by_row(tokens)


class Sampler:
    """Chooses the tokens of all rows, step by step.

    Args:
        samplers: of each row; a row with None gets the likeliest token.
        device: of the logits.
        ranks: all take the tokens of rank 0, as each would sample and round differently.
    """

    def __init__(
        self, samplers: Sequence[SamplingState | None], device: torch.device, ranks: TPGroup
    ) -> None:
        self._ranks = ranks
        changed = [
            (row, sampler)
            for row, sampler in enumerate(samplers)
            if sampler is not None and sampler.sampling.changes_logits
        ]
        self._rows = torch.tensor([row for row, _ in changed], dtype=torch.long, device=device)
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
        """Next tokens from (batch, vocabulary) logits, which may be overwritten afterwards."""
        # NaN is the highest of all.
        highest, tokens = logits.max(-1)
        if self._chooser is not None:
            tokens[self._rows] = self._chooser.choose(logits[self._rows])
        told = tokens.masked_fill(highest.isnan(), BROKEN)
        self._ranks.broadcast(told)
        if self._ranks.count > 1:
            tokens = told.clamp(min=0)
        logprobs = StepLogprobs(self._asked, logits, tokens) if self._asked else None
        sent = told.to("cpu", non_blocking=True)
        arrived = None
        if told.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(told.device))
        return SampledTokens(tokens, sent, arrived, logprobs)
