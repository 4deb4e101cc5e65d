"""The kernel of ``linear`` for a full batch of rows on Hopper GPUs, csrc/linear/linear_cluster.cu.

Matrix units read weights and x from shared memory (wgmma). A cluster of thread blocks computes a
run of outputs; its thread blocks divide the width among them.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from oscar_mm.fast_decode.linear_params import (
    LARGEST_GROUP,
    MAX_MATRICES,
    NORM_SOURCE,
    UNQUANTIZED,
    WIDEST_NORM,
    WORST_ERROR,
    Matrices,
    WeightFormat,
    norm_macros,
    normalized,
    worst_error,
)
from oscar_mm.fast_decode.linear_torch import LinearArguments
from oscar_mm.kernels.compile import KernelError
from oscar_mm.kernels.launch import (
    current_stream,
    ints,
    multiprocessors,
    shared_limit,
    uses_wgmma,
)
from oscar_mm.kernels.macros import Macros, macros_of
from oscar_mm.kernels.self_check import OperationKernel
from oscar_mm.kernels.tensor_map import PANEL_BYTES, TensorMap, tensor_map

_COLUMNS = (16, 32, 64, 96, 128)
"""Numbers of rows of x for which there are products; fewer rows are filled up with zeros."""
MAX_CLUSTER_ROWS = {16: _COLUMNS[-1], 8: _COLUMNS[-1], 4: 64}
"""Maximum rows of x, by bits of a weight. On an H200, cuBLAS takes 29% longer with 64 rows and 18%
with 128. INT4 has wide stages, which do not fit with more rows."""
TILE = 64
"""Rows of weights per warpgroup."""
MAX_GROUPS = 3
_BARRIER = 8


class ClusterParams(ctypes.Structure):
    """Mirror of ``Params`` in csrc/linear/linear_cluster.cu, field for field."""

    _fields_ = (
        ("x", TensorMap),
        ("weights", TensorMap * MAX_MATRICES),
        ("matrices", Matrices),
        *ints("rows", "share", "extra", "step", "depth"),
        ("unused", ctypes.c_int * 11),
    )


def takes_in_cluster(rows: int, weights: WeightFormat) -> bool:
    """Return whether the kernel takes so many rows of x and the format of the weights; scales of
    small groups take too many registers."""
    return rows <= MAX_CLUSTER_ROWS[weights.weight_bits] and weights.group_columns > 32


class ClusterSpecialization(NamedTuple):
    """Compile-time parameters of ``linear_cluster``, without those of its tiling."""

    columns: int
    """Number of rows of x, rounded up."""
    gated: bool
    dtype: torch.dtype
    weights: WeightFormat = UNQUANTIZED

    @classmethod
    def of(
        cls,
        rows: int,
        gated: bool,
        dtype: torch.dtype,
        weights: WeightFormat = UNQUANTIZED,
    ) -> ClusterSpecialization:
        """Return the specialization for this number of rows of x."""
        return cls(next(one for one in _COLUMNS if rows <= one), gated, dtype, weights)

    @property
    def sides(self) -> int:
        """Rows of weights per output."""
        return 2 if self.gated else 1

    @property
    def cluster(self) -> int:
        """Thread blocks per cluster. With a gate there are so many rows of weights that each thread
        block has enough of its own."""
        return 1 if self.gated else 2


class ClusterLaunch(NamedTuple):
    """How a problem is partitioned.

    Attributes:
        clusters: number of clusters.
        share: grains of outputs per cluster.
        extra: number of clusters with one grain more.
        step: grains per sweep.
    """

    clusters: int
    share: int
    extra: int
    step: int


class ClusterTiling(NamedTuple):
    """Sizes of a thread block and its stages; same names as in csrc/linear/linear_cluster.cu.

    A warp takes long to issue a copy, so copies are large and two warps issue them.
    """

    groups: int
    span: int
    producers: int = 2
    grain: int = 32

    @classmethod
    def of(cls, specialization: ClusterSpecialization, groups: int, limit: int) -> ClusterTiling:
        """Return the tiling for a number of warpgroups: long stages, if enough of them fit."""
        bits, _, columns = specialization.weights
        panel = PANEL_BYTES * 8 // bits
        long = cls(groups, 2 * panel)
        # The scales of a long stage of INT4 take registers.
        few = bits != 4 or (columns == LARGEST_GROUP and specialization.columns <= 32)
        return long if few and long.fits(specialization, limit) else cls(groups, panel)

    def macros(self, specialization: ClusterSpecialization) -> Macros:
        """Return the macros for csrc/linear/linear_cluster.cu."""
        return macros_of(specialization) | macros_of(
            self, CLUSTER=specialization.cluster, USE_TMA=1
        )

    @property
    def threads(self) -> int:
        """Threads per block."""
        return self.groups * 128 + self.producers * 32

    def stage_bytes(self, specialization: ClusterSpecialization) -> int:
        """Return the size of a stage."""
        weights = self.groups * TILE * specialization.weights.weight_bits
        return (weights + specialization.columns * 16) * self.span // 8

    def grants(self, specialization: ClusterSpecialization) -> int:
        """Return the number of slots that the sums of a sweep take."""
        part = TILE * specialization.columns // specialization.cluster * 4
        together = self.stage_bytes(specialization) // part
        return -(-self.groups * specialization.cluster // together)

    def depth(self, specialization: ClusterSpecialization, limit: int) -> int:
        """Return the number of stages that fit in shared memory.

        Args:
            specialization: specialization of the kernel.
            limit: maximum shared memory per thread block, in bytes.
        """
        # Two barriers for each stage, and two for the sums.
        return (limit - 2 * _BARRIER) // (self.stage_bytes(specialization) + 2 * _BARRIER)

    def shared_bytes(self, specialization: ClusterSpecialization, depth: int) -> int:
        """Return the shared memory of a thread block."""
        return depth * (self.stage_bytes(specialization) + 2 * _BARRIER) + 2 * _BARRIER

    def fits(self, specialization: ClusterSpecialization, limit: int) -> bool:
        """Return whether enough stages fit, besides those that the sums take. With quantized
        weights, long stages gain more than a third stage does."""
        depth = self.depth(specialization, limit)
        few = 3 if specialization.weights.weight_bits == 16 else 2
        return depth >= few and depth > self.grants(specialization)

    def launch(
        self, specialization: ClusterSpecialization, grains: int, clusters: int
    ) -> ClusterLaunch:
        """Partition grains among at most this number of clusters."""
        clusters = min(clusters, grains)
        share, extra = divmod(grains, clusters)
        most, room = share + (extra > 0), self.groups * TILE // (self.grain * specialization.sides)
        sweeps = -(-most // room)
        return ClusterLaunch(clusters, share, extra, -(-most // sweeps))


class LinearClusterKernel(
    OperationKernel[ClusterSpecialization], operation="linear_cluster", bound=WORST_ERROR
):
    """CUDA kernel for up to ``MAX_CLUSTER_ROWS`` rows, in a tiling for each size of a cluster's
    share of outputs, and the kernel for the norm."""

    def __init__(self, specialization: ClusterSpecialization, device: torch.device) -> None:
        super().__init__(specialization, device)
        if not uses_wgmma(device):
            raise KernelError(f"linear_cluster needs a Hopper GPU and TMA, not {device}")
        self._clusters = multiprocessors(device) // specialization.cluster
        # With a gate, all problems of decoder layers fill the largest tiling.
        sizes = [MAX_GROUPS] if specialization.gated else range(1, MAX_GROUPS + 1)
        limit = shared_limit(device)
        self.tilings = [ClusterTiling.of(specialization, groups, limit) for groups in sizes]
        self._kernels = [
            self._load("linear/linear_cluster.cu", tiling.macros(specialization))
            for tiling in self.tilings
        ]
        self._norm = self._load(NORM_SOURCE, norm_macros(specialization.dtype))

    def takes(self, arguments: LinearArguments) -> bool:
        """Return whether the kernel supports the width of x."""
        width, norm = arguments.x.shape[1], arguments.norm is not None
        return width % 16 == 0 and not (norm and width > WIDEST_NORM)

    def __call__(self, arguments: LinearArguments) -> torch.Tensor:
        """Launch the kernels; no bias is added if the product is gated."""
        x, stream, output = arguments.x, current_stream(arguments.x.device), arguments.result()
        if arguments.norm is not None:
            x = normalized(self._norm, x, arguments.norm, arguments.epsilon, stream)
        made, weights = self.specialization, arguments.weights
        outputs = [weight.shape[0] for weight in (weights[:1] if made.gated else weights)]
        # Rows of weights of a cluster, to choose the tiling that has room for them.
        each = -(-sum(outputs) * made.sides // self._clusters)
        index = min(-(-each // TILE), MAX_GROUPS) - self.tilings[0].groups
        tiling, kernel = self.tilings[max(index, 0)], self._kernels[max(index, 0)]
        grain = tiling.grain
        cut = tiling.launch(made, sum([-(-one // grain) for one in outputs]), self._clusters)
        depth = tiling.depth(made, kernel.shared_limit)
        params = ClusterParams(
            tensor_map(x, made.columns),
            (TensorMap * MAX_MATRICES)(*[tensor_map(weight, grain) for weight in weights]),
            Matrices.of(arguments, output),
            *(len(x), cut.share, cut.extra, cut.step, depth),
        )
        kernel.launch(
            (cut.clusters * made.cluster, 1, 1),
            (tiling.threads, 1, 1),
            tiling.shared_bytes(made, depth),
            params,
            stream,
            dependent=True,
        )
        return output

    @staticmethod
    def disagreement(
        specialization: ClusterSpecialization, kernel: LinearClusterKernel, device: torch.device
    ) -> float:
        """Return the worst error over all tilings, few and several sweeps, full and partial boxes,
        and rows that end in a stage."""
        columns, gated, dtype, weights = specialization
        many = multiprocessors(device) * TILE * 2
        more = LARGEST_GROUP if weights.weight_bits == 4 else 32
        problems = (
            (columns - 3, 256, (50, 50)),
            (columns, 4096 + more, (3000, 3000) if gated else (3000, 7, 31, 5)),
            (columns - 15, 1024, (9000, 9000) if gated else (5000, 1001)),
            (columns - 1, 256, (many, many)),
        )
        return worst_error(kernel, gated, dtype, device, problems, weights)
