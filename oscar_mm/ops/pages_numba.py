"""Page layout for CPU kernels (positions of codes and numbers), and a CPU kernel for unpack.

A vector holds 16 words of a code plane, and a place in a word means the same in all of them (see
``oscar_mm.pages.fragments``). Planes are converted to words of eight 4-bit codes; the index of a
code's place has three bits, k2 k1 k0. For keys, a lane holds two tokens: k1 selects the token, k2
and k0 the channel. For values, k0 selects the channel; k2, k1 and the lane select the token.

``unpack_on_cpu`` is compiled by numba; its arithmetic is that of ``oscar_mm.quant``, but a vector
at a time.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from oscar_mm.kernels.numba_vectors import LANES, compiled, read_floats, rotate_vector, shares
from oscar_mm.kernels.run_parallel import run_parallel
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat

if TYPE_CHECKING:
    from oscar_mm.ops.unpack import Sides, UnpackArguments

TILE = 16
"""Tokens per tile."""
TILES = PAGE_TOKENS // TILE
GROUPS = 8
"""Word groups per tile."""


class CodesLayout(NamedTuple):
    """Where the codes of keys or values are within a head, in 32-bit words.

    Attributes:
        start: first word of the plane of low bits.
        high: first word of the plane of high bits; 0 if there is none.
        steps: number of runs of words per tile; a run has the words of 8 groups.
        words: number of words per group in a run: 8 or 16.
        high_words: the same for the plane of high bits: half as many, or as many, where a run has
            the high bits of two runs of low bits.
        parts: number of words of eight codes that a stored word becomes: 1, or 2 (its even and its
            odd codes).
        mask: bit mask of the low bits in a word of eight codes.
        channels: for keys (head_dim,): the channel of each run, word, part, k2 and k0. For values
            (sums,): the channel of each run, vector, part, k0 and lane.
        scales: for values (runs, scales, 16) float32: 1 for the scale of a lane's channels,
            otherwise 0.
    """

    start: int
    high: int
    steps: int
    words: int
    high_words: int
    parts: int
    mask: int
    channels: np.ndarray
    scales: np.ndarray


class PageLayout(NamedTuple):
    """Page layout for the CPU kernels.

    Attributes:
        head_words: size of a KV head in 32-bit words.
        keys, values: layouts of the codes of keys and of values.
        key_numbers: (KV heads, n) uint32: offsets in a page of the float16 numbers for a head's
            keys, in natural order: scales, zeros, and center and norms if the format has them.
        value_numbers: (KV heads, 2 * n) uint32: offsets of the values' scales, then of their zeros,
            both group by group.
        has_center, has_norms: whether the format has a center, or norms.
        key_group: number of tokens that share channel scales; 0 if each token has its own scales.
        value_group: number of channels per scale of a value.
    """

    head_words: int
    keys: CodesLayout
    values: CodesLayout
    key_numbers: np.ndarray
    value_numbers: np.ndarray
    has_center: bool
    has_norms: bool
    key_group: int
    value_group: int


@lru_cache(maxsize=64)
def page_layout(page_format: PageFormat) -> PageLayout | None:
    """Return the layout for pages in fragment order; None for other pages."""
    if not page_format.in_fragments or page_format.value_group % 32:
        return None
    heads = page_format.kv_heads
    by_group = page_format.number_places("value_scales", "value_zeros")
    by_group = by_group.reshape(heads, 2, PAGE_TOKENS, -1).transpose(0, 1, 3, 2)
    return PageLayout(
        head_words=page_format.head_bytes // 4,
        keys=_codes_layout(page_format, "key"),
        values=_codes_layout(page_format, "value"),
        # Indices are unsigned, since numba adds code for negative ones.
        key_numbers=page_format.number_places("key_scales", "key_zeros", "center", "norms").astype(
            np.uint32
        ),
        value_numbers=by_group.reshape(heads, -1).astype(np.uint32),
        has_center=page_format.center,
        has_norms=page_format.token_scaling is not None,
        key_group=0 if _scales_tokens(page_format) else page_format.key_group,
        value_group=page_format.value_group,
    )


@lru_cache(maxsize=64)
def plain_layout(page_format: PageFormat) -> tuple[Any, ...]:
    """Return a layout as unnamed tuples, which numba accepts 20 microseconds faster."""
    layout = page_layout(page_format)
    assert layout is not None
    return layout.head_words, tuple(layout.keys), tuple(layout.values), *layout[3:]


def _codes_layout(page_format: PageFormat, side: str) -> CodesLayout:
    """Return the layout of the codes for keys ("key") or values ("value")."""
    (name, _, bits), *high = page_format.planes(f"{side}_codes")
    head_dim, group = page_format.head_dim, page_format.value_group
    parts = 4 // bits
    of_lane = head_dim * bits // 64  # words
    steps = of_lane // gcd(4, of_lane)
    stored = page_format.orders[name].elements().numpy() % head_dim
    # run, word, k2, k1, k0, part of the first tile
    stored = stored.reshape(TILES, steps, -1, 2, 2, 2, parts)[0]
    words = stored.shape[1] // GROUPS
    scales = np.zeros((0, 0, LANES), np.float32)
    if side == "key":
        channels = stored[:, :words, :, 0].transpose(0, 1, 4, 2, 3)
    else:
        by_vector = stored[:, :, 0, 0].reshape(steps, -1, LANES, 2, parts)
        channels = by_vector.transpose(0, 1, 4, 3, 2)
        scale_of = by_vector[:, 0, :, 0, 0] // group
        scales = scale_of[:, None] == np.arange(head_dim // group)[:, None]
    fields = page_format.fields
    return CodesLayout(
        start=fields[name].offset // 4,
        high=fields[high[0][0]].offset // 4 if high else 0,
        steps=steps,
        words=words,
        high_words=4 * gcd(4, of_lane // 2),
        parts=parts,
        mask=0x33333333 if parts == 2 else 0xFFFFFFFF,
        channels=channels.ravel(),
        scales=np.ascontiguousarray(scales, np.float32),
    )


class _Side(NamedTuple):
    """Tables for reading keys or values.

    Attributes:
        group: number of channels per scale.
        places: (planes, 128, n) int64: which bytes of a head hold a token's codes.
        counts: (planes, 2) int64: number of bytes per token, and of codes per byte.
        codes: (planes, 256, 8) float32: contribution of each byte value to a token's codes.
        elements: (planes, d) int64: index of each channel among a token's codes in a plane.
        numbers: (KV heads, 2, 128, groups) int64: offsets of scales and zeros, in units of two
            bytes.
        center: (KV heads, d) int64: offsets of the center, in the same units; empty if there is no
            center.
    """

    group: int
    places: np.ndarray
    counts: np.ndarray
    codes: np.ndarray
    elements: np.ndarray
    numbers: np.ndarray
    center: np.ndarray

    @classmethod
    def of(cls, page_format: PageFormat, name: str) -> _Side:
        """Return a page format's tables for keys (name "key") or values ("value")."""
        planes, head_dim = page_format.planes(f"{name}_codes"), page_format.head_dim
        places = np.zeros((len(planes), PAGE_TOKENS, head_dim), np.int64)
        counts = np.zeros((len(planes), 2), np.int64)
        codes = np.zeros((len(planes), 256, 8), np.float32)
        elements = np.zeros((len(planes), head_dim), np.int64)
        for plane, (field, first, width) in enumerate(planes):
            per_byte, offset = 8 // width, page_format.fields[field].offset
            of_tokens, channels = (x.numpy() for x in page_format.token_elements(field))
            if (channels != channels[0]).any():
                raise ValueError(f"{field}: the order of channels differs between tokens")
            counts[plane] = head_dim // per_byte, per_byte
            places[plane, :, : counts[plane, 0]] = offset + of_tokens[:, ::per_byte] * width // 8
            shifts = width * np.arange(per_byte)
            found = np.arange(256)[:, None] >> shifts & (1 << width) - 1
            codes[plane, :, :per_byte] = found << first
            elements[plane] = np.argsort(channels[0])
        heads, is_key = page_format.kv_heads, name == "key"
        numbers = page_format.number_places(f"{name}_scales", f"{name}_zeros")
        none = np.zeros((heads, 0), np.int64)
        return cls(
            group=page_format.key_group if is_key else page_format.value_group,
            places=places,
            counts=counts,
            codes=codes,
            elements=elements,
            numbers=numbers.reshape(heads, 2, PAGE_TOKENS, -1),
            center=page_format.number_places("center") if page_format.center and is_key else none,
        )


@lru_cache(maxsize=64)
def _sides(page_format: PageFormat) -> tuple[tuple[Any, ...], ...]:
    """Return the tables for keys and values as unnamed tuples, which numba accepts faster."""
    return tuple(_Side.of(page_format, "key")), tuple(_Side.of(page_format, "value"))


def reads(page_format: PageFormat, rotate: bool) -> bool:
    """Return whether there is a CPU kernel for a page format; rotation blocks must be whole
    vectors."""
    rotates = not rotate or page_format.head_dim % LANES == 0
    return page_format.codec.has_kernels and _scales_tokens(page_format) and rotates


def _scales_tokens(page_format: PageFormat) -> bool:
    """Return whether each key has its own scales."""
    return page_format.fields["key_scales"].shape[0] == PAGE_TOKENS


@torch.no_grad()
def unpack_on_cpu(arguments: UnpackArguments) -> Sides:
    """Run ``unpack`` on pages that ``reads`` accepts; for arguments see
    ``oscar_mm.ops.unpack.UnpackArguments``."""
    page_format, sigma, slots = arguments.page_format, arguments.sigma, arguments.slots.numpy()
    heads, head_dim = page_format.kv_heads, page_format.head_dim
    sigma = torch.ones(1, head_dim) if sigma is None else sigma
    balancing = sigma.expand(heads, -1).contiguous().numpy()
    results = np.empty((2, heads, len(slots), PAGE_TOKENS, head_dim), np.float32)
    pages = arguments.pages.numpy()
    given = pages, pages.view(np.uint16), page_format.head_bytes, balancing, arguments.rotate
    run_parallel(
        [
            (_unpack, results, slots, part, *_sides(page_format), *given)
            for part in shares(np.arange(2 * heads * len(slots)))
        ]
    )
    keys, values = torch.from_numpy(results).to(arguments.dtype)
    return keys.transpose(0, 1), values.transpose(0, 1)


@compiled
def _unpack(
    results,
    slots,
    tasks,
    plain_key_side,
    plain_value_side,
    pages,
    halves,
    head_bytes,
    balancing,
    rotate,
):
    """Write (sides, KV heads, n, 128, head_dim) results; arrays as in ``unpack_on_cpu``."""
    key_side, value_side = _Side(*plain_key_side), _Side(*plain_value_side)
    heads, head_dim = balancing.shape
    count = len(slots)
    center = np.empty(head_dim, np.float32)
    raw = np.empty((2, head_dim + 8), np.float32)
    for task in tasks:
        is_value, head, page = task // (heads * count), task // count % heads, task % count
        side = value_side if is_value else key_side
        slot, start = slots[page], head * head_bytes
        groups, planes = head_dim // side.group, len(side.places)
        numbers = np.empty((2, groups), np.float32)
        has_center = side.center.shape[1] > 0
        read_floats(halves[slot], side.center[head], center[: side.center.shape[1]])
        for token in range(PAGE_TOKENS):
            for plane in range(planes):
                of_plane, width = side.counts[plane]
                for index in range(of_plane):
                    byte = pages[slot, start + side.places[plane, token, index]]
                    # Write eight codes at a time; later ones overwrite any surplus.
                    for code in range(8):
                        raw[plane, index * width + code] = side.codes[plane, byte, code]
            for number in range(2):
                read_floats(halves[slot], side.numbers[head, number, token], numbers[number])
            vector = results[is_value, head, page, token]
            for channel in range(head_dim):
                vector[channel] = raw[0, side.elements[0, channel]]
            if planes > 1:
                for channel in range(head_dim):
                    vector[channel] += raw[1, side.elements[1, channel]]
            for group in range(groups):
                scale, zero = abs(numbers[0, group]), numbers[1, group]
                for channel in range(group * side.group, (group + 1) * side.group):
                    vector[channel] = vector[channel] * scale + zero
            if has_center and halves[slot, side.numbers[head, 0, token, 0]] >> 15:
                for channel in range(head_dim):
                    vector[channel] += center[channel]
            if rotate:
                rotate_vector(vector)
            if not is_value:
                for channel in range(head_dim):
                    vector[channel] *= balancing[head, channel]
