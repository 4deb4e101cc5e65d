"""The decode kernel: a few queries per sequence over pages and 16-bit blocks, on a GPU.

The host side of ``csrc/decode.cu``: which specialization, its parameters, the launch.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from oscar_mm.cache.fragments import KERNEL_HEAD_DIMS
from oscar_mm.cache.layout import PAGE_TOKENS, PageFormat
from oscar_mm.cache.tables import COLUMNS, Tables
from oscar_mm.ops.kernel import (
    ELEMENTS,
    SCALINGS,
    SWITCH,
    Kernel,
    architecture,
    load_kernel,
    switched_off,
    tell_once,
)
from oscar_mm.ops.nvrtc import KernelError

MAX_QUERY_TOKENS = 16
_POINTERS = (
    *("queries", "keys", "values", "output", "pages_a", "pages_b", "blocks", "items", "counts"),
    *("assignments", "sigma", "partials", "arrivals"),
)
_INTS = ("batch", "kv_heads", "group", "tokens", "item_stride", "sigma_rows")


class Params(ctypes.Structure):
    """``Params`` of csrc/decode.cu, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((f"{name}_stride", ctypes.c_int64 * 3) for name in ("query", "key", "value")),
        *((name, ctypes.c_int) for name in _INTS),
        ("scaling", ctypes.c_float),
    )


@dataclass(frozen=True)
class Specialization:
    """What the kernel is compiled for; equal ones share a kernel."""

    head_dim: int
    bits: tuple[int, int | None]
    key_group: int
    value_group: int
    token_scaling: str | None
    rotate: bool
    dtype: torch.dtype
    head_bytes: int
    """Bytes of a KV head of the larger page."""

    @classmethod
    def of(
        cls, formats: Mapping[int, PageFormat], head_dim: int, rotate: bool, dtype: torch.dtype
    ) -> Specialization | str:
        """For a layer's page formats, or the reason why there is none."""
        if dtype not in ELEMENTS:
            return f"keys and values are {dtype}; the kernel takes bfloat16 and float16"
        if head_dim not in KERNEL_HEAD_DIMS:
            return f"head_dim is {head_dim}; the kernel takes {KERNEL_HEAD_DIMS}"
        if not formats:
            # Everything is in 16 bit. The kernel knows of some page that it will never see.
            unseen = PageFormat(2, 1, head_dim, "channel", PAGE_TOKENS, head_dim, None)
            return cls.of({2: unseen}, head_dim, False, dtype)
        if not all(page_format.in_fragments for page_format in formats.values()):
            return "keys are quantized per token; the kernel takes key_axis 'channel'"
        any_format = next(iter(formats.values()))
        widths = sorted(formats)
        return cls(
            head_dim,
            (widths[0], widths[1] if len(widths) > 1 else None),
            any_format.key_group,
            any_format.value_group,
            any_format.token_scaling,
            rotate,
            dtype,
            max(page_format.head_bytes for page_format in formats.values()),
        )

    def macros(self, warps: int, buffers: int, bulk: bool) -> dict[str, str | int]:
        """Macros that csrc/decode.cu is compiled with."""
        return {
            "HEAD_DIM": self.head_dim,
            "KEY_GROUP": self.key_group,
            "VALUE_GROUP": self.value_group,
            "SCALING": SCALINGS[self.token_scaling],
            "BITS_A": self.bits[0],
            "BITS_B": self.bits[1] or 0,
            "ELEMENT": ELEMENTS[self.dtype],
            "ROTATE": int(self.rotate),
            "WARPS": warps,
            "BUFFERS": buffers,
            "BULK": int(bulk),
        }

    def shared_bytes(self, warps: int, buffers: int) -> int:
        """``sizeof(Shared)`` of csrc/decode.cu."""
        buffer = self.head_bytes + (2 * PAGE_TOKENS if self.token_scaling == "shared" else 0)
        size = buffers * _aligned(buffer, 128)
        size = _aligned(size, 16) + -(-warps // 2) * COLUMNS * (self.head_dim + 3) * 4
        size = _aligned(size, 16) + COLUMNS * self.head_dim * 2
        size = _aligned(size, 16) + COLUMNS * self.head_dim * 4
        size = _aligned(size, 8) + buffers * (8 + 4) + COLUMNS * 4 + 4
        return _aligned(size, 128)

    def shape(self, limit: int) -> tuple[int, int] | None:
        """Warps and buffers for a limit of shared memory; None where not even 8 and 8 fit.

        A buffer a warp and some on the way; more than 20 gain nothing (measured on an H200).
        """
        for warps in (12, 8):
            for buffers in range(20, warps - 1, -1):
                if self.shared_bytes(warps, buffers) <= limit:
                    return warps, buffers
        return None


class PackedAttention:
    """The kernel of one specialization on one device, compiled when made.

    Attributes:
        trusted: whether its first result agreed with that of PyTorch operations; None before.
    """

    def __init__(self, specialization: Specialization, device: torch.device) -> None:
        arch = architecture(device)
        if arch is None:
            raise KernelError(f"{device} is no NVIDIA GPU of capability 8.0 or more")
        properties = torch.cuda.get_device_properties(device)
        limit = properties.shared_memory_per_block_optin
        shape = specialization.shape(limit)
        if shape is None:
            raise KernelError(
                f"a thread block has {limit} bytes of shared memory on {device}, too few for "
                f"pages of {specialization.head_bytes} bytes a head"
            )
        bulk = int(arch[3:].rstrip("a")) >= 90 and os.environ.get(SWITCH) != "no-bulk"
        self.specialization, self.workers = specialization, properties.multi_processor_count
        self.warps, buffers = shape
        self._shared_bytes = specialization.shared_bytes(self.warps, buffers)
        macros = specialization.macros(self.warps, buffers, bulk)
        self._kernel: Kernel = load_kernel("decode.cu", macros, device)
        self._arrivals: dict[int, torch.Tensor] = {}
        self.trusted: bool | None = None

    def __deepcopy__(self, memo: dict) -> PackedAttention:
        """Itself: copies of a cache share the kernel."""
        return self

    def __call__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
        pages: Mapping[int, torch.Tensor],
        blocks: torch.Tensor,
        sigma: torch.Tensor | None,
        tables: Tables,
    ) -> torch.Tensor:
        """Attention over what the tables list and, causally, over the new tokens.

        Args:
            queries: (batch, query heads, tokens, head_dim), at most 16 tokens.
            keys: (batch, KV heads, tokens, head_dim) of the new tokens; values likewise.
            scaling: factor of the scores.
            pages: bit width -> (slots, page_bytes) uint8.
            blocks: (slots, 2, KV heads, 32, head_dim).
            sigma: (KV heads or 1, head_dim) float32 contiguous, or None.

        Returns:
            (batch, query heads, tokens, head_dim), in memory by tokens, then heads.
        """
        batch, query_heads, tokens, head_dim = queries.shape
        queries = queries if queries.stride(3) == 1 else queries.contiguous()
        keys, values = _in_rows(keys), _in_rows(values)
        output = queries.new_empty(batch, tokens, query_heads, head_dim)
        stream = torch.cuda.current_stream(queries.device).cuda_stream
        parts = tables.segments + self.workers
        partials = output.new_empty(parts * COLUMNS * (head_dim + 3), dtype=torch.float32)
        first, second = self.specialization.bits
        params = Params(
            *(queries.data_ptr(), keys.data_ptr(), values.data_ptr(), output.data_ptr()),
            *(pages[bits].data_ptr() if bits in pages else None for bits in (first, second)),
            *(blocks.data_ptr(), tables.items.data_ptr(), tables.counts.data_ptr()),
            tables.assignments.data_ptr(),
            None if sigma is None else sigma.data_ptr(),
            partials.data_ptr(),
            self._arrivals_on(stream, tables.segments, queries.device).data_ptr(),
            *((ctypes.c_int64 * 3)(*x.stride()[:3]) for x in (queries, keys, values)),
            *(batch, keys.shape[1], query_heads // keys.shape[1], tokens, tables.items.shape[1]),
            0 if sigma is None else len(sigma),
            scaling,
        )
        self._kernel.launch(
            (len(tables.assignments), 1, 1),
            (self.warps * 32, 1, 1),
            self._shared_bytes,
            params,
            stream,
        )
        return output.transpose(1, 2)

    def _arrivals_on(self, stream: int, segments: int, device: torch.device) -> torch.Tensor:
        """Counters that a launch leaves at zero; of each stream its own, as launches overlap."""
        arrivals = self._arrivals.get(stream)
        if arrivals is None or len(arrivals) < segments:
            arrivals = torch.zeros(max(segments, 1024), dtype=torch.int32, device=device)
            self._arrivals[stream] = arrivals
        return arrivals


_made: dict[tuple[Specialization, torch.device, str | None], PackedAttention | None] = {}


def packed_attention(
    formats: Mapping[int, PageFormat],
    head_dim: int,
    rotate: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> PackedAttention | None:
    """The kernel for a layer; None, with the reason once in the log, for PyTorch operations."""
    if device.type != "cuda" or switched_off():
        return None
    specialization = Specialization.of(formats, head_dim, rotate, dtype)
    if isinstance(specialization, str):
        tell_once("decode attention", specialization)
        return None
    key = (specialization, device, os.environ.get(SWITCH))
    if key not in _made:
        try:
            _made[key] = PackedAttention(specialization, device)
        except KernelError as error:
            tell_once("decode attention", str(error))
            _made[key] = None
    return _made[key]


def _in_rows(states: torch.Tensor) -> torch.Tensor:
    """Rows contiguous and at multiples of 16 bytes, as the copy engine wants them."""
    aligned = all(stride % 8 == 0 for stride in states.stride()[:3])
    return (
        states
        if aligned and states.stride(3) == 1 and states.data_ptr() % 16 == 0
        else (states.contiguous())
    )


def _aligned(size: int, unit: int) -> int:
    return -(-size // unit) * unit
