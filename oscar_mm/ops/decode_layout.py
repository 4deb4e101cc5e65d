"""Where codes and numbers are in a page, as loops for CPUs see it.

A vector has 16 words of a plane of codes, and a place in a word means the same for all of them (see
``oscar_mm.pages.fragments``). Planes become words of eight codes, of 4 bits each; the number of a
code's place has three bits, k2 k1 k0. Of keys a lane has two tokens: k1 tells which, k2 and k0 tell
the channel. Of values k0 tells the channel, k2, k1 and the lane tell the token.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from oscar_mm.kernels.loops import LANES
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat

TILE = 16
"""Tokens."""
TILES = PAGE_TOKENS // TILE
GROUPS = 8
"""Of words of a tile."""


class CodesLayout(NamedTuple):
    """Where the codes of keys or of values are in a head, in 32-bit words.

    Attributes:
        start: first word of the plane of low bits.
        high: first word of the plane of high bits; 0 where there is none.
        steps: runs of a tile's words; a run has the words of 8 groups.
        words: words of a group in a run: 8 or 16.
        parts: words of eight codes that a word becomes: 1, or 2 (its even and its odd codes).
        mask: places of the low bits in a word of eight codes.
        channels: of keys (head_dim,): for each run, word, part, k2 and k0 the channel. Of values
            (sums,): for each run, vector, part, k0 and lane.
        scales: of values (runs, scales, 16) float32: 1 for the scale of a lane's channels, else 0.
    """

    start: int
    high: int
    steps: int
    words: int
    parts: int
    mask: int
    channels: np.ndarray
    scales: np.ndarray


class PageLayout(NamedTuple):
    """A page as the loops see it.

    Attributes:
        head_words: 32-bit words of a KV head.
        keys, values: their codes.
        key_numbers: (KV heads, n) uint32: where the float16 numbers of a head's keys are in a page,
            in natural order: scales, zeros, center and norms, the last two where there are any.
        value_numbers: (KV heads, 2 * n) uint32: of values, scales and zeros, each group by group.
        has_center, has_norms: whether there are.
        key_group: tokens that share the scales of channels; 0 where each token has its own.
        value_group: channels of a value's scale.
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
    """The layout of pages in the order of fragments; None for others."""
    if not page_format.in_fragments or page_format.value_group % 32:
        return None
    heads = page_format.kv_heads
    by_group = page_format.number_places("value_scales", "value_zeros")
    by_group = by_group.reshape(heads, 2, PAGE_TOKENS, -1).transpose(0, 1, 3, 2)
    return PageLayout(
        head_words=page_format.head_bytes // 4,
        keys=_codes_layout(page_format, "key"),
        values=_codes_layout(page_format, "value"),
        # Unsigned: numba takes care of negative indices.
        key_numbers=page_format.number_places("key_scales", "key_zeros", "center", "norms").astype(
            np.uint32
        ),
        value_numbers=by_group.reshape(heads, -1).astype(np.uint32),
        has_center=page_format.center,
        has_norms=page_format.token_scaling is not None,
        key_group=0 if page_format.by_token else page_format.key_group,
        value_group=page_format.value_group,
    )


@lru_cache(maxsize=64)
def plain_layout(page_format: PageFormat) -> tuple[Any, ...]:
    """A layout in tuples without names, which numba takes 20 microseconds faster."""
    layout = page_layout(page_format)
    assert layout is not None
    return layout.head_words, tuple(layout.keys), tuple(layout.values), *layout[3:]


def _codes_layout(page_format: PageFormat, side: str) -> CodesLayout:
    """Codes of keys or of values."""
    (name, _, bits), *high = page_format.planes(f"{side}_codes")
    head_dim, group = page_format.head_dim, page_format.value_group
    parts = 4 // bits
    of_lane = head_dim * bits // 64  # words
    steps = -(-of_lane // 4)
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
        of_lane = by_vector[:, 0, :, 0, 0] // group
        scales = of_lane[:, None] == np.arange(head_dim // group)[:, None]
    fields = page_format.fields
    return CodesLayout(
        start=fields[name].offset // 4,
        high=fields[high[0][0]].offset // 4 if high else 0,
        steps=steps,
        words=words,
        parts=parts,
        mask=0x33333333 if parts == 2 else 0xFFFFFFFF,
        channels=channels.ravel(),
        scales=np.ascontiguousarray(scales, np.float32),
    )
