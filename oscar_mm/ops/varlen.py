"""Varlen: causal attention of concatenated sequences in 16-bit precision, on Hopper GPUs.

Matrix units read queries, keys and values from shared memory (wgmma). On other GPUs, torch's flash
attention computes the same (``oscar_mm.cache.varlen_attention``); on an H200, it would take about
twice as long.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from oscar_mm.kernels.compile import KernelError
from oscar_mm.kernels.launch import (
    ELEMENTS,
    addresses,
    current_stream,
    ints,
    pointers,
    uses_wgmma,
)
from oscar_mm.kernels.macros import Macros, macros_of
from oscar_mm.kernels.self_check import OperationKernel, random_normal, relative_error, worst
from oscar_mm.kernels.tensor_map import TensorMap, tensor_map
from oscar_mm.ops.library import Written

HEAD_DIMS = (64, 128)
_TILE = 128
"""Queries of a thread block, and keys that it multiplies at a time."""
_STAGES = 2
"""Tiles of keys in shared memory, and of values."""
_THREADS = 384
_BARRIERS = 1 + 4 * _STAGES
_LOG2_E = 1.4426950408889634


class VarlenArguments(NamedTuple):
    """Arguments of ``VarlenKernel``: sequences, each of whose last query attends to all its keys.

    Attributes:
        queries: (queries, query heads, head_dim), contiguous except between queries.
        keys, values: (keys, KV heads, head_dim), contiguous except between keys.
        query_ends, key_ends: (sequences + 1,) int32 boundaries of the sequences. The output is 0
            for queries of a sequence without keys.
        scaling: factor that the scores are multiplied by.
        output: (queries, query heads, head_dim), contiguous; only rows between the first and the
            last boundary are written.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    query_ends: torch.Tensor
    key_ends: torch.Tensor
    scaling: float
    output: Written


class Params(ctypes.Structure):
    """Mirror of ``Params`` in csrc/varlen/varlen.cu, field for field."""

    _fields_ = (
        *((name, TensorMap) for name in ("queries", "keys", "values")),
        *pointers("query_ends", "key_ends", "output"),
        *ints("sequences", "group"),
        ("scale", ctypes.c_float),
        ("unused", ctypes.c_int * 7),
    )


class VarlenSpecialization(NamedTuple):
    """Compile-time parameters of the kernel."""

    head_dim: int
    dtype: torch.dtype

    @property
    def macros(self) -> Macros:
        """Preprocessor macros for compiling csrc/varlen/varlen.cu."""
        return macros_of(self, USE_TMA=1)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a thread block: its queries, and tiles of keys and of values."""
        tile = _TILE * self.head_dim * self.dtype.itemsize
        return (1 + 2 * _STAGES) * tile + _BARRIERS * 8


class VarlenKernel(OperationKernel[VarlenSpecialization], operation="varlen", bound=0.02):
    """CUDA kernel of causal attention of sequences."""

    def __init__(self, specialization: VarlenSpecialization, device: torch.device) -> None:
        super().__init__(specialization, device)
        if not uses_wgmma(device):
            raise KernelError(f"varlen needs a Hopper GPU and TMA, not {device}")
        self._kernel = self._load("varlen/varlen.cu", specialization.macros)

    @classmethod
    def for_arguments(cls, arguments: VarlenArguments) -> VarlenKernel | None:
        """Return the kernel; None if it does not take the arguments, or on other devices."""
        sides, device = arguments[:3], arguments.queries.device
        head_dim, dtype = arguments.queries.shape[2], arguments.queries.dtype
        takes = (
            device.type == "cuda"
            and uses_wgmma(device)
            and head_dim in HEAD_DIMS
            and dtype in ELEMENTS
            and arguments.output.is_contiguous()
            and all(map(_in_rows, sides))
        )
        return cls.of(VarlenSpecialization(head_dim, dtype), device) if takes else None

    def __call__(self, arguments: VarlenArguments) -> None:
        """Launch the kernel."""
        queries, keys, values, query_ends, key_ends, scaling, output = arguments
        count, heads, _ = queries.shape
        sequences = len(query_ends) - 1
        params = Params(
            *(tensor_map(x.flatten(1), _TILE) for x in (queries, keys, values)),
            *addresses(query_ends, key_ends, output),
            *(sequences, heads // keys.shape[1], scaling * _LOG2_E),
        )
        # Each sequence may end in a partial tile.
        grid, stream = (heads, count // _TILE + sequences, 1), current_stream(queries.device)
        shared = self.specialization.shared_bytes
        self._kernel.launch(grid, (_THREADS, 1, 1), shared, params, stream, dependent=True)

    @staticmethod
    def disagreement(
        specialization: VarlenSpecialization, kernel: Callable[[Any], None], device: torch.device
    ) -> float:
        """Return the largest relative error of a head.

        The problem has sequences with and without a past and without keys, partial tiles and
        several tiles; rows after the last key are NaN.
        """
        head_dim, dtype = specialization
        random, errors = random_normal(dtype, device), []
        for new, whole in (
            ((3, 0, 5, 1, 70), (13, 0, 5, 10, 0)),
            ((130, 300, 1, 257), (130, 1000, 513, 400)),
        ):
            queries = random(sum(new), 6, head_dim)[:, :4]
            keys, values = (random(sum(whole) + 50, 2, head_dim) for _ in range(2))
            for side in (keys, values):
                side[sum(whole) :] = torch.nan
            query_ends, key_ends = (boundaries(counts, device) for counts in (new, whole))
            output = queries.new_full((sum(new), 4, head_dim), torch.nan)
            ends = query_ends, key_ends
            arguments = VarlenArguments(queries, keys, values, *ends, 0.1, output)
            kernel(arguments)
            expected = varlen_by_torch(arguments)
            some = expected.any(-1)
            errors += [relative_error(output[some], expected[some]), float(output[~some].norm())]
        return worst(errors)


def varlen_by_torch(arguments: VarlenArguments) -> torch.Tensor:
    """Return the output in float64, computed sequence by sequence; waits for the device."""
    found = torch.zeros_like(arguments.output, dtype=torch.float64)
    ends = (x.tolist() for x in (arguments.query_ends, arguments.key_ends))
    (start, key_start), *pairs = zip(*ends, strict=True)
    for end, key_end in pairs:
        own = slice(start, end), *[slice(key_start, key_end)] * 2
        sides = zip(arguments[:3], own, strict=True)
        query, key, value = (x[rows].double().transpose(0, 1)[None] for x, rows in sides)
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=found.device)
        seen = seen.tril(key.shape[2] - query.shape[2])
        if seen.any():
            one = scaled_dot_product_attention(
                *(query, key, value, seen), scale=arguments.scaling, enable_gqa=True
            )
            found[start:end] = one[0].transpose(0, 1)
        start, key_start = end, key_end
    return found


def boundaries(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the (ranges + 1,) int32 boundaries of adjacent ranges with the given numbers of
    elements."""
    return torch.tensor([*accumulate(counts, initial=0)], dtype=torch.int32, device=device)


def _in_rows(x: torch.Tensor) -> bool:
    """Return whether TMA can copy boxes of (rows, heads, head_dim)."""
    unit = 16 // x.element_size()
    return (
        x.stride()[1:] == (x.shape[2], 1)
        and x.stride(0) % unit == 0
        and x.data_ptr() % 16 == 0
        and len(x) > 0
    )
