"""linear: a few rows times weight matrices, with what a decoder layer has around them.

    y = [norm(x) W0^T + b0, norm(x) W1^T + b1, ...] + residual, or silu(norm(x) W0^T) * norm(x) W1^T

The host side of csrc/linear/linear.cu, which reads the weights once at the speed of memory, and
begins to before the launch in front of it has ended; for more rows that of ``linear_rows`` does.
Elsewhere the same by PyTorch operations, with the rounding of transformers' modules.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from oscar_mm.fast_decode import linear_params, linear_rows
from oscar_mm.fast_decode.linear_rows import LinearRowsKernel
from oscar_mm.fast_decode.linear_torch import (
    WORST_ERROR,
    Norm,
    disagreement,
    in_rows,
    linear_by_torch,
)
from oscar_mm.kernels.launch import (
    ELEMENTS,
    Kernel,
    current_stream,
    load_kernel,
    multiprocessors,
    shared_limit,
    shared_of_one,
    uses_tma,
)
from oscar_mm.kernels.self_check import CheckedKernels

MOST_ROWS = 4
"""Rows of the kernel."""
FEW_ROWS = 2
"""Rows with which it is fastest; with four, matrix units take 17% less (H200)."""
AT_ONCE = 256
WARPS, PIECE = 16, 1024
"""Of a thread block, and elements of a piece."""


class Params(ctypes.Structure):
    """``Params`` of csrc/linear/linear.cu, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "norm")),
        ("matrices", linear_params.Matrices),
        ("epsilon", ctypes.c_float),
    )


@dataclass(frozen=True)
class Specialization:
    """What the kernel is compiled for."""

    rows: int
    gated: bool
    dtype: torch.dtype

    def macros(self, depth: int, tma: bool) -> dict[str, str | int]:
        """Macros that csrc/linear/linear.cu is compiled with."""
        return {
            "ROWS": self.rows,
            "GATED": int(self.gated),
            "ELEMENT": ELEMENTS[self.dtype],
            "WARPS": WARPS,
            "DEPTH": depth,
            "PIECE": PIECE,
            "USE_TMA": int(tma),
        }


class LinearKernel:
    """The kernel of one specialization on one device, compiled when made.

    Attributes:
        key: of its code, ``Kernel.key``.
    """

    def __init__(self, specialization: Specialization, device: torch.device) -> None:
        tma = uses_tma(device)
        self.specialization = specialization
        self._depth = depth_for(shared_limit(device))
        macros = specialization.macros(self._depth, tma)
        self._kernel: Kernel = load_kernel("linear/linear.cu", macros, device)
        self.key, self._blocks = self._kernel.key, multiprocessors(device)
        self._least_shared = shared_of_one(device)

    def takes(self, width: int, norm: bool) -> bool:
        """Whether rows of so many elements fit its shared memory."""
        return self._shared_bytes(width, norm) <= self._kernel.shared_limit

    def _shared_bytes(self, width: int, norm: bool) -> int:
        needed = 2 * (WARPS * self._depth * PIECE + (self.specialization.rows + norm) * width)
        return max(needed, self._least_shared)

    def __call__(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        norm: Norm | None,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ``linear``."""
        total = linear_params.total_outputs(weights, self.specialization.gated)
        output = x.new_empty(x.shape[0], total)
        params = Params(
            x.data_ptr(),
            None if norm is None else norm.weight.data_ptr(),
            linear_params.matrices(weights, biases, residual, output),
            0.0 if norm is None else norm.epsilon,
        )
        self._kernel.launch(
            (self._blocks, 1, 1),
            (WARPS * 32, 1, 1),
            self._shared_bytes(x.shape[1], norm is not None),
            params,
            current_stream(x.device),
            dependent=True,
        )
        return output


def depth_for(shared_bytes: int) -> int:
    """Pieces of a warp on their way, where a thread block may have so many bytes of shared memory.

    Three, 96 KiB of a thread block, keep an H200's memory busy. What is asked for next comes after
    all that is on its way, so with more it only comes later.
    """
    return 3 if shared_bytes >= 200 << 10 else 2


def linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] = (),
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """Rows times one to three matrices.

    Args:
        x: (rows, width), contiguous.
        weights: (outputs, width) each, in the dtype of x.
        biases: (outputs,) of each, None for none; or empty.
        norm: of x before the products.
        residual: (rows, outputs of all) to be added.
        gated: of two matrices, silu(first product) * second instead of both.

    Returns:
        (rows, outputs of all, or of one if gated).
    """
    biases = tuple(biases) or (None,) * len(weights)
    kernel = _kernel_for(x, weights, gated, norm is not None)
    # The kernels' gate has no biases.
    if kernel is not None and not (gated and any(bias is not None for bias in biases)):
        return kernel(x, weights, biases, norm, residual)
    x = x if norm is None else norm.at_once(x)
    return linear_by_torch(x, weights, biases, None, residual, gated)


def _kernel_for(
    x: torch.Tensor, weights: Sequence[torch.Tensor], gated: bool, norm: bool
) -> LinearKernel | LinearRowsKernel | None:
    rows, width = x.shape
    if not x.is_cuda or x.dtype not in ELEMENTS or width % AT_ONCE:
        return None
    for kernel in _kernels(rows, gated, x.dtype, x.device):
        if kernel is not None and kernel.takes(width, norm) and in_rows(x, *weights):
            return kernel
    return None


def _kernels(
    rows: int, gated: bool, dtype: torch.dtype, device: torch.device
) -> Iterator[LinearKernel | LinearRowsKernel | None]:
    """The fastest first."""
    if FEW_ROWS < rows <= linear_rows.MOST_ROWS and uses_tma(device):
        made = linear_rows.Specialization.of(rows, gated, dtype)
        yield linear_rows.TRUSTED.kernel(made, device)
    if rows <= MOST_ROWS:
        yield TRUSTED.kernel(Specialization(rows, gated, dtype), device)


def _disagreement(
    specialization: Specialization, kernel: LinearKernel, device: torch.device
) -> float:
    rows, gated = specialization.rows, specialization.gated
    many = (3000, 3000) if gated else (3000, 7, 31)
    problems = (rows, 256, (5, 5)), (rows, PIECE + 768, many)
    return disagreement(kernel, gated, specialization.dtype, device, problems)


TRUSTED: CheckedKernels[Specialization, LinearKernel] = CheckedKernels(
    "linear", LinearKernel, _disagreement, WORST_ERROR
)
