"""Norms of keys by modality, and outliers among their channels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oscar_mm.modality import Modality
from oscar_mm.quant.basis import Basis

LONG = 3.0
"""A key is long if its norm is over this many times the median of its modality."""
_CHUNK_TOKENS = 4096
"""Tokens that are copied to float32 at a time."""


@dataclass(frozen=True)
class Spread:
    """Norms of the tokens of one modality.

    Attributes:
        mean, p5, median, p95: mean, and percentiles 5, 50 and 95.
        long: share of norms over ``LONG`` times the median.
    """

    mean: float
    p5: float
    median: float
    p95: float
    long: float

    @classmethod
    def of(cls, norms: torch.Tensor) -> Spread:
        """Spread of a tensor of norms, of any shape."""
        ordered = norms.flatten().sort().values
        p5, median, p95 = (ordered[round(q * (len(ordered) - 1))] for q in (0.05, 0.5, 0.95))
        long = (ordered > LONG * median).float().mean()
        return cls(*(float(x) for x in (ordered.mean(), p5, median, p95, long)))


@dataclass(frozen=True)
class Norms:
    """Norms of a layer's keys by modality, in the balanced coordinates in which they are stored.

    Attributes:
        tokens: norm of a token's keys in all KV heads, divided by the square root of their number.
        heads: norm of a token's key in one head, divided by the median of that head.
        scaled: ``heads`` after token scaling "shared", which makes ``tokens`` equal. After
            "per_head" every norm is 1.
    """

    tokens: dict[str, Spread]
    heads: dict[str, Spread]
    scaled: dict[str, Spread]

    @property
    def ratio(self) -> float:
        """Largest over smallest median of ``tokens``."""
        return _ratio(self.tokens)

    @property
    def scaled_ratio(self) -> float:
        """Largest over smallest median of ``scaled``."""
        return _ratio(self.scaled)

    @property
    def long(self) -> float:
        """Largest share of long tokens of any modality."""
        return max(spread.long for spread in self.tokens.values())


def measure_norms(keys: torch.Tensor, sigma: torch.Tensor | None, ids: torch.Tensor) -> Norms:
    """Norms of (KV heads, tokens, head_dim) keys; ``ids`` are (tokens,) modality ids."""
    basis = Basis(keys.shape[-1], False, sigma)
    parts = [basis.balanced(part).norm(dim=-1) for part in keys.split(_CHUNK_TOKENS, dim=1)]
    heads = torch.cat(parts, dim=1)
    tokens = heads.square().mean(0).sqrt()
    scaled = heads / tokens.clamp(min=1e-12)
    heads, scaled = (
        x / x.median(dim=1, keepdim=True).values.clamp(min=1e-12) for x in (heads, scaled)
    )
    by_modality = [
        {
            modality.label: Spread.of(norms[..., ids == int(modality)])
            for modality in Modality
            if bool((ids == int(modality)).any())
        }
        for norms in (tokens, heads, scaled)
    ]
    return Norms(*by_modality)


def channel_outliers(keys: torch.Tensor, sigma: torch.Tensor | None) -> dict[str, float]:
    """Largest over median rms of a head's key channels, in the worst head.

    Args:
        keys: (KV heads, tokens, head_dim) after RoPE.
        sigma: (KV heads or 1, head_dim), balancing.

    Returns:
        the ratio for keys that are "raw", "rotated", "balanced", and "balanced, rotated".
    """
    head_dim = keys.shape[-1]
    bases = {
        "raw": Basis(head_dim, False),
        "rotated": Basis(head_dim, True),
        "balanced": Basis(head_dim, False, sigma),
        "balanced, rotated": Basis(head_dim, True, sigma),
    }
    ratios = {}
    for name, basis in bases.items():
        parts = [basis.keys_in(part).square().sum(1) for part in keys.split(_CHUNK_TOKENS, dim=1)]
        rms = (torch.stack(parts).sum(0) / keys.shape[1]).sqrt()
        ratio = rms.amax(-1) / rms.median(-1).values.clamp(min=1e-12)
        ratios[name] = float(ratio.max())
    return ratios


def _ratio(spreads: dict[str, Spread]) -> float:
    medians = [spread.median for spread in spreads.values()]
    return max(medians) / max(min(medians), 1e-12)
