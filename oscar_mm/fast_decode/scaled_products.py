"""Products of many rows with FP8 weights on the FP8 matrix units of Hopper GPUs.

The rows are quantized too, with a scale for each row and block of 128 columns, as the released FP8
checkpoints are meant to run (DeepSeek-V3 technical report, section 3.3.2). This takes half the time
of products in 16 bits; a step of few rows, which is limited by memory bandwidth, keeps its rows in
16 bits.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple, Self

import torch
from torch.nn.functional import ScalingType, pad, scaled_mm

from oscar_mm.fast_decode.gate import gate_
from oscar_mm.fast_decode.linear_torch import LinearArguments, in_rows, joined
from oscar_mm.kernels.launch import (
    ELEMENTS,
    addresses,
    current_stream,
    ints,
    pointers,
    uses_wgmma,
)
from oscar_mm.kernels.self_check import OperationKernel, random_normal, relative_error
from oscar_mm.weights import fp8

THREADS, EACH = 256, 8
_MULTIPLE = 16
"""Rows are padded to a multiple of this number, for the alignment of the scales."""


class Params(ctypes.Structure):
    """Mirror of ``Params`` in csrc/linear/quantize_rows.cu, field for field."""

    _fields_ = (*pointers("x", "codes", "scales"), *ints("rows", "padded", "width"))


class QuantizeRowsKernel(OperationKernel[torch.dtype], operation="quantize_rows", bound=0.01):
    """CUDA kernel of ``oscar_mm.weights.fp8.quantized_rows`` for one dtype."""

    def __init__(self, specialization: torch.dtype, device: torch.device) -> None:
        super().__init__(specialization, device)
        macros = {"ELEMENT": ELEMENTS[specialization]}
        self._kernel = self._load("linear/quantize_rows.cu", macros)

    def __call__(self, x: torch.Tensor) -> QuantizedRows:
        """Quantize (rows, width); the width is a multiple of 128."""
        rows, width = x.shape
        padded = -(-rows // _MULTIPLE) * _MULTIPLE
        codes = x.new_empty(padded, width, dtype=fp8.CODES)
        scales = x.new_empty(width // fp8.BLOCK, padded, dtype=torch.float32)
        params = Params(*addresses(x, codes, scales), rows, padded, width)
        blocks = -(-padded * width // (EACH * THREADS))
        stream = current_stream(x.device)
        self._kernel.launch((blocks, 1, 1), (THREADS, 1, 1), 0, params, stream, dependent=True)
        return QuantizedRows(codes, scales.T, rows)

    @staticmethod
    def disagreement(
        specialization: torch.dtype, kernel: QuantizeRowsKernel, device: torch.device
    ) -> float:
        """Return the largest relative error of the scales, or of any row's codes."""
        x = random_normal(specialization, device)(37, 384)
        x[5, 128:256] = 0
        found, (codes, scales) = kernel(x), fp8.quantized_rows(x)
        rows = slice(found.rows)
        return max(
            relative_error(found.codes[rows].float(), codes.float()),
            relative_error(found.scales[rows], scales),
        )


class QuantizedRows(NamedTuple):
    """Rows in FP8.

    Attributes:
        codes: (padded rows, width) in ``oscar_mm.weights.fp8.CODES``.
        scales: (padded rows, width / 128), float32, stored column after column.
        rows: number of rows without the padding.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    rows: int

    def times(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Multiply by a weight matrix: (rows, outputs) in bfloat16.

        Args:
            codes: (outputs, width).
            scales: (outputs / 128, width / 128).
        """
        # The library reads four scales of a row at a time. Padding by 0 columns would copy them.
        missing = -scales.shape[1] % 4
        of_weights = (pad(scales, (0, missing)) if missing else scales).T
        of_rows, blocks = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        found = scaled_mm(self.codes, codes.T, self.scales, of_rows, of_weights, blocks)
        return found[: self.rows]


class ScaledProducts(NamedTuple):
    """``linear`` for many rows and FP8 weights, without a norm.

    Attributes:
        quantize: kernel that quantizes the rows.
    """

    quantize: QuantizeRowsKernel

    @classmethod
    def of(cls, arguments: LinearArguments) -> Self | None:
        """Return the products to use; None if PyTorch operations must be used."""
        x = arguments.x
        takes = (
            arguments.weight_bits == 8
            and x.is_cuda
            and x.dtype == torch.bfloat16
            and uses_wgmma(x.device)
            and in_rows(x, *arguments.weights)
            and not x.shape[1] % fp8.BLOCK
            and all(
                codes.dtype == fp8.CODES
                and not len(codes) % fp8.BLOCK
                and fp8.rows_per_scale(codes, scales) == fp8.BLOCK
                for codes, scales in zip(arguments.weights, arguments.scales, strict=True)
            )
        )
        kernel = QuantizeRowsKernel.of(x.dtype, x.device) if takes else None
        return None if kernel is None else cls(kernel)

    def __call__(self, arguments: LinearArguments) -> torch.Tensor:
        """Quantize the rows and multiply them; sums are rounded as in separate operations."""
        x, weights, biases, *_ = arguments
        rows, scales = self.quantize(x), arguments.scales
        whole, whole_scales = joined(weights), joined(scales)
        if whole is None or whole_scales is None or arguments.gated:
            output, products = None, [rows.times(*one) for one in zip(weights, scales, strict=True)]
        else:
            output = rows.times(whole, whole_scales)
            products = output.split([len(one) for one in weights], -1)
        for product, bias in zip(products, biases, strict=True):
            if bias is not None:
                product += bias
        if arguments.gated:
            output = gate_(*products)
        elif output is None:
            output = torch.cat(products, -1)
        return output if arguments.residual is None else output.add_(arguments.residual)
