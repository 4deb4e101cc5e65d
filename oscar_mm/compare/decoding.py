"""Decoding token by token over what a method stores, by one forward pass of all its tokens.

Teacher forcing over a stored past (``oscar_mm.compare.teacher_forcing``) lets the new tokens see
each other exactly. While a model decodes they see each other as the cache holds them: exactly as
long as the cache keeps a token in 16 bits, else as it is restored, and what deeper layers make of
that goes into the cache in its turn. All of this is known layer by layer, so that one pass with two
versions of every key and value gives what as many steps would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from oscar_mm.compare.methods import Method
from oscar_mm.compare.teacher_forcing import ForcedCache, LayerStates, Pair


class DecodedCache(ForcedCache):
    """Stands in for a cache in which the tokens of a forward pass come one by one.

    Args:
        method: how tokens are stored.
        layers: recorded states of the prompt, of a single row.
        ids: (tokens,) modality ids on the CPU, of the prompt and the tokens of the pass.
    """

    def __init__(self, method: Method, layers: Sequence[LayerStates], ids: Tensor) -> None:
        super().__init__(length=layers[0].keys.shape[2])
        self.method, self.layers, self.ids = method.one_by_one(self.length), layers, ids
        self.restored_from = self.method.restored_from(ids, self.length)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Pair:
        """The new keys and values; attention "oscar" calls the object attached to the keys."""
        keys = key_states.view_as(key_states)
        keys.oscar_chunk = _Attention(self, layer_idx)  # pyright: ignore[reportAttributeAccessIssue]
        return keys, value_states


class _Attention:
    """Attention of one layer, which attention "oscar" calls."""

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
    ) -> Tensor:
        """(rows, query heads, tokens, head_dim)."""
        cache, states = self._cache, self._states
        pairs = zip((states.keys, states.values), (key, value), strict=True)
        # Rounded to 16 bits, as a cache keeps them.
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
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(values.dtype)
        return (weights * restored) @ back_values + (weights * ~restored) @ values
