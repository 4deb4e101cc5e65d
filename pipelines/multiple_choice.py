"""Multiple choice: the given answer of a question that a model finds likeliest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oscar_mm.cache.memory import MemoryReport
from oscar_mm.generation.decode_loop import read_prompt
from oscar_mm.generation.scoring import log_likelihoods
from oscar_mm.pipelines.batch import BatchRequest, batch_cache, left_padded, row_memory

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline


@dataclass(frozen=True)
class Choice:
    """How likely a model finds the choices of one question.

    Attributes:
        index: place of the request.
        best: index of the likeliest choice; the first of equals.
        scores: log-probability of each choice as the whole answer; see
            ``oscar_mm.generation.scoring``.
        memory: bytes of the request when its choices were scored.
        prompt_tokens: tokens of the prompt, media included.
    """

    index: int
    best: int
    scores: list[float]
    memory: MemoryReport
    prompt_tokens: int


def choose(
    pipe: Pipeline, batch: list[BatchRequest], choices: Sequence[Sequence[Sequence[int]]]
) -> list[Choice]:
    """Read several questions at once, then score the choices of each over its pages.

    Args:
        pipe: whose model chooses.
        batch: questions; their pasts are shared, not changed.
        choices: token ids of each choice of each question.

    Raises:
        FloatingPointError: the model's logits are NaN.
        torch.OutOfMemoryError: too much at once.
    """
    with pipe.lock:
        cache = batch_cache(pipe, batch)
        try:
            prompt = left_padded([request.prompt for request in batch], pipe.family)
            logits = read_prompt(pipe.model, prompt, cache, pipe.prefill_chunk)
            rows = prompt.positions.shape[:-2]
            following = prompt.next_position.view(*[1] * len(rows), -1, 1).expand(*rows, -1, 1)
            scores = log_likelihoods(
                pipe.model, cache, logits, following, choices, pipe.family.end_tokens()
            )
            return [
                Choice(
                    index=request.index,
                    best=max(range(len(row_scores)), key=row_scores.__getitem__),
                    scores=row_scores,
                    memory=row_memory(cache, row, request.past),
                    prompt_tokens=request.tokens,
                )
                for row, (request, row_scores) in enumerate(zip(batch, scores, strict=True))
            ]
        finally:
            cache.close()
