"""Element order of pages for the kernels: elements that one lane of a warp reads are adjacent.

A kernel multiplies 16 x 16 fragments. For keys (tokens x channels), lane 4 * group + quad of a warp
(group 0..7, quad 0..3) has the elements in rows group and group + 8, and in columns 2 quad,
2 quad + 1, 2 quad + 8 and 2 quad + 9. For transposed values (channels x tokens), the lane has the
same rows and columns. Let ``half`` (for columns, ``chalf`` or ``thalf``) be 1 for the rows or
columns + 8, ``odd`` be 1 for the columns + 1, and ``step`` be the index of the 16 channels of a key
fragment or of a value fragment's rows. Then:

    key codes    token = 16 tile + 8 half + group,  channel = 16 step + 8 chalf + 2 quad + odd
    value codes  token = 16 tile + 8 thalf + 2 quad + odd,
                 channel = 32 (step / 2) + 8 (group / 2) + 4 (step % 2) + 2 half + group % 2

A 32-bit word holds the codes of one lane and tile for one step (4 bits) or two (2 bits). Within a
word, the order from the lowest bit is chalf (for values: half), then step % 2 (2 bits only), then
half (thalf), then odd. Up to four words (16 bytes) of a lane, as many as divide all of its words,
are adjacent, followed by the words of the next lane. So the bit position of a code depends only on
indices that a kernel can fold into the query or undo in the result. A word of high bits (of 3-bit
codes) covers four steps: within a byte, step / 2 % 2 comes first, then chalf (half) and step % 2,
so that a shift of the word moves each high bit next to the other two bits of its code.

Scales and zeros are stored in runs of 32 channels (per-channel keys, a page's center) or tokens
(values), in the order quad, step % 2, half, odd. Norms, and scales and zeros of per-token keys, are
in runs of 64 tokens, in the order group, tile % 4, half.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from oscar_mm.policy import PAGE_TOKENS, Bits

KERNEL_HEAD_DIMS = (64, 128, 256, 512)
"""Channels per head that the CUDA kernels support."""
FRAGMENT_CHANNELS = 64
"""Channels whose codes fill a lane's words, whatever the number of bits."""
CODE_PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}
"""Bits per code -> bits per code in each array that stores it, lowest bits first."""


@dataclass(frozen=True)
class Order:
    """A permutation of the elements of an array.

    Attributes:
        shape: natural shape of the array.
        split: shape after splitting dimensions.
        axes: order in which the split dimensions are stored.
    """

    shape: tuple[int, ...]
    split: tuple[int, ...]
    axes: tuple[int, ...]

    def stored(self, values: torch.Tensor) -> torch.Tensor:
        """Permute values of shape (..., *shape) to stored order, (..., elements)."""
        lead = values.shape[: values.ndim - len(self.shape)]
        dims = [*range(len(lead)), *(len(lead) + axis for axis in self.axes)]
        return values.reshape(*lead, *self.split).permute(dims).reshape(*lead, -1)

    def elements(self) -> torch.Tensor:
        """Return the natural index of the element at each stored index, (elements,) int64."""
        return self.stored(torch.arange(math.prod(self.shape)).view(self.shape))

    def natural(self, stored: torch.Tensor) -> torch.Tensor:
        """Permute values in stored order, (..., elements), back to (..., *shape)."""
        lead = stored.shape[:-1]
        dims = [*range(len(lead)), *(len(lead) + self.axes.index(i) for i in range(len(self.axes)))]
        ordered = stored.reshape(*lead, *(self.split[axis] for axis in self.axes))
        return ordered.permute(dims).reshape(*lead, *self.shape)


def as_is(*shape: int) -> Order:
    """Return the order that keeps an array of this shape as it is."""
    return Order(shape, shape, tuple(range(len(shape))))


def by_group(groups: int) -> Order:
    """Return the order that stores (128, groups) numbers group by group."""
    return Order((PAGE_TOKENS, groups), (PAGE_TOKENS, groups), (1, 0))


def fragment_orders(
    head_dim: int, bits: Bits, key_group: int | None, value_group: int
) -> dict[str, Order]:
    """Return the orders in which the kernels read the arrays of a page, by array name.

    Args:
        head_dim: number of channels per head.
        bits: bits per code for keys and for values.
        key_group: number of tokens per key group; None if each token has its own scale.
        value_group: number of channels per value group.
    """
    # run, step % 2, half, quad, odd of channels
    channels = (head_dim // 32, 2, 2, 4, 2)
    # run, tile % 4, half, group
    in_runs = (2, 4, 2, 8), (0, 3, 1, 2)
    norms = Order((PAGE_TOKENS,), *in_runs)
    if key_group is None:
        key_scales = Order((PAGE_TOKENS, 1), *in_runs)
    else:
        groups = PAGE_TOKENS // key_group
        key_scales = Order((groups, head_dim), (groups, *channels), (0, 1, 4, 2, 3, 5))
    value_groups = head_dim // value_group
    # run, step % 2, half, quad, odd, group
    value_scales = Order(
        (PAGE_TOKENS, value_groups),
        (PAGE_TOKENS // 32, 2, 2, 4, 2, value_groups),
        (5, 0, 3, 1, 2, 4),
    )
    return {
        "center": Order((head_dim,), channels, (0, 3, 1, 2, 4)),
        "key_codes": _key_codes(CODE_PLANES[bits.keys][0], head_dim),
        "key_codes_high": _key_codes(1, head_dim),
        "key_scales": key_scales,
        "key_zeros": key_scales,
        "norms": norms,
        "value_codes": _value_codes(CODE_PLANES[bits.values][0], head_dim),
        "value_codes_high": _value_codes(1, head_dim),
        "value_scales": value_scales,
        "value_zeros": value_scales,
    }


_OF_WORD = {1: (2, 2), 2: (1, 2), 4: (1, 1)}
"""Bits per code -> steps per word, as (number of values of step / 2 % 2, and of step % 2)."""


def _key_codes(bits: int, head_dim: int) -> Order:
    pairs, parities = _OF_WORD[bits]
    words = head_dim // 16 // (pairs * parities)
    near = math.gcd(4, words)  # number of adjacent words of a lane
    # tile, half, group, far, near, pair, parity, chalf, quad, odd
    return Order(
        (PAGE_TOKENS, head_dim),
        (PAGE_TOKENS // 16, 2, 8, words // near, near, pairs, parities, 2, 4, 2),
        (0, 3, 2, 8, 4, 9, 1, 6, 7, 5),
    )


def _value_codes(bits: int, head_dim: int) -> Order:
    pairs, parities = _OF_WORD[bits]
    words = head_dim // 16 // (pairs * parities)
    near = math.gcd(4, words)
    # If a word covers one step, two adjacent words cover the steps of a pair.
    after = 2 // parities
    # tile, thalf, quad, odd, far, near, pair, group / 2, step % 2, half, group % 2
    split = (PAGE_TOKENS // 16, 2, 4, 2, words // near, near // after, pairs, 4, 2, 2, 2)
    in_bytes = (0, 4, 7, 10, 2, 5, 3, 1, 8, 9, 6)
    in_words = (0, 4, 7, 10, 2, 5, 8, 3, 1, 9, 6)
    return Order((PAGE_TOKENS, head_dim), split, in_bytes if parities == 2 else in_words)
