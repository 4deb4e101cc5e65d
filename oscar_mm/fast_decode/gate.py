"""Gate: compute silu(gate) * up from a feed-forward layer's products, in one launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch.nn.functional import silu

from oscar_mm.kernels.launch import ELEMENTS, addresses, current_stream, ints, pointers
from oscar_mm.kernels.self_check import OperationKernel, random_normal, relative_error

THREADS, _AT_ONCE = 256, 8


class Params(ctypes.Structure):
    """Mirror of ``Params`` in csrc/linear/gate.cu, field for field."""

    _fields_ = (
        *pointers("gates", "ups"),
        *((name, ctypes.c_int64) for name in ("stride", "rows")),
        *ints("width"),
    )


class GateKernel(OperationKernel[torch.dtype], operation="gate", bound=0.01):
    """CUDA kernel of ``gate_`` for one dtype."""

    def __init__(self, specialization: torch.dtype, device: torch.device) -> None:
        super().__init__(specialization, device)
        self._kernel = self._load("linear/gate.cu", {"ELEMENT": ELEMENTS[specialization]})

    def __call__(self, gates: torch.Tensor, ups: torch.Tensor) -> None:
        """Launch the kernel; requires at least one row."""
        rows, width = gates.shape
        params = Params(*addresses(gates, ups), gates.stride(0), rows, width)
        blocks = -(-rows * width // (_AT_ONCE * THREADS))
        stream = current_stream(gates.device)
        self._kernel.launch((blocks, 1, 1), (THREADS, 1, 1), 0, params, stream, dependent=True)

    @staticmethod
    def disagreement(
        specialization: torch.dtype,
        kernel: Callable[[torch.Tensor, torch.Tensor], None],
        device: torch.device,
    ) -> float:
        """Return the largest relative error of any row; the inputs are halves of wider rows."""
        both = random_normal(specialization, device)(37, 2 * 264)
        expected = both.clone()
        kernel(*both.chunk(2, -1))
        _by_torch(*expected.chunk(2, -1))
        return relative_error(both, expected)


def gate_(gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    """Write silu(gates) * ups to gates, and return gates.

    Args:
        gates, ups: (rows, width) of the same dtype, contiguous or halves of wider rows.
    """
    takes = (
        gates.is_cuda
        and gates.dtype in ELEMENTS
        and gates.stride() == ups.stride()
        and gates.stride(1) == 1
        and not any(x % _AT_ONCE for x in (gates.shape[1], gates.stride(0)))
        and not any(x.data_ptr() % 16 for x in (gates, ups))
        and gates.shape[0] > 0
    )
    kernel = GateKernel.of(gates.dtype, gates.device) if takes else None
    (kernel or _by_torch)(gates, ups)
    return gates


def _by_torch(gates: torch.Tensor, ups: torch.Tensor) -> None:
    silu(gates, inplace=True).mul_(ups)
