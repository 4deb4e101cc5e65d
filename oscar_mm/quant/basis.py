"""Basis: the coordinates in which a layer's keys and values are quantized, balanced and rotated.

The rotation is a Hadamard matrix along head_dim (OScaR's "canalized rotation", QuaRot's online
rotation).

``oscar_mm.quant.balance`` computes the balancing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


def rotation_blocks(head_dim: int) -> tuple[int, ...]:
    """Return the sizes of the diagonal blocks: the powers of two that add up to head_dim, largest
    first."""
    if head_dim < 1:
        raise ValueError(f"head_dim={head_dim}: must be positive")
    return tuple(
        1 << bit for bit in range(head_dim.bit_length() - 1, -1, -1) if head_dim >> bit & 1
    )


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # shared with callers that need gradients
def hadamard(head_dim: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the normalized Hadamard matrix; block-diagonal if head_dim is not a power of two.

    It is built by Sylvester's doubling [[H, H], [H, -H]] / sqrt(2), and so is symmetric,
    orthonormal and its own inverse.

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
    """Balancing (sigma) and rotation (H) for one layer.

    Keys are stored as (k / sigma) H and values as v H. If queries are converted to (q sigma) H, the
    scores are unchanged; multiplying by H again restores the attention output, since H is its own
    inverse.

    Attributes:
        head_dim: number of channels per head.
        rotate: whether H is the Hadamard matrix rather than the identity.
        sigma: (..., KV heads or 1, head_dim) float32, or None for no balancing. Any leading
            dimensions, such as rows for per-row balancing, are those of keys and queries.
    """

    head_dim: int
    rotate: bool
    sigma: torch.Tensor | None = None

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        return x @ hadamard(self.head_dim, x.device) if self.rotate else x

    def keys_in(self, keys: torch.Tensor) -> torch.Tensor:
        """Convert (..., KV heads, tokens, head_dim) keys of any float dtype to stored coordinates
        in float32."""
        return self._rotated(self.balanced(keys))

    def balanced(self, keys: torch.Tensor) -> torch.Tensor:
        """Divide keys by sigma without rotating them; the result is float32 and has the same norms
        as in stored coordinates."""
        keys = keys.float()
        return keys if self.sigma is None else keys / self.sigma.unsqueeze(-2)

    def keys_out(self, keys: torch.Tensor) -> torch.Tensor:
        """Convert float32 keys from stored coordinates; inverse of ``keys_in``."""
        keys = self._rotated(keys)
        return keys if self.sigma is None else keys * self.sigma.unsqueeze(-2)

    def queries_in(self, queries: torch.Tensor) -> torch.Tensor:
        """Convert (..., KV heads, n, head_dim) queries to float32 such that their scores with
        stored keys are unchanged."""
        queries = queries.float()
        return self._rotated(queries if self.sigma is None else queries * self.sigma.unsqueeze(-2))

    def values_in(self, values: torch.Tensor) -> torch.Tensor:
        """Convert (..., tokens, head_dim) values of any float dtype to stored coordinates in
        float32."""
        return self._rotated(values.float())

    def values_out(self, values: torch.Tensor) -> torch.Tensor:
        """Convert values or the attention output from stored coordinates; inverse of
        ``values_in``."""
        return self._rotated(values)
