"""The kernel of ``linear`` for one or two rows and quantized weights, csrc/linear/linear_few.cu.

The warps of a thread block divide the width among them. TMA copies boxes of weights, which each
warp multiplies on matrix units by its part of x, in registers. FP8 weights are multiplied as
halves, INT4 weights as integers, to which the thread block first converts x.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from oscar_mm.fast_decode.linear_params import (
    MAX_MATRICES,
    WORST_ERROR,
    Matrices,
    WeightFormat,
    worst_error,
)
from oscar_mm.fast_decode.linear_torch import LinearArguments, in_rows
from oscar_mm.kernels.compile import KernelError
from oscar_mm.kernels.launch import (
    addresses,
    current_stream,
    ints,
    multiprocessors,
    pointers,
    shared_limit,
    uses_tma,
)
from oscar_mm.kernels.macros import Macros, macros_of
from oscar_mm.kernels.self_check import OperationKernel
from oscar_mm.kernels.tensor_map import TensorMap, tensor_map

MAX_FEW_ROWS = 2
"""Maximum rows of x."""
BOX_ROW = 256
"""Bytes of a row of a box of weights."""
MAX_DEPTH = 16
"""Maximum boxes of a warp in flight."""
GRAIN = 16
"""Rows of a box of weights."""
_RESERVED = 3072
"""Bytes of shared memory of a thread block besides boxes, sums and x: barriers, squares, and the
system's."""


class FewParams(ctypes.Structure):
    """Mirror of ``Params`` in csrc/linear/linear_few.cu, field for field."""

    _fields_ = (
        ("weights", TensorMap * MAX_MATRICES),
        ("matrices", Matrices),
        *pointers("x", "norm"),
        *ints("grains", "depth", "columns"),
        ("epsilon", ctypes.c_float),
        ("unused", ctypes.c_int * 8),
    )


def most_warps_for(shared_bytes: int) -> int:
    """Return the maximum warps of a thread block, given its maximum shared memory.

    There is one thread block on a multiprocessor. With two of 8 warps, chains of INT4 products take
    less time, but decode steps take more (docs/attempts.md).
    """
    return 16 if shared_bytes >= 200 << 10 else 8  # More warps would have too few boxes each.


class FewLaunch(NamedTuple):
    """Partition of a problem among thread blocks and warps.

    Attributes:
        blocks: number of thread blocks.
        columns: number of warps that divide the width among them.
        teams: number of such groups of warps in a thread block, which divide its boxes.
        depth: boxes of a warp in flight.
        shared_bytes: bytes of shared memory per thread block.
    """

    blocks: int
    columns: int
    teams: int
    depth: int
    shared_bytes: int


class FewSpecialization(NamedTuple):
    """Compile-time parameters of ``linear_few``."""

    rows: int
    gated: bool
    dtype: torch.dtype
    weights: WeightFormat

    def macros(self, most_warps: int) -> Macros:
        """Return the macros for csrc/linear/linear_few.cu."""
        return macros_of(self, GRAIN=GRAIN, USE_TMA=1, MOST_WARPS=most_warps)

    @property
    def span(self) -> int:
        """Columns of a box."""
        return BOX_ROW * 8 // self.weights.weight_bits

    @property
    def stage_bytes(self) -> int:
        """Bytes of a box, its scales and zero points."""
        bits, wide, group = self.weights
        # With INT4, each scale has a zero point of one byte.
        each = (5 if wide else 3) if bits == 4 else 4
        return -(-GRAIN * (BOX_ROW + self.span // group * each) // 128) * 128

    def x_bytes(self, width: int) -> int:
        """Return the bytes of x in shared memory, ``RowsOfX::bytes``: with INT4, three digits for
        each element and a ``GroupOfX`` of 16 bytes for each group."""
        bits, _, group = self.weights
        return self.rows * (3 * width + width // group * 16) if bits == 4 else 0

    def launch(
        self, grains: int, width: int, blocks: int, most_warps: int, limit: int
    ) -> FewLaunch:
        """Partition a problem.

        Args:
            grains: grains of all matrices; with a gate, of one.
            width: columns of the weights.
            blocks: maximum number of thread blocks.
            most_warps: maximum warps of a thread block.
            limit: bytes of shared memory of a thread block for boxes, sums and x.

        Returns:
            The partition; its depth is below 2 if the shared memory is too small.
        """
        spans = width // self.span
        columns = -(-spans // -(-spans // most_warps))
        boxes = -(-grains // blocks) * (2 if self.gated else 1)
        teams = min(most_warps // columns, boxes)
        rest = boxes * (columns * GRAIN * self.rows * 4 + 8) + self.x_bytes(width)
        stage = columns * teams * self.stage_bytes
        depth = min(MAX_DEPTH, max(limit - rest, 0) // stage)
        if depth < 2 and most_warps > 4:  # There is room for boxes of fewer warps.
            return self.launch(grains, width, blocks, most_warps // 2, limit)
        return FewLaunch(min(blocks, grains), columns, teams, depth, depth * stage + rest)


class LinearFewKernel(
    OperationKernel[FewSpecialization], operation="linear_few", bound=WORST_ERROR
):
    """CUDA kernel for up to ``MAX_FEW_ROWS`` rows and quantized weights."""

    def __init__(self, specialization: FewSpecialization, device: torch.device) -> None:
        super().__init__(specialization, device)
        if not uses_tma(device):
            raise KernelError(f"linear_few needs TMA, which {device} lacks")
        limit = shared_limit(device)
        self._blocks, self._most_warps = multiprocessors(device), most_warps_for(limit)
        macros = specialization.macros(self._most_warps)
        self._kernel = self._load("linear/linear_few.cu", macros)
        self._limit = limit - _RESERVED

    def takes(self, arguments: LinearArguments) -> bool:
        """Return whether the kernel supports the width and the groups of the weights, its copies of
        scales are aligned, and the sums of all outputs fit in shared memory."""
        width, made = arguments.x.shape[1], self.specialization
        scales, zeros = arguments.scales, arguments.zeros
        return (
            width % made.span == 0
            and (not zeros or scales[0].shape[1] == width // made.weights.group_columns)
            and in_rows(*scales, *zeros)
            and self._cut(arguments).depth >= 2
        )

    def _cut(self, arguments: LinearArguments) -> FewLaunch:
        made, grains = self.specialization, _grains(arguments)
        width = arguments.x.shape[1]
        return made.launch(grains, width, self._blocks, self._most_warps, self._limit)

    def __call__(self, arguments: LinearArguments) -> torch.Tensor:
        """Launch the kernel; no bias is added if the product is gated."""
        x, output, cut = arguments.x, arguments.result(), self._cut(arguments)
        maps = [tensor_map(weight, GRAIN, BOX_ROW, False) for weight in arguments.weights]
        params = FewParams(
            (TensorMap * MAX_MATRICES)(*maps),
            Matrices.of(arguments, output),
            *addresses(x, arguments.norm),
            *(_grains(arguments), cut.depth, cut.columns, arguments.epsilon),
        )
        grid, block = (cut.blocks, 1, 1), (cut.columns * cut.teams * 32, 1, 1)
        stream = current_stream(x.device)
        self._kernel.launch(grid, block, cut.shared_bytes, params, stream, dependent=True)
        return output

    @staticmethod
    def disagreement(
        specialization: FewSpecialization, kernel: LinearFewKernel, device: torch.device
    ) -> float:
        """Return the worst error over full and partial grains, one and several boxes of a warp, and
        one and several spans."""
        rows, gated, dtype, weights = specialization
        many = multiprocessors(device) * 40
        problems = (
            (rows, 512, (5, 5)),
            (rows, 4096 + 512, (3000, 3000) if gated else (3000, 7, 31, 5)),
            (rows, 1024, (many, many)),
        )
        return worst_error(kernel, gated, dtype, device, problems, weights, whole_rows=False)


def _grains(arguments: LinearArguments) -> int:
    weights = arguments.weights[:1] if arguments.gated else arguments.weights
    return sum(-(-len(weight) // GRAIN) for weight in weights)
