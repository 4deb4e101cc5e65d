"""RoPE: rotary position embedding of one token per row, after the norm of each head."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from oscar_mm.fast_decode.linear_torch import Norm
from oscar_mm.kernels.launch import ELEMENTS, addresses, current_stream, ints, pointers
from oscar_mm.kernels.macros import Macros, macros_of
from oscar_mm.kernels.self_check import OperationKernel, random_normal, relative_error, worst
from oscar_mm.ops.library import STATES, ArgumentChecker, Written, define

HEAD_DIMS = (64, 128, 192, 256)
_WARPS = 4
_MAX_ROWS = (1 << 16) - 1
"""Maximum number of rows per launch."""
_checker = ArgumentChecker("rope")


class RopeArguments(NamedTuple):
    """Arguments of ``rope``, which rotates channels i and i + head_dim / 2 of each head by the
    angle for its row.

    Attributes:
        heads: (rows, heads, head_dim), query heads first; contiguous except between rows.
        query_heads: number of query heads.
        cosine: (rows, head_dim), contiguous, in the dtype of heads.
        sine: same shape and dtype as cosine.
        query_norm: (head_dim,): RMSNorm weight for query heads; None for no norm.
        key_norm: (head_dim,): RMSNorm weight for key heads; None for no norm.
        epsilon: epsilon of both norms.
    """

    heads: Written
    query_heads: int
    cosine: torch.Tensor
    sine: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    epsilon: float


class Params(ctypes.Structure):
    """Mirror of ``Params`` in csrc/rope/rope.cu, field for field."""

    _fields_ = (
        *pointers("heads", "query_norm", "key_norm", "cosine", "sine"),
        ("row_stride", ctypes.c_int64),
        *ints("query_heads", "all_heads"),
        ("epsilon", ctypes.c_float),
    )


class Specialization(NamedTuple):
    """Compile-time parameters of the kernel."""

    head_dim: int
    dtype: torch.dtype

    @property
    def macros(self) -> Macros:
        """Preprocessor macros for compiling csrc/rope/rope.cu."""
        return macros_of(self, WARPS=_WARPS)


class RopeKernel(OperationKernel[Specialization], operation="rope", bound=0.01):
    """CUDA kernel of ``rope``."""

    def __init__(self, specialization: Specialization, device: torch.device) -> None:
        super().__init__(specialization, device)
        self._kernel = self._load("rope/rope.cu", specialization.macros)

    def __call__(self, arguments: RopeArguments) -> None:
        """Launch the kernel."""
        heads, query_heads, cosine, sine, query_norm, key_norm, epsilon = arguments
        count, block = heads.shape[1], (_WARPS * 32, 1, 1)
        parts = (x.split(_MAX_ROWS) for x in (heads, cosine, sine))
        for some, *angles in zip(*parts, strict=True):
            params = Params(
                *addresses(some, query_norm, key_norm, *angles),
                *(heads.stride(0), query_heads, count, epsilon),
            )
            grid, stream = (-(-count // _WARPS), len(some), 1), current_stream(heads.device)
            self._kernel.launch(grid, block, 0, params, stream, dependent=True)

    @staticmethod
    def disagreement(
        specialization: Specialization, kernel: Callable[[Any], None], device: torch.device
    ) -> float:
        """Return the largest relative error of a head, with and without norms."""
        head_dim, dtype = specialization
        random, errors = random_normal(dtype, device), []
        for norms in ((None, None, 0.0), (random(head_dim), random(head_dim), 1e-6)):
            heads, angles = random(3, 9, head_dim), random(3, head_dim).float()
            cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
            found, expected = heads, heads.clone()
            for run, target in ((kernel, found), (rope_by_torch, expected)):
                run(RopeArguments(target[:, :7], 4, cosine, sine, *norms))
            errors.append(relative_error(found, expected))
        return worst(errors)


def rope_(
    heads: torch.Tensor,
    query_heads: int,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    norms: tuple[Norm, Norm] | None = None,
) -> None:
    """Rotate heads in place, like ``rope`` but without checking arguments.

    Args:
        heads, query_heads, cosine, sine: see ``RopeArguments``.
        norms: norms for query and key heads, with the same epsilon; None for no norms.
    """
    around = (None, None, 0.0)
    if norms is not None:
        (query_norm, epsilon), (key_norm, _) = norms
        around = (query_norm, key_norm, epsilon)
    _rope(RopeArguments(heads, query_heads, cosine, sine, *around))


def rope_by_torch(arguments: RopeArguments) -> None:
    """Run ``rope`` with PyTorch operations and the rounding of transformers' modules."""
    heads, query_heads, cosine, sine, query_norm, key_norm, epsilon = arguments
    if query_norm is not None and key_norm is not None:
        norms = Norm(query_norm, epsilon), Norm(key_norm, epsilon)
        sides = heads[:, :query_heads], heads[:, query_heads:]
        heads[:] = torch.cat([norm(side) for norm, side in zip(norms, sides, strict=True)], 1)
    first, second = heads.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    heads[:] = heads * cosine[:, None] + turned * sine[:, None]


def _rope(arguments: RopeArguments) -> None:
    heads, kernel = arguments.heads, None
    if heads.is_cuda and heads.shape[2] in HEAD_DIMS and heads.dtype in ELEMENTS:
        kernel = RopeKernel.of(Specialization(heads.shape[2], heads.dtype), heads.device)
    (kernel or rope_by_torch)(arguments)


def _check(arguments: RopeArguments) -> None:
    heads, query_heads, cosine, sine, query_norm, key_norm, _ = arguments
    check, device = _checker.check, heads.device
    check("heads", heads, ("rows", "heads", "head_dim"), STATES, device, rows=True)
    rows, count, head_dim = heads.shape
    if heads.stride(1) != head_dim:
        _checker.refuse("heads", f"of strides {heads.stride()}", "contiguous in each row")
    if not 0 <= query_heads <= count:
        _checker.refuse("query_heads", query_heads, f"0 to {count}")
    for name, angles in (("cosine", cosine), ("sine", sine)):
        check(name, angles, (rows, head_dim), heads.dtype, device)
    if (query_norm is None) != (key_norm is None):
        _checker.refuse("query_norm", "one of two norms", "given with key_norm, or both None")
    for name, norm in (("query_norm", query_norm), ("key_norm", key_norm)):
        if norm is not None:
            check(name, norm, (head_dim,), heads.dtype, device)


rope_operation = define("rope", RopeArguments, _check, _rope)
