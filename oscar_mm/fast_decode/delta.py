"""Delta: one decode step of a Gated DeltaNet layer between its projections, in one launch.

The convolution and SiLU, the L2 norm of queries and keys, the gates, the recurrent state and the
gated RMSNorm. The states of each row have addresses of their own, which a CUDA graph reads from a
tensor, so rows may join and leave a batch without a copy of their states.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch.nn.functional import conv1d, silu, softplus

from oscar_mm.cache.states import LinearLayer, RowStates, StateChain, StateRow, StateTable
from oscar_mm.kernels.launch import (
    ELEMENTS,
    addresses,
    architecture,
    current_stream,
    multiprocessors,
    pointers,
    refuse_capture,
)
from oscar_mm.kernels.macros import Macros, macros_of
from oscar_mm.kernels.self_check import OperationKernel, random_normal, relative_error, worst

HEAD_DIMS = (64, 128)
TAPS, THREADS, COLUMNS = 4, 256, 32
_TINY = 1e-6
_MAX_CLUSTER = 8
_BLOCKS = 2
"""Maximum number of thread blocks per multiprocessor among which few rows are divided. With 512
blocks, 8 rows of 16 key heads take a fifth longer than with 256 (H200)."""
_MAX_ROWS = (1 << 16) - 1


class Part(NamedTuple):
    """Place of a part of the projections in a row: the part of key head i begins at
    offset + i * stride."""

    offset: int
    stride: int

    def of(self, rows: torch.Tensor, key_heads: int, width: int) -> torch.Tensor:
        """Return the part, (rows, key heads, width)."""
        heads, inner = (torch.arange(count, device=rows.device) for count in (key_heads, width))
        return rows[:, self.offset + self.stride * heads[:, None] + inner]


class Parts(NamedTuple):
    """Places of the parts: queries, keys, values and output gates z in ``mixed``, and b and a of
    the value heads in ``gates``."""

    query: Part
    key: Part
    value: Part
    z: Part
    b: Part
    a: Part


class DeltaShape(NamedTuple):
    """Numbers of heads, and channels of a head."""

    key_heads: int
    value_heads: int
    keys: int
    values: int

    @property
    def group(self) -> int:
        """Number of value heads per key head."""
        return self.value_heads // self.key_heads

    @property
    def one_after_the_other(self) -> Parts:
        """Parts of projections that have all heads of queries, then of keys, and so on
        (Qwen3.5)."""
        heads, values = self.key_heads * self.keys, self.group * self.values
        return Parts(
            Part(0, self.keys),
            Part(heads, self.keys),
            Part(2 * heads, values),
            Part(2 * heads + self.key_heads * values, values),
            Part(0, self.group),
            Part(self.value_heads, self.group),
        )

    @property
    def by_key_head(self) -> Parts:
        """Parts of projections that group all parts by key head (Qwen3-Next)."""
        values = self.group * self.values
        width = 2 * self.keys + 2 * values
        return Parts(
            Part(0, width),
            Part(self.keys, width),
            Part(2 * self.keys, width),
            Part(2 * self.keys + values, width),
            Part(0, 2 * self.group),
            Part(self.group, 2 * self.group),
        )


class DeltaArguments(NamedTuple):
    """Arguments of ``delta``.

    Attributes:
        mixed: (rows, width): projections, see ``Parts``; rows are contiguous.
        gates: (rows, 2 * value heads): projections, see ``Parts``; rows are contiguous.
        states: states of the rows in the layer before the step, and where to write those after it.
        convolution: (channels, taps): weights of the convolution, whose channels are all queries,
            then all keys, then all values.
        decay: (value heads,): logarithm of A.
        bias: (value heads,): bias of a.
        norm: (values,): weight of the norm.
        epsilon: epsilon of the norm.
        shape: numbers of heads and channels.
        parts: places of the parts of ``mixed`` and ``gates``.
    """

    mixed: torch.Tensor
    gates: torch.Tensor
    states: RowStates
    convolution: torch.Tensor
    decay: torch.Tensor
    bias: torch.Tensor
    norm: torch.Tensor
    epsilon: float
    shape: DeltaShape
    parts: Parts


class Place(ctypes.Structure):
    """Mirror of ``Part`` in csrc/delta/delta.cu, field for field."""

    _fields_ = (("offset", ctypes.c_int), ("stride", ctypes.c_int))


class Params(ctypes.Structure):
    """Mirror of ``Params`` in csrc/delta/delta.cu, field for field."""

    _fields_ = (
        *pointers("mixed", "gates", "states", "convolution", "decay", "bias", "norm", "output"),
        *((name, ctypes.c_int64) for name in ("mixed_stride", "gates_stride")),
        *((name, Place) for name in Parts._fields),
        ("epsilon", ctypes.c_float),
    )


class Specialization(NamedTuple):
    """Compile-time parameters of the kernel."""

    keys: int
    values: int
    group: int
    cluster: int
    """Thread blocks per key head."""
    dtype: torch.dtype
    tokens: int = 1
    """Number of rows that are consecutive tokens of one sequence; 1 if rows are sequences."""

    @classmethod
    def of(
        cls,
        shape: DeltaShape,
        dtype: torch.dtype,
        rows: int,
        device: torch.device,
        tokens: int = 1,
    ) -> Self:
        """Return the specialization for a number of rows.

        Few sequences are divided among many thread blocks; with many, that would only make thread
        blocks load and wait more often.

        Args:
            shape: heads of the layer and their sizes.
            dtype: dtype of the activations.
            rows: number of rows.
            device: GPU.
            tokens: see the attribute.
        """
        sizes = cluster_sizes(shape.group, shape.values, architecture(device))
        most = _BLOCKS * multiprocessors(device)
        few = [one for one in sizes if rows // tokens * shape.key_heads * one <= most]
        cluster = max(few, default=sizes[0])
        return cls(shape.keys, shape.values, shape.group, cluster, dtype, tokens)

    @property
    def macros(self) -> Macros:
        """Macros for csrc/delta/delta.cu."""
        return macros_of(self)


def cluster_sizes(group: int, values: int, arch: str | None) -> list[int]:
    """Return the numbers of thread blocks that can share a key head: only one before sm_90.

    Args:
        group: value heads per key head.
        values: channels of a value head.
        arch: architecture of the GPU.
    """
    if arch is None or int(arch[3:].rstrip("a")) < 90:
        return [1]
    items = group * values // COLUMNS
    return [size for size in range(1, _MAX_CLUSTER + 1) if items % size == 0]


class DeltaKernel(OperationKernel[Specialization], operation="delta", bound=0.02):
    """CUDA kernel of ``delta``."""

    def __init__(self, specialization: Specialization, device: torch.device) -> None:
        super().__init__(specialization, device)
        self._kernel = self._load("delta/delta.cu", specialization.macros)

    def __call__(self, arguments: DeltaArguments) -> torch.Tensor:
        """Launch the kernel; requires at least one row."""
        mixed, gates, states, *weights, epsilon, shape, parts = arguments
        output = mixed.new_empty(len(mixed), shape.value_heads * shape.values)
        params = Params(
            *addresses(mixed, gates, states.addresses, *weights, output),
            *(mixed.stride(0), gates.stride(0)),
            *(Place(*part) for part in parts),
            epsilon,
        )
        blocks, stream = shape.key_heads * self.specialization.cluster, current_stream(self.device)
        grid = (blocks, len(mixed) // self.specialization.tokens, 1)
        self._kernel.launch(grid, (THREADS, 1, 1), 0, params, stream, dependent=True)
        return output

    @staticmethod
    def disagreement(
        specialization: Specialization,
        kernel: Callable[[DeltaArguments], torch.Tensor],
        device: torch.device,
    ) -> float:
        """Return the largest relative error of an output or a state after two steps: of three
        rows, one of which has no token, or of the consecutive tokens of one sequence."""
        keys, values, group, _, dtype, tokens = specialization
        shape, errors = DeltaShape(3, 3 * group, keys, values), list[float]()
        chained = tokens > 1
        rows, idle, every = (tokens, None, 1) if chained else (3, 1, 2)
        for parts, in_place in ((shape.one_after_the_other, True), (shape.by_key_head, False)):
            states = {"idle": idle, "in_place": in_place and not chained, "chained": chained}
            found, expected = (
                sample(shape, parts, rows, dtype, device, **states) for _ in range(2)
            )
            for _ in range(2):
                outputs = [
                    x.unflatten(1, (-1, values)) for x in (kernel(found), delta_by_torch(expected))
                ]
                errors.append(relative_error(*(x[::every] for x in outputs)))
            for one, other in zip(found.states.results, expected.states.results, strict=True):
                errors.append(relative_error(one.flatten(1), other.flatten(1)))
        return worst(errors)


def sample(
    shape: DeltaShape,
    parts: Parts,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    idle: int | None = None,
    *,
    in_place: bool = True,
    chained: bool = False,
) -> DeltaArguments:
    """Return random arguments, the same in each process.

    Args:
        shape: numbers of heads and channels.
        parts: ``shape.one_after_the_other`` or ``shape.by_key_head``.
        rows: number of rows.
        dtype: dtype of activations and weights.
        device: device of all tensors.
        idle: a row without a new token; None for none.
        in_place: whether the states after the step replace those before it.
        chained: whether the rows are consecutive tokens of one sequence; not with ``in_place``.
    """
    random = random_normal(dtype, device)
    key_heads, value_heads, keys, values = shape
    channels = 2 * key_heads * keys + value_heads * values
    layers = [
        LinearLayer.of(
            random(1, channels, TAPS), random(1, value_heads, keys, values).float().div_(8)
        )
        for _ in range(1 if chained else rows)
    ]
    cache_rows = [StateRow([layer], {}, 0) for layer in layers]
    if chained:
        cache_rows = StateChain(rows).rows(*cache_rows)
    for row in () if in_place else cache_rows:
        row.make_spares()
    table = StateTable()
    table.begin(
        [None if place == idle else row for place, row in enumerate(cache_rows)],
        to_spares=not in_place,
        chained=chained,
    )
    return DeltaArguments(
        random(rows, channels + value_heads * values),
        random(rows, 2 * value_heads),
        table.of(0),
        random(channels, TAPS),
        random(value_heads),
        random(value_heads),
        random(values),
        1e-6,
        shape,
        parts,
    )


def delta(arguments: DeltaArguments) -> torch.Tensor:
    """Write the states after the step and return the output, (rows, value heads * values).

    The output of a row without a new token is 0, and its states do not change.
    """
    kernel = _kernel_for(arguments) if arguments.mixed.is_cuda else None
    if kernel is None:
        # A graph would keep the addresses of the states of its capture.
        refuse_capture("Gated DeltaNet without its kernel", arguments.mixed.device)
        return delta_by_torch(arguments)
    return kernel(arguments)


def _kernel_for(arguments: DeltaArguments) -> DeltaKernel | None:
    mixed, gates, states, *weights, _, shape, _ = arguments
    dtypes = {x.dtype for x in (mixed, gates, *weights, *states.tensors[::2])}
    takes = (
        dtypes == {mixed.dtype}
        and mixed.dtype in ELEMENTS
        and {shape.keys, shape.values} <= {*HEAD_DIMS}
        and arguments.convolution.shape[1] == TAPS
        and 0 < len(mixed) <= _MAX_ROWS
        and mixed.stride(0) % 4 == 0
    )
    if not takes:
        return None
    tokens = len(mixed) if states.chained else 1
    made = Specialization.of(shape, mixed.dtype, len(mixed), mixed.device, tokens)
    return DeltaKernel.of(made, mixed.device)


def delta_by_torch(arguments: DeltaArguments) -> torch.Tensor:
    """Run ``delta`` with PyTorch operations and the rounding of transformers' modules."""
    mixed, *_, shape, _ = arguments
    output = mixed.new_zeros(len(mixed), shape.value_heads * shape.values)
    layers, targets, *_ = arguments.states
    for row, (layer, target) in enumerate(zip(layers, targets, strict=True)):
        if layer is not None and target is not None:
            output[row] = _row_by_torch(arguments, row, *layer.states, *target.states)
    return output


def _row_by_torch(
    arguments: DeltaArguments,
    row: int,
    window: torch.Tensor,
    before: torch.Tensor,
    next_window: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Run the step of a row with its states before and after the step, (1, ...) each."""
    mixed, gates, _, convolution, decay, bias, norm, epsilon, shape, parts = arguments
    key_heads, group, keys, values = shape.key_heads, shape.group, shape.keys, shape.values
    widths = (keys, keys, group * values, group * values)
    one = mixed[row : row + 1]
    *new, z = (x.of(one, key_heads, n).flatten(1) for x, n in zip(parts[:4], widths, strict=True))
    b, a = (part.of(gates[row : row + 1], key_heads, group).flatten() for part in parts[4:])
    inputs = torch.cat([window, torch.cat(new, 1)[..., None]], -1)
    next_window.copy_(inputs[..., 1:])
    found = silu(conv1d(inputs[..., 1:], convolution[:, None], groups=len(convolution)))[0, :, 0]
    query, key, value = (x.float() for x in found.split([x.shape[1] for x in new]))
    query, key = (
        (heads * (heads.square().sum(-1, keepdim=True) + _TINY).rsqrt()).repeat_interleave(group, 0)
        for heads in (query.view(-1, keys), key.view(-1, keys))
    )
    query /= keys**0.5
    factor = torch.exp(-decay.float().exp() * softplus(a.float() + bias))
    torch.mul(before, factor[:, None, None], out=state)
    told = (state[0] * key[..., None]).sum(1)
    update = (value.view(-1, values) - told) * b.sigmoid()[:, None]
    state += key[..., None] * update[:, None]
    output = (state[0] * query[..., None]).sum(1).to(mixed.dtype).float()
    output *= torch.rsqrt(output.square().mean(-1, keepdim=True) + epsilon)
    gate = silu(z.view(-1, values).float())
    return (norm * output.to(mixed.dtype) * gate).to(mixed.dtype).flatten()
