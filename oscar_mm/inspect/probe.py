"""Probe: shows the queries, keys and values of each layer of one forward pass, and keeps none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from oscar_mm.compare.teacher_forcing import ForcedCache


@dataclass(frozen=True)
class LayerStates:
    """Queries, keys and values of one layer's attention, after RoPE and QK-norm.

    Attributes:
        index: number of the layer.
        module: the attention layer.
        queries: (query heads, tokens, head_dim).
        keys: (KV heads, tokens, head_dim).
        values: (KV heads, tokens, head_dim).
        scaling: factor of the scores.
    """

    index: int
    module: torch.nn.Module
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scaling: float


class Probe(ForcedCache):
    """Stands in for a cache during a prefill, in a model with attention "oscar".

    Attention over the prompt is exact. At most one layer's keys and values are in memory.

    Args:
        look: called with each layer's states, for a single row without padding.
    """

    def __init__(self, look: Callable[[LayerStates], None]) -> None:
        def show(
            index: int,
            module: torch.nn.Module,
            queries: torch.Tensor,
            keys: torch.Tensor,
            values: torch.Tensor,
            scaling: float,
        ) -> None:
            look(LayerStates(index, module, queries[0], keys[0], values[0], scaling))

        super().__init__(look=show)
