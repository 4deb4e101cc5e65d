"""An experiment: values whose scale is fitted like the norm of keys, so that they do not shrink."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_mm.compare.forced import LayerStates
from oscar_mm.compare.methods import DEFAULT, FINE, MIDDLE, main_methods
from oscar_mm.compare.paged import Paged, Restored
from oscar_mm.quant.basis import Basis
from oscar_mm.quant.fit import VALUE_RUN, assign_codes, fit_group


@dataclass(frozen=True)
class UnbiasedValues(Paged):
    """A policy, with values stored another way in the same bits; no page has that yet.

    A least-squares fit shrinks a group of values towards its mean. Attention averages the errors
    of many tokens, but not what all of them lack. So the scale is chosen, once the codes are
    known, such that <v^ - mean, v - mean> = |v - mean|^2 in each group.
    """

    def restored(self, states: LayerStates, ids: Tensor) -> Restored:
        """See ``Paged.restored``."""
        back = super().restored(states, ids)
        basis = Basis(states.values.shape[-1], self.policy.rotate)
        for modality, places in self.packed(ids).items():
            where, bits = places.to(states.values.device), self.policy.bits_for(modality)
            stored = _stored(
                basis.values_in(states.values[:, :, where]), bits, self.policy.value_group
            )
            back.values[:, :, where] = basis.values_out(stored).to(back.values.dtype)
        return back


def experiments() -> list[UnbiasedValues]:
    """The default and its smaller groups with such values."""
    return [
        UnbiasedValues(f"{one.name}, unbiased values", one.policy)
        for one in main_methods()
        if one.name in (DEFAULT, MIDDLE, FINE)
    ]


def _stored(values: Tensor, bits: int, group: int) -> Tensor:
    """(..., d) float32 as read back from codes, float16 scales and zeros."""
    grouped = values.unflatten(-1, (-1, min(group, values.shape[-1])))
    scale, zero = fit_group(grouped, bits, "lsq", -1, VALUE_RUN)
    codes = assign_codes(grouped, scale, zero, bits)
    mean_code, mean = codes.mean(-1, keepdim=True), grouped.mean(-1, keepdim=True)
    spread, wanted = scale * (codes - mean_code), grouped - mean
    overlap = (spread * wanted).sum(-1, keepdim=True)
    factor = wanted.square().sum(-1, keepdim=True) / overlap
    factor = torch.where((overlap > 0) & factor.isfinite(), factor, 1.0).clamp(0.5, 2)
    centre = zero + scale * mean_code
    scale = (scale * factor).half().float()
    return (codes * scale + (centre - scale * mean_code).half().float()).flatten(-2)
