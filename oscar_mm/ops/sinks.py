"""Learned attention sinks: a score per query head that only enlarges the softmax's denominator.

Where attention returns the log-sum-exp of its scores, a sink scales the output
(``oscar_mm.ops.decode_torch.MergedAttention.add_sinks``). Elsewhere it becomes a key.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

_PADDING = 8
"""Number of channels that are added: the head size remains a multiple of 8."""


def with_sink_key(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    sinks: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add a key whose scores are the sinks and whose value is 0.

    Args:
        queries: (batch, query heads, tokens, head_dim).
        keys, values: (batch, KV heads, n, head_dim).
        visible: (batch, 1 or query heads, tokens, n): bool, whether a query attends to a key, or
            numbers to add to the scores; None for causal attention, of several queries to the first
            keys, of a single one to all keys.
        sinks: (query heads,).
        scaling: factor by which scores are multiplied.

    Returns:
        Queries and keys of head_dim + 8 channels, n + 1 keys and values, and what is visible.
    """
    if visible is None:
        new, count = queries.shape[2], keys.shape[2]
        ones = torch.ones(new, count, dtype=torch.bool, device=queries.device)
        # Keys after those of several queries are free places of a static cache.
        visible = (ones.tril() if new > 1 else ones)[None, None]
    # True, or nothing to add.
    seen = pad(visible, (0, 1), value=int(visible.dtype == torch.bool))
    extra = queries.new_zeros(*queries.shape[:3], _PADDING)
    extra[..., 0] = (sinks / scaling)[:, None]
    keys = pad(keys, (0, _PADDING, 0, 1))
    keys[:, :, -1, -_PADDING] = 1
    values = pad(values, (0, 0, 0, 1))
    return torch.cat([queries, extra], dim=-1), keys, values, seen
