"""The kernel that adds the products with matrices B of LoRA adapters, csrc/linear/low_rank.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import silu

from oscar_mm.fast_decode.linear_params import MAX_MATRICES
from oscar_mm.kernels.launch import ELEMENTS, addresses, current_stream, ints, pointers
from oscar_mm.kernels.macros import macros_of
from oscar_mm.kernels.self_check import OperationKernel, random_normal, relative_error

MAX_ROWS, TILE, STEP, WARPS = 16, 8, 16, 4
"""Rows, outputs and ranks of a product on matrix units, and warps of a thread block, each of which
computes ``TILE`` outputs."""
_MOST_SHARED = 48 << 10
"""Maximum bytes of a thread block's part of the matrices B."""


class LowRankArguments(NamedTuple):
    """Arguments of ``LowRankKernel``.

    Attributes:
        products: (rows, total outputs): products without adapters, perhaps columns of wider rows.
        between: (rows, modules * ranks): products with the matrices A, perhaps columns of wider
            rows.
        up: (total outputs, ranks): matrices B times their scaling.
        sizes: number of outputs of each module.
        idle: (rows or 1, ranks) bool: ranks to leave out, see ``choosing``; or None.
        residual: (rows, outputs) to add, or None.
    """

    products: torch.Tensor
    between: torch.Tensor
    up: torch.Tensor
    sizes: Sequence[int]
    idle: torch.Tensor | None
    residual: torch.Tensor | None


class LowRankParams(ctypes.Structure):
    """Mirror of ``Params`` in csrc/linear/low_rank.cu, field for field."""

    _fields_ = (
        *pointers("products", "between", "up", "idle", "residual", "output"),
        *((f"{name}_stride", ctypes.c_int64) for name in ("products", "between", "idle")),
        ("ends", ctypes.c_int * MAX_MATRICES),
        *ints("rows", "outputs", "ranks"),
    )


class LowRankSpecialization(NamedTuple):
    """Compile-time parameters of ``low_rank``."""

    gated: bool
    dtype: torch.dtype


class LowRankKernel(OperationKernel[LowRankSpecialization], operation="low_rank", bound=0.02):
    """CUDA kernel that adds the products with B, for up to ``MAX_ROWS`` rows, and then does what
    follows a product: it adds the residual stream or applies the gate."""

    def __init__(self, specialization: LowRankSpecialization, device: torch.device) -> None:
        super().__init__(specialization, device)
        self._kernel = self._load("linear/low_rank.cu", macros_of(specialization))

    @classmethod
    def for_rows(
        cls, x: torch.Tensor, up: torch.Tensor, sizes: Sequence[int], gated: bool
    ) -> LowRankKernel | None:
        """Return the kernel for the rows of x; None if PyTorch operations must be used.

        Args:
            x: (rows, width) activations.
            up, sizes: see ``LowRankArguments``.
            gated: whether the first of two modules is the gate of the other.
        """
        whole = up.shape[1] % STEP == 0 and all(size % TILE == 0 for size in sizes)
        if not whole or not x.is_cuda or x.dtype not in ELEMENTS or len(x) > MAX_ROWS:
            return None
        kernel = cls.of(LowRankSpecialization(gated, x.dtype), x.device)
        fits = kernel is not None and kernel._shared_bytes(up.shape[1]) <= _MOST_SHARED
        return kernel if fits else None

    def _shared_bytes(self, ranks: int) -> int:
        return WARPS * TILE * (1 + self.specialization.gated) * ranks * 2

    def __call__(self, arguments: LowRankArguments) -> torch.Tensor:
        """Launch the kernel; return (rows, outputs), those of one module if gated."""
        products, between, up, sizes, idle, residual = arguments
        rows, outputs = len(products), products.shape[1] // (1 + self.specialization.gated)
        output = products.new_empty(rows, outputs)
        idle_stride = 0 if idle is None or len(idle) == 1 else idle.stride(0)
        ends = [sum(sizes[: at + 1]) for at in range(MAX_MATRICES)]
        params = LowRankParams(
            *addresses(products, between, up, idle, residual, output),
            *(products.stride(0), between.stride(0), idle_stride),
            (ctypes.c_int * MAX_MATRICES)(*ends),
            *(rows, outputs, up.shape[1]),
        )
        grid, block = (-(-outputs // (WARPS * TILE)), 1, 1), (WARPS * 32, 1, 1)
        shared, stream = self._shared_bytes(up.shape[1]), current_stream(products.device)
        self._kernel.launch(grid, block, shared, params, stream, dependent=True)
        return output

    @staticmethod
    def disagreement(
        specialization: LowRankSpecialization,
        kernel: Callable[[LowRankArguments], torch.Tensor],
        device: torch.device,
    ) -> float:
        """Return the largest relative error of a row, with different adapters in each row."""
        gated, dtype = specialization
        random, rows, ranks, sizes = random_normal(dtype, device), 13, 48, (104, 104)
        both, up = random(rows, 208 + 2 * ranks), random(208, ranks)
        products, between = both.split([208, 2 * ranks], 1)
        idle = torch.arange(rows * ranks, device=device).view(rows, ranks) % 3 == 0
        residual = None if gated else random(rows, 208)
        found = kernel(LowRankArguments(products, between, up, sizes, idle, residual))
        used = between.float().view(rows, 2, ranks) * ~idle[:, None]
        added = torch.einsum("rmk,mok->rmo", used, up.float().view(2, 104, ranks))
        exact = products.float() + added.reshape(rows, 208)
        gates, ups = exact.chunk(2, 1)
        expected = exact if residual is None else exact + residual.float()
        return relative_error(found, silu(gates) * ups if gated else expected)
