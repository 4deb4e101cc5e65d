"""Order of a page's elements for the kernels: what a lane of a warp reads lies together.

A kernel multiplies 16 x 16 fragments. Lane 4 * group + quad (group 0..7, quad 0..3) of a warp
holds, of keys (tokens x channels), rows group and group + 8 and columns 2 quad, 2 quad + 1 and
both + 8; of values transposed (channels x tokens) likewise. With ``half`` for the + 8, ``odd`` for
the + 1 and ``step`` for the 16 channels of a key fragment or of a value fragment's rows:

    key codes    token = 16 tile + 8 half + group,  channel = 16 step + 8 chalf + 2 quad + odd
    value codes  token = 16 tile + 8 thalf + 2 quad + odd,
                 channel = 32 (step / 2) + 8 (group / 2) + 4 (step % 2) + 2 half + group % 2

A 32-bit word has the codes of one lane and tile for one step (4 bits) or two (2 bits); within it,
from the lowest bit, chalf (of values: half), then step % 2 (2 bits only), then half (thalf), then
odd. Words of a lane follow each other, at most four (16 bytes), then those of the next lane. The
bit place of a code so depends only on what a kernel can fold into the query or take out of the
result. Scales and zeros are in runs of 32 channels (keys) or tokens (values): quad, step % 2,
half, odd; norms in runs of 64 tokens: group, tile % 4, half.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

KERNEL_HEAD_DIMS = (64, 128)
_TOKENS = 128


@dataclass(frozen=True)
class Order:
    """A permutation of the elements of an array.

    Attributes:
        shape: the array's own shape.
        split: the same elements with its dimensions split.
        axes: the order in which the split dimensions are stored.
    """

    shape: tuple[int, ...]
    split: tuple[int, ...]
    axes: tuple[int, ...]

    def stored(self, values: torch.Tensor) -> torch.Tensor:
        """(..., *shape) -> (..., elements) in stored order."""
        lead = values.shape[: values.ndim - len(self.shape)]
        dims = [*range(len(lead)), *(len(lead) + axis for axis in self.axes)]
        return values.reshape(*lead, *self.split).permute(dims).reshape(*lead, -1)

    def natural(self, stored: torch.Tensor) -> torch.Tensor:
        """(..., elements) in stored order -> (..., *shape)."""
        lead = stored.shape[:-1]
        dims = [*range(len(lead)), *(len(lead) + self.axes.index(i) for i in range(len(self.axes)))]
        ordered = stored.reshape(*lead, *(self.split[axis] for axis in self.axes))
        return ordered.permute(dims).reshape(*lead, *self.shape)


def plain_orders(
    tokens: int, head_dim: int, key_scales: tuple[int, ...], value_groups: int
) -> dict[str, Order]:
    """Arrays as their shapes say."""
    codes = _as_is(tokens, head_dim)
    values = Order((tokens, value_groups), (tokens, value_groups), (1, 0))
    return {
        "key_codes": codes,
        "key_scales": _as_is(*key_scales),
        "key_zeros": _as_is(*key_scales),
        "norms": _as_is(tokens),
        "value_codes": codes,
        "value_scales": values,
        "value_zeros": values,
    }


def fragment_orders(bits: int, head_dim: int, key_group: int, value_group: int) -> dict[str, Order]:
    """Arrays as the kernels take them."""
    tiles, steps = _TOKENS // 16, head_dim // 16
    parity = 2 if bits == 2 else 1  # steps that share a word
    words = steps // parity
    near = min(4, words)  # words of a lane that follow each other
    # tile, half, group, far, near, parity, chalf, quad, odd
    keys = Order(
        (_TOKENS, head_dim),
        (tiles, 2, 8, words // near, near, parity, 2, 4, 2),
        (0, 3, 2, 7, 4, 8, 1, 5, 6),
    )
    pairs = head_dim // 32
    near_pairs = near if bits == 2 else near // 2
    # tile, thalf, quad, odd, far, near, group / 2, step % 2, half, group % 2
    value_split = (tiles, 2, 4, 2, pairs // near_pairs, near_pairs, 4, 2, 2, 2)
    value_axes = (0, 4, 6, 9, 2, 5, 3, 1, 7, 8) if bits == 2 else (0, 4, 6, 9, 2, 5, 7, 3, 1, 8)
    values = Order((_TOKENS, head_dim), value_split, value_axes)
    key_groups = _TOKENS // key_group
    # group, run, step % 2, half, quad, odd
    key_scales = Order(
        (key_groups, head_dim), (key_groups, head_dim // 32, 2, 2, 4, 2), (0, 1, 4, 2, 3, 5)
    )
    value_groups = head_dim // value_group
    # run, step % 2, half, quad, odd, group
    value_scales = Order(
        (_TOKENS, value_groups), (_TOKENS // 32, 2, 2, 4, 2, value_groups), (5, 0, 3, 1, 2, 4)
    )
    return {
        "key_codes": keys,
        "key_scales": key_scales,
        "key_zeros": key_scales,
        # run, tile % 4, half, group
        "norms": Order((_TOKENS,), (2, 4, 2, 8), (0, 3, 1, 2)),
        "value_codes": values,
        "value_scales": value_scales,
        "value_zeros": value_scales,
    }


def _as_is(*shape: int) -> Order:
    return Order(shape, shape, tuple(range(len(shape))))
