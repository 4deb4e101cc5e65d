"""Shared gate: activations of the expert that all rows of a mixture use, in one launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch.nn.functional import silu

from oscar_mm.kernels.launch import ELEMENTS, addresses, current_stream, ints, pointers
from oscar_mm.kernels.self_check import OperationKernel, random_normal, relative_error, worst

THREADS = 256


class Params(ctypes.Structure):
    """Mirror of ``Params`` in csrc/experts/shared_gate.cu, field for field."""

    _fields_ = (
        *pointers("inner", "outer", "between", "logits"),
        *((name, ctypes.c_int64) for name in ("inner_stride", "outer_stride")),
        *ints("width", "experts"),
    )


class SharedGateKernel(OperationKernel[torch.dtype], operation="shared_gate", bound=0.01):
    """CUDA kernel of ``shared_gate`` for one dtype."""

    def __init__(self, specialization: torch.dtype, device: torch.device) -> None:
        super().__init__(specialization, device)
        self._kernel = self._load("experts/shared_gate.cu", {"ELEMENT": ELEMENTS[specialization]})

    def __call__(
        self, inner: torch.Tensor, outer: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the kernel; requires at least one row."""
        rows, width, experts = len(inner), inner.shape[1] // 2, outer.shape[1] - 1
        between, logits = inner.new_empty(rows, width), outer.new_empty(rows, experts)
        strides = inner.stride(0), outer.stride(0)
        params = Params(*addresses(inner, outer, between, logits), *strides, width, experts)
        stream = current_stream(inner.device)
        self._kernel.launch((rows, 1, 1), (THREADS, 1, 1), 0, params, stream, dependent=True)
        return between, logits

    @staticmethod
    def disagreement(
        specialization: torch.dtype,
        kernel: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        device: torch.device,
    ) -> float:
        """Return the largest relative error of any row; the inputs are parts of wider rows."""
        inputs = random_normal(specialization, device)(5, 1290).split([700, 590], 1)
        pairs = zip(kernel(*inputs), _by_torch(*inputs), strict=True)
        return worst([relative_error(*pair) for pair in pairs])


def shared_gate(inner: torch.Tensor, outer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what the shared expert's second product reads, and the router's logits.

    Args:
        inner: (rows, 2 * width): products with the shared expert's gate and up matrices; may be a
            part of wider rows.
        outer: (rows, experts + 1): the router's logits, and the logit of the shared expert's share;
            may be a part of wider rows.

    Returns:
        (rows, width): silu(gate) * up, times the share; and (rows, experts): the router's logits.
    """
    takes = (
        inner.is_cuda
        and inner.dtype == outer.dtype
        and inner.dtype in ELEMENTS
        and inner.stride(1) == outer.stride(1) == 1
        and len(inner) > 0
    )
    kernel = SharedGateKernel.of(inner.dtype, inner.device) if takes else None
    return (kernel or _by_torch)(inner, outer)


def _by_torch(inner: torch.Tensor, outer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gates, ups = inner.chunk(2, -1)
    logits, share = outer[:, :-1], torch.sigmoid(outer[:, -1:])
    return silu(gates) * ups * share, logits.contiguous()
