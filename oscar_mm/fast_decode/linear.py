"""Linear: multiply a few rows by weight matrices, fused with the surrounding operations of a
decoder layer.

y = [norm(x) W0^T + b0, norm(x) W1^T + b1, ...] + residual, or silu(norm(x) W0^T) * norm(x) W1^T

There is a kernel for a few rows, csrc/linear/linear.cu (for one or two with quantized weights,
linear_few.cu), and one for more, linear_rows.cu; on Hopper GPUs, linear_cluster.cu takes the place
of linear_rows.cu for up to 128 rows. Before these two, rms_norm.cu computes the norm. All read the
weights once, and begin before the preceding kernel has ended.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from oscar_mm.fast_decode.centered_norm import CenteredNorm
from oscar_mm.fast_decode.linear_cluster import (
    MAX_CLUSTER_ROWS,
    ClusterSpecialization,
    LinearClusterKernel,
    takes_in_cluster,
)
from oscar_mm.fast_decode.linear_few import MAX_FEW_ROWS, FewSpecialization, LinearFewKernel
from oscar_mm.fast_decode.linear_params import (
    LARGEST_GROUP,
    MAX_MATRICES,
    NORM_SOURCE,
    UNQUANTIZED,
    WIDEST_NORM,
    WORST_ERROR,
    Matrices,
    WeightFormat,
    group_shift,
    norm_macros,
    normalized,
    worst_error,
)
from oscar_mm.fast_decode.linear_torch import (
    LinearArguments,
    Norm,
    in_rows,
    linear_by_torch,
    linear_on_gpu,
)
from oscar_mm.fast_decode.scaled_products import ScaledProducts
from oscar_mm.kernels.launch import (
    ELEMENTS,
    addresses,
    current_stream,
    exclusive_shared_bytes,
    ints,
    multiprocessors,
    pointers,
    shared_limit,
    uses_tma,
    uses_wgmma,
)
from oscar_mm.kernels.macros import Macros, macros_of
from oscar_mm.kernels.self_check import OperationKernel
from oscar_mm.ops.library import STATES, ArgumentChecker, define
from oscar_mm.weights import fp8, int4
from oscar_mm.weights.matrix import QuantizedMatrix

FEW_ROWS = 2
"""Number of rows up to which the kernel for a few rows is fastest; with four rows, the kernel on
matrix units takes 17% less time (H200)."""
MAX_ROWS = 4
"""Maximum number of rows for the kernel for a few rows."""
AT_ONCE = 256
WARPS, PIECE_BYTES = 16, 2048
"""Warps per thread block, and bytes per piece of weights."""
MAX_COLUMNS = 24
"""Maximum rows of x for the kernel for more rows. On an H200, cuBLAS is as fast with 32 rows, a
fifth slower with 16 and a third slower with 8; ``linear_cluster`` is 6% faster with 4 rows and a
quarter with 24."""
_MAX_LAUNCHES = 4
"""Maximum number of launches that share the rows of a product with quantized weights. They move
fewer bytes than dequantizing does: 1 for each weight and launch, instead of 5 for each weight."""
_FRAGMENT = 8
"""Number of columns in a matrix unit's product, and half its number of rows."""
MAX_DEPTH = 16
_FLOAT = 4
_checker = ArgumentChecker("linear")


def linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] = (),
    *,
    norm: Norm | CenteredNorm | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    scales: Sequence[torch.Tensor] = (),
    zeros: Sequence[torch.Tensor] = (),
    in_place: bool = False,
) -> torch.Tensor:
    """Multiply rows by one to four matrices: the operation ``linear`` without its checks.

    Args:
        x, weights, biases, norm, residual, gated, scales, zeros: see ``LinearArguments``; no biases
            if empty.
        in_place: see ``linear_of``.

    Returns:
        (rows, total outputs); (rows, outputs of one matrix) if gated.
    """
    around = norm, residual, gated, scales, zeros
    centered = isinstance(norm, CenteredNorm)
    arguments = LinearArguments.of(x, weights, biases, *around, centered=centered)
    return linear_of(arguments, in_place=in_place)


def kernel_for(
    arguments: LinearArguments,
) -> LinearKernel | LinearFewKernel | LinearRowsKernel | LinearClusterKernel | None:
    """Return the kernel to use; None if PyTorch operations must be used."""
    x = arguments.x
    if not x.is_cuda or x.dtype not in ELEMENTS or x.shape[1] % AT_ONCE:
        return None
    if arguments.scales and not _has_kernel_format(arguments):
        return None
    # Gated kernels do not support biases.
    if arguments.gated and any(bias is not None for bias in arguments.biases):
        return None
    for kernel in _kernels(arguments):
        if kernel is not None and kernel.takes(arguments) and in_rows(x, *arguments.weights):
            return kernel
    return None


def _has_kernel_format(arguments: LinearArguments) -> bool:
    """Return whether the kernels support the scales, zero points and codes of the weights."""
    x, weights, scales = arguments.x, arguments.weights, arguments.scales
    if not arguments.zeros:
        exact = all(one.dtype == torch.float32 for one in scales)
        return exact and all(codes.dtype == fp8.CODES for codes in weights)
    dtypes, groups = {one.dtype for one in scales}, {one.shape[1] for one in scales}
    return (
        dtypes in ({x.dtype}, {torch.float32})
        and len(groups) == 1
        and group_shift(x.shape[1], *groups) is not None
    )


def _kernels(
    arguments: LinearArguments,
) -> Iterator[LinearKernel | LinearFewKernel | LinearRowsKernel | LinearClusterKernel | None]:
    """Yield candidate kernels, fastest first."""
    x, gated, bits = arguments.x, arguments.gated, arguments.weight_bits
    rows, dtype, device = len(x), x.dtype, x.device
    if arguments.centered:  # The other kernels would need a launch for the norm.
        if rows <= FEW_ROWS and bits == 16:
            yield LinearKernel.of(Specialization(rows, gated, dtype, centered=True), device)
        return
    weights = WeightFormat.of(arguments)
    if bits != 16 and rows <= MAX_FEW_ROWS and uses_tma(device):
        yield LinearFewKernel.of(FewSpecialization(rows, gated, dtype, weights), device)
    few = FEW_ROWS if bits == 16 else _FRAGMENT  # Quantized: ``_FEW_ROW_TILINGS``.
    if few < rows and takes_in_cluster(rows, weights) and uses_wgmma(device):
        wide = ClusterSpecialization.of(rows, gated, dtype, weights)
        yield LinearClusterKernel.of(wide, device)
    if (rows > FEW_ROWS or bits != 16) and rows <= MAX_COLUMNS and uses_tma(device):
        yield LinearRowsKernel.of(RowsSpecialization.of(rows, gated, dtype, weights), device)
    if rows <= MAX_ROWS and bits != 4:
        yield LinearKernel.of(Specialization(rows, gated, dtype, bits), device)


class Params(ctypes.Structure):
    """Mirror of ``Params`` in csrc/linear/linear.cu, field for field."""

    _fields_ = (*pointers("x", "norm"), ("matrices", Matrices), ("epsilon", ctypes.c_float))


class Specialization(NamedTuple):
    """Compile-time parameters of the kernel for a few rows."""

    rows: int
    gated: bool
    dtype: torch.dtype
    weight_bits: int = 16
    """16, or 8 for FP8."""
    centered: bool = False
    """See ``LinearArguments``."""

    @property
    def piece(self) -> int:
        """Elements per piece of weights."""
        return PIECE_BYTES * 8 // self.weight_bits

    def macros(self, depth: int, tma: bool) -> Macros:
        """Return the macros for csrc/linear/linear.cu."""
        return macros_of(self, WARPS=WARPS, DEPTH=depth, PIECE=self.piece, USE_TMA=tma)


def depth_for(shared_bytes: int) -> int:
    """Return the number of pieces in flight per warp, given the maximum shared memory per thread
    block.

    Three pieces (96 KiB per thread block) saturate an H200's memory bandwidth. Loads arrive in
    order, so more pieces would only delay later loads.
    """
    return 3 if shared_bytes >= 200 << 10 else 2


class LinearKernel(OperationKernel[Specialization], operation="linear", bound=WORST_ERROR):
    """CUDA kernel for up to ``MAX_ROWS`` rows."""

    def __init__(self, specialization: Specialization, device: torch.device) -> None:
        super().__init__(specialization, device)
        self._depth = depth_for(shared_limit(device))
        macros = specialization.macros(self._depth, uses_tma(device))
        self._kernel = self._load("linear/linear.cu", macros)
        self._blocks, self._min_shared = multiprocessors(device), exclusive_shared_bytes(device)

    def takes(self, arguments: LinearArguments) -> bool:
        """Return whether x fits in the kernel's shared memory."""
        width, norm = arguments.x.shape[1], arguments.norm is not None
        return self._shared_bytes(width, norm) <= self._kernel.shared_limit

    def _shared_bytes(self, width: int, norm: bool) -> int:
        pieces = WARPS * self._depth * PIECE_BYTES
        needed = pieces + 2 * (self.specialization.rows + norm) * width
        return max(needed, self._min_shared)

    def __call__(self, arguments: LinearArguments) -> torch.Tensor:
        """Launch the kernel."""
        x, norm, output = arguments.x, arguments.norm, arguments.result()
        matrices = Matrices.of(arguments, output)
        self._kernel.launch(
            (self._blocks, 1, 1),
            (WARPS * 32, 1, 1),
            self._shared_bytes(x.shape[1], norm is not None),
            Params(*addresses(x, norm), matrices, arguments.epsilon),
            current_stream(x.device),
            dependent=True,
        )
        return output

    @staticmethod
    def disagreement(
        specialization: Specialization,
        kernel: Callable[[Any], torch.Tensor],
        device: torch.device,
    ) -> float:
        """Return the largest relative error of a row."""
        rows, gated, dtype, bits, centered = specialization
        many = (3000, 3000) if gated else (3000, 7, 31, 5)
        problems = (rows, 256, (5, 5)), (rows, specialization.piece + 768, many)
        form = WeightFormat(bits)
        return worst_error(kernel, gated, dtype, device, problems, form, centered)


class RowsParams(ctypes.Structure):
    """Mirror of ``Params`` in csrc/linear/linear_rows.cu, field for field."""

    _fields_ = (
        *pointers("x"),
        ("matrices", Matrices),
        *pointers("groups", "count", "rows_of"),
        *ints("rows", "step", "depth"),
    )


class RowsSpecialization(NamedTuple):
    """Compile-time parameters of ``linear_rows``, the kernel for more rows."""

    columns: int
    """Number of rows of x, rounded up to whole fragments."""
    gated: bool
    dtype: torch.dtype
    grouped: bool = False
    """Whether each group of rows has its own matrices; ``columns`` is then the size of a group."""
    weights: WeightFormat = UNQUANTIZED

    @classmethod
    def of(
        cls,
        rows: int,
        gated: bool,
        dtype: torch.dtype,
        weights: WeightFormat = UNQUANTIZED,
    ) -> RowsSpecialization:
        """Return the specialization for this number of rows of x."""
        return cls(-(-rows // _FRAGMENT) * _FRAGMENT, gated, dtype, False, weights)

    @property
    def unit(self) -> int:
        """Elements that a warp multiplies at a time."""
        bits, _, group = self.weights
        return 32 if bits == 16 else max(group, 64)

    def stage_bytes(self, weight_rows: int, span: int) -> int:
        """Return the size of a stage in shared memory, whose rows are padded as in
        csrc/linear/linear_rows.cu.

        Args:
            weight_rows: number of rows of weights.
            span: elements of each row.
        """
        bits = self.weights.weight_bits
        weights, x = span * bits // 8 + 16, span * 2 + 256 // bits
        return weight_rows * weights + self.columns * x


class Launch(NamedTuple):
    """How a problem is partitioned.

    Attributes:
        step: number of outputs per sweep.
        depth: number of stages in shared memory.
        shared_bytes: shared memory per thread block.
    """

    step: int
    depth: int
    shared_bytes: int


class Tiling(NamedTuple):
    """Sizes of a thread block and its stages; same names as in csrc/linear/linear_rows.cu."""

    consumers: int = 8
    producers: int = 4
    tile: int = 16
    sweep: int = 64
    span: int = 512

    def macros(self, specialization: RowsSpecialization) -> Macros:
        """Return the macros for csrc/linear/linear_rows.cu."""
        return macros_of(specialization) | macros_of(self, USE_TMA=1)

    @property
    def threads(self) -> int:
        """Threads per block."""
        return (self.consumers + self.producers) * 32

    def outputs(self, gated: bool) -> int:
        """Return the maximum number of outputs per sweep."""
        return self.sweep // (2 if gated else 1)

    def launch(self, specialization: RowsSpecialization, outputs: int, limit: int) -> Launch:
        """Partition the outputs of a thread block.

        Args:
            specialization: specialization of the kernel.
            outputs: maximum number of outputs per thread block.
            limit: maximum shared memory per thread block, in bytes.

        Returns:
            The partition; its depth is below 2 if the shared memory is too small.
        """
        sides = 2 if specialization.gated else 1
        sweeps = -(-outputs * sides // self.sweep)
        step = -(-outputs // sweeps)
        weight_rows = -(-step // _FRAGMENT) * 2 * _FRAGMENT if specialization.gated else step
        weight_rows = -(-weight_rows // 16) * 16
        stage = specialization.stage_bytes(weight_rows, self.span)
        partials = self.consumers * specialization.columns * (self.tile + 4) * _FLOAT
        depth = min(MAX_DEPTH, (limit - partials) // stage)
        return Launch(step, depth, partials + depth * stage)


_FEW_ROW_TILINGS = {8: Tiling(12, 4, 64, 64, 1024), 4: Tiling(8, 4, 64, 64, 2048)}
"""The fastest tilings for up to 8 rows, by bits of a weight. With 8 rows, ``linear_cluster`` takes
a third longer; with 16 rows it is as fast in FP8, and takes a tenth less time in INT4 (H200)."""


def tiling_for(shared_bytes: int, specialization: RowsSpecialization | None = None) -> Tiling:
    """Return the tiling.

    Args:
        shared_bytes: maximum shared memory per thread block.
        specialization: specialization of the kernel; None for weights of 16 bits or of experts.
    """
    large = shared_bytes >= 200 << 10
    tiling = Tiling() if large else Tiling(sweep=32, span=256)
    if specialization is None or specialization.weights.weight_bits == 16:
        return tiling
    bits, columns = specialization.weights.weight_bits, specialization.columns
    if large and columns == _FRAGMENT:
        return _FEW_ROW_TILINGS[bits]
    # A warp converts x for all rows of its tile, which with more columns take too many registers.
    tile = 32 if columns < MAX_COLUMNS else 16
    return tiling._replace(tile=tile, span=tiling.span * 8 // bits)


class LinearRowsKernel(
    OperationKernel[RowsSpecialization], operation="linear_rows", bound=WORST_ERROR
):
    """CUDA kernel for 3 to ``MAX_COLUMNS`` rows on matrix units, and the kernel for the norm."""

    def __init__(self, specialization: RowsSpecialization, device: torch.device) -> None:
        super().__init__(specialization, device)
        self.tiling = tiling_for(shared_limit(device), specialization)
        macros = self.tiling.macros(specialization)
        self._kernel = self._load("linear/linear_rows.cu", macros)
        self._norm = self._load(NORM_SOURCE, norm_macros(specialization.dtype))
        self._blocks = multiprocessors(device)

    def takes(self, arguments: LinearArguments) -> bool:
        """Return whether the kernel supports the width of x."""
        width, norm = arguments.x.shape[1], arguments.norm is not None
        fits = self._cut(self.tiling.sweep * self._blocks).depth >= 2
        unit = 32 if self.specialization.weights.weight_bits == 16 else LARGEST_GROUP
        return fits and width % unit == 0 and not (norm and width > WIDEST_NORM)

    def __call__(self, arguments: LinearArguments) -> torch.Tensor:
        """Launch the kernels; no bias is added if the product is gated."""
        x, stream, output = arguments.x, current_stream(arguments.x.device), arguments.result()
        if arguments.norm is not None:
            x = normalized(self._norm, x, arguments.norm, arguments.epsilon, stream)
        step, depth, shared_bytes = self._cut(output.shape[1])
        params = RowsParams(
            *addresses(x),
            Matrices.of(arguments, output),
            *(None, None, None, len(x), step, depth),
        )
        grid, block = (self._blocks, 1, 1), (self.tiling.threads, 1, 1)
        self._kernel.launch(grid, block, shared_bytes, params, stream, dependent=True)
        return output

    def _cut(self, total: int) -> Launch:
        outputs = -(-total // self._blocks)
        return self.tiling.launch(self.specialization, outputs, self._kernel.shared_limit)

    @staticmethod
    def disagreement(
        specialization: RowsSpecialization, kernel: LinearRowsKernel, device: torch.device
    ) -> float:
        """Return the worst error over full and partial fragments, one and two sweeps, and one
        partial and many stages."""
        columns, gated, dtype, _, weights = specialization
        many = kernel.tiling.sweep * multiprocessors(device) // 2 + 700
        more = 64 if weights.weight_bits == 16 else LARGEST_GROUP
        problems = (
            (columns - 3, 256, (5, 5)),
            (columns, 4096 + more, (3000, 3000) if gated else (3000, 7, 31, 5)),
            (columns - 1, 256, (many, many)),
        )
        return worst_error(kernel, gated, dtype, device, problems, weights)


def _rows_at_once(arguments: LinearArguments) -> int:
    """Return the maximum number of rows that a kernel takes with quantized weights."""
    weights = WeightFormat.of(arguments)
    if uses_wgmma(arguments.x.device) and takes_in_cluster(1, weights):
        return MAX_CLUSTER_ROWS[weights.weight_bits]
    return MAX_COLUMNS


def linear_of(arguments: LinearArguments, *, in_place: bool = False) -> torch.Tensor:
    """Multiply rows by matrices; the caller has checked the arguments.

    Args:
        in_place: whether the result may overwrite the residual, which nothing else may need then.
            The sum is the same, and with many rows a GPU need not copy the residual first.
    """
    kernel = kernel_for(arguments)
    if kernel is not None:
        return kernel(arguments)
    if arguments.norm is not None and arguments.centered:
        x = CenteredNorm(arguments.norm, arguments.epsilon).at_once(arguments.x)
        return linear_of(arguments._replace(x=x, norm=None, centered=False), in_place=in_place)
    many = len(arguments.x) > MAX_CLUSTER_ROWS[8]
    scaled = ScaledProducts.of(arguments) if many else None
    if scaled is None and arguments.scales and arguments.x.is_cuda:
        at_once = _rows_at_once(arguments)
        parts = arguments.split(at_once) if len(arguments.x) <= _MAX_LAUNCHES * at_once else []
        if len(parts) > 1 and kernel_for(parts[0]) is not None:
            return torch.cat(list(map(linear_of, parts)))
    if arguments.norm is not None:
        x = Norm(arguments.norm, arguments.epsilon).at_once(arguments.x)
        arguments = arguments._replace(x=x, norm=None)
    if scaled is not None:
        return scaled(arguments)
    multiply = linear_on_gpu if arguments.x.is_cuda else linear_by_torch
    return multiply(arguments, in_place=in_place)


def _check(arguments: LinearArguments) -> None:
    x, weights, biases, norm, _, residual, gated, *_ = arguments
    check, device = _checker.check, x.device
    check("x", x, ("rows", "width"), STATES, device)
    rows, width = x.shape
    if gated and len(weights) != 2:
        _checker.refuse("weights", f"{len(weights)} matrices", "2 with a gate")
    if not 1 <= len(weights) <= MAX_MATRICES or len(biases) != len(weights):
        found = f"{len(weights)} matrices with {len(biases)} biases"
        _checker.refuse("weights", found, f"1 to {MAX_MATRICES}, with as many biases")
    stored, columns = _check_formats(arguments)
    for weight, bias in zip(weights, biases, strict=True):
        check("weights", weight, ("outputs", columns), stored, device)
        if bias is not None:
            check("biases", bias, weight.shape[:1], x.dtype, device)
    if norm is not None:
        check("norm", norm, (width,), x.dtype, device)
    if residual is not None:
        check("residual", residual, (rows, arguments.total), x.dtype, device)


def _check_formats(arguments: LinearArguments) -> tuple[torch.dtype, int]:
    """Check scales and zero points; return the dtype and the columns that weights must have."""
    x, weights, scales, zeros = arguments.x, arguments.weights, arguments.scales, arguments.zeros
    if not scales:
        if zeros:
            _checker.refuse("zeros", f"{len(zeros)} tensors without scales", "given with scales")
        return x.dtype, x.shape[1]
    for name, tensors in (("scales", scales), ("zeros", zeros)):
        if len(tensors) != len(weights) and (name == "scales" or tensors):
            found = f"{len(tensors)} for {len(weights)} matrices"
            _checker.refuse(name, found, "one for each")
    for at, codes in enumerate(weights):
        matrix = QuantizedMatrix(codes, scales[at], zeros[at] if zeros else None)
        matrix.check()
        dtypes = STATES if zeros else torch.float32
        shape = tuple(matrix.scales.shape)
        _checker.check("scales", matrix.scales, shape, dtypes, x.device)
        if matrix.zeros is not None:
            _checker.check("zeros", matrix.zeros, shape, torch.uint8, x.device)
    return (int4.CODES, x.shape[1] // 8) if zeros else (fp8.CODES, x.shape[1])


linear_operation = define("linear", LinearArguments, _check, linear_of, "Tensor")
