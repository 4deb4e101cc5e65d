"""What the kernels of ``linear`` share: parameters, the norm in front of them, and their check."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable

import torch

from oscar_mm.fast_decode.linear_torch import LinearArguments, Norm, linear_by_torch
from oscar_mm.kernels.launch import Kernel, addresses, ints, pointers
from oscar_mm.kernels.self_check import random_normal, relative_error, worst
from oscar_mm.weights.fp8 import BLOCK, quantized, rows_per_scale

WORST_ERROR = 0.02
"""Maximum relative error of a correct kernel: above the rounding error in 16-bit precision, below
the error of a wrong row."""
NORM_SOURCE = "linear/rms_norm.cu"
WIDEST_NORM = 16384
NORM_THREADS = 512
_MAX_PARTS = 3
_ADDRESSES, _SIZES = ctypes.c_void_p * _MAX_PARTS, ctypes.c_int * _MAX_PARTS


class Matrices(ctypes.Structure):
    """Mirror of ``Matrices`` in csrc/linear/matrices.cuh, field for field."""

    _fields_ = (
        *((name, _ADDRESSES) for name in ("weights", "scales", "biases")),
        *pointers("residual", "output"),
        *((name, _SIZES) for name in ("outputs", "shifts")),
        *ints("total", "width"),
    )

    @classmethod
    def of(cls, arguments: LinearArguments, output: torch.Tensor) -> Matrices:
        """Return the matrices of a launch; the tensors must outlive the launch."""
        weights, scales = arguments.weights, arguments.scales
        return cls(
            _ADDRESSES(*addresses(*weights)),
            _ADDRESSES(*addresses(*scales)),
            _ADDRESSES(*addresses(*arguments.biases)),
            *addresses(arguments.residual, output),
            _SIZES(*[weight.shape[0] for weight in weights]),
            _SIZES(*map(scale_shift, weights, scales)),
            *(output.shape[1], weights[0].shape[1]),
        )


def scale_shift(codes: torch.Tensor, scales: torch.Tensor) -> int:
    """Return the binary logarithm of the rows per scale of FP8 weights."""
    return rows_per_scale(codes, scales).bit_length() - 1


class NormParams(ctypes.Structure):
    """Mirror of ``Params`` in csrc/linear/rms_norm.cu, field for field."""

    _fields_ = (
        *pointers("x", "weight", "output"),
        *ints("width"),
        ("epsilon", ctypes.c_float),
    )


def normalized(
    kernel: Kernel, x: torch.Tensor, weight: torch.Tensor, epsilon: float, stream: int
) -> torch.Tensor:
    """Launch the norm's kernel (``NORM_SOURCE``), whose rows are up to ``WIDEST_NORM`` wide."""
    output = torch.empty_like(x)
    params = NormParams(*addresses(x, weight, output), x.shape[1], epsilon)
    kernel.launch((len(x), 1, 1), (NORM_THREADS, 1, 1), 0, params, stream, dependent=True)
    return output


def worst_error(
    kernel: Callable[[LinearArguments], torch.Tensor],
    gated: bool,
    dtype: torch.dtype,
    device: torch.device,
    problems: Iterable[tuple[int, int, tuple[int, ...]]],
    fp8: bool = False,
) -> float:
    """Return a kernel's largest relative error over all rows, with and without norm, bias and
    residual.

    Args:
        kernel: kernel for x and weights of ``dtype``.
        problems: number of rows, width, and number of outputs of each weight matrix.
        fp8: whether the weights are in FP8, with scales for each block and for each row in turn.
    """
    random, errors = random_normal(dtype, device), []
    for rows, width, outputs in problems:
        x = random(rows, width)
        weights = [random(count, width).div_(width**0.5) for count in outputs]
        biases = () if gated else [random(count) for count in outputs]
        residual = None if gated else random(rows, sum(outputs))
        scales = ()
        if fp8:
            weights, scales = zip(*map(quantized, weights), strict=True)
        for around in (((), None, None), (biases, Norm(random(width), 1e-5), residual)):
            arguments = LinearArguments.of(x, weights, *around, gated, scales)
            errors.append(relative_error(kernel(arguments), linear_by_torch(arguments)))
            if fp8:  # From now on, each row has its own scales.
                pairs = zip(weights, scales, strict=True)
                scales = [by_row.repeat_interleave(BLOCK, 0)[: len(w)] for w, by_row in pairs]
    return worst(errors)
