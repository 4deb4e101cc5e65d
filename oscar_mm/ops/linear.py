"""linear: a few rows times weight matrices, with what a decoder layer has around them.

    y = [norm(x) W0^T + b0, norm(x) W1^T + b1, ...] + residual, or silu(norm(x) W0^T) * norm(x) W1^T

The host side of csrc/linear.cu, which reads the weights once at the speed of memory, and begins to
before the launch in front of it has ended. Elsewhere the same by PyTorch operations, with the
rounding of transformers' modules.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import rms_norm, silu

from oscar_mm.ops.kernel import (
    ELEMENTS,
    Kernel,
    copies_in_bulk,
    load_kernel,
    multiprocessors,
)
from oscar_mm.ops.trust import Trusted

MOST_ROWS = 4
"""Rows of the kernel; for more, matrix units are faster."""
MOST_PARTS = 3
AT_ONCE = 256
_ALIGNMENT = 16
WARPS, PIECE = 16, 1024
"""Of a thread block, and elements of a piece."""
_WORST_ERROR = 0.02
"""Relative error of a kernel that is right: above the rounding of 16 bit, below that of a wrong
row."""


class Norm(NamedTuple):
    """An RMSNorm: x / sqrt(mean(x^2) + epsilon) * weight, the weight of shape (width,)."""

    weight: torch.Tensor
    epsilon: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Over the last dimension, in float32 and rounded before the weight comes in.

        On a GPU in one launch, where the weight comes in before the rounding.
        """
        if x.is_cuda:
            return rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * scaled.to(x.dtype)


class Params(ctypes.Structure):
    """``Params`` of csrc/linear.cu, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "norm")),
        *((name, ctypes.c_void_p * MOST_PARTS) for name in ("weights", "biases")),
        *((name, ctypes.c_void_p) for name in ("residual", "output")),
        ("outputs", ctypes.c_int * MOST_PARTS),
        ("total", ctypes.c_int),
        ("width", ctypes.c_int),
        ("epsilon", ctypes.c_float),
    )


@dataclass(frozen=True)
class Specialization:
    """What the kernel is compiled for."""

    rows: int
    gated: bool
    dtype: torch.dtype

    def macros(self, depth: int, bulk: bool) -> dict[str, str | int]:
        """Macros that csrc/linear.cu is compiled with."""
        return {
            "ROWS": self.rows,
            "GATED": int(self.gated),
            "ELEMENT": ELEMENTS[self.dtype],
            "WARPS": WARPS,
            "DEPTH": depth,
            "PIECE": PIECE,
            "BULK": int(bulk),
        }


class LinearKernel:
    """The kernel of one specialization on one device, compiled when made.

    Attributes:
        key: of its code, ``Kernel.key``.
    """

    def __init__(self, specialization: Specialization, device: torch.device) -> None:
        bulk = copies_in_bulk(device)
        self.specialization = specialization
        self._depth = depth_for(
            torch.cuda.get_device_properties(device).shared_memory_per_block_optin
        )
        macros = specialization.macros(self._depth, bulk)
        self._kernel: Kernel = load_kernel("linear.cu", macros, device)
        self.key, self._blocks = self._kernel.key, multiprocessors(device)

    def takes(self, width: int, norm: bool) -> bool:
        """Whether rows of so many elements fit its shared memory."""
        return self._shared_bytes(width, norm) <= self._kernel.shared_limit

    def _shared_bytes(self, width: int, norm: bool) -> int:
        return 2 * (WARPS * self._depth * PIECE + (self.specialization.rows + norm) * width)

    def __call__(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        norm: Norm | None,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ``linear``."""
        width = x.shape[1]
        total = len(weights[0]) if self.specialization.gated else sum(map(len, weights))
        output = x.new_empty(len(x), total)
        addresses = ctypes.c_void_p * MOST_PARTS
        params = Params(
            x.data_ptr(),
            None if norm is None else norm.weight.data_ptr(),
            addresses(*(weight.data_ptr() for weight in weights)),
            addresses(*(None if bias is None else bias.data_ptr() for bias in biases)),
            None if residual is None else residual.data_ptr(),
            output.data_ptr(),
            (ctypes.c_int * MOST_PARTS)(*map(len, weights)),
            *(total, width, 0.0 if norm is None else norm.epsilon),
        )
        self._kernel.launch(
            (self._blocks, 1, 1),
            (WARPS * 32, 1, 1),
            self._shared_bytes(width, norm is not None),
            params,
            torch.cuda.current_stream(x.device).cuda_stream,
            dependent=True,
        )
        return output


def depth_for(shared_bytes: int) -> int:
    """Pieces of a warp on their way, where a thread block may have so many bytes of shared memory.

    Four take 128 KiB, so that no two thread blocks share a multiprocessor: with 96 KiB the next
    kernel's weights came in while this one's were read, 10% to 40% slower (H200).
    """
    return 4 if shared_bytes >= 200 << 10 else 2


def in_rows(*tensors: torch.Tensor) -> bool:
    """Whether these are contiguous and begin where they can be copied 16 bytes at a time."""
    return all(x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0 for x in tensors)


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
    # The kernel's gate has no biases.
    if kernel is not None and not (gated and any(bias is not None for bias in biases)):
        return kernel(x, weights, biases, norm, residual)
    return _by_torch(x, weights, biases, norm, residual, gated)


def _by_torch(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    norm: Norm | None,
    residual: torch.Tensor | None,
    gated: bool,
) -> torch.Tensor:
    x = x if norm is None else norm(x)
    products = [torch_linear(x, *part) for part in zip(weights, biases, strict=True)]
    output = silu(products[0]) * products[1] if gated else torch.cat(products, -1)
    return output if residual is None else residual + output


def _kernel_for(
    x: torch.Tensor, weights: Sequence[torch.Tensor], gated: bool, norm: bool
) -> LinearKernel | None:
    rows, width = x.shape
    if not x.is_cuda or rows > MOST_ROWS or x.dtype not in ELEMENTS or width % AT_ONCE:
        return None
    kernel = TRUSTED.kernel(Specialization(rows, gated, x.dtype), x.device)
    if kernel is None or not kernel.takes(width, norm) or not in_rows(x, *weights):
        return None
    return kernel


def _disagreement(
    specialization: Specialization, kernel: LinearKernel, device: torch.device
) -> float:
    """Largest relative error of a row, with and without norm, bias and residual."""
    rows, gated, dtype = specialization.rows, specialization.gated, specialization.dtype
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    worst = 0.0
    for width, outputs in ((256, (5, 5)), (PIECE + 768, (3000, 3000) if gated else (3000, 7, 31))):
        x, weights = random(rows, width), [random(one, width) / width**0.5 for one in outputs]
        biases = [random(one) for one in outputs]
        residual = random(rows, outputs[0] if gated else sum(outputs))
        for arguments in (
            (x, weights, [None] * len(weights), None, None),
            (x, weights, biases, Norm(random(width), 1e-5), None if gated else residual),
        ):
            if gated:
                arguments = (*arguments[:2], [None] * 2, *arguments[3:])
            found = kernel(*arguments).double()
            expected = _by_torch(*arguments, gated).double()
            worst = max(worst, float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max()))
    return worst


TRUSTED: Trusted[Specialization, LinearKernel] = Trusted(
    "linear", LinearKernel, _disagreement, _WORST_ERROR
)
