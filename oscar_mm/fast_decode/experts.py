"""Mixture of experts for a batch of rows, each routed to its top experts.

    residual + sum over the chosen k of share_k * (silu(n Wg_k^T) * (n Wu_k^T)) Wd_k^T,  n = norm(x)

The kernels read each weight of the chosen experts once, in place. For a few rows,
csrc/experts/experts.cu runs row by row in two launches. For more, csrc/experts/route.cu groups the
rows by expert, csrc/linear/linear_rows.cu multiplies them by the experts' matrices, and
csrc/experts/combine.cu adds up the outputs of each row's experts. For a prompt
csrc/experts/prompt.cu copies the rows grouped by expert, and torch's grouped products multiply
them; quantized weights are dequantized for it, a layer at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.functional import grouped_mm

from oscar_mm.fast_decode.experts_torch import (
    Choice,
    Experts,
    MixtureArguments,
    clear_choices,
    error_of,
    experts_by_torch,
)
from oscar_mm.fast_decode.gate import gate_
from oscar_mm.fast_decode.linear import (
    AT_ONCE,
    MAX_ROWS,
    Launch,
    RowsParams,
    RowsSpecialization,
    Tiling,
    linear,
    tiling_for,
)
from oscar_mm.fast_decode.linear_params import (
    UNQUANTIZED,
    Matrices,
    WeightFormat,
    group_shift,
    scale_shift,
)
from oscar_mm.fast_decode.linear_torch import LinearArguments, in_rows
from oscar_mm.kernels.compile import KernelError
from oscar_mm.kernels.launch import (
    ELEMENTS,
    Kernel,
    addresses,
    current_stream,
    exclusive_shared_bytes,
    ints,
    multiprocessors,
    pointers,
    shared_limit,
    uses_tma,
)
from oscar_mm.kernels.macros import Macros, macros_of
from oscar_mm.kernels.self_check import OperationKernel
from oscar_mm.ops.library import STATES, ArgumentChecker, define
from oscar_mm.weights import fp8, int4
from oscar_mm.weights.fp8 import BLOCK
from oscar_mm.weights.matrix import QuantizedMatrix

_MAX_CHOSEN, _MAX_EXPERTS = 32, 512
MAX_GROUPED = 512
"""Maximum number of rows for our grouped products; more rows use the kernels for prompts."""
_MAX_PROMPT_ROWS = 1 << 16
ROUTE_THREADS, COMBINE_THREADS, PROMPT_THREADS = 1024, 256, 256
_MOST_COLUMNS = 32
"""Maximum number of rows of a group. With so many rows, a warp multiplies at most 64 elements of
INT4 weights at a time, because the elements of x take registers."""
WARPS, PIECE, BLOCK_OF_X = 16, 256, 128
"""Warps per thread block of the kernels for a few rows, columns of their pieces of weights, and
elements of x that they convert together."""
_DEPTHS = {16: 2, 8: 2, 4: 3}
"""Pieces that a warp of these kernels loads ahead, by bits of a weight."""
_RECORD_BYTES = (16 + 1) * 4
"""Shared memory of the sums of a piece."""
_checker = ArgumentChecker("mixture")


class Params(ctypes.Structure):
    """Mirror of ``Params`` in csrc/experts/experts.cu, field for field."""

    _fields_ = (
        *pointers("x", "norm", "logits", "weights", "scales", "zeros", "residual", "output"),
        *ints("shift"),
        ("epsilon", ctypes.c_float),
    )


class Specialization(NamedTuple):
    """Compile-time parameters of the two kernels for a few rows."""

    choice: Choice
    rows: int
    width: int
    between: int
    weights: WeightFormat = UNQUANTIZED
    has_norm: bool = True
    """Whether the kernels normalize the rows."""

    def macros(self, down: bool) -> Macros:
        """Return the macros for csrc/experts/experts.cu.

        Args:
            down: whether the macros are for the second kernel.
        """
        sizes = (self.between, self.width) if down else (self.width, self.between)
        more = {"ROWS": self.rows, "DOWN": down, "WIDTH": sizes[0], "OUTPUTS": sizes[1]}
        more["NORM"] = self.has_norm
        tiling = {"WARPS": WARPS, "DEPTH": _DEPTHS[self.weights.weight_bits]}
        return macros_of(self.choice, **more, **tiling) | macros_of(self.weights)

    def shared_bytes(self, down: bool, blocks: int) -> int:
        """Return the shared memory per thread block in bytes: rows of x, what their products need
        besides, and sums of pieces.

        Args:
            down: whether this is about the second kernel.
            blocks: number of thread blocks.
        """
        chosen = self.choice.chosen
        columns = chosen * self.between if down else self.width
        tiles = self.rows * (self.width // 8 if down else chosen * self.between // 4)
        weights = self.weights
        groups = BLOCK_OF_X // weights.group_columns if weights.weight_bits == 4 else 1
        of_x = self.rows * columns // BLOCK_OF_X * (2 * BLOCK_OF_X + 4 * (1 + groups))
        return of_x + -(-tiles // blocks) * columns // PIECE * _RECORD_BYTES


class ExpertKernels(OperationKernel[Specialization], operation="mixture", bound=0.02):
    """The two kernels of a mixture for a few rows."""

    def __init__(self, specialization: Specialization, device: torch.device) -> None:
        super().__init__(specialization, device)
        self._blocks = multiprocessors(device)
        self._kernels: list[tuple[Kernel, int]] = []
        for down in (False, True):
            needed = specialization.shared_bytes(down, self._blocks)
            shared = max(needed, exclusive_shared_bytes(device))
            kernel = self._load("experts/experts.cu", specialization.macros(down))
            if shared > kernel.shared_limit:
                chosen = specialization.choice.chosen
                raise KernelError(
                    f"{specialization.rows} rows of {chosen} experts take {shared} bytes of "
                    f"shared memory; {device} has {kernel.shared_limit}"
                )
            self._kernels.append((kernel, shared))

    def __call__(self, arguments: MixtureArguments) -> torch.Tensor:
        """Launch the kernels."""
        x, weight, epsilon, router, gate_and_up, down, _, _, scales, zeros, _, logits = arguments
        choice, rows, _, narrow, *_ = self.specialization
        (into, out_of), (zeros_in, zeros_out) = scales or (None, None), zeros or (None, None)
        inner, outer = map(_shift, arguments.experts.matrices) if scales else (0, 0)
        if logits is None:
            logits = linear(x, [router], norm=arguments.of_norm)
        between = x.new_empty(rows, choice.chosen, narrow)
        output = arguments.result()
        inward = Params(
            *addresses(x, weight, logits, gate_and_up, into, zeros_in, None, between),
            *(inner, epsilon),
        )
        outward = Params(
            *addresses(between, None, logits, down, out_of, zeros_out, arguments.stream, output),
            *(outer, 0.0),
        )
        stream = current_stream(x.device)
        for (kernel, shared), params in zip(self._kernels, (inward, outward), strict=True):
            grid, block = (self._blocks, 1, 1), (WARPS * 32, 1, 1)
            kernel.launch(grid, block, shared, params, stream, dependent=True)
        return output

    @staticmethod
    def disagreement(
        specialization: Specialization,
        kernel: Callable[[Any], torch.Tensor],
        device: torch.device,
    ) -> float:
        """Return the largest relative error of a row with unambiguous routing, without the residual
        stream."""
        choice, rows, width, between, weights, has_norm = specialization
        sizes = (width, between, device, weights)
        problem = clear_choices([0] * rows, choice, *sizes, has_norm=has_norm)
        return error_of(kernel, problem)


def _shift(matrix: QuantizedMatrix) -> int | None:
    """Return what the kernels need to find the scales of a matrix; None if they do not support
    the groups of INT4."""
    if matrix.zeros is None:
        return scale_shift(matrix.codes, matrix.scales)
    return group_shift(matrix.width, matrix.scales.shape[-1])


class GroupedParams(ctypes.Structure):
    """Mirror of ``Params`` in csrc/experts/route.cu, field for field."""

    _fields_ = (
        *pointers("logits", "shares", "places", "rows_of", "groups", "count"),
        *ints("rows"),
    )


class CombineParams(ctypes.Structure):
    """Mirror of ``Params`` in csrc/experts/combine.cu, field for field."""

    _fields_ = (*pointers("found", "shares", "places", "residual", "output"), *ints("width"))


class GroupedSpecialization(NamedTuple):
    """Compile-time parameters of the kernels for more rows."""

    choice: Choice
    columns: int
    """Maximum number of rows per group."""
    weights: WeightFormat = UNQUANTIZED

    @classmethod
    def of(
        cls, choice: Choice, rows: int, weights: WeightFormat = UNQUANTIZED
    ) -> GroupedSpecialization:
        """Return the specialization for this number of rows of x.

        Groups of 16 rows leave more shared memory for weights in flight, and are seldom too small
        if an expert has six rows on average.
        """
        many = rows * choice.chosen > 6 * choice.experts
        return cls(choice, 8 if rows <= 8 else _MOST_COLUMNS if many else 16, weights)

    def products(self, gated: bool) -> RowsSpecialization:
        """Return the specialization of linear_rows.cu for the experts' first (gated) or second
        matrices."""
        weights = self.weights
        if self.columns == _MOST_COLUMNS:
            weights = weights._replace(group_columns=min(weights.group_columns, 64))
        return RowsSpecialization(self.columns, gated, self.choice.dtype, True, weights)


def grouped_tilings(shared_bytes: int) -> tuple[Tiling, Tiling]:
    """Return the tilings of the experts' first and second matrices, given the maximum shared memory
    per thread block."""
    first = tiling_for(shared_bytes)
    return first, first._replace(span=min(first.span, 384))


def _combined(
    kernel: Kernel,
    arguments: MixtureArguments,
    found: torch.Tensor,
    shares: torch.Tensor,
    places: torch.Tensor,
) -> torch.Tensor:
    """Sum the outputs of each row's experts with the kernel of combine.cu."""
    x, output = arguments.stream, arguments.result()
    params = CombineParams(*addresses(found, shares, places, x, output), x.shape[1])
    grid, block = (len(x), 1, 1), (COMBINE_THREADS, 1, 1)
    kernel.launch(grid, block, 0, params, current_stream(x.device), dependent=True)
    return output


class GroupedKernels(
    OperationKernel[GroupedSpecialization], operation="grouped_mixture", bound=0.02
):
    """The kernels of a mixture for up to ``MAX_GROUPED`` rows."""

    def __init__(self, specialization: GroupedSpecialization, device: torch.device) -> None:
        super().__init__(specialization, device)
        macros, self._blocks = macros_of(specialization), multiprocessors(device)
        self._route = self._load("experts/route.cu", macros)
        self._combine = self._load("experts/combine.cu", macros)
        self._products: list[tuple[Kernel, int, Launch]] = []
        tilings = grouped_tilings(shared_limit(device))
        for gated, tiling in zip((True, False), tilings, strict=True):
            made = specialization.products(gated)
            kernel = self._load("linear/linear_rows.cu", tiling.macros(made))
            launch = tiling.launch(made, tiling.outputs(gated), kernel.shared_limit)
            if launch.depth < 2:
                raise KernelError(f"{device} has too little shared memory")
            self._products.append((kernel, tiling.threads, launch))

    def __call__(self, arguments: MixtureArguments) -> torch.Tensor:
        """Launch the kernels."""
        x, _, _, router, gate_and_up, down, chosen, *_ = arguments
        stream, rows, normed = current_stream(x.device), len(x), arguments.at_once
        logits = linear(normed, [router]) if arguments.logits is None else arguments.logits
        shares = x.new_empty(rows, chosen, dtype=torch.float32)
        places, rows_of = x.new_empty(2, rows * chosen, dtype=torch.int32)
        max_groups = len(router) + rows * chosen // self.specialization.columns
        groups = x.new_empty(max_groups + 1, 4, dtype=torch.int32)
        count = groups[-1]
        self._route.launch(
            *((1, 1, 1), (ROUTE_THREADS, 1, 1), 4 * rows * chosen),
            GroupedParams(*addresses(logits, shares, places, rows_of, groups, count), rows),
            stream,
            dependent=True,
        )
        between = x.new_empty(rows * chosen, gate_and_up.shape[1] // 2)
        found = x.new_empty(rows * chosen, down.shape[1])
        inward, outward = _of_first(arguments.experts)
        first = LinearArguments.of(normed, gated=True, **inward)
        second = LinearArguments.of(between, **outward)
        parts = (first, between, rows_of), (second, found, None)
        for (kernel, threads, how), (product, result, from_rows) in zip(
            self._products, parts, strict=True
        ):
            params = RowsParams(
                *addresses(product.x),
                Matrices.of(product, result),
                *addresses(groups, count, from_rows),
                *(0, how.step, how.depth),
            )
            grid, block = (self._blocks, 1, 1), (threads, 1, 1)
            kernel.launch(grid, block, how.shared_bytes, params, stream, dependent=True)
        return _combined(self._combine, arguments, found, shares, places)

    @staticmethod
    def disagreement(
        specialization: GroupedSpecialization,
        kernel: Callable[[Any], torch.Tensor],
        device: torch.device,
    ) -> float:
        """Return the largest relative error of a row with unambiguous routing, without the residual
        stream.

        Some experts have more rows than fit in a group.
        """
        choice, columns, weights = specialization
        kinds = [1, 2, 3, *[0] * (columns + 2)]
        # Quantized matrices have whole blocks.
        width, between = (544, 64) if weights == UNQUANTIZED else (5 * BLOCK, BLOCK)
        problem = clear_choices(kinds, choice, width, between, device, weights)
        return error_of(kernel, problem)


def _of_first(experts: Experts) -> Iterator[dict[str, Any]]:
    """Yield the weights, scales and zero points of the first expert for both products; the other
    experts follow in memory."""
    stacked = {
        "weights": (experts.gate_and_up, experts.down),
        "scales": experts.scales,
        "zeros": experts.zeros,
    }
    for at, parts in enumerate((2, 1)):
        yield {name: both[at][0].chunk(parts) if both else () for name, both in stacked.items()}


class PromptParams(ctypes.Structure):
    """Mirror of ``Params`` in csrc/experts/prompt.cu, field for field."""

    _fields_ = (
        *pointers("logits", "x", "shares", "choices", "counts", "places", "ends", "copies"),
        *ints("rows", "width"),
    )


class PromptKernels(OperationKernel[Choice], operation="prompt_mixture", bound=0.02):
    """The kernels of a mixture for the rows of a prompt, used around torch's grouped products.

    The module of transformers copies the experts' inputs and outputs three more times, which takes
    twice as long as the products (8,192 tokens, H200).
    """

    def __init__(self, specialization: Choice, device: torch.device) -> None:
        super().__init__(specialization, device)
        macros = macros_of(specialization)
        self._choose = self._load("experts/prompt.cu", macros, "choose")
        self._place = self._load("experts/prompt.cu", macros, "place")
        self._combine = self._load("experts/combine.cu", macros)

    def __call__(self, arguments: MixtureArguments) -> torch.Tensor:
        """Launch the kernels."""
        x, normed = arguments.x, arguments.at_once
        experts = arguments.experts.dequantized(x.dtype)
        router, gate_and_up, down, chosen, *_ = experts
        (rows, width), count, stream = x.shape, router.shape[0], current_stream(x.device)
        logits = linear(normed, [router]) if arguments.logits is None else arguments.logits
        shares = x.new_empty(rows, chosen, dtype=torch.float32)
        choices, places = x.new_empty(2, rows, chosen, dtype=torch.int32)
        counts, ends = x.new_zeros(2, count, dtype=torch.int32)
        copies = x.new_empty(rows * chosen, width)
        tensors = logits, normed, shares, choices, counts, places, ends, copies
        params = PromptParams(*addresses(*tensors), rows, width)
        grid, block = (-(-rows * 32 // PROMPT_THREADS), 1, 1), (PROMPT_THREADS, 1, 1)
        for kernel in (self._choose, self._place):
            kernel.launch(grid, block, 0, params, stream, dependent=True)
        between = gate_(*grouped_mm(copies, gate_and_up.transpose(1, 2), offs=ends).chunk(2, -1))
        del copies
        found = grouped_mm(between, down.transpose(1, 2), offs=ends)
        return _combined(self._combine, arguments, found, shares, places)

    @staticmethod
    def disagreement(
        specialization: Choice,
        kernel: Callable[[Any], torch.Tensor],
        device: torch.device,
    ) -> float:
        """Return the largest relative error of a row with unambiguous routing, without the residual
        stream.

        The last thread block has fewer rows than the others.
        """
        kinds = [1, 2, 3, *[0] * 30]
        return error_of(kernel, clear_choices(kinds, specialization, 544, 64, device))


def expert_kernels(
    x: torch.Tensor, experts: Experts, *, has_norm: bool = True
) -> ExpertKernels | GroupedKernels | PromptKernels | None:
    """Return the kernels for x of shape (rows, width); None if there are none.

    Args:
        x: rows, normalized by the kernels if ``has_norm``.
        experts: weights of the mixture.
        has_norm: see ``MixtureArguments.norm``.
    """
    rows, width = x.shape
    count, both, _ = experts.gate_and_up.shape
    if not x.is_cuda or not rows or x.dtype not in ELEMENTS:
        return None
    if width % AT_ONCE or both // 2 % AT_ONCE:
        return None
    if experts.chosen > _MAX_CHOSEN or count > _MAX_EXPERTS:
        return None
    if not in_rows(x, experts.gate_and_up, experts.down):
        return None
    choice = Choice(count, experts.chosen, experts.normalized, x.dtype)
    if (weights := _format_of(experts)) is None:
        return None
    if rows > MAX_ROWS:
        if not uses_tma(x.device):
            return None
        if rows <= MAX_GROUPED:
            return GroupedKernels.of(GroupedSpecialization.of(choice, rows, weights), x.device)
        # torch's grouped products support no other dtype.
        if x.dtype != torch.bfloat16 or rows > _MAX_PROMPT_ROWS:
            return None
        return PromptKernels.of(choice, x.device)
    made = Specialization(choice, rows, width, both // 2, weights, has_norm)
    return ExpertKernels.of(made, x.device)


def _format_of(experts: Experts) -> WeightFormat | None:
    """Return the format of the experts' weights; None if the kernels do not support it."""
    matrices = experts.matrices
    if not experts.zeros:
        return WeightFormat(8) if matrices else UNQUANTIZED
    one, *others = (WeightFormat.of_int4(matrix.width, matrix.scales) for matrix in matrices)
    as_x = all(matrix.scales.dtype in (experts.router.dtype, torch.float32) for matrix in matrices)
    has_shifts = None not in map(_shift, matrices)
    return one if as_x and has_shifts and others == [one] else None


def mixture_of_experts(arguments: MixtureArguments) -> torch.Tensor:
    """Apply a layer's norm, mixture of experts and residual sum, without checking arguments.

    Returns:
        (rows, width).
    """
    has_norm = arguments.norm is not None
    kernels = expert_kernels(arguments.x, arguments.experts, has_norm=has_norm)
    return (kernels or experts_by_torch)(arguments)


def _check(arguments: MixtureArguments) -> None:
    x, norm, _, router, _, _, chosen, _, scales, zeros, residual, logits = arguments
    check, dtype, device = _checker.check, x.dtype, x.device
    check("x", x, ("rows", "width"), STATES, device)
    width = x.shape[1]
    if norm is not None:
        check("norm", norm, (width,), dtype, device)
    if residual is not None:
        check("residual", residual, tuple(x.shape), dtype, device)
    if logits is not None:
        check("logits", logits, (len(x), len(router)), dtype, device)
    check("router", router, ("experts", width), dtype, device)
    for name, tensors in (("scales", scales), ("zeros", zeros)):
        if len(tensors) not in (0, 2):
            _checker.refuse(name, f"{len(tensors)} tensors", "none or two")
    if zeros and not scales:
        _checker.refuse("zeros", f"{len(zeros)} tensors", "given with scales")
    _check_weights(arguments)
    if not 1 <= chosen <= len(router):
        _checker.refuse("chosen", chosen, f"1 to {len(router)}, the experts")


def _check_weights(arguments: MixtureArguments) -> None:
    x, _, _, router, gate_and_up, down, _, _, scales, zeros, *_ = arguments
    check, width, device = _checker.check, x.shape[1], x.device
    stored, packed = (int4.CODES, 8) if zeros else (fp8.CODES if scales else x.dtype, 1)
    into = (len(router), "2 * between", width // packed)
    check("gate_and_up", gate_and_up, into, stored, device)
    out_of = (len(router), width, gate_and_up.shape[1] // 2 // packed)
    check("down", down, out_of, stored, device)
    for matrix in arguments.experts.matrices:
        matrix.check()
        dtypes = STATES if zeros else torch.float32
        check("scales", matrix.scales, tuple(matrix.scales.shape), dtypes, device)
        if matrix.zeros is not None:
            check("zeros", matrix.zeros, tuple(matrix.scales.shape), torch.uint8, device)


mixture_operation = define("mixture", MixtureArguments, _check, mixture_of_experts, "Tensor")
