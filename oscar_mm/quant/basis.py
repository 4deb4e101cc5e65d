"""The coordinates in which one layer's keys and values are quantized: balanced and rotated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oscar_mm.quant.rotation import hadamard


@dataclass(frozen=True)
class Basis:
    """Balancing (sigma) and rotation (H) of one layer.

    Keys are stored as (k / sigma) H and values as v H; with queries as (q sigma) H the scores are
    unchanged, and the attention output comes back by one more H (H is its own inverse).

    Attributes:
        head_dim: channels of a head.
        rotate: whether H is the Hadamard matrix (else the identity).
        sigma: (KV heads or 1, head_dim) float32, or None for no balancing.
    """

    head_dim: int
    rotate: bool
    sigma: torch.Tensor | None = None

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        return x @ hadamard(self.head_dim, x.device) if self.rotate else x

    def keys_in(self, keys: torch.Tensor) -> torch.Tensor:
        """(..., KV heads, tokens, head_dim) any float dtype -> the same shape, float32."""
        return self._rotated(self.balanced(keys))

    def balanced(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys divided by sigma, not rotated: the same shape, float32, and the same norms."""
        keys = keys.float()
        return keys if self.sigma is None else keys / self.sigma[:, None]

    def keys_out(self, keys: torch.Tensor) -> torch.Tensor:
        """Inverse of ``keys_in``: float32 to float32."""
        keys = self._rotated(keys)
        return keys if self.sigma is None else keys * self.sigma[:, None]

    def queries_in(self, queries: torch.Tensor) -> torch.Tensor:
        """(KV heads, query rows, head_dim) -> float32, so that scores with stored keys hold."""
        queries = queries.float()
        return self._rotated(queries if self.sigma is None else queries * self.sigma[:, None])

    def values_in(self, values: torch.Tensor) -> torch.Tensor:
        """(..., tokens, head_dim) any float dtype -> float32."""
        return self._rotated(values.float())

    def values_out(self, values: torch.Tensor) -> torch.Tensor:
        """Inverse of ``values_in``; also takes the attention output back."""
        return self._rotated(values)
