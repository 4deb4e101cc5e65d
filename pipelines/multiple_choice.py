"""Multiple choice: the given answer of a question that a model finds likeliest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.memory import MemoryReport
from oscar_mm.generation.prompt import Prompt, text_after
from oscar_mm.generation.prompt_reader import PromptReader
from oscar_mm.generation.sampling import NAN

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline


@dataclass(frozen=True)
class Question:
    """A question with choices, ready to be read.

    Attributes:
        prompt: of a single row.
        cache: holds what comes before the prompt; it is not changed.
        choices: token ids of each choice.
    """

    prompt: Prompt
    cache: OscarCache
    choices: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Choice:
    """How likely a model finds the choices of one question.

    Attributes:
        best: index of the likeliest choice; the first of equals.
        scores: log-probability of each choice as the whole answer; see ``log_likelihoods``.
        memory: bytes of the request when its choices were scored.
        prompt_tokens: tokens of the prompt and what comes before it, media included.
    """

    best: int
    scores: list[float]
    memory: MemoryReport
    prompt_tokens: int


def choose(pipe: Pipeline, questions: Sequence[Question]) -> list[Choice]:
    """Read several questions, then score the choices of each over its pages.

    Args:
        pipe: whose model chooses.
        questions: with choices.

    Raises:
        FloatingPointError: the model's logits are NaN.
        torch.OutOfMemoryError: too much at once.
    """
    with pipe.lock:
        caches = [question.cache.fork() for question in questions]
        try:
            prompts = [question.prompt for question in questions]
            choices = [question.choices for question in questions]
            scores = log_likelihoods(pipe.engine.reader, prompts, caches, choices)
            return [
                Choice(
                    best=max(range(len(row)), key=row.__getitem__),
                    scores=row,
                    memory=cache.memory(),
                    prompt_tokens=cache.get_seq_length(),
                )
                for cache, row in zip(caches, scores, strict=True)
            ]
        finally:
            for cache in caches:
                cache.close()


@torch.inference_mode()
def log_likelihoods(
    reader: PromptReader,
    prompts: Sequence[Prompt],
    caches: Sequence[OscarCache],
    continuations: Sequence[Sequence[Sequence[int]]],
) -> list[list[float]]:
    """Log-probability that an answer is a continuation of its prompt, and ends there.

    The end counts, so that a continuation is at no disadvantage against its own beginning, which
    is shorter.

    Args:
        reader: of prompts; the lock of its store is held.
        prompts: of a single row each.
        caches: hold what comes before the prompts, then the prompts too; the continuations are
            read on forks, which share their pages.
        continuations: token ids of each continuation of each prompt; none is empty.

    Raises:
        FloatingPointError: the model's logits are NaN.
    """
    first = reader.read_together(prompts, caches)
    texts = [(row, list(ids)) for row, several in enumerate(continuations) for ids in several]
    forks = [caches[row].fork() for row, _ in texts]
    try:
        read = [text_after(prompts[row], torch.tensor([ids])) for row, ids in texts]
        after = reader.read_together(read, forks, every_token=True)
    finally:
        for fork in forks:
            fork.close()
    end_tokens = sorted(reader.family.end_tokens())
    scores: list[list[float]] = [[] for _ in continuations]
    for (row, ids), logits in zip(texts, after, strict=True):
        scored = torch.cat([first[row], logits]).float().log_softmax(-1).cpu()
        if bool(scored.isnan().any()):
            raise FloatingPointError(NAN)
        chosen = scored[:-1].gather(-1, torch.tensor(ids)[:, None]).sum()
        scores[row].append(float(chosen + scored[-1, end_tokens].logsumexp(-1)))
    return scores
