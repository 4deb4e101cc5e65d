"""FP8 weights: 8-bit floats (e4m3) with one scale for each block of a weight matrix.

    weight[n, k] = codes[n, k] * scales[n // rows, k // BLOCK],  rows = 1 or BLOCK

This is the format of Qwen's FP8 checkpoints (blocks of 128 x 128; DeepSeek-V3 technical report,
section 3.3.2). Scales for each output or for the whole matrix are expanded into it.
"""

from __future__ import annotations

import torch

BLOCK = 128
"""Columns per block of a weight matrix, and rows unless each row has its own scales."""
CODES = torch.float8_e4m3fn
_LARGEST = torch.finfo(CODES).max
_ROWS_AT_ONCE = 8 * BLOCK


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight matrix to FP8, such that the largest magnitude of each block stays exact
    up to rounding.

    Args:
        weight: (outputs, width), floating point.

    Returns:
        Codes, (outputs, width) in ``CODES``, and float32 scales, see ``scales_shape``.
    """
    outputs, width = weight.shape
    rows, columns = scales_shape(weight)
    codes = torch.empty_like(weight, dtype=CODES, memory_format=torch.contiguous_format)
    scales = weight.new_empty(rows, columns, dtype=torch.float32)
    for block, first in enumerate(range(0, outputs, BLOCK)):
        part = weight[first : first + BLOCK].float()
        padded = torch.nn.functional.pad(part.abs(), (0, columns * BLOCK - width))
        largest = padded.view(len(part), columns, BLOCK).amax((0, 2))
        scales[block] = torch.where(largest > 0, largest / _LARGEST, 1.0)
        codes[first : first + BLOCK] = (part / _by_column(scales[block], width)).to(CODES)
    return codes, scales


def dequantized(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight matrix in ``dtype``; the inverse of ``quantized`` up to rounding.

    Args:
        codes: (outputs, width).
        scales: see ``scales_shape``.
    """
    outputs, width = codes.shape
    rows = rows_per_scale(codes, scales)
    weight = torch.empty_like(codes, dtype=dtype)
    # In parts, since a float32 copy of a large matrix takes four times the memory of its codes.
    for first in range(0, outputs, _ROWS_AT_ONCE):
        part = codes[first : first + _ROWS_AT_ONCE].float()
        of_part = scales[first // rows :][: -(-len(part) // rows)]
        by_row = _by_column(of_part, width).repeat_interleave(rows, 0)[: len(part)]
        weight[first : first + len(part)] = part.mul_(by_row)
    return weight


def _by_column(scales: torch.Tensor, width: int) -> torch.Tensor:
    return scales.repeat_interleave(BLOCK, -1)[..., :width]


def scales_shape(codes: torch.Tensor, rows: int = BLOCK) -> tuple[int, int]:
    """Return the shape of a matrix's scales: (outputs / rows, width / BLOCK), rounded up.

    Args:
        codes: (outputs, width).
        rows: rows per scale, 1 or ``BLOCK``.
    """
    outputs, width = codes.shape
    return -(-outputs // rows), -(-width // BLOCK)


def rows_per_scale(codes: torch.Tensor, scales: torch.Tensor) -> int:
    """Return 1 if each row has its own scales, otherwise ``BLOCK``.

    Raises:
        ValueError: if the scales have neither shape.
    """
    for rows in (BLOCK, 1):
        if tuple(scales.shape) == scales_shape(codes, rows):
            return rows
    expected = " or ".join(str(list(scales_shape(codes, rows))) for rows in (BLOCK, 1))
    raise ValueError(
        f"scales: the shape is {list(scales.shape)}, but FP8 weights of shape {list(codes.shape)} "
        f"need {expected}"
    )


def expanded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return scales in a shape of ``scales_shape``, given one scale for each block, output or
    matrix.

    Args:
        codes: (outputs, width).
        scales: (outputs / 128, width / 128) rounded up, (outputs, 1), (outputs,), (1, 1), (1,)
            or ().

    Raises:
        ValueError: if the scales have another shape.
    """
    scales, outputs = scales.float(), len(codes)
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(scales_shape(codes)).contiguous()
    if tuple(scales.shape) in {(outputs,), (outputs, 1)}:
        return scales.reshape(outputs, 1).expand(scales_shape(codes, 1)).contiguous()
    rows_per_scale(codes, scales)
    return scales.contiguous()
