"""The matrices of a launch of linear, and where their products go."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

MOST_PARTS = 3
"""Matrices of a launch."""
_ADDRESSES = ctypes.c_void_p * MOST_PARTS
_SIZES = ctypes.c_int * MOST_PARTS


class Matrices(ctypes.Structure):
    """``Matrices`` of csrc/linear/matrices.cuh, field for field."""

    _fields_ = (
        *((name, _ADDRESSES) for name in ("weights", "biases")),
        *((name, ctypes.c_void_p) for name in ("residual", "output")),
        ("outputs", _SIZES),
        *((name, ctypes.c_int) for name in ("total", "width")),
    )


def total_outputs(weights: Sequence[torch.Tensor], gated: bool) -> int:
    """Elements of a row of the result."""
    return weights[0].shape[0] if gated else sum(one.shape[0] for one in weights)


def matrices(
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    residual: torch.Tensor | None,
    output: torch.Tensor,
) -> Matrices:
    """Matrices of a launch. All tensors must outlive it."""
    return Matrices(
        _ADDRESSES(*map(_address, weights)),
        _ADDRESSES(*map(_address, biases)),
        _address(residual),
        _address(output),
        _SIZES(*(one.shape[0] for one in weights)),
        *(output.shape[1], weights[0].shape[1]),
    )


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
