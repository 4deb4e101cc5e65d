"""Queries, keys and values with the troubles that real models have."""

import torch

from oscar_mm.modality import Modality
from oscar_mm.quant.balance import sigma_from_rms


def multimodal(
    seed: int,
    *,
    kv_heads: int = 8,
    group: int = 4,
    tokens: int = 1024,
    head_dim: int = 128,
    outliers: float = 6.0,
    imbalance: float = 3.0,
    long: float = 5.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Text, image, text, audio, image: queries, keys, values (1, heads, tokens, d), modality ids.

    Text keys are ``imbalance`` times as long as image keys, 1.5% of keys ``long`` times, some key
    channels are ``outliers`` times the others and not centred, and heads differ in size.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    counts = [tokens // 8, tokens // 2, tokens // 8, tokens // 8, tokens // 8]
    kinds = (Modality.TEXT, Modality.IMAGE, Modality.TEXT, Modality.AUDIO, Modality.IMAGE)
    ids = torch.cat([torch.full((n,), int(m)) for n, m in zip(counts, kinds, strict=True)])
    keys = normal(kv_heads, tokens, head_dim) + normal(kv_heads, 1, head_dim)
    keys *= normal(kv_heads, 1, 1).exp()
    keys *= torch.where(ids == Modality.TEXT, imbalance, 1.0)[:, None]
    keys *= torch.where(torch.rand(tokens, generator=generator) < 0.015, long, 1.0)[:, None]
    channels = torch.randperm(head_dim // 2, generator=generator)[:3]
    channels = torch.cat([channels, channels + head_dim // 2])  # rotary pairs
    keys[..., channels] = outliers * (keys[..., channels] + 0.5)
    values = normal(kv_heads, tokens, head_dim) * normal(1, 1, head_dim).exp()
    queries = normal(kv_heads * group, tokens, head_dim) + normal(kv_heads * group, 1, head_dim)
    queries[..., channels] /= outliers
    scale = keys.square().sum(-1).mean(-1).sqrt().repeat_interleave(group) / head_dim**0.5
    queries /= scale[:, None, None]
    return queries[None], keys[None], values[None], ids


def attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Plain softmax attention of all queries over all keys, in float64."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = queries.double() @ keys.transpose(2, 3) * keys.shape[-1] ** -0.5
    return scores.softmax(-1) @ values


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def sigma_of(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """(KV heads, head_dim) balancing of these queries and keys."""
    grouped = queries[0].unflatten(0, (keys.shape[1], -1)).square().mean((1, 2)).sqrt()
    return sigma_from_rms(keys[0].std(1, correction=0), grouped)
