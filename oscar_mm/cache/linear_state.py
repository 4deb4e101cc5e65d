"""LinearLayer: a layer of a cache that holds the state of linear attention."""

from __future__ import annotations

import copy

import torch
from transformers.cache_utils import LinearAttentionLayer


class LinearLayer(LinearAttentionLayer):
    """Transformers' own layer, and what an ``OscarCache`` asks of it besides."""

    @property
    def states(self) -> list[torch.Tensor]:
        """What it holds."""
        both = (*self.conv_states.values(), *self.recurrent_states.values())
        return [state for state in both if state is not None]

    def fork(self) -> LinearLayer:
        """A layer of the same states, in tensors of its own."""
        twin = copy.copy(self)
        for name, by_state in vars(self).items():
            if isinstance(by_state, dict):
                own = {k: x.clone() if torch.is_tensor(x) else x for k, x in by_state.items()}
                setattr(twin, name, own)
        return twin
