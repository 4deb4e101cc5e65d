"""Float64 attention over what a cache holds, and the error of an output against it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from oscar_mm.cache.layer import OscarLayer
from oscar_mm.cache.rows import Row, TokenPlaces


def stored_pair(
    layer: OscarLayer, sequence: Row, heads: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of some KV heads as the pages say, (heads, tokens, head_dim) float64.

    Stream by stream instead of in sequence order, which attention of a last token cannot see.
    """
    sides: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for stream in sequence.streams.values():
        # Float32, so that nothing is rounded on the way.
        for pair in layer.parts(TokenPlaces.of([stream], layer.device), torch.float32):
            for parts, side in zip(sides, pair, strict=True):
                parts.append(side[heads].double())
    keys, values = (torch.cat(parts, dim=1) for parts in sides)
    return keys, values


def exact(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Float64 attention: queries (heads, group, d), keys and values (heads, tokens, d)."""
    scores = queries.double() @ keys.double().transpose(1, 2) * keys.shape[-1] ** -0.5
    return scores.softmax(-1) @ values.double()


def error_of(
    output: torch.Tensor,
    queries: torch.Tensor,
    kv_heads: int,
    pair_of: Callable[[int, list[int]], tuple[torch.Tensor, torch.Tensor]],
) -> float:
    """Relative error of the first and last KV heads of the first and last rows.

    Args:
        output: (batch, query heads, 1, head_dim); queries likewise.
        kv_heads: their number.
        pair_of: keys and values, (heads, tokens, head_dim), of a row and KV heads.
    """
    heads = sorted({0, kv_heads - 1})
    wrong = norm = 0.0
    for row in sorted({0, len(output) - 1}):
        found, asked = (x[row, :, 0].unflatten(0, (kv_heads, -1))[heads] for x in (output, queries))
        expected = exact(asked, *pair_of(row, heads))
        wrong += float((found.double() - expected).square().sum())
        norm += float(expected.square().sum())
    return (wrong / norm) ** 0.5
