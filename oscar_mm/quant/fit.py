"""Scale and zero point of a group of values, and their codes.

A value x of a group is stored as code = round((x - zero) / scale) in 0 .. 2^bits - 1 and read as
scale * code + zero. Scales and zeros are float16 in a page; they are rounded before the codes are
assigned, so a code is the nearest one to what will be read back.
"""

from __future__ import annotations

import torch

LSQ_START = {2: 0.75, 4: 0.95}
"""First range of the least-squares fit by bits, as a part of the min-max range. From 0.75 the few
rounds end worse than min-max at 4 bits (squared error on normal groups of 128: 1.12 times it)."""
LSQ_ROUNDS = 3


def fit_group(
    values: torch.Tensor, bits: int, fit: str, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero of every group along ``dim`` (kept, of size 1): float32 of float16 values.

    Args:
        values: float32, finite.
        bits: 2 or 4.
        fit: "minmax" or "lsq". "lsq" starts from a part of the range around its middle and
            three times assigns codes, then solves for scale and zero by linear regression on them.
        dim: the dimension of the group.
    """
    low, high = values.amin(dim, keepdim=True), values.amax(dim, keepdim=True)
    steps = (1 << bits) - 1
    if fit == "minmax":
        scale, zero = (high - low) / steps, low
    elif fit == "lsq":
        part = LSQ_START[bits]
        scale = (high - low) * (part / steps)
        zero = (high + low - (high - low) * part) * 0.5
        for _ in range(LSQ_ROUNDS):
            scale, zero = _regress(values, assign_codes(values, scale, zero, bits), scale, dim)
    else:
        raise ValueError(f"fit={fit!r}: must be 'minmax' or 'lsq'")
    return scale.half().float(), zero.half().float()


def _regress(
    values: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Least-squares scale and zero for given codes; the scale stays where all codes are equal."""
    mean_code = codes.mean(dim, keepdim=True)
    mean_value = values.mean(dim, keepdim=True)
    spread = codes - mean_code
    variance = spread.square().mean(dim, keepdim=True)
    covariance = (spread * (values - mean_value)).mean(dim, keepdim=True)
    scale = torch.where(variance > 0, covariance / variance.clamp(min=1e-12), scale)
    return scale, mean_value - scale * mean_code


def assign_codes(
    values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int
) -> torch.Tensor:
    """Nearest codes, as float32 whole numbers; 0 for a group without extent (scale 0)."""
    inverse = torch.where(scale > 0, 1 / scale, torch.zeros_like(scale))
    return ((values - zero) * inverse).round().clamp(0, (1 << bits) - 1)
