"""Dequantize weight matrices on a GPU in one launch, for products of many rows.

PyTorch operations take some ten passes over float32 copies, longer than the product itself.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from oscar_mm.kernels.launch import ELEMENTS, addresses, current_stream, ints, pointers
from oscar_mm.kernels.macros import macros_of
from oscar_mm.kernels.self_check import OperationKernel, random_normal, relative_error
from oscar_mm.weights import fp8
from oscar_mm.weights.matrix import QuantizedMatrix

THREADS, EACH = 256, 8


class Params(ctypes.Structure):
    """Mirror of ``Params`` in csrc/linear/dequantize.cu, field for field."""

    _fields_ = (
        *pointers("codes", "scales", "zeros", "weights"),
        ("rows", ctypes.c_int64),
        *ints("width", "rows_per_scale", "columns_per_scale"),
    )


class Specialization(NamedTuple):
    """Compile-time parameters of the kernel."""

    dtype: torch.dtype
    weight_bits: int
    """8 for FP8, 4 for INT4."""
    float_scales: bool = False
    """Whether INT4 weights have scales in float32 instead of ``dtype``."""


class DequantizeKernel(OperationKernel[Specialization], operation="dequantize", bound=0.01):
    """CUDA kernel of ``dequantized``."""

    def __init__(self, specialization: Specialization, device: torch.device) -> None:
        super().__init__(specialization, device)
        self._kernel = self._load("linear/dequantize.cu", macros_of(specialization))

    def __call__(self, matrix: QuantizedMatrix) -> torch.Tensor:
        """Dequantize (..., outputs, width) weights."""
        codes, scales, zeros = matrix
        rows, width = codes[..., 0].numel(), matrix.width
        weights = codes.new_empty(*codes.shape[:-1], width, dtype=self.specialization.dtype)
        params = Params(*addresses(codes, scales, zeros, weights), rows, width, *_shared(matrix))
        blocks = -(-rows * width // (EACH * THREADS))
        stream = current_stream(codes.device)
        self._kernel.launch((blocks, 1, 1), (THREADS, 1, 1), 0, params, stream, dependent=True)
        return weights

    @staticmethod
    def disagreement(
        specialization: Specialization, kernel: DequantizeKernel, device: torch.device
    ) -> float:
        """Return the largest relative error of any row."""
        dtype, bits, float_scales = specialization
        codes, scales, zeros = QuantizedMatrix.of(random_normal(dtype, device)(259, 640), bits)
        scales *= torch.linspace(0.5, 2, scales.shape[1], device=device)
        scales = scales.float() if float_scales else scales
        matrix = QuantizedMatrix(codes, scales, zeros)
        return relative_error(kernel(matrix), matrix.dequantized(dtype))


def dequantized(matrix: QuantizedMatrix, dtype: torch.dtype) -> torch.Tensor:
    """Return the (..., outputs, width) weights in ``dtype``."""
    kernel = _kernel_for(matrix, dtype)
    return matrix.dequantized(dtype) if kernel is None else kernel(matrix)


def _kernel_for(matrix: QuantizedMatrix, dtype: torch.dtype) -> DequantizeKernel | None:
    codes, scales = matrix.codes, matrix.scales
    wide = scales.dtype == torch.float32
    takes = (
        codes.is_cuda
        and dtype in ELEMENTS
        and (wide or (matrix.zeros is not None and scales.dtype == dtype))
        and not (matrix.width % EACH or _shared(matrix)[1] % EACH)
        and (codes.ndim == 2 or codes.shape[-2] % _shared(matrix)[0] == 0)
        and all(x is None or x.is_contiguous() for x in matrix)
        and codes.data_ptr() % EACH == 0
        and codes.numel() > 0
    )
    if not takes:
        return None
    return DequantizeKernel.of(
        Specialization(dtype, matrix.bits, wide and matrix.bits == 4), codes.device
    )


def _shared(matrix: QuantizedMatrix) -> tuple[int, int]:
    """Return how many rows, and how many columns, share a scale."""
    if matrix.zeros is None:
        return fp8.rows_per_scale(matrix.codes, matrix.scales), fp8.BLOCK
    return 1, matrix.width // matrix.scales.shape[-1]
