"""Codec of stream pages, key_axis "token": each token has its own scales and is written alone."""

from __future__ import annotations

from typing import ClassVar

import torch

from oscar_mm.pages.codecs.base import Arrays, Fitting, PageShape
from oscar_mm.pages.codecs.groups import GroupCodec, decoded
from oscar_mm.pages.fragments import FRAGMENT_CHANNELS, Order, by_group
from oscar_mm.policy import KEY_AXES, PAGE_TOKENS
from oscar_mm.quant.basis import Basis, hadamard
from oscar_mm.quant.fit import (
    assign_codes,
    fit_group,
    lower_score_error,
    score_weights,
    unbiased_scale,
)


class StreamCodec(GroupCodec):
    """Format in which the keys and values of a token have a scale and a zero per group of channels.

    If the format has a center, the sign bit of a key's scale indicates whether to add the page's
    center; the scale is the absolute value.
    """

    key_axis: ClassVar[str] = "token"
    limits = KEY_AXES["token"]
    stream: ClassVar[bool] = True

    def key_scales(self, page: PageShape) -> tuple[int, int]:
        """Return the shape of the array of key scales in a head, (128, groups of channels)."""
        return PAGE_TOKENS, page.head_dim // page.key_group

    def in_fragments(self, page: PageShape) -> bool:
        """Return whether a key is one group, of a number of channels that fills whole words."""
        return page.head_dim % FRAGMENT_CHANNELS == 0 and page.key_group == page.head_dim

    def orders(self, page: PageShape) -> dict[str, Order]:
        """Return the orders that the kernels read; in other pages, scales are stored by group."""
        grouped = by_group(page.head_dim // page.key_group)
        return {"key_scales": grouped, "key_zeros": grouped} | super().orders(page)

    def encode(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        page: PageShape,
        fitting: Fitting,
        basis: Basis,
        centers: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Encode tokens to codes, scales and zeros; see ``PageCodec.encode``."""
        vectors, group, bits = basis.keys_in(keys), page.key_group, page.bits
        how = bits.keys, group, fitting.fit, fitting.unbiased_keys
        codes, scale, zero, error = in_codes(vectors, *how)
        if centers is not None:
            centers = centers.unsqueeze(-2)
            apart = in_codes(vectors - centers, *how)
            nearer = (apart[3] < error)[..., None]
            codes = torch.where(nearer, apart[0], codes)
            scale = torch.where(nearer, -apart[1], scale)
            zero = torch.where(nearer, apart[2], zero)
            vectors = torch.where(nearer, vectors - centers, vectors)
        if fitting.lowers_score_error:
            plain = None if centers is None else centers @ hadamard(keys.shape[-1], keys.device)
            scales, zeros = (x.repeat_interleave(group, -1) for x in (scale.abs(), zero))
            weights = score_weights(basis.balanced(keys), plain)
            codes = lower_score_error(vectors, codes, scales, zeros, weights, bits.keys)
        unbiased = fitting.value_scale == "unbiased"
        of_values = in_codes(
            basis.values_in(values), bits.values, page.value_group, fitting.fit, unbiased
        )
        return {
            "key_codes": codes,
            "key_scales": scale,
            "key_zeros": zero,
            "value_codes": of_values[0],
            "value_scales": of_values[1],
            "value_zeros": of_values[2],
        }

    def decode(self, arrays: Arrays, page: PageShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode pages to scale * code + zero, plus the center if the scale's sign bit is set."""
        values = decoded(arrays, "value", page.value_group, 3)
        if not page.center:
            return decoded(arrays, "key", page.key_group, 3), values
        scales = arrays["key_scales"]
        keys = decoded(dict(arrays, key_scales=scales.abs()), "key", page.key_group, 3)
        centered = keys + arrays["center"][:, :, None]
        return torch.where(scales.signbit()[..., :1], centered, keys), values


def in_codes(
    vectors: torch.Tensor, bits: int, group: int, fit: str, unbiased: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encode vectors, (..., d), and return codes (..., d), scales and zeros (..., groups each), and
    squared errors (...)."""
    grouped = vectors.unflatten(-1, (-1, group))
    scale, zero = fit_group(grouped, bits, fit, -1)
    codes = assign_codes(grouped, scale, zero, bits)
    if unbiased:
        scale, zero = unbiased_scale(grouped, codes, scale, zero, -1)
    error = (codes * scale + zero - grouped).square().sum((-2, -1))
    return codes.view_as(vectors), scale[..., 0], zero[..., 0], error
