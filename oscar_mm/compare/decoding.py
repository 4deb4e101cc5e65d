"""Simulate token-by-token decoding with a method's stored keys and values in one forward pass.

With teacher forcing over a stored past (``oscar_mm.compare.teacher_forcing``), new tokens attend to
each other exactly. In real decoding, they attend to each other as the cache stores them: exactly
while the cache keeps a token in 16-bit precision, and in restored form afterwards; deeper layers
store the resulting keys and values. Since all of this can be computed layer by layer, one pass with
two versions of every key and value gives the same result as decoding step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from oscar_mm.compare.methods import Method
from oscar_mm.compare.teacher_forcing import ForcedCache, LayerStates


class DecodedCache(ForcedCache):
    """Stand-in for a cache that receives the tokens of a forward pass one by one.

    Args:
        method: method that stores the tokens.
        layers: recorded states of a single-row prompt.
        ids: (tokens,) modality ids on the CPU, of the prompt and the tokens of the pass.
    """

    def __init__(self, method: Method, layers: Sequence[LayerStates], ids: Tensor) -> None:
        super().__init__(length=layers[0].keys.shape[2])
        self.method, self.layers, self.ids = method.one_by_one(self.length), layers, ids
        self.restored_from = self.method.restored_from(ids, self.length)

    def attention_of(self, index: int) -> Any:
        """See ``ForcedCache.attention_of``."""
        return _Attention(self, index)


class _Attention:
    """Attention of one layer, called by attention "oscar"."""

    def __init__(self, cache: DecodedCache, index: int) -> None:
        self._cache, self._states = cache, cache.layers[index]

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        visible: Tensor | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the output, (rows, query heads, tokens, head_dim)."""
        cache, states = self._cache, self._states
        pairs = zip((states.keys, states.values), (key, value), strict=True)
        # New keys and values are rounded to 16 bits, as in a cache.
        keys, values = (torch.cat([old, new.to(old.dtype)], 2) for old, new in pairs)
        back = cache.method.restored(replace(states, keys=keys, values=values), cache.ids)
        place = torch.arange(keys.shape[2], device=query.device)
        new = place[cache.length :, None]
        restored = cache.restored_from.to(query.device) <= new
        group = query.shape[1] // keys.shape[1]
        keys, values, back_keys, back_values = (
            x.to(key.dtype).repeat_interleave(group, dim=1)
            for x in (keys, values, back.keys, back.values)
        )
        scores = torch.where(restored, query @ back_keys.mT, query @ keys.mT).float() * scaling
        seen = place <= new if visible is None else visible
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            added = sinks[:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, added], dim=-1)
        weights = scores.softmax(-1)[..., : len(place)].to(values.dtype)
        return (weights * restored) @ back_values + (weights * ~restored) @ values
