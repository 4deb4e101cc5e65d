"""Codes of 1, 2 or 4 bits in bytes: consecutive ones of the last dimension, lowest bits first."""

from __future__ import annotations

import torch


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """(..., n) codes of any dtype in 0 .. 2^bits - 1 -> (..., n * bits / 8) uint8."""
    per_byte = 8 // bits
    if codes.shape[-1] % per_byte:
        raise ValueError(f"{codes.shape[-1]} codes of {bits} bits do not fill whole bytes")
    parts = codes.to(torch.uint8).unflatten(-1, (-1, per_byte))
    packed = parts[..., 0].clone()
    for place in range(1, per_byte):
        packed |= parts[..., place] << (bits * place)
    return packed


def unpack_bits(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """(..., n) uint8 -> (..., n * 8 / bits) uint8 codes; inverse of ``pack_bits``."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)
