"""Codec of full pages, key_axis "channel": each key channel has a scale per group of tokens."""

from __future__ import annotations

from typing import ClassVar

import torch

from oscar_mm.pages.codecs.base import Arrays, Fitting, PageShape
from oscar_mm.pages.codecs.groups import GroupCodec, decoded
from oscar_mm.policy import KEY_AXES, PAGE_TOKENS, Bits, KVPolicy
from oscar_mm.quant.basis import Basis
from oscar_mm.quant.fit import (
    KEY_RUN,
    VALUE_RUN,
    assign_codes,
    divide_by_norm,
    fit_group,
    fitted_norm,
    token_rms,
    unbiased_scale,
)

_HEAD_DIMS = (64, 128)
"""Channels per head for which the kernels support the format."""


class ChannelCodec(GroupCodec):
    """Format in which each key channel has a scale and a zero per group of tokens.

    Keys may be divided by a norm per token. The values of a token have a scale and a zero per group
    of channels.
    """

    key_axis: ClassVar[str] = "channel"
    limits = KEY_AXES["channel"]
    appends_tokens: ClassVar[bool] = False
    stream: ClassVar[bool] = False

    def key_group(self, group: int | str, head_dim: int) -> int:
        """Return the number of tokens per key group."""
        assert isinstance(group, int), "see ``limits``"
        return group

    def key_scales(self, page: PageShape) -> tuple[int, int]:
        """Return the shape of the array of key scales in a head, (groups of tokens, channels)."""
        return PAGE_TOKENS // page.key_group, page.head_dim

    def centers_keys(self, policy: KVPolicy) -> bool:
        """Return True: the zeros of the channels are the common part of the keys."""
        return True

    def in_fragments(self, page: PageShape) -> bool:
        """Return whether the kernels support the page's head_dim and bits."""
        return page.head_dim in _HEAD_DIMS and page.bits in (Bits(2, 2), Bits(4, 4))

    def encode(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        page: PageShape,
        fitting: Fitting,
        basis: Basis,
        centers: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Encode full pages to codes, scales, zeros and norms; see ``PageCodec.encode``."""
        arrays = _packed_keys(basis.keys_in(keys), page, fitting)
        return arrays | _packed_values(basis.values_in(values), page, fitting)

    def decode(self, arrays: Arrays, page: PageShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode pages to scale * code + zero; keys are also multiplied by their norms."""
        keys = decoded(arrays, "key", page.key_group, 2)
        if page.token_scaling is not None:
            norms = arrays["norms"]
            keys = keys * (norms[:, None, :, None] if norms.ndim == 2 else norms[..., None])
        return keys, decoded(arrays, "value", page.value_group, 3)


def _packed_keys(keys: torch.Tensor, page: PageShape, fitting: Fitting) -> dict[str, torch.Tensor]:
    """Return the arrays of (pages, heads, 128, d) float32 keys."""
    unit, norms, scaling = keys, None, page.token_scaling
    if scaling is not None:
        norms = token_rms(keys, scaling)
        unit = divide_by_norm(keys, norms)
    dim = 3  # of (pages, heads, groups, tokens, d)
    grouped = unit.unflatten(2, (-1, page.key_group))
    scale, zero = fit_group(grouped, page.bits.keys, fitting.fit, dim, KEY_RUN)
    codes = assign_codes(grouped, scale, zero, page.bits.keys)
    if fitting.unbiased_keys:
        scale, zero = unbiased_scale(grouped, codes, scale, zero, dim)
    arrays = {
        "key_codes": codes.view_as(keys),
        "key_scales": scale.squeeze(dim),
        "key_zeros": zero.squeeze(dim),
    }
    if scaling is not None and norms is not None:
        coded = (codes * scale + zero).view_as(keys)
        norms = fitted_norm(keys, coded, norms, fitting.norm, scaling)
        arrays["norms"] = norms[..., 0]
        if scaling == "shared":
            arrays["norms"] = norms[:, 0, :, 0]
    return arrays


def _packed_values(
    values: torch.Tensor, page: PageShape, fitting: Fitting
) -> dict[str, torch.Tensor]:
    grouped = values.unflatten(3, (-1, page.value_group))
    scale, zero = fit_group(grouped, page.bits.values, fitting.fit, 4, VALUE_RUN)
    codes = assign_codes(grouped, scale, zero, page.bits.values)
    if fitting.value_scale == "unbiased":
        scale, zero = unbiased_scale(grouped, codes, scale, zero, 4)
    return {
        "value_codes": codes.view_as(values),
        "value_scales": scale.squeeze(4),
        "value_zeros": zero.squeeze(4),
    }
