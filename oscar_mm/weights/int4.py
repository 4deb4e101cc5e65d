"""INT4 weights: unsigned 4-bit codes, with a scale and a zero point for each group of a row.

    weight[n, k] = (codes[n, k] - zeros[n, k // group]) * scales[n, k // group]

Checkpoints of AWQ, GPTQ and compressed-tensors are of this format, but order the codes differently.
Here a 32-bit word has eight consecutive codes of a row, such that a mask selects two neighbours in
its two halves: code 2i in bits 4i to 4i + 3, and code 2i + 1 in bits 16 + 4i to 19 + 4i.
"""

from __future__ import annotations

import torch

CODES = torch.int32
_PER_WORD = 8
_LARGEST = 15
_SHIFTS = tuple(4 * (i // 2) + 16 * (i % 2) for i in range(_PER_WORD))


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes into words.

    Args:
        codes: (..., width) integers of any dtype, 0 to 15; the width is a multiple of 8.

    Returns:
        (..., width / 8), int32.
    """
    eights = codes.unflatten(-1, (-1, _PER_WORD))
    words = torch.zeros_like(eights[..., 0], dtype=torch.int32)
    # One after the other, since all codes as integers of 32 bits take eight times the memory.
    for place, shift in enumerate(_SHIFTS):
        words |= eights[..., place].to(torch.int32) << shift
    return words


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """Return the codes of words, uint8; the inverse of ``packed``."""
    shifts = torch.tensor(_SHIFTS, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & _LARGEST).to(torch.uint8).flatten(-2)


def check(words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> None:
    """Check that words, scales and zero points belong to matrices of the same shape.

    Raises:
        ValueError: if they do not.
    """
    width, groups = words.shape[-1] * _PER_WORD, scales.shape[-1]
    if scales.shape[:-1] != words.shape[:-1] or groups == 0 or width % groups:
        raise ValueError(
            f"scales: the shape is {list(scales.shape)}, but INT4 weights with {list(words.shape)} "
            f"words need one scale for each row and each group of its {width} columns"
        )
    if zeros.shape != scales.shape or zeros.dtype != torch.uint8:
        raise ValueError(
            f"zeros: {zeros.dtype} of shape {list(zeros.shape)}, must be uint8 of shape "
            f"{list(scales.shape)}, as the scales"
        )


def quantized(
    weight: torch.Tensor, group: int = 128
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize weight matrices, such that the range of each group, with 0, is divided evenly.

    Args:
        weight: (..., outputs, width), floating point; the width is a multiple of ``group``.
        group: columns per group.

    Returns:
        Words, (..., outputs, width / 8); scales, (..., outputs, width / group), in the dtype of the
        weights; zero points of the same shape, uint8.
    """
    groups = weight.unflatten(-1, (-1, group)).float()
    lowest, highest = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((highest - lowest) / _LARGEST).to(weight.dtype)
    scales = torch.where(scales > 0, scales, 1)
    zeros = (-lowest / scales.float()).round().clamp(0, _LARGEST)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, _LARGEST)
    return packed(codes.flatten(-2)), scales, zeros.to(torch.uint8)


def dequantized(
    words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return weight matrices in ``dtype``; the inverse of ``quantized`` up to rounding.

    Args:
        words: (..., outputs, width / 8), see ``packed``.
        scales: (..., outputs, width / group), floating point.
        zeros: zero points of the same shape, uint8.
    """
    codes = unpacked(words).unflatten(-1, (scales.shape[-1], -1)).float()
    weight = (codes - zeros.float()[..., None]) * scales.float()[..., None]
    return weight.flatten(-2).to(dtype)
