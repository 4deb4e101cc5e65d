"""Scoring: how likely given continuations are, after prompts that were read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oscar_mm.cache.cache import OscarCache
from oscar_mm.generation.prompt import Prompt, text_after
from oscar_mm.generation.prompt_reader import PromptReader
from oscar_mm.generation.sampling import NAN


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
