"""Probe: shows the queries, keys and values of each layer of one forward pass, and keeps none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache

from oscar_mm.cache.pending import KeyLength


@dataclass(frozen=True)
class LayerStates:
    """What attention of one layer reads, after RoPE and QK-norm.

    Attributes:
        index: of the layer.
        module: the attention layer.
        queries: (query heads, tokens, head_dim).
        keys: (KV heads, tokens, head_dim); values likewise.
        scaling: factor of the scores.
    """

    index: int
    module: torch.nn.Module
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scaling: float


class Probe(Cache):
    """Goes through a prefill in place of a cache, in a model with attention "oscar".

    The result of the forward pass is that of any cache, as attention over a prompt is exact. Of
    the keys and values no more than one layer's are alive.

    Args:
        look: called with each layer's states, for a single row without padding.
    """

    def __init__(self, look: Callable[[LayerStates], None]) -> None:
        super().__init__(layers=[])
        self._look = look

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``OscarCache.update``: attention "oscar" hands the queries to what is attached."""
        keys = key_states.view_as(key_states)
        keys.oscar_chunk = _Attention(layer_idx, self._look)  # pyright: ignore[reportAttributeAccessIssue]
        return keys, value_states

    def attend_packed(self, mask: torch.Tensor | None) -> bool:
        """Attention "oscar" tells of padding, of which there is none."""
        if mask is not None and not bool(mask.all()):
            raise ValueError("a prompt that is inspected has no padding")
        return False

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(tokens of the prompt, 0)."""
        return KeyLength(query_length, self), 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: nothing is kept."""
        return 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: unbounded."""
        return -1


class _Attention:
    """Exact attention of one layer over the prompt, looked at on the way."""

    def __init__(self, index: int, look: Callable[[LayerStates], None]) -> None:
        self._index, self._look = index, look

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        visible: torch.Tensor | None,
    ) -> torch.Tensor:
        """(1, query heads, tokens, head_dim)."""
        output = scaled_dot_product_attention(
            *(query, key, value, visible),
            is_causal=visible is None,
            scale=scaling,
            enable_gqa=True,
        )
        self._look(LayerStates(self._index, module, query[0], key[0], value[0], scaling))
        return output
