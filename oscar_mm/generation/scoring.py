"""Scoring: how likely given continuations are, on a cache that holds what they continue."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from oscar_mm.cache.cache import OscarCache
from oscar_mm.modality import PADDING, Modality


@torch.inference_mode()
def log_likelihoods(
    model: nn.Module,
    cache: OscarCache,
    logits: torch.Tensor,
    positions: torch.Tensor,
    continuations: Sequence[Sequence[Sequence[int]]],
    end_tokens: frozenset[int],
) -> list[list[float]]:
    """Log-probability that a row goes on with a continuation and ends there.

    The end counts, so that a continuation is at no disadvantage against its own beginning, which
    is shorter.

    Args:
        model: a model of transformers that generates, with attention "oscar" in its decoder.
        cache: what each row has read. It is left as it is: the continuations are read on a fork
            whose rows share its pages.
        logits: (rows, vocabulary) of the last token read.
        positions: (dimensions, rows, 1) or (rows, 1) position ids of the first token to come.
        continuations: token ids of each continuation of each row; none is empty.
        end_tokens: ids that end an answer; any of them will do.

    Raises:
        FloatingPointError: the model's logits are NaN.
    """
    texts = [(row, list(ids)) for row, several in enumerate(continuations) for ids in several]
    rows = [row for row, _ in texts]
    longest = max(len(ids) for _, ids in texts)
    # Padding on the right: the tokens of a row are at the same places in the logits.
    tokens = torch.tensor([ids + [0] * (longest - len(ids)) for _, ids in texts])
    real = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for _, ids in texts]).bool()
    fork = cache.fork()
    try:
        fork.batch_select_indices(torch.tensor(rows))
        fork.expect(torch.where(real, int(Modality.TEXT), PADDING))
        start = positions[..., torch.tensor(rows, device=positions.device), :]
        output = model(
            input_ids=tokens.to(positions.device),
            position_ids=start + torch.arange(longest, device=start.device),
            past_key_values=fork,
            use_cache=True,
            logits_to_keep=longest,
        )
    finally:
        fork.close()
    first = logits[rows, None]
    scored = torch.cat([first, output.logits.to(first.device)], dim=1).float().log_softmax(-1).cpu()
    if bool(scored.isnan().any()):
        raise FloatingPointError("the model's logits are NaN: its weights or inputs are broken")
    chosen = scored[:, :-1].gather(-1, tokens[..., None])[..., 0].masked_fill(~real, 0.0).sum(-1)
    after = scored[torch.arange(len(texts)), real.sum(-1)]
    ended = after[:, sorted(end_tokens)].logsumexp(-1)
    scores: list[list[float]] = [[] for _ in continuations]
    for row, score in zip(rows, (chosen + ended).tolist(), strict=True):
        scores[row].append(score)
    return scores
