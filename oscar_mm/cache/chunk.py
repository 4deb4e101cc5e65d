"""What carries a cache through a model's forward pass: the length of the keys, and new tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from oscar_mm.cache.attend import attend_stored
from oscar_mm.cache.layer import OscarLayer
from oscar_mm.cache.step import Step

if TYPE_CHECKING:
    pass


class KeyLength(int):
    """Length of the keys, as ``get_mask_sizes`` returns it, that knows its cache."""

    cache: Any

    def __new__(cls, length: int, cache: Any) -> KeyLength:
        """An int with the attribute ``cache``: an OscarCache, or what takes its place."""
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
        visible: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend over past and chunk, then store the chunk; see ``oscar_mm.cache.attend``.

        Args:
            visible: what a query sees of what is stored, (batch, 1 or query heads, new tokens,
                all tokens) bool, or numbers that are added to the scores; None for causal.
        """
        layer, step = self._layer, self._step
        real = layer.cache.real_tokens(key.shape[2]) if step.real is not None else None
        if not layer.sigma_is_final:
            tokens = None if real is None else real.to(key.device)
            layer.settle_basis(key, query, module, tokens)
        if visible is None:
            output = attend_stored(layer, query, key, value, scaling, step)
        else:
            keys, values = layer.cache.with_past(layer, step, key, value)
            output = scaled_dot_product_attention(
                *(query, keys, values, self._stored(visible)), scale=scaling, enable_gqa=True
            ).nan_to_num()  # a query that is padding sees nothing
        layer.append(key, value, step)
        return output

    def _stored(self, visible: torch.Tensor) -> torch.Tensor:
        """A mask without what is not stored: padding and forgotten tokens."""

        def real() -> torch.Tensor:
            return self._layer.cache.real_tokens(visible.shape[-1])[:, None, None]

        stored = self._step.once(("stored", visible.device), lambda: real().to(visible.device))
        if visible.dtype == torch.bool:
            return visible & stored
        return visible.masked_fill(~stored, -torch.inf)
