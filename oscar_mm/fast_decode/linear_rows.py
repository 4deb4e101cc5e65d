"""linear for 3 to 24 rows, by matrix units.

The host side of csrc/linear/linear_rows.cu, which reads the weights once at the speed of memory,
and of csrc/linear/rms_norm.cu, which normalizes the rows in front of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from oscar_mm.fast_decode import linear_params
from oscar_mm.fast_decode.linear_torch import WORST_ERROR, Norm, disagreement
from oscar_mm.kernels.launch import (
    ELEMENTS,
    current_stream,
    load_kernel,
    multiprocessors,
    shared_limit,
)
from oscar_mm.kernels.self_check import CheckedKernels

MOST_ROWS = 24
"""With 32, cuBLAS is as fast on an H200; with 16, a fifth slower, with 8, a third."""
_FRAGMENT = 8
"""Columns of a matrix product, and half its rows."""
MOST_DEPTH = 16
WIDEST_NORM = 16384
NORM_THREADS = 512
_FLOAT = 4


class Params(ctypes.Structure):
    """``Params`` of csrc/linear/linear_rows.cu, field for field."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("matrices", linear_params.Matrices),
        *((name, ctypes.c_int) for name in ("rows", "step", "depth")),
    )


class NormParams(ctypes.Structure):
    """``Params`` of csrc/linear/rms_norm.cu, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "output")),
        ("width", ctypes.c_int),
        ("epsilon", ctypes.c_float),
    )


@dataclass(frozen=True)
class Specialization:
    """What the kernel is compiled for."""

    columns: int
    """Rows of x, rounded up to whole fragments."""
    gated: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, rows: int, gated: bool, dtype: torch.dtype) -> Specialization:
        """That for so many rows of x."""
        return cls(-(-rows // _FRAGMENT) * _FRAGMENT, gated, dtype)


class Launch(NamedTuple):
    """How a problem is cut up.

    Attributes:
        step: outputs of a sweep.
        depth: stages in shared memory.
        shared_bytes: of a thread block.
    """

    step: int
    depth: int
    shared_bytes: int


@dataclass(frozen=True)
class Tiling:
    """Sizes of a thread block and its stages; names as in csrc/linear/linear_rows.cu."""

    consumers: int = 8
    producers: int = 4
    tile: int = 16
    sweep: int = 64
    span: int = 512

    def macros(self, specialization: Specialization) -> dict[str, str | int]:
        """Macros that csrc/linear/linear_rows.cu is compiled with."""
        return {
            "COLUMNS": specialization.columns,
            "GATED": int(specialization.gated),
            "ELEMENT": ELEMENTS[specialization.dtype],
            "CONSUMERS": self.consumers,
            "PRODUCERS": self.producers,
            "TILE": self.tile,
            "SWEEP": self.sweep,
            "SPAN": self.span,
            "USE_TMA": 1,
        }

    def launch(self, specialization: Specialization, outputs: int, limit: int) -> Launch:
        """Cut up the outputs of a thread block.

        Args:
            specialization: of the kernel.
            outputs: of the thread block that has most.
            limit: bytes of shared memory that a thread block may have.

        Returns:
            With a depth below 2 where the shared memory is too small.
        """
        sides = 2 if specialization.gated else 1
        sweeps = -(-outputs * sides // self.sweep)
        step = -(-outputs // sweeps)
        weight_rows = -(-step // _FRAGMENT) * 2 * _FRAGMENT if specialization.gated else step
        weight_rows = -(-weight_rows // self.tile) * self.tile
        stage = (weight_rows + specialization.columns) * (self.span * 2 + 16)
        partials = self.consumers * specialization.columns * (self.tile + 4) * _FLOAT
        depth = min(MOST_DEPTH, (limit - partials) // stage)
        return Launch(step, depth, partials + depth * stage)


def tiling_for(shared_bytes: int) -> Tiling:
    """Where a thread block may have so many bytes of shared memory."""
    return Tiling() if shared_bytes >= 200 << 10 else Tiling(sweep=32, span=256)


class LinearRowsKernel:
    """The kernel of one specialization on one device, with that of the norm, compiled when made.

    Attributes:
        key: of their code.
    """

    def __init__(self, specialization: Specialization, device: torch.device) -> None:
        self.specialization = specialization
        self.tiling = tiling_for(shared_limit(device))
        macros = self.tiling.macros(specialization)
        self._kernel = load_kernel("linear/linear_rows.cu", macros, device)
        self._norm = load_kernel("linear/rms_norm.cu", {"ELEMENT": macros["ELEMENT"]}, device)
        self.key, self._blocks = self._kernel.key + self._norm.key, multiprocessors(device)

    def takes(self, width: int, norm: bool) -> bool:
        """Whether rows may have so many elements."""
        fits = self._launch(self.tiling.sweep * self._blocks).depth >= 2
        return fits and width % 32 == 0 and not (norm and width > WIDEST_NORM)

    def __call__(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        norm: Norm | None,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        """As ``linear``; with a gate no bias is added."""
        stream = current_stream(x.device)
        if norm is not None:
            x = self._normalized(x, norm, stream)
        total = linear_params.total_outputs(weights, self.specialization.gated)
        output = x.new_empty(len(x), total)
        step, depth, shared_bytes = self._launch(total)
        params = Params(
            x.data_ptr(),
            linear_params.matrices(weights, biases, residual, output),
            *(len(x), step, depth),
        )
        block = (self.tiling.consumers + self.tiling.producers) * 32
        self._kernel.launch(
            (self._blocks, 1, 1), (block, 1, 1), shared_bytes, params, stream, dependent=True
        )
        return output

    def _launch(self, total: int) -> Launch:
        outputs = -(-total // self._blocks)
        return self.tiling.launch(self.specialization, outputs, self._kernel.shared_limit)

    def _normalized(self, x: torch.Tensor, norm: Norm, stream: int) -> torch.Tensor:
        output = torch.empty_like(x)
        addresses = x.data_ptr(), norm.weight.data_ptr(), output.data_ptr()
        params = NormParams(*addresses, x.shape[1], norm.epsilon)
        self._norm.launch((len(x), 1, 1), (NORM_THREADS, 1, 1), 0, params, stream, dependent=True)
        return output


def _disagreement(
    specialization: Specialization, kernel: LinearRowsKernel, device: torch.device
) -> float:
    """Over whole and part fragments, one sweep and two, a part of a stage and many stages."""
    columns, gated = specialization.columns, specialization.gated
    many = kernel.tiling.sweep * multiprocessors(device) // 2 + 700
    problems = (
        (columns - 3, 256, (5, 5)),
        (columns, 4096 + 32, (3000, 3000) if gated else (3000, 7, 31)),
        (columns - 1, 256, (many, many)),
    )
    return disagreement(kernel, gated, specialization.dtype, device, problems)


TRUSTED: CheckedKernels[Specialization, LinearRowsKernel] = CheckedKernels(
    "linear_rows", LinearRowsKernel, _disagreement, WORST_ERROR
)
