"""unpack on CPUs: stream pages to keys and values, by loops that numba compiles.

The arithmetic is that of ``oscar_mm.quant``, a vector at a time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from oscar_mm.kernels.loops import call_all, compiled, read_floats, rotate_vector, shares
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat

if TYPE_CHECKING:
    from oscar_mm.ops.unpack import Sides, UnpackArguments


class _Side(NamedTuple):
    """How keys or values are read.

    Attributes:
        group: channels of a scale.
        places: (planes, 128, n) int64: which bytes of a head have a token's codes.
        counts: (planes, 2) int64: of a token's bytes, and of the codes of a byte.
        codes: (planes, 256, 8) float32: what the codes of a byte add to a token's.
        elements: (planes, d) int64: which of a token's codes in a plane a channel has.
        numbers: (KV heads, 2, 128, groups) int64: where scales and zeros are, in units of two
            bytes.
        center: (KV heads, d) int64 likewise; without elements where there is none.
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
        """For "key" or "value"."""
        planes, head_dim = page_format.planes(f"{name}_codes"), page_format.head_dim
        places = np.zeros((len(planes), PAGE_TOKENS, head_dim), np.int64)
        counts = np.zeros((len(planes), 2), np.int64)
        codes = np.zeros((len(planes), 256, 8), np.float32)
        elements = np.zeros((len(planes), head_dim), np.int64)
        for plane, (field, first, width) in enumerate(planes):
            per_byte, offset = 8 // width, page_format.fields[field].offset
            of_tokens, channels = (x.numpy() for x in page_format.token_elements(field))
            if (channels != channels[0]).any():
                raise ValueError(f"{field}: tokens have their channels in other orders")
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
    """Keys' and values', in tuples without names, which numba takes faster."""
    return tuple(_Side.of(page_format, "key")), tuple(_Side.of(page_format, "value"))


def reads(page_format: PageFormat) -> bool:
    """Whether there are loops for pages of a format."""
    return page_format.by_token and page_format.in_fragments


@torch.no_grad()
def unpack_on_cpu(arguments: UnpackArguments) -> Sides:
    """``unpack``, see ``oscar_mm.ops.unpack.UnpackArguments``; of pages that ``reads`` takes."""
    page_format, sigma, slots = arguments.page_format, arguments.sigma, arguments.slots.numpy()
    heads, head_dim = page_format.kv_heads, page_format.head_dim
    sigma = torch.ones(1, head_dim) if sigma is None else sigma
    balancing = sigma.expand(heads, -1).contiguous().numpy()
    results = np.empty((2, heads, len(slots), PAGE_TOKENS, head_dim), np.float32)
    pages = arguments.pages.numpy()
    given = pages, pages.view(np.uint16), page_format.head_bytes, balancing, arguments.rotate
    call_all(
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
                    # Eight at a time; those that are too many are written over.
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
