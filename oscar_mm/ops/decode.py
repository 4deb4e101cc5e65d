"""Decode: attention of a few new tokens to packed pages, 16-bit tokens and each other.

The operation supports 1 to 16 new tokens; ``max_total_tokens`` returns the number up to which a
cache uses it.

Results are bitwise reproducible. Kernel calls may overlap on several streams and be captured in
several CUDA graphs, because each stream and each graph has its own scratch buffers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from oscar_mm.kernels.compile import KernelError
from oscar_mm.kernels.launch import (
    ELEMENTS,
    OUT_OF_ORDER,
    Kernel,
    Strides,
    addresses,
    aligned_rows,
    cpu_kernels_available,
    current_stream,
    ints,
    kernels_disabled,
    multiprocessors,
    page_macros,
    pointers,
    shared_limit,
    sigma_strides,
    strides,
    uses_tma,
    warn_once,
)
from oscar_mm.kernels.self_check import OperationKernel, relative_error
from oscar_mm.ops.decode_tables import (
    COLUMNS,
    DIVIDING_WARPS,
    FIELDS,
    DecodeArguments,
    by_warps,
)
from oscar_mm.ops.decode_torch import decode_by_torch
from oscar_mm.ops.library import STATES, ArgumentChecker, define, numbers_of
from oscar_mm.ops.samples import CHECKED_HEADS, random_basis, random_past
from oscar_mm.pages.fragments import KERNEL_HEAD_DIMS
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.policy import Bits

MAX_QUERY_TOKENS = 16
_MAX_COLUMNS = 128
"""Queries per KV head up to which a CPU attends to packed pages faster than it unpacks them and
attends to the copy. Both are equally fast at 224 queries with float32 states, and at 165 with
bfloat16 states on a CPU with AMX; heads, head_dim and past hardly matter."""
_ASSIGNMENT_BYTES = FIELDS // 2 * 4
"""``sizeof(Assignment)`` of csrc/decode/params.cuh, half of a thread block's work."""
_MAX_VALUE_GROUPS = 4
"""Value groups of a head that the GPU kernel has registers for."""
_checker = ArgumentChecker("decode")


class Params(ctypes.Structure):
    """Mirror of ``Params`` in csrc/decode/decode.cu, field for field."""

    _fields_ = (
        *pointers("queries", "keys", "values", "output", "pages_a", "pages_b", "recent", "recents"),
        *pointers("items", "counts", "assignments", "sigma", "partials", "arrivals"),
        *((f"{name}_stride", Strides) for name in ("query", "key", "value")),
        *ints("batch", "kv_heads", "group", "tokens", "recent_stride", "item_stride"),
        *ints("sigma_row_stride", "sigma_head_stride", "early"),
        ("scaling", ctypes.c_float),
    )


class BlockShape(NamedTuple):
    """Size of a thread block.

    Attributes:
        warps: number of warps.
        buffers: number of pages that it has room for.
        by_warps: number of warps that can attend to segments of their own
            (csrc/decode/by_warps.cuh); 0 if none can.
        team: number of warps that share the tokens of a page.
    """

    warps: int
    buffers: int
    by_warps: int
    team: int = 1

    @property
    def launched(self) -> int:
        """Number of warps that are launched."""
        return max(self.warps, self.by_warps)


class Specialization(NamedTuple):
    """Compile-time parameters of the kernel; equal parameters share a kernel."""

    formats: tuple[PageFormat, ...]
    """One or two page formats, with one KV head."""
    rotate: bool
    dtype: torch.dtype
    narrow: bool
    """Whether half of a fragment's columns suffice; the other half then holds the queries' low
    parts."""

    @classmethod
    def of(
        cls,
        formats: Sequence[PageFormat],
        head_dim: int,
        rotate: bool,
        dtype: torch.dtype,
        columns: int,
    ) -> Specialization | str:
        """Return the specialization for a layer's page formats (at most two), or the reason why
        there is none.

        Args:
            columns: queries per KV head, i.e. new tokens times query heads per KV head.
        """
        if dtype not in ELEMENTS:
            return f"keys and values are {dtype}; the kernel supports bfloat16 and float16"
        if head_dim not in KERNEL_HEAD_DIMS:
            return f"head_dim is {head_dim}; the kernel supports {KERNEL_HEAD_DIMS}"
        if not formats:
            # Everything is in 16-bit precision. The kernel still needs some page format, which it
            # never reads.
            channel = PageFormat(Bits(2, 2), 1, head_dim, "channel", PAGE_TOKENS, head_dim, None)
            token = replace(channel, key_axis="token", key_group=head_dim)
            unseen = channel if channel.in_fragments else token
            return cls.of((unseen,), head_dim, False, dtype, columns)
        if not all(page_format.in_fragments for page_format in formats):
            return OUT_OF_ORDER
        first, last = formats[0], formats[-1]
        if replace(last, bits=first.bits) != first:
            return "pages of different bit widths also differ in their groups or scaling"
        if (groups := head_dim // first.value_group) > _MAX_VALUE_GROUPS:
            return (
                f"value_group {first.value_group} makes {groups} groups of a head of {head_dim} "
                f"channels; the kernel supports up to {_MAX_VALUE_GROUPS}"
            )
        of_one_head = tuple(replace(page_format, kv_heads=1) for page_format in formats)
        return cls(of_one_head, rotate, dtype, columns <= COLUMNS // 2)

    @property
    def head_dim(self) -> int:
        """Number of channels per head."""
        return self.formats[0].head_dim

    @property
    def head_bytes(self) -> int:
        """Size of one KV head in the larger page, in bytes."""
        return max(page_format.head_bytes for page_format in self.formats)

    def macros(self, shape: BlockShape, tma: bool) -> dict[str, str | int]:
        """Return the macros for csrc/decode/decode.cu."""
        first, *more = (page_format.bits for page_format in self.formats)
        second = more[0] if more else Bits(0, 0)
        return page_macros(self.formats[0]) | {
            "KEY_BITS_A": first.keys,
            "VALUE_BITS_A": first.values,
            "KEY_BITS_B": second.keys,
            "VALUE_BITS_B": second.values,
            "ELEMENT": ELEMENTS[self.dtype],
            "ROTATE": int(self.rotate),
            "NARROW": int(self.narrow),
            "WARPS": shape.warps,
            "TEAM": shape.team,
            "BUFFERS": shape.buffers,
            "USE_TMA": int(tma),
            "BY_WARPS": shape.by_warps,
        }

    @property
    def _is_stream(self) -> bool:
        return bool(page_macros(self.formats[0])["STREAM"])

    @property
    def _columns(self) -> int:
        return COLUMNS // 2 if self.narrow else COLUMNS

    @property
    def _query_bytes(self) -> int:
        """``sizeof(Queries)`` of csrc/decode/state.cuh."""
        if not self._is_stream:
            return COLUMNS * (self.head_dim * 4 + 4)
        fixed = self.head_dim * (32 if self.narrow else 16)
        return self._columns * self.head_dim * 4 + fixed + COLUMNS * 8

    def launch_bytes(self, shape: BlockShape) -> int:
        """Return the shared memory of a thread block."""
        size = self.shared_bytes(shape.warps, shape.buffers)
        return max(size, shape.by_warps * self.warp_bytes)

    @property
    def warp_bytes(self) -> int:
        """``sizeof(Own)`` of csrc/decode/by_warps.cuh."""
        records = self._columns * (self.head_dim + 3) * 4
        query = self.head_dim * 16 + COLUMNS * 8
        size = _aligned(self.head_bytes, 16) + _aligned(max(query, records), 16)
        return _aligned(size + 16 + 2 * _ASSIGNMENT_BYTES + 16, 128)

    def shared_bytes(self, warps: int, buffers: int) -> int:
        """Return ``sizeof(Shared)`` of csrc/decode/decode.cu."""
        shared_norms = self.formats[0].token_scaling == "shared"
        buffer = self.head_bytes + (2 * PAGE_TOKENS if shared_norms else 0)
        size = buffers * _aligned(buffer, 128)
        if self.head_dim <= 128:  # otherwise buffers take the records
            size = _aligned(size, 16) + -(-warps // 2) * self._columns * (self.head_dim + 3) * 4
        size = _aligned(size, 16) + COLUMNS * self.head_dim * 2
        size = _aligned(_aligned(size, 16) + self._query_bytes, 16) + _ASSIGNMENT_BYTES
        size = _aligned(size, 8) + buffers * (8 + 4 + 4 + 4) + 4
        return _aligned(size, 128)

    def shape(self, limit: int) -> BlockShape | None:
        """Return the shape for a shared memory limit in bytes; None if not even 8 warps and 4
        buffers fit, or 2 buffers of the larger pages of more than 128 channels.

        Two to five pages of 512 channels fit, so four warps share each.

        With one buffer per warp and a few more, pages arrive while all warps compute; beyond 20
        buffers the kernel gets no faster (measured on an H200). With fewer buffers than warps, as
        on small GPUs with larger pages, some warps wait. 16 warps, with 128 registers each, are 5%
        faster than 12 with 20 buffers, and 5% slower with 17.
        """
        of_16 = [(16, 20)] if self._is_stream and self.narrow else []
        shapes = (*of_16, (12, 12), (8, 4)) if self.head_dim <= 128 else ((8, 2),)
        team = 4 if self.head_dim > 256 else 1
        for warps, fewest in shapes:
            for buffers in range(20, fewest - 1, -1):
                if self.shared_bytes(warps, buffers) <= limit:
                    return BlockShape(warps, buffers, self._dividing(limit), team)
        return None

    def _dividing(self, limit: int) -> int:
        """Return the number of warps that may divide the work list; 0 if they cannot."""
        if not (self._is_stream and self.narrow and len(self.formats) == 1):
            return 0
        return DIVIDING_WARPS if DIVIDING_WARPS * self.warp_bytes <= limit else 0


class _Compiled(NamedTuple):
    kernel: Kernel
    shape: BlockShape
    shared_bytes: int


class DecodeKernel(OperationKernel[Specialization], operation="decode", bound=0.02):
    """CUDA kernel of ``decode``.

    The bound is far above the 16-bit rounding error (0.002) and far below the error of a wrong
    token or head.
    """

    def __init__(self, specialization: Specialization, device: torch.device) -> None:
        super().__init__(specialization, device)
        limit = shared_limit(device)
        shape = specialization.shape(limit)
        if shape is None:
            raise KernelError(
                f"a thread block has {limit} bytes of shared memory on {device}, too few for "
                f"pages of {specialization.head_bytes} bytes per head"
            )
        # Where only thread blocks divide the work, a kernel compiled without the code for warps is
        # 1% to 2% faster, because its threads may have more registers.
        self._of_blocks = self._compiled(shape._replace(by_warps=0))
        self._of_warps = self._compiled(shape)
        self._arrivals: dict[tuple[int, bool], tuple[int | None, torch.Tensor]] = {}

    def _compiled(self, shape: BlockShape) -> _Compiled:
        macros = self.specialization.macros(shape, uses_tma(self.device))
        size = self.specialization.launch_bytes(shape)
        return _Compiled(self._load("decode/decode.cu", macros), shape, size)

    def __call__(
        self,
        arguments: DecodeArguments,
        output: torch.Tensor | None = None,
        *,
        early: bool = False,
    ) -> torch.Tensor:
        """Launch the kernel.

        Args:
            arguments: arguments of ``decode``.
            output: tensor for the result, with its shape and strides; None allocates it.
            early: whether to read tables and stored tokens before the preceding kernel has ended;
                all of them must have been written before that kernel began.
        """
        queries, keys, values, pages, recent, sigma, items, recents, counts, assignments, *_ = (
            arguments
        )
        batch, query_heads, tokens, head_dim = queries.shape
        queries, keys, values = map(aligned_rows, (queries, keys, values))
        output = arguments.result() if output is None else output
        kv_heads = keys.shape[1]
        stream = current_stream(queries.device)
        columns = query_heads // kv_heads * tokens
        segments = batch * kv_heads * -(-columns // COLUMNS)
        workers = assignments.shape[0]
        kernel, shape, size = self._of_warps if by_warps(segments, workers) else self._of_blocks
        parts = segments + workers * max(shape.by_warps, 1)
        partials = output.new_empty(parts * COLUMNS * (head_dim + 3), dtype=torch.float32)
        arrivals = self._arrivals_on(stream, segments, queries.device)
        pools = [*pages, None, None][:2]
        params = Params(
            *addresses(queries, keys, values, output, *pools, recent, recents, items, counts),
            *addresses(assignments, sigma, partials, arrivals),
            *(strides(queries), strides(keys), strides(values)),
            *(batch, kv_heads, query_heads // kv_heads, tokens),
            *(recents.shape[1], items.shape[1]),
            *sigma_strides(sigma),
            early,
            arguments.scaling,
        )
        grid, block = (workers, 1, 1), (shape.launched * 32, 1, 1)
        kernel.launch(grid, block, size, params, stream, dependent=True)
        return output

    def _arrivals_on(self, stream: int, segments: int, device: torch.device) -> torch.Tensor:
        """Return counters that each launch leaves at zero: one tensor per stream, since launches on
        different streams overlap.

        Each graph also has a tensor, created during its capture: the graph may be replayed on any
        stream, concurrently with others that were captured on the same stream.
        """
        capture = self._of_blocks.kernel.capture_on(stream)
        place = stream, capture is not None
        owner, arrivals = self._arrivals.get(place, (None, None))
        if arrivals is None or owner != capture or arrivals.shape[0] < segments:
            arrivals = torch.zeros(max(segments, 1024), dtype=torch.int32, device=device)
            self._arrivals[place] = capture, arrivals
        return arrivals

    @staticmethod
    def disagreement(
        specialization: Specialization,
        kernel: Callable[[Any], torch.Tensor],
        device: torch.device,
    ) -> float:
        """Return the largest relative error of the output for any query."""
        rotate, dtype = specialization.rotate, specialization.dtype
        formats = [replace(one, kv_heads=CHECKED_HEADS) for one in specialization.formats]
        problems = []
        # With one thread block, there are many segments. Each warp has one of them, or, where the
        # second half of the table is 0, warps straddle segments.
        for workers, straddle in ((multiprocessors(device), False), (1, False), (1, True)):
            states, items, recents, counts, assignments = random_past(
                formats, rotate, dtype, device, workers, specialization.narrow
            )
            if straddle:
                assignments[:, FIELDS // 2 :] = 0
            tables = (items, recents, counts, assignments)
            shared = DecodeArguments(*states, *tables, 0.1, numbers_of(*formats), rotate)
            of_rows = random_basis(formats[0], rotate, device, (len(counts),)).sigma
            problems += [shared, shared._replace(sigma=of_rows)]
        found, expected = (torch.stack([*map(run, problems)]) for run in (kernel, decode_by_torch))
        return relative_error(found, expected)


def decode_kernel(
    formats: Iterable[PageFormat],
    head_dim: int,
    rotate: bool,
    dtype: torch.dtype,
    columns: int,
    device: torch.device,
) -> DecodeKernel | None:
    """Return the kernel for a layer, or None to use PyTorch operations; log the reason once.

    Args:
        formats: formats of the layer's pages, at most two.
        columns: queries per KV head, i.e. new tokens times query heads per KV head.
    """
    if device.type != "cuda" or kernels_disabled():
        return None
    specialization = _specialization(tuple(formats), head_dim, rotate, dtype, columns)
    if isinstance(specialization, str):
        warn_once("decode", specialization)
        return None
    return DecodeKernel.of(specialization, device)


@lru_cache(maxsize=64)
def _specialization(
    formats: tuple[PageFormat, ...], head_dim: int, rotate: bool, dtype: torch.dtype, columns: int
) -> Specialization | str:
    return Specialization.of(formats, head_dim, rotate, dtype, columns)


def _aligned(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _check(arguments: DecodeArguments) -> None:
    queries, keys, check, device = *arguments[:2], _checker.check, arguments.queries.device
    shape = ("batch", "query heads", "tokens", "d")
    check("queries", queries, shape, STATES, device, rows=True)
    batch, query_heads, tokens, head_dim = queries.shape
    if not 1 <= tokens <= MAX_QUERY_TOKENS:
        _checker.refuse("queries", f"of {tokens} tokens", f"of 1 to {MAX_QUERY_TOKENS}")
    check("keys", keys, (batch, "KV heads", tokens, head_dim), queries.dtype, device, rows=True)
    check("values", arguments.values, keys.shape, queries.dtype, device, rows=True)
    kv_heads = keys.shape[1]
    if query_heads % kv_heads:
        wanted = f"of a multiple of {kv_heads}, the KV heads"
        _checker.refuse("queries", f"of {query_heads} heads", wanted)
    dtypes = (queries.dtype, torch.bfloat16) if queries.dtype == torch.float32 else queries.dtype
    check("recent", arguments.recent, ("slots", 2, kv_heads, head_dim), dtypes, device)
    pages, formats = arguments.pages, arguments.page_formats
    if len(pages) != len(formats):
        _checker.refuse("pages", f"of {len(pages)} pools", f"of {len(formats)}, as formats")
    for pool, page_format in zip(pages, formats, strict=True):
        if (page_format.kv_heads, page_format.head_dim) != (kv_heads, head_dim):
            found = f"for {page_format.kv_heads} heads of {page_format.head_dim}"
            _checker.refuse("formats", found, f"for {kv_heads} of {head_dim}, as keys")
        check("pages", pool, ("slots", page_format.page_bytes), torch.uint8, device)
    _checker.check_sigma(arguments.sigma, kv_heads, head_dim, device, batch)
    if arguments.sinks is not None:
        check("sinks", arguments.sinks, (query_heads,), torch.float32, device)
    check("items", arguments.items, (batch, "longest", 2), torch.int32, device)
    check("recents", arguments.recents, (batch, "longest"), torch.int32, device)
    check("counts", arguments.counts, (batch, 2), torch.int32, device)
    check("assignments", arguments.assignments, ("thread blocks", FIELDS), torch.int32, device)


@torch.no_grad()
def decode_directly(arguments: DecodeArguments) -> torch.Tensor:
    """Run the operation ``decode`` without its checks and without gradients."""
    queries, formats = arguments.queries, arguments.page_formats
    columns = queries.shape[1] // arguments.keys.shape[1] * queries.shape[2]
    how = (queries.shape[3], arguments.rotate, queries.dtype, columns, queries.device)
    kernel = _loops(formats) if queries.is_cpu else None
    if arguments.sinks is None or takes_sinks(queries.device):
        kernel = decode_kernel(formats, *how) or kernel
    return (kernel or decode_by_torch)(arguments)


def takes_sinks(device: torch.device) -> bool:
    """Return whether the kernels of a device take sinks; if not, unpacking the past is faster."""
    return device.type == "cpu"


def max_total_tokens(formats: tuple[PageFormat, ...], group: int, device: torch.device) -> int:
    """Return the maximum number of new tokens per row for which ``decode_directly`` is used; with
    more, the pages are unpacked to a copy.

    Args:
        formats: formats of the pages; empty if hardly any tokens are packed.
        group: query heads per KV head.
        device: device of the layer.
    """
    if device.type == "cpu" and formats and _loops(formats) is not None:
        return max(MAX_QUERY_TOKENS, _MAX_COLUMNS // group)
    return MAX_QUERY_TOKENS


def _loops(formats: tuple[PageFormat, ...]) -> Callable[[DecodeArguments], torch.Tensor] | None:
    """Return the CPU kernel, or None to use PyTorch operations; log the reason once."""
    if not cpu_kernels_available("decode"):
        return None
    # Imported on first use, since it loads a compiler.
    from oscar_mm.ops.decode_numba import decode_on_cpu, reads

    if all(map(reads, formats)):
        return decode_on_cpu
    warn_once("decode", OUT_OF_ORDER)
    return None


decode = define("decode", DecodeArguments, _check, decode_directly, "Tensor")
