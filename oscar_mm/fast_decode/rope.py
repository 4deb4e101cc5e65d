"""rope: rotary position embedding of one token of each row, after the norm of each head.

The host side of csrc/rope/rope.cu; elsewhere the same by PyTorch operations, with the rounding of
transformers' modules.
"""

from __future__ import annotations

import ctypes
from functools import partial

import torch

from oscar_mm.fast_decode.linear import Norm
from oscar_mm.kernels.launch import ELEMENTS, Kernel, current_stream, load_kernel
from oscar_mm.kernels.self_check import CheckedKernels

HEAD_DIMS = (64, 128, 192, 256)
_WARPS = 4
_WORST_ERROR = 0.01


class Params(ctypes.Structure):
    """``Params`` of csrc/rope/rope.cu, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("heads", "query_norm", "key_norm")),
        *((name, ctypes.c_void_p) for name in ("cosine", "sine")),
        ("row_stride", ctypes.c_int64),
        ("query_heads", ctypes.c_int),
        ("all_heads", ctypes.c_int),
        ("epsilon", ctypes.c_float),
    )


def macros(head_dim: int, dtype: torch.dtype) -> dict[str, str | int]:
    """Macros that csrc/rope/rope.cu is compiled with."""
    return {
        "HEAD_DIM": head_dim,
        "ELEMENT": ELEMENTS[dtype],
        "WARPS": _WARPS,
    }


class RopeKernel:
    """The kernel of one head_dim and dtype on one device, compiled when made.

    Attributes:
        key: of its code, ``Kernel.key``.
    """

    def __init__(self, specialization: tuple[int, torch.dtype], device: torch.device) -> None:
        self._kernel: Kernel = load_kernel("rope/rope.cu", macros(*specialization), device)
        self.key = self._kernel.key

    def __call__(
        self,
        heads: torch.Tensor,
        query_heads: int,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        norms: tuple[Norm, Norm] | None,
    ) -> None:
        """See ``rope_``."""
        rows, count, _ = heads.shape
        weights = (None, None) if norms is None else [norm.weight.data_ptr() for norm in norms]
        params = Params(
            *(heads.data_ptr(), *weights, cosine.data_ptr(), sine.data_ptr()),
            *(heads.stride(0), query_heads, count),
            0.0 if norms is None else norms[0].epsilon,
        )
        stream = current_stream(heads.device)
        self._kernel.launch(
            (-(-count // _WARPS), rows, 1),
            (_WARPS * 32, 1, 1),
            0,
            params,
            stream,
            dependent=True,
        )


def rope_(
    heads: torch.Tensor,
    query_heads: int,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    norms: tuple[Norm, Norm] | None = None,
) -> None:
    """Turn channels i and i + head_dim / 2 of every head by the angle of its row, in place.

    Args:
        heads: (rows, heads, head_dim), the query heads first; only rows may have strides.
        query_heads: how many of them.
        cosine: (rows, head_dim), contiguous, in the dtype of heads; sine likewise.
        norms: of query and key heads, of one epsilon.
    """
    specialization, kernel = (heads.shape[2], heads.dtype), None
    if heads.is_cuda and heads.shape[2] in HEAD_DIMS and heads.dtype in ELEMENTS:
        kernel = TRUSTED.kernel(specialization, heads.device)
    if kernel is not None:
        kernel(heads, query_heads, cosine, sine, norms)
    else:
        _by_torch(heads, query_heads, cosine, sine, norms)


def _by_torch(
    heads: torch.Tensor,
    query_heads: int,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    norms: tuple[Norm, Norm] | None,
) -> None:
    if norms is not None:
        sides = heads[:, :query_heads], heads[:, query_heads:]
        heads[:] = torch.cat([norm(side) for norm, side in zip(norms, sides, strict=True)], 1)
    first, second = heads.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    heads[:] = heads * cosine[:, None] + turned * sine[:, None]


def _disagreement(
    specialization: tuple[int, torch.dtype], kernel: RopeKernel, device: torch.device
) -> float:
    """Largest relative error of a head, with and without norms."""
    head_dim, dtype = specialization
    generator = torch.Generator(device).manual_seed(0)
    random = partial(torch.randn, generator=generator, device=device, dtype=dtype)
    errors = []
    for norms in (None, (Norm(random(head_dim), 1e-6), Norm(random(head_dim), 1e-6))):
        wide, angles = random(3, 9, head_dim), random(3, head_dim).float()
        cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
        results = []
        for rope in (kernel, _by_torch):
            whole = wide.clone()
            rope(whole[:, :7], 4, cosine, sine, norms)
            results.append(whole.double())
        found, expected = results
        errors.append((found - expected).norm(dim=2) / expected.norm(dim=2))
    # Not Python's max(), which would drop NaN.
    return float(torch.cat(errors).max())


TRUSTED: CheckedKernels[tuple[int, torch.dtype], RopeKernel] = CheckedKernels(
    "rope", RopeKernel, _disagreement, _WORST_ERROR
)
