"""The coordinates in which one layer's keys and values are quantized: balanced and rotated.

The rotation is a Hadamard matrix along head_dim ("canalized rotation" of OScaR, the online rotation
of QuaRot).

``oscar_mm.quant.balance`` computes the balancing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


def rotation_blocks(head_dim: int) -> tuple[int, ...]:
    """Sizes of the diagonal blocks: the powers of two that add up to head_dim, largest first."""
    if head_dim < 1:
        raise ValueError(f"head_dim={head_dim}: must be positive")
    return tuple(
        1 << bit for bit in range(head_dim.bit_length() - 1, -1, -1) if head_dim >> bit & 1
    )


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # shared, so also by callers that need gradients
def hadamard(head_dim: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Normalized Hadamard matrix, block-diagonal where head_dim is no power of two.

    Built by Sylvester's doubling [[H, H], [H, -H]] / sqrt(2), so it is symmetric, orthonormal and
    its own inverse.

    Returns:
        (head_dim, head_dim) float32 on ``device``. Shared between callers: do not write to it.
    """
    blocks = []
    for size in rotation_blocks(head_dim):
        block = torch.ones(1, 1, dtype=torch.float64)
        while block.shape[0] < size:
            block = torch.cat([torch.cat([block, block], dim=1), torch.cat([block, -block], dim=1)])
        blocks.append(block / size**0.5)
    return torch.block_diag(*blocks).to(device=device, dtype=torch.float32)


@dataclass(frozen=True)
class Basis:
    """Balancing (sigma) and rotation (H) of one layer.

    Keys are stored as (k / sigma) H and values as v H; with queries as (q sigma) H the scores are
    unchanged, and the attention output comes back by one more H (H is its own inverse).

    Attributes:
        head_dim: channels of a head.
        rotate: whether H is the Hadamard matrix (else the identity).
        sigma: (..., KV heads or 1, head_dim) float32, or None for no balancing. Leading dimensions
            are those of the keys and queries, as where each row has its own.
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
        return keys if self.sigma is None else keys / self.sigma.unsqueeze(-2)

    def keys_out(self, keys: torch.Tensor) -> torch.Tensor:
        """Inverse of ``keys_in``: float32 to float32."""
        keys = self._rotated(keys)
        return keys if self.sigma is None else keys * self.sigma.unsqueeze(-2)

    def queries_in(self, queries: torch.Tensor) -> torch.Tensor:
        """(..., KV heads, n, head_dim) -> float32, so that scores with stored keys hold."""
        queries = queries.float()
        return self._rotated(queries if self.sigma is None else queries * self.sigma.unsqueeze(-2))

    def values_in(self, values: torch.Tensor) -> torch.Tensor:
        """(..., tokens, head_dim) any float dtype -> float32."""
        return self._rotated(values.float())

    def values_out(self, values: torch.Tensor) -> torch.Tensor:
        """Inverse of ``values_in``; also takes the attention output back."""
        return self._rotated(values)
