"""RoPE: rotary position embedding of one token per row, after the norm of each head."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from oscar_mm.fast_decode.centered_norm import CenteredNorm
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
    """Arguments of ``rope``, which rotates channels i and i + turned / 2 of each head by the angle
    for its row; channels from ``turned`` on are not rotated.

    Attributes:
        heads: (rows, heads, head_dim), query heads first; contiguous except between rows.
        query_heads: number of query heads.
        cosine: (rows, turned), contiguous, in the dtype of heads; turned is at most head_dim.
        sine: same shape and dtype as cosine.
        query_norm: (head_dim,): RMSNorm weight for query heads; None for no norm.
        key_norm: (head_dim,): RMSNorm weight for key heads; None for no norm.
        epsilon: epsilon of both norms.
        centered: whether the norms are ``CenteredNorm``.
        gated: whether each query head is followed by a gate, which stays as it is.
    """

    heads: Written
    query_heads: int
    cosine: torch.Tensor
    sine: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    epsilon: float
    centered: bool = False
    gated: bool = False


class Params(ctypes.Structure):
    """Mirror of ``Params`` in csrc/rope/rope.cu, field for field."""

    _fields_ = (
        *pointers("heads", "query_norm", "key_norm", "cosine", "sine"),
        ("row_stride", ctypes.c_int64),
        *ints("query_heads", "all_heads", "query_step"),
        ("epsilon", ctypes.c_float),
    )


class Specialization(NamedTuple):
    """Compile-time parameters of the kernel."""

    head_dim: int
    dtype: torch.dtype
    turned: int
    centered: bool = False

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
        heads, query_heads, cosine, sine, query_norm, key_norm, epsilon, _, gated = arguments
        count, block = heads.shape[1] - gated * query_heads, (_WARPS * 32, 1, 1)
        parts = (x.split(_MAX_ROWS) for x in (heads, cosine, sine))
        for some, *angles in zip(*parts, strict=True):
            params = Params(
                *addresses(some, query_norm, key_norm, *angles),
                *(heads.stride(0), query_heads, count, 1 + gated, epsilon),
            )
            blocks, stream = -(-count // (2 * _WARPS)), current_stream(heads.device)
            self._kernel.launch((blocks, len(some), 1), block, 0, params, stream, dependent=True)

    @staticmethod
    def disagreement(
        specialization: Specialization, kernel: Callable[[Any], None], device: torch.device
    ) -> float:
        """Return the largest relative error of a head, with and without norms, and with gates."""
        head_dim, dtype, turned, centered = specialization
        random, errors = random_normal(dtype, device), []
        weights = random(head_dim), random(head_dim)
        for norms, gated in (((None, None), False), (weights, False), (weights, True)):
            heads, angles = random(3, 13, head_dim), random(3, turned).float()
            cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
            found, expected = heads, heads.clone()
            query_norm, key_norm = norms
            around = 4, cosine, sine, query_norm, key_norm, 1e-6, centered, gated
            for run, target in ((kernel, found), (rope_by_torch, expected)):
                run(RopeArguments(target[:, :11], *around))
            errors.append(relative_error(found, expected))
        return worst(errors)


def rope_(
    heads: torch.Tensor,
    query_heads: int,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    norms: tuple[Norm, Norm] | tuple[CenteredNorm, CenteredNorm] | None = None,
    *,
    gated: bool = False,
) -> None:
    """Rotate heads in place, like ``rope`` but without checking arguments.

    Args:
        heads, query_heads, cosine, sine, gated: see ``RopeArguments``.
        norms: norms for query and key heads, with the same epsilon; None for no norms.
    """
    query_norm = key_norm = None
    epsilon, centered = 0.0, False
    if norms is not None:
        (query_norm, epsilon), (key_norm, _) = norms
        centered = isinstance(norms[0], CenteredNorm)
    around = query_norm, key_norm, epsilon, centered, gated
    _rope(RopeArguments(heads, query_heads, cosine, sine, *around))


def rope_by_torch(arguments: RopeArguments) -> None:
    """Run ``rope`` with PyTorch operations and the rounding of transformers' modules."""
    heads, count, cosine, sine, query_norm, key_norm, epsilon, centered, gated = arguments
    norms = query_norm, key_norm
    step, turned = 1 + gated, cosine.shape[1]
    sides = heads[:, : count * step : step], heads[:, count * step :]
    for side, weight in zip(sides, norms, strict=True):
        kind = CenteredNorm if centered else Norm
        normed = side if weight is None else kind(weight, epsilon)(side)
        first, second = normed[..., :turned].chunk(2, -1)
        around = torch.cat([-second, first], -1) * sine[:, None]
        moved = normed[..., :turned] * cosine[:, None] + around
        side[:] = torch.cat([moved, normed[..., turned:]], -1)


def _rope(arguments: RopeArguments) -> None:
    heads, turned, kernel = arguments.heads, arguments.cosine.shape[1], None
    if (
        heads.is_cuda
        and heads.shape[2] in HEAD_DIMS
        and turned % 64 == 0
        and heads.dtype in ELEMENTS
        and _aligned(arguments)
    ):
        made = Specialization(heads.shape[2], heads.dtype, turned, arguments.centered)
        kernel = RopeKernel.of(made, heads.device)
    (kernel or rope_by_torch)(arguments)


def _aligned(arguments: RopeArguments) -> bool:
    """Return whether the kernel can read four channels at once."""
    heads, _, *vectors = arguments[:6]
    starts = (x.data_ptr() % 8 == 0 for x in (heads, *vectors) if x is not None)
    return all(starts) and heads.stride(0) % 4 == 0


def _check(arguments: RopeArguments) -> None:
    heads, query_heads, cosine, sine, query_norm, key_norm, *_, gated = arguments
    check, device = _checker.check, heads.device
    check("heads", heads, ("rows", "heads", "head_dim"), STATES, device, rows=True)
    rows, count, head_dim = heads.shape
    if heads.stride(1) != head_dim:
        _checker.refuse("heads", f"of strides {heads.stride()}", "contiguous in each row")
    if not 0 <= query_heads <= count // (1 + gated):
        _checker.refuse("query_heads", query_heads, f"0 to {count // (1 + gated)}")
    check("cosine", cosine, (rows, "channels"), heads.dtype, device)
    if cosine.shape[1] > head_dim or cosine.shape[1] % 2:
        _checker.refuse("cosine", f"of {cosine.shape[1]} channels", f"even, at most {head_dim}")
    check("sine", sine, tuple(cosine.shape), heads.dtype, device)
    if (query_norm is None) != (key_norm is None):
        _checker.refuse("query_norm", "one of two norms", "given with key_norm, or both None")
    for name, norm in (("query_norm", query_norm), ("key_norm", key_norm)):
        if norm is not None:
            check(name, norm, (head_dim,), heads.dtype, device)


rope_operation = define("rope", RopeArguments, _check, _rope)
