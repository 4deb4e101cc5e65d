"""What carries a cache through a model's forward pass: the length of the keys, and new tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from oscar_mm.cache.attend import attend_stored
from oscar_mm.cache.layer import OscarLayer
from oscar_mm.cache.step import Step

if TYPE_CHECKING:
    from oscar_mm.cache.cache import OscarCache


class KeyLength(int):
    """Length of the keys, as ``get_mask_sizes`` returns it, that knows its cache."""

    cache: OscarCache

    def __new__(cls, length: int, cache: OscarCache) -> KeyLength:
        """An int with the attribute ``cache``."""
        self = super().__new__(cls, length)
        self.cache = cache
        return self


class Chunk:
    """The new tokens of one layer in one forward pass, on their way through attention."""

    def __init__(self, layer: OscarLayer, step: Step) -> None:
        self._layer, self._step = layer, step

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Attend over past and chunk, then store the chunk; see ``oscar_mm.cache.attend``."""
        layer, step = self._layer, self._step
        real = layer.cache.real_tokens(key.shape[2]) if step.real is not None else None
        if not layer.sigma_is_final:
            tokens = None if real is None else real.to(key.device)
            layer.settle_basis(key, query, module, tokens)
        past = layer.cache.get_seq_length() - key.shape[2]
        if sliding_window is None or past + key.shape[2] <= sliding_window:
            output = attend_stored(layer, query, key, value, scaling, step)
        else:
            keys, values = layer.cache.with_past(layer, step, key, value)
            visible = window_mask(layer.cache, key.shape[2], sliding_window).to(key.device)
            output = scaled_dot_product_attention(
                query, keys, values, attn_mask=visible, scale=scaling, enable_gqa=True
            ).nan_to_num()  # a query that is padding sees nothing
        layer.append(key, value, step)
        return output


def window_mask(cache: OscarCache, queries: int, window: int) -> torch.Tensor:
    """(batch, 1, queries, length) bool: causal, sliding, without what is not stored."""
    length = cache.get_seq_length()
    query = torch.arange(length - queries, length)[:, None]
    key = torch.arange(length)
    visible = (key <= query) & (key > query - window)
    return visible & cache.real_tokens(length)[:, None, None]
