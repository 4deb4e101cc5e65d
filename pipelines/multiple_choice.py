"""Multiple choice: the given answer of a question that a model finds likeliest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.memory import MemoryReport
from oscar_mm.generation.prompt import Prompt
from oscar_mm.generation.scoring import log_likelihoods

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
        scores: log-probability of each choice as the whole answer; see
            ``oscar_mm.generation.scoring``.
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
