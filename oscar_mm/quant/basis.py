"""Basis: the scaled and rotated coordinates in which a layer's keys and values are quantized.

The rotation is a Hadamard matrix along head_dim (OScaR's "canalized rotation", QuaRot's online
rotation). ``oscar_mm.quant.balance`` computes the scale factors, sigma.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


def rotation_blocks(head_dim: int) -> tuple[int, ...]:
    """Return the sizes of the rotation's diagonal blocks, largest first: the powers of two that add
    up to head_dim."""
    if head_dim < 1:
        raise ValueError(f"head_dim={head_dim}: must be at least 1")
    return tuple(
        1 << bit for bit in range(head_dim.bit_length() - 1, -1, -1) if head_dim >> bit & 1
    )


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # shared with callers that need gradients
def hadamard(head_dim: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the normalized Hadamard matrix; block-diagonal if head_dim is not a power of two.

    The matrix is built by Sylvester's doubling [[H, H], [H, -H]] / sqrt(2), so it is symmetric,
    orthonormal and its own inverse.

    Returns:
        (head_dim, head_dim) float32 on ``device``. Callers share this tensor and must not write to
        it.
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
    """Scale factors per channel (sigma) and rotation (H) of one layer's keys and values.

    Keys are stored as (k / sigma) H and values as v H. If queries are converted to (q sigma) H, the
    scores are unchanged; multiplying by H again restores the attention output, since H is its own
    inverse.

    Attributes:
        head_dim: number of channels per head.
        rotate: whether H is the Hadamard matrix rather than the identity.
        sigma: scale factors per channel, (..., KV heads or 1, head_dim) float32; None for no
            scaling. Any leading dimensions, such as rows if each row has its own sigma, match those
            of keys and queries.
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
        """Divide keys by sigma without rotating them; the result is float32, with the same norms as
        in stored coordinates."""
        keys = keys.float()
        return keys if self.sigma is None else keys / self.sigma.unsqueeze(-2)

    def keys_out(self, keys: torch.Tensor) -> torch.Tensor:
        """Convert float32 keys from stored coordinates; inverse of ``keys_in``."""
        keys = self._rotated(keys)
        return keys if self.sigma is None else keys * self.sigma.unsqueeze(-2)

    def queries_in(self, queries: torch.Tensor) -> torch.Tensor:
        """Convert (..., KV heads, n, head_dim) queries to stored coordinates in float32, such that
        their scores are unchanged."""
        queries = queries.float()
        return self._rotated(queries if self.sigma is None else queries * self.sigma.unsqueeze(-2))

    def values_in(self, values: torch.Tensor) -> torch.Tensor:
        """Convert (..., tokens, head_dim) values of any float dtype to stored coordinates in
        float32."""
        return self._rotated(values.float())

    def values_out(self, values: torch.Tensor) -> torch.Tensor:
        """Convert values or the attention output from stored coordinates (the inverse of
        ``values_in``)."""
        return self._rotated(values)
