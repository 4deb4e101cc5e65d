"""Sampling: how the next token is chosen; Choices: the next token of every row.

Tokens are on the device at once and on the host later: only ``NextTokens.listed`` makes the host
wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from oscar_mm.errors import InputError, shown
from oscar_mm.ranks import Ranks


class SamplingOptions(TypedDict, total=False):
    """How a user has an answer generated; what is None or not given is the checkpoint's own.

    Attributes:
        max_new_tokens: longest answer, in tokens; by default 256, and 8,192 more for the reasoning
            of a thinking model (at most half of the context).
        temperature: 0 takes the likeliest token, above 0 samples. By default the checkpoint's
            generation_config says how tokens are chosen, which may be by sampling.
        top_p, top_k, repetition_penalty: see ``Sampling``; by default the checkpoint's too, but
            off beside a temperature. In a chat the penalty counts the tokens of earlier turns.
        seed, stop: see ``Sampling``. In a chat the model has read what it wrote of a stop text.
        deterministic: see ``Sampling``; by default False.
    """

    max_new_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    repetition_penalty: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    deterministic: bool | None


@dataclass(frozen=True)
class Sampling:
    """How an answer is generated, checked.

    Attributes:
        max_new_tokens: longest answer, its reasoning included, at least 1.
        temperature: 0 takes the likeliest token; above 0 samples.
        top_p: sample from the likeliest tokens of this much probability, in (0, 1].
        top_k: sample from this many likeliest tokens; 0 for all.
        repetition_penalty: divides positive logits of tokens that have occurred; 1 is none.
        seed: of the sampling; the same seed gives the same answer on the same machine beside the
            same other answers.
        stop: text that ends the answer (not part of it): a string or several.
        deterministic: decode by itself. Else the answers that run at the same time decode in one
            batch, whose size changes an answer by rounding.

    Raises:
        InputError: a value that is not allowed.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        stop = () if self.stop is None else self.stop
        stop = tuple(stop) if isinstance(stop, list | tuple) else (stop,)
        object.__setattr__(self, "stop", stop)
        checks = {
            "max_new_tokens": (_whole(self.max_new_tokens, 1), "a whole number, at least 1"),
            # Logits divided by less overflow.
            "temperature": (
                _within(self.temperature, 0) and not 0 < self.temperature < 1e-6,
                "0 or a number, at least 1e-6",
            ),
            "top_p": (
                _within(self.top_p, 0) and 0 < self.top_p <= 1,
                "a number above 0, at most 1",
            ),
            "top_k": (_whole(self.top_k, 0), "a whole number, at least 0 (0: all tokens)"),
            # Logits divided by less overflow, or multiplied by more.
            "repetition_penalty": (
                _within(self.repetition_penalty, 1e-3) and self.repetition_penalty <= 1e6,
                "a number from 0.001 to 1,000,000",
            ),
            "seed": (
                self.seed is None or (_whole(self.seed, 0) and self.seed < 1 << 63),
                "None or a whole number from 0 to 2^63 - 1",
            ),
            "stop": (
                all(isinstance(text, str) and text for text in stop),
                "text that is not empty, or a list of such",
            ),
            "deterministic": (isinstance(self.deterministic, bool), "True or False"),
        }
        for name, (valid, allowed) in checks.items():
            if not valid:
                raise InputError(f"{name}={shown(getattr(self, name))}: must be {allowed}")

    @property
    def changes_logits(self) -> bool:
        """Whether the next token may differ from that of the highest logit."""
        return self.temperature > 0 or self.repetition_penalty != 1.0

    @property
    def rules(self) -> tuple[float, ...]:
        """Rows with equal rules have their tokens chosen together."""
        return self.temperature, self.top_p, self.top_k, self.repetition_penalty

    def processors(self) -> LogitsProcessorList:
        """Processors of the logits, in the order of transformers."""
        processors = LogitsProcessorList()
        if self.repetition_penalty != 1.0:
            processors.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.temperature > 0:
            if self.temperature != 1.0:
                processors.append(TemperatureLogitsWarper(float(self.temperature)))
            if self.top_k:
                processors.append(TopKLogitsWarper(self.top_k))
            if self.top_p < 1.0:
                processors.append(TopPLogitsWarper(float(self.top_p)))
        return processors

    def generator(self, device: torch.device) -> torch.Generator | None:
        """Random numbers of a seeded answer; None for a greedy or unseeded answer."""
        if self.seed is None or not self.temperature:
            return None
        return torch.Generator(device).manual_seed(self.seed)


class TokenSampler:
    """How the tokens of one row are chosen, and what is remembered from one to the next.

    Args:
        sampling: the row's options.
        seen: (tokens,) ids that the row has read, without padding, for the repetition penalty.
    """

    def __init__(self, sampling: Sampling, seen: torch.Tensor) -> None:
        self.sampling, self._prompt = sampling, seen
        self._chosen: list[int] = []
        self._generator: torch.Generator | None = None

    def note(self, token: int) -> None:
        """Count a token that was chosen as seen."""
        self._chosen.append(token)

    def seen(self, device: torch.device) -> torch.Tensor:
        """(tokens,) ids that the row has read or chosen."""
        chosen = torch.tensor(self._chosen, dtype=torch.long, device=device)
        return torch.cat([self._prompt.to(device), chosen])

    def generator(self, device: torch.device) -> torch.Generator | None:
        """Random numbers of a seeded answer, where the last token left them; None for a greedy or
        unseeded answer."""
        if self._generator is None:
            self._generator = self.sampling.generator(device)
        return self._generator


class Chooser:
    """Next tokens of rows with the same rules, each the same whatever rows stand beside it.

    Args:
        samplers: of the rows; they may differ in their seeds.
        device: of the logits.
    """

    def __init__(self, samplers: Sequence[TokenSampler], device: torch.device) -> None:
        sampling = samplers[0].sampling
        self._samples = sampling.temperature > 0
        self._processors: Callable[..., torch.Tensor] = sampling.processors()
        self._generators = [one.generator(device) for one in samplers]
        self._seen = torch.zeros((len(samplers), 0), dtype=torch.long, device=device)
        self._penalizes = sampling.repetition_penalty != 1.0
        if self._penalizes:
            seen = [one.seen(device) for one in samplers]
            longest = max(map(len, seen))
            # Padding repeats a token of the row, which changes no penalty.
            padded = [torch.cat([x, x[:1].expand(longest - len(x))]) for x in seen]
            self._seen = torch.stack(padded)

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """(rows,) next tokens from (rows, vocabulary) float32 logits; from now they are seen."""
        scores = self._processors(self._seen, logits)
        if self._samples:
            scores = scores.softmax(-1).div_(self._noise(scores))
        tokens = scores.argmax(-1, keepdim=True)
        if self._penalizes:
            self._seen = torch.cat([self._seen, tokens], dim=1)
        return tokens[:, 0]

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


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _within(value: Any, least: float) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= least


BROKEN = -1
"""Stands on the host for a token that was chosen from NaN."""
NAN = "the model's logits are NaN: its weights or inputs are broken"


@dataclass(frozen=True)
class NextTokens:
    """The tokens that were chosen from the logits of one step.

    Attributes:
        tokens: (batch,) int64 ids on the device, valid ids even where logits are NaN.
        sent: (batch,) int64 ids on the host, or on their way there.
        arrived: happens when ``sent`` is complete; None if it is already.
    """

    tokens: torch.Tensor
    sent: torch.Tensor
    arrived: torch.cuda.Event | None

    def listed(self) -> list[int]:
        """Wait for the tokens on the host; ``BROKEN`` for a row whose logits are NaN."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.sent.tolist()


class Choices:
    """Chooses the tokens of all rows, step by step.

    Args:
        samplers: of each row; a row with None gets the likeliest token.
        device: of the logits.
        ranks: all take the tokens of rank 0, as each would sample and round differently.
    """

    def __init__(
        self, samplers: Sequence[TokenSampler | None], device: torch.device, ranks: Ranks
    ) -> None:
        self._ranks = ranks
        alike: dict[tuple[float, ...], list[int]] = {}
        for row, sampler in enumerate(samplers):
            if sampler is not None and sampler.sampling.changes_logits:
                alike.setdefault(sampler.sampling.rules, []).append(row)
        self._choosers = [
            (
                torch.tensor(rows, device=device),
                Chooser([one for row in rows if (one := samplers[row]) is not None], device),
            )
            for rows in alike.values()
        ]

    def __call__(self, logits: torch.Tensor) -> NextTokens:
        """Next tokens from (batch, vocabulary) logits, which may be overwritten afterwards."""
        # NaN is the highest of all.
        highest, tokens = logits.max(-1)
        for rows, chooser in self._choosers:
            # Rows with NaN get some token, which the host never sees.
            scores = logits[rows].float().nan_to_num(0.0, math.inf, -math.inf)
            tokens[rows] = chooser.choose(scores)
        told = tokens.masked_fill(highest.isnan(), BROKEN)
        self._ranks.agree(told)
        if self._ranks.count > 1:
            tokens = told.clamp(min=0)
        sent = told.to("cpu", non_blocking=True)
        arrived = None
        if told.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(told.device))
        return NextTokens(tokens, sent, arrived)
