"""Comparison of page formats on a model's own 16-bit answers, one decode step at a time.

Nothing is simulated here, unlike in ``oscar_mm.compare.comparison``: each format first answers
through the engine, and is then fed the 16-bit answer token by token. Its cache has packed whatever
decoding packs by then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import exp
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oscar_mm.cache.cache import OscarCache
from oscar_mm.compare.methods import REFERENCE
from oscar_mm.compare.teacher_forcing import kl_divergence, ratio
from oscar_mm.engine.answer import Answer, Timings
from oscar_mm.engine.prefill import read_prompt
from oscar_mm.engine.prompt import Prompt
from oscar_mm.engine.sampling import NAN, Sampling
from oscar_mm.errors import InputError
from oscar_mm.fast_decode.graph_runner import GraphRunner
from oscar_mm.policy import KVPolicy

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline


@dataclass(frozen=True)
class DecodedAnswer:
    """A format's own answer to a question, and its errors when it is fed the 16-bit answer.

    Attributes:
        answer: greedy answer of the format itself.
        right: whether this answer is correct; None if no correct answer is known.
        same: number of its tokens before the first that differs from the 16-bit answer.
        exact: whether all its tokens are those of the 16-bit answer.
        steps: (decode steps, 4) float64 on the CPU, one step after each token of the 16-bit answer:
            KL divergence from the 16-bit cache's distribution in nats; 1 if the most likely token
            is the same, else 0; negative log-likelihood (nats) of the 16-bit cache's most likely
            token, with the format and with the 16-bit cache.
    """

    answer: Answer
    right: bool | None
    same: int
    exact: bool
    steps: Tensor

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers of this answer as a JSON-serializable dict."""
        kl, agreement = self.steps.mean(0)[:2].tolist()
        memory = self.answer.memory
        return {
            "text": self.answer.text,
            "tokens": len(self.answer.token_ids),
            "same": self.same,
            "exact": self.exact,
            "right": self.right,
            "kl": kl,
            "agreement": agreement,
            "kv_bytes": memory.kv_bytes,
            "bf16_bytes": memory.bf16_bytes,
        }


class AnswerComparison:
    """Compares page formats on a model's own 16-bit answers, question by question.

    The 16-bit cache answers greedily, and is then fed its own answer again for the logits after
    each token. Every format does the same: it answers greedily, and is fed the 16-bit answer. Only
    logits of one answer of the 16-bit cache are in memory at a time, (tokens, vocabulary).

    Args:
        pipe: pipeline of the model; its own policy is ignored.
        policies: policies to compare, by name.
        max_new_tokens: maximum number of tokens of an answer.
    """

    def __init__(
        self, pipe: Pipeline, policies: Mapping[str, KVPolicy], max_new_tokens: int
    ) -> None:
        chosen = {REFERENCE: KVPolicy.preset("bf16"), **policies}
        self.pipes = {name: pipe.with_policy(policy) for name, policy in chosen.items()}
        self._sampling = Sampling(max_new_tokens=max_new_tokens, temperature=0)
        self._answers: dict[str, list[DecodedAnswer]] = {name: [] for name in chosen}

    def add(
        self, prompt: Prompt, is_right: Callable[[str], bool] | None = None
    ) -> dict[str, DecodedAnswer]:
        """Compare the formats on one prompt, and return the answer of each by name.

        A prompt on which any format fails counts for none, so that all are judged on the same
        answers.

        Args:
            prompt: prompt of a single row, from ``Pipeline.read_request``.
            is_right: function that returns whether a text is a correct answer, if that is known.

        Raises:
            InputError: if the 16-bit answer is empty.
            FloatingPointError: if a format's keys, values or logits are not finite.
        """
        reference = self.pipes[REFERENCE]
        truth = self._answer(reference, prompt)
        expected = truth.token_ids
        if not expected:
            raise InputError("the model's 16-bit answer is empty, so there is nothing to compare")
        exact = _fed(reference, prompt, expected, lambda _, logits: logits.clone())
        found = {}
        for name, pipe in self.pipes.items():
            answer = truth if pipe is reference else self._answer(pipe, prompt)
            found[name] = DecodedAnswer(
                answer=answer,
                right=None if is_right is None else is_right(answer.text),
                same=_same(answer.token_ids, expected),
                exact=answer.token_ids == expected,
                steps=_judged(pipe, prompt, expected, exact),
            )
        for name, judged in found.items():
            self._answers[name].append(judged)
        return found

    def _answer(self, pipe: Pipeline, prompt: Prompt) -> Answer:
        return pipe.answer(prompt, self._sampling, time.perf_counter()).complete()

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for the 16-bit cache and for each format; none before the first answer.

        Rates are shares from 0 to 1. "..._error" are standard errors over prompts.

        - "method", "prompts" and "tokens": name, number of answers and of decode steps
        - "kl": mean KL divergence in nats, "agreement": steps with the same most likely token,
          "perplexity_ratio": perplexity of the 16-bit answers, divided by the 16-bit cache's
        - "exact": answers that equal the 16-bit answer, "same": mean number of tokens before the
          first that differs, "right": correct answers among those whose correctness is known, or
          None
        - "kv_bytes": mean size of a cache at the end, "memory_ratio": how many times smaller that
          is than the same tokens in 16-bit precision, "packs": whether any cache had packed tokens;
          all from the caches' memory reports
        """
        return [
            {"method": name} | _summary(answers)
            for name, answers in self._answers.items()
            if answers
        ]

    def speeds(
        self, prompt: Prompt, repeats: int, progress: Callable[[], object] = bool
    ) -> dict[str, dict[str, Any]]:
        """Measure first-token times and decode speeds of one prompt, by format.

        Each format generates ``max_new_tokens`` tokens once for warm-up, then ``repeats`` times in
        turn with the others, so that a slow minute of the machine affects all.

        Args:
            prompt: prompt of a single row, from ``Pipeline.read_request``.
            repeats: number of measured answers per format.
            progress: function called after each answer.

        Returns:
            For each format "tokens_per_s", the tokens after the first per second, and
            "first_token_s", the seconds from a decoded prompt to its first token: each the median,
            with "..._low" and "..._high".
        """
        most = self._sampling.max_new_tokens
        sampling = Sampling(max_new_tokens=most, temperature=0, ignore_eos=True)
        timings: dict[str, list[Timings]] = {name: [] for name in self.pipes}
        for _ in range(1 + repeats):
            for name, pipe in self.pipes.items():
                answer = pipe.answer(prompt, sampling, time.perf_counter()).complete()
                timings[name].append(answer.timings)
                progress()
        return {
            name: _spread("tokens_per_s", [one.tokens_per_s for one in runs[1:]])
            | _spread("first_token_s", [one.prefill_s for one in runs[1:]])
            for name, runs in timings.items()
        }


def _fed(
    pipe: Pipeline, prompt: Prompt, tokens: Sequence[int], look: Callable[[int, Tensor], Tensor]
) -> list[Tensor]:
    """Read a prompt, then add the tokens one decode step at a time.

    Args:
        pipe: pipeline, whose policy is used.
        prompt: prompt of a single row.
        tokens: ids of the text after the prompt.
        look: function of a token's index and the (vocabulary,) logits after it, which a later step
            overwrites.

    Returns:
        The results of ``look``.
    """

    @torch.inference_mode()
    def steps() -> list[Tensor]:
        cache = OscarCache(pipe.policy, model=pipe.model, store=pipe.store)
        device = prompt.positions.device
        try:
            read_prompt(pipe.model, prompt, cache)
            runner = GraphRunner(pipe.model, cache, 1, prompt.positions.shape[:-2], device)
            runner.place([int(prompt.next_position)])
            ids, ended = torch.tensor(tokens, device=device)[:, None], torch.tensor([False])
            return [look(index, runner(token, ended)[0]) for index, token in enumerate(ids)]
        finally:
            cache.close()
            pipe.store.trim_surplus()  # The next format needs the memory.

    return pipe.engine.call(steps, runs_model=True)


def _judged(
    pipe: Pipeline, prompt: Prompt, tokens: Sequence[int], exact: Sequence[Tensor]
) -> Tensor:
    """Return ``DecodedAnswer.steps`` of a format, given the 16-bit logits after each token."""

    def judge(index: int, logits: Tensor) -> Tensor:
        expected, actual = exact[index].float(), logits.float()
        target, losses = expected.argmax(), (actual, expected)
        agreed = (actual.argmax() == target).float()
        own, other = (-x.log_softmax(-1)[target] for x in losses)
        return torch.stack([kl_divergence(expected, actual), agreed, own, other])

    steps = torch.stack(_fed(pipe, prompt, tokens, judge)).double().cpu()
    if not steps.isfinite().all():
        raise FloatingPointError(NAN)
    return steps


def _same(tokens: Sequence[int], expected: Sequence[int]) -> int:
    pairs = zip(tokens, expected, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _summary(answers: Sequence[DecodedAnswer]) -> dict[str, Any]:
    steps = torch.tensor([len(one.steps) for one in answers]).double()
    divergence, agreed, loss, exact_loss = torch.stack([x.steps.sum(0) for x in answers], dim=1)
    (kl, kl_error), (agreement, agreement_error) = ratio(divergence, steps), ratio(agreed, steps)
    rise, rise_error = ratio(loss - exact_loss, steps)
    memory, right = [x.answer.memory for x in answers], [x.right for x in answers]
    known = [one for one in right if one is not None]
    kv_bytes = sum(report.kv_bytes for report in memory)
    return {
        "prompts": len(answers),
        "tokens": int(steps.sum()),
        "kl": kl,
        "kl_error": kl_error,
        "agreement": agreement,
        "agreement_error": agreement_error,
        "perplexity_ratio": exp(rise),
        "perplexity_ratio_error": exp(rise) * rise_error,
        "exact": sum(x.exact for x in answers) / len(answers),
        "same": sum(x.same for x in answers) / len(answers),
        "right": sum(known) / len(known) if known else None,
        "kv_bytes": kv_bytes // len(answers),
        "packs": any(report.by_kind["codes"] for report in memory),
        "memory_ratio": sum(report.bf16_bytes for report in memory) / kv_bytes,
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {name: median(values), f"{name}_low": min(values), f"{name}_high": max(values)}
