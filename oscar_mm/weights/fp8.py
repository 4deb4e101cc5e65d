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
_ELEMENTS_AT_ONCE = 1 << 24


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize weight matrices to FP8: the largest magnitude of a block becomes the largest code.

    Args:
        weight: (..., outputs, width), floating point.

    Returns:
        Codes, (..., outputs, width) in ``CODES``, and float32 scales, see ``scales_shape``.
    """
    *_, outputs, width = weight.shape
    shape = scales_shape(weight)
    codes = torch.empty_like(weight, dtype=CODES, memory_format=torch.contiguous_format)
    scales = weight.new_empty(shape, dtype=torch.float32)
    for block, first in enumerate(range(0, outputs, BLOCK)):
        part = weight[..., first : first + BLOCK, :].float()
        padded = torch.nn.functional.pad(part.abs(), (0, shape[-1] * BLOCK - width))
        largest = padded.unflatten(-1, (shape[-1], BLOCK)).amax((-3, -1))
        of_part = torch.where(largest > 0, largest / _LARGEST, 1.0)
        scales[..., block, :] = of_part
        by_column = _by_column(of_part, width)[..., None, :]
        codes[..., first : first + BLOCK, :] = (part / by_column).to(CODES)
    return codes, scales


def quantized_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows of activations to FP8, with a scale for each row and block of columns.

    Args:
        x: (rows, width), a multiple of ``BLOCK`` wide.

    Returns:
        Codes, (rows, width) in ``CODES``, and float32 scales, (rows, width / BLOCK).
    """
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    # A tensor: on a GPU, PyTorch divides by a Python number through its rounded reciprocal.
    scales = torch.where(largest > 0, largest / largest.new_tensor(_LARGEST), 1.0)
    return (blocks / scales[..., None]).flatten(-2).to(CODES), scales


def dequantized(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return weight matrices in ``dtype``; the inverse of ``quantized`` up to rounding.

    Args:
        codes: (..., outputs, width).
        scales: see ``scales_shape``.
    """
    *_, outputs, width = codes.shape
    rows = rows_per_scale(codes, scales)
    weight = torch.empty_like(codes, dtype=dtype)
    # In parts, since a float32 copy takes four times the memory of the codes.
    per_row = max(codes.numel() // outputs, 1)
    at_once = max(_ELEMENTS_AT_ONCE // per_row // BLOCK, 1) * BLOCK
    for first in range(0, outputs, at_once):
        part = codes[..., first : first + at_once, :].float()
        count = part.shape[-2]
        of_part = scales[..., first // rows : (first + count - 1) // rows + 1, :]
        of_rows = _by_column(of_part, width).repeat_interleave(rows, -2)[..., :count, :]
        weight[..., first : first + count, :] = part.mul_(of_rows)
    return weight


def _by_column(scales: torch.Tensor, width: int) -> torch.Tensor:
    return scales.repeat_interleave(BLOCK, -1)[..., :width]


def scales_shape(codes: torch.Tensor, rows: int = BLOCK) -> tuple[int, ...]:
    """Return the shape of the scales: (..., outputs / rows, width / BLOCK), rounded up.

    Args:
        codes: (..., outputs, width).
        rows: rows per scale, 1 or ``BLOCK``.
    """
    *matrices, outputs, width = codes.shape
    return *matrices, -(-outputs // rows), -(-width // BLOCK)


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


def by_row(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the scales of each row: (..., outputs, width / 128), rounded up.

    Args:
        codes: (..., outputs, width).
        scales: see ``scales_shape``.
    """
    outputs = codes.shape[-2]
    return scales.repeat_interleave(rows_per_scale(codes, scales), -2)[..., :outputs, :]


def expanded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return scales in a shape of ``scales_shape``, given one scale for each block, output or
    matrix.

    Args:
        codes: (..., outputs, width).
        scales: (..., outputs / 128, width / 128) rounded up, or (..., outputs, 1), or (..., 1, 1);
            of a single matrix also (outputs,), (1,) or ().

    Raises:
        ValueError: if the scales have another shape.
    """
    *matrices, outputs, _ = codes.shape
    scales = scales.float()
    if scales.ndim < 2:
        scales = scales.reshape(-1, 1)
    for rows, expected in ((BLOCK, (*matrices, 1, 1)), (1, (*matrices, outputs, 1))):
        if tuple(scales.shape) == expected:
            scales = scales.expand(scales_shape(codes, rows))
    rows_per_scale(codes, scales)
    return scales.contiguous()
