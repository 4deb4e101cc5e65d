"""Hadamard rotation along head_dim ("canalized rotation" of OScaR, QuaRot's online rotation)."""

from __future__ import annotations

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
