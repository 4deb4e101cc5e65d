"""Function-preserving stress: key channels far larger than others, as large models have them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

FACTORS = (8.0, 16.0)
"""One rotary pair of every layer each. Powers of two: nothing is rounded differently."""


@contextmanager
def outlier_channels(model: Any, seed: int) -> Iterator[None]:
    """Inside, two rotary pairs of each layer have keys 8 and 16 times as large, and queries as
    much smaller: scores are what they were.

    Both channels of a pair are scaled, so RoPE does not mix what was scaled with what was not.
    Done to the weights of the QK norms, or, without them, of the projections.
    """
    generator = torch.Generator().manual_seed(seed)
    saved = []
    for layer in model.get_decoder().layers:
        attention = layer.self_attn
        half = attention.head_dim // 2
        pairs = torch.randperm(half, generator=generator)[: len(FACTORS)]
        scale = torch.ones(attention.head_dim)
        for pair, factor in zip(pairs.tolist(), FACTORS, strict=True):
            scale[[pair, pair + half]] = factor
        names = ("q_norm", "k_norm") if hasattr(attention, "k_norm") else ("q_proj", "k_proj")
        for name, power in zip(names, (-1, 1), strict=True):
            weight = getattr(attention, name).weight
            saved.append((weight, weight.detach().clone()))
            by_head = weight.data.view(-1, attention.head_dim, *weight.shape[1:])
            factor = scale.to(weight).pow(power)
            by_head *= factor.view(1, -1, *[1] * (weight.ndim - 1))
    try:
        yield
    finally:
        for weight, old in saved:
            weight.data.copy_(old)
