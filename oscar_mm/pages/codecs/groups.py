"""Base of the formats with a scale and a zero per group of numbers, which the kernels support.

A head consists of these arrays (g: size of a key group, c: size of a value group, d: head_dim, b:
bits per code of keys or values, 2, 3 or 4):

    array         shape                        dtype    key_axis "channel" / "token"
    center        (d,)                         float16  only with center
    key_codes     (128, d) of b bits           uint8
    key_scales    (128 / g, d) / (128, d / g)  float16
    key_zeros     as key_scales                float16
    norms         (128,)                       float16  with token_scaling "per_head"; "shared": one
                                                        for all heads
    value_codes   (128, d) of b bits           uint8
    value_scales  (128, d / c)                 float16
    value_zeros   (128, d / c)                 float16

A stored key is (scale * code + zero) * norm, a stored value scale * code + zero, both in the
coordinates of ``oscar_mm.quant.basis``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch

from oscar_mm.errors import InputError
from oscar_mm.pages.codecs.base import Array, Arrays, PageCodec, PageShape
from oscar_mm.pages.fragments import Order, by_group, fragment_orders
from oscar_mm.policy import ALLOWED_BITS, PAGE_TOKENS, TOKEN_SCALINGS


class GroupCodec(PageCodec):
    """Base class of formats that store scale * code + zero, with one scale and zero per group.

    A value group consists of channels of a token; subclasses define key groups.
    """

    has_kernels: ClassVar[bool] = True
    stream: ClassVar[bool]
    """Value of the macro STREAM in csrc/common/page.cuh."""

    @abstractmethod
    def key_scales(self, page: PageShape) -> tuple[int, int]:
        """Return the shape of the array of key scales in a head."""

    def arrays(self, page: PageShape) -> list[Array]:
        """Return the arrays of codes, scales and zeros, and of the center and norms if the pages
        have them."""
        tokens, d = PAGE_TOKENS, page.head_dim
        center = [Array("center", (d,), of_tokens=False)] if page.center else []
        norms = Array("norms", (tokens,), kind="norms", per_head=page.token_scaling == "per_head")
        key_scales, value_scales = self.key_scales(page), (tokens, d // page.value_group)
        return [
            *center,
            Array.codes("key_codes", d, page.bits.keys),
            Array("key_scales", key_scales),
            Array("key_zeros", key_scales),
            *([norms] if page.token_scaling else []),
            Array.codes("value_codes", d, page.bits.values),
            Array("value_scales", value_scales),
            Array("value_zeros", value_scales),
        ]

    def check(self, page: PageShape) -> None:
        """Raise InputError if the format does not support such pages; codes must have 2, 3 or 4
        bits and fill whole bytes."""
        if not set(page.bits) <= set(ALLOWED_BITS):
            raise InputError(f"bits={page.bits}: must be 2, 3 or 4")
        super().check(page)

    def orders(self, page: PageShape) -> dict[str, Order]:
        """Return the orders that the kernels read; in other pages, value scales are stored group by
        group."""
        if self.in_fragments(page):
            key_group = None if self.stream else page.key_group
            return fragment_orders(page.head_dim, page.bits, key_group, page.value_group)
        grouped = by_group(page.head_dim // page.value_group)
        return {"value_scales": grouped, "value_zeros": grouped}

    def macros(self, page: PageShape) -> dict[str, str | int]:
        """Return name -> value of the macros for csrc/common/page.cuh."""
        return {
            "HEAD_DIM": page.head_dim,
            "KEY_GROUP": page.key_group,
            "VALUE_GROUP": page.value_group,
            "SCALING": TOKEN_SCALINGS.index(page.token_scaling),
            "STREAM": int(self.stream),
            "CENTER": int(page.center),
        }


def decoded(arrays: Arrays, side: str, group: int, dim: int) -> torch.Tensor:
    """Decode keys or values to scale * code + zero, (n, KV heads, 128, d) float32.

    Args:
        arrays: arrays of n pages by name.
        side: "key" or "value".
        group: size of a group.
        dim: dimension of the codes along which values are grouped.
    """
    codes, scales, zeros = (arrays[f"{side}_{name}"] for name in ("codes", "scales", "zeros"))
    codes = codes.float()
    grouped = codes.unflatten(dim, (-1, group))
    return (grouped * scales.unsqueeze(dim + 1) + zeros.unsqueeze(dim + 1)).view_as(codes)
