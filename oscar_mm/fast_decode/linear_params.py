"""What the kernels of ``linear`` share: parameters, the norm in front of them, and their check."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from oscar_mm.fast_decode.linear_torch import LinearArguments, Norm, linear_by_torch
from oscar_mm.kernels.launch import ELEMENTS, Kernel, addresses, ints, pointers
from oscar_mm.kernels.macros import Macros
from oscar_mm.kernels.self_check import random_normal, relative_error, worst
from oscar_mm.weights import fp8, int4
from oscar_mm.weights.matrix import QuantizedMatrix

WORST_ERROR = 0.02
"""Maximum relative error of a correct kernel: above the rounding error in 16-bit precision, below
the error of a wrong row."""
NORM_SOURCE = "linear/rms_norm.cu"
WIDEST_NORM = 16384
NORM_THREADS = 512
LARGEST_GROUP = 128
"""Columns of a block of FP8 weights, and the most that a warp multiplies by one scale at a time."""
MAX_MATRICES = 4
"""Maximum number of matrices of a launch."""
_ADDRESSES, _SIZES = ctypes.c_void_p * MAX_MATRICES, ctypes.c_int * MAX_MATRICES


class WeightFormat(NamedTuple):
    """The format of weights for which a kernel is compiled."""

    weight_bits: int = 16
    """16, 8 for FP8, or 4 for INT4."""
    float_scales: bool = False
    """Whether INT4 weights have scales in float32 instead of the dtype of x."""
    group_columns: int = LARGEST_GROUP
    """Columns of a group of INT4 weights: 32, 64, or ``LARGEST_GROUP`` for larger groups too."""

    @classmethod
    def of(cls, arguments: LinearArguments) -> WeightFormat:
        """Return the format of the weights."""
        if not arguments.zeros:
            return cls(arguments.weight_bits)
        scales, width = arguments.scales[0], arguments.x.shape[1]
        return cls.of_int4(width, scales)

    @classmethod
    def of_int4(cls, width: int, scales: torch.Tensor) -> WeightFormat:
        """Return the format of INT4 weights with that many columns, and these scales."""
        group = min(width // scales.shape[-1], LARGEST_GROUP)
        return cls(4, scales.dtype == torch.float32, group)

    def quantized(self, weight: torch.Tensor, whole: bool = False) -> QuantizedMatrix:
        """Quantize (..., outputs, width) weights.

        Args:
            whole: whether INT4 has groups of whole rows.
        """
        if self.weight_bits == 8:
            return QuantizedMatrix(*fp8.quantized(weight))
        group = weight.shape[-1] if whole else self.group_columns
        words, scales, zeros = int4.quantized(weight, group)
        return QuantizedMatrix(words, scales.float() if self.float_scales else scales, zeros)


UNQUANTIZED = WeightFormat()


class Matrices(ctypes.Structure):
    """Mirror of ``Matrices`` in csrc/linear/matrices.cuh, field for field."""

    _fields_ = (
        *((name, _ADDRESSES) for name in ("weights", "scales", "zeros", "biases")),
        *pointers("residual", "output"),
        *((name, _SIZES) for name in ("outputs", "shifts")),
        *ints("total", "width", "group_shift"),
    )

    @classmethod
    def of(cls, arguments: LinearArguments, output: torch.Tensor) -> Matrices:
        """Return the matrices of a launch; the tensors must outlive the launch."""
        weights, scales, width = arguments.weights, arguments.scales, arguments.x.shape[1]
        shifts = [] if arguments.zeros else list(map(scale_shift, weights, scales))
        by_group = group_shift(width, scales[0].shape[1]) if arguments.zeros else None
        return cls(
            _ADDRESSES(*addresses(*weights)),
            _ADDRESSES(*addresses(*scales)),
            _ADDRESSES(*addresses(*arguments.zeros)),
            _ADDRESSES(*addresses(*arguments.biases)),
            *addresses(arguments.residual, output),
            _SIZES(*[weight.shape[0] for weight in weights]),
            _SIZES(*shifts),
            *(output.shape[1], width, by_group or 0),
        )


def group_shift(width: int, groups: int) -> int | None:
    """Return the binary logarithm of the columns per group of INT4 weights, 31 for a single group,
    or None if kernels do not support the groups."""
    size = width // groups
    if groups == 1:
        return 31
    return size.bit_length() - 1 if size >= 32 and size & (size - 1) == 0 else None


def scale_shift(codes: torch.Tensor, scales: torch.Tensor) -> int:
    """Return the binary logarithm of the rows per scale of FP8 weights."""
    return fp8.rows_per_scale(codes, scales).bit_length() - 1


class NormParams(ctypes.Structure):
    """Mirror of ``Params`` in csrc/linear/rms_norm.cu, field for field."""

    _fields_ = (
        *pointers("x", "weight", "output"),
        *ints("width"),
        ("epsilon", ctypes.c_float),
    )


def norm_macros(dtype: torch.dtype, *, centered: bool = False) -> Macros:
    """Return the macros for the norm's kernel (``NORM_SOURCE``).

    Args:
        dtype: dtype of the rows.
        centered: whether the weight is added to 1, see ``CenteredNorm``.
    """
    return {"ELEMENT": ELEMENTS[dtype], "CENTERED": int(centered)}


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
    weights: WeightFormat = UNQUANTIZED,
    centered: bool = False,
    whole_rows: bool = True,
) -> float:
    """Return a kernel's largest relative error over all rows, with and without norm, bias and
    residual.

    It is compared with products in float32. Products of weights in 16-bit precision would differ
    from a faultless kernel's by more than ``WORST_ERROR`` in a row of a few gated outputs, one time
    in ten.

    Args:
        kernel: kernel for x and weights of ``dtype``.
        problems: number of rows, width, and number of outputs of each weight matrix.
        weights: format of the weights. FP8 has scales of blocks and of rows.
        centered: see ``LinearArguments``.
        whole_rows: whether INT4 in its largest groups also has groups of whole rows.
    """
    random, errors = random_normal(dtype, device), []
    for rows, width, outputs in problems:
        x = random(rows, width)
        exact = [random(count, width).div_(width**0.5) for count in outputs]
        biases = () if gated else [random(count) for count in outputs]
        residual = None if gated else random(rows, sum(outputs))
        for by_row, around in (
            (False, ((), None, None)),
            (True, (biases, Norm(random(width), 1e-5), residual)),
        ):
            whole = whole_rows and by_row and weights.group_columns == LARGEST_GROUP
            parts = _quantized(exact, weights, by_row, whole, random)
            arguments = LinearArguments.of(
                x, parts[0], *around, gated, *parts[1:], centered=centered
            )
            expected = linear_by_torch(_in_float32(arguments))
            errors.append(relative_error(kernel(arguments), expected))
    return worst(errors)


def _in_float32(arguments: LinearArguments) -> LinearArguments:
    """Return the arguments in float32, with x normalized and rounded as in a kernel."""
    weights = arguments.weights
    return arguments._replace(
        x=arguments.normalized.float(),
        norm=None,
        weights=weights if arguments.scales else [weight.float() for weight in weights],
        biases=[None if bias is None else bias.float() for bias in arguments.biases],
        residual=None if arguments.residual is None else arguments.residual.float(),
    )


def _quantized(
    weights: Sequence[torch.Tensor],
    form: WeightFormat,
    by_row: bool,
    whole: bool,
    random: Callable[..., torch.Tensor],
) -> tuple[Sequence[torch.Tensor], ...]:
    """Return weights, scales and zero points in a format, see ``worst_error``.

    Args:
        by_row: whether FP8 has scales of rows.
        whole: whether INT4 has groups of whole rows.
        random: function that returns random numbers of a shape.
    """

    def varied(scales: torch.Tensor) -> torch.Tensor:
        """Return scales that differ so much that a kernel's error shows if it reads another."""
        return scales * random(*scales.shape).float().sigmoid().mul(4).exp2().div(4)

    if form.weight_bits == 16:
        return (weights,)
    codes, scales, zeros = zip(*(form.quantized(w, whole) for w in weights), strict=True)
    if form.weight_bits == 4:
        return codes, [varied(one).to(one) for one in scales], zeros
    if by_row:
        pairs = zip(codes, scales, strict=True)
        scales = [one.repeat_interleave(fp8.BLOCK, 0)[: len(w)] for w, one in pairs]
    return codes, [varied(one) for one in scales]
