"""Token scaling ("omni-token scaling" of OScaR): keys are divided by a norm per token.

Tokens of a key group share one scale per channel, so a token with a large norm would cost all
others their resolution (text and vision norms differ several times in some layers). The norm is
stored as the root mean square over channels, which float16 holds for any float16 key.
"""

from __future__ import annotations

import torch


def token_rms(keys: torch.Tensor, scaling: str) -> torch.Tensor:
    """Root mean square of every token's key, float32 rounded to float16 values.

    Args:
        keys: (pages, KV heads, tokens, head_dim) float32.
        scaling: "shared": over all KV heads; "per_head": of each.

    Returns:
        (pages, 1 or KV heads, tokens, 1).
    """
    dims = (1, 3) if scaling == "shared" else (3,)
    return keys.square().mean(dims, keepdim=True).sqrt().half().float()


def divide_by_norm(keys: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """keys / norms, 0 for tokens of norm 0."""
    return torch.where(norms > 0, keys / norms, torch.zeros_like(keys))


def fitted_norm(
    keys: torch.Tensor, coded: torch.Tensor, norms: torch.Tensor, norm: str, scaling: str
) -> torch.Tensor:
    """The norm to store once the codes are known, so that ``norm * coded`` stands for the key.

    "plain" keeps the norm; "refit" minimizes |norm * coded - key|^2; "unbiased" makes
    <norm * coded, key> = |key|^2. A least-squares fit shrinks keys towards the group's middle,
    which flattens attention: undoing that costs no bits (measured in KL; the squared error of
    the key prefers "refit").

    Args:
        keys: (pages, KV heads, tokens, head_dim) float32.
        coded: keys as read back from their codes, before the norm; same shape.
        norms: (pages, 1 or KV heads, tokens, 1), the norms that the keys were divided by.

    Returns:
        the shape of ``norms``, within a factor 2 of it, rounded to float16 values.
    """
    if norm == "plain":
        return norms
    dims = (1, 3) if scaling == "shared" else (3,)
    overlap = (keys * coded).sum(dims, keepdim=True)
    if norm == "refit":
        fitted = overlap / coded.square().sum(dims, keepdim=True)
    elif norm == "unbiased":
        fitted = keys.square().sum(dims, keepdim=True) / overlap
    else:
        raise ValueError(f"norm={norm!r}: must be 'plain', 'refit' or 'unbiased'")
    # A token whose codes barely overlap with it (norm near zero, coarse group) keeps its norm.
    fitted = torch.where((overlap > 0) & fitted.isfinite(), fitted, norms)
    return torch.minimum(torch.maximum(fitted, norms / 2), norms * 2).half().float()
