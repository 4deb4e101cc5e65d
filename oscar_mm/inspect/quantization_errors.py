"""What quantization does to keys, values and attention of a layer, by modality."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oscar_mm.inspect.probe import LayerStates
from oscar_mm.modality import Modality
from oscar_mm.pages.layout import PAGE_TOKENS
from oscar_mm.policy import DEFAULT, KVPolicy
from oscar_mm.round_trip import roundtrip

SAMPLE_TOKENS = 8192
"""Most tokens of a layer that are quantized; of a longer prompt, pages at even distances."""
QUERY_TOKENS = 64
"""The last tokens of the prompt, whose attention is compared."""
ALL = "all"
_PRESETS = ("compact", "oscar", "kivi")


@dataclass(frozen=True)
class Variant:
    """A policy that is tried: a preset with token scaling or without.

    Attributes:
        preset: its name.
        token_scaling: "shared", "per_head" or None.
    """

    preset: str
    token_scaling: str | None

    @property
    def policy(self) -> KVPolicy:
        """The preset with this token scaling; the balancing is done outside."""
        return KVPolicy.preset(self.preset, token_scaling=self.token_scaling, balance=None)

    @property
    def balances(self) -> bool:
        """Whether the preset balances."""
        return KVPolicy.preset(self.preset).balance is not None

    @property
    def label(self) -> str:
        """For tables."""
        return f"{self.preset}, {self.token_scaling or 'no'} token scaling"


def _variants(preset: str) -> tuple[Variant, Variant]:
    # KIVI has none of its own: it gets that of the published recipe.
    own = KVPolicy.preset(preset).token_scaling or "shared"
    return Variant(preset, own), Variant(preset, None)


PAIRS = {preset: _variants(preset) for preset in _PRESETS}
"""Each preset with token scaling and without."""
VARIANTS = (Variant(DEFAULT, None), *(variant for pair in PAIRS.values() for variant in pair))
"""All that are tried. The default scales each token by itself."""


@dataclass(frozen=True)
class Errors:
    """What quantizing one modality's tokens, or all, does.

    Attributes:
        bits: of a page per key or value element, everything counted.
        keys: |found - exact| / |exact| of those tokens that are in pages.
        values: likewise.
        output: likewise, of attention, where these tokens are quantized and all others are exact.
        divergence: of the attention weights, exact against found (Kullback-Leibler), in nats, mean
            over queries and heads. It tells more about answers than ``output``, which favours
            fits that shrink keys.
    """

    bits: float
    keys: float
    values: float
    output: float
    divergence: float


def sampled(ids: torch.Tensor, limit: int = SAMPLE_TOKENS) -> torch.Tensor:
    """Indices of tokens to quantize, ascending: all, or whole pages of a long prompt.

    Pages hold tokens of one modality that follow each other; of each modality so many are taken
    as is its share of the prompt, one at least.

    Args:
        ids: (tokens,) modality ids on the CPU.
        limit: about how many tokens.
    """
    if len(ids) <= limit:
        return torch.arange(len(ids))
    chosen = []
    for modality in Modality:
        places = (ids == int(modality)).nonzero()[:, 0]
        pages = len(places) // PAGE_TOKENS
        if pages:
            count = max(1, min(pages, round(len(places) / len(ids) * limit / PAGE_TOKENS)))
            which = torch.linspace(0, pages - 1, count).round().long()
            chosen.append(places[: pages * PAGE_TOKENS].view(pages, PAGE_TOKENS)[which].flatten())
    return torch.cat(chosen).sort().values


def measure_errors(
    states: LayerStates, sigma: torch.Tensor | None, ids: torch.Tensor, sample: torch.Tensor
) -> dict[str, dict[str, Errors]]:
    """Errors by variant's label, then by modality and "all"; none of modalities without a page.

    Args:
        states: of the layer.
        sigma: (KV heads or 1, head_dim), balancing.
        ids: (tokens,) modality ids on the CPU.
        sample: indices of the tokens that are looked at, as ``sampled`` gives them.

    Raises:
        InputError: keys or values are NaN, infinite or beyond float16.
    """
    device = states.keys.device
    where = sample.to(device)
    keys, values = (x[:, where].float()[None] for x in (states.keys, states.values))
    length = states.keys.shape[1]
    first = max(0, length - QUERY_TOKENS)
    attention = _Attention(
        queries=states.queries[:, first:].float().unflatten(0, (len(states.keys), -1)),
        hidden=where > torch.arange(first, length, device=device)[:, None],
        scaling=states.scaling,
    )
    exact, weights = attention(keys[0], values[0])
    parts = _paged(ids[sample], device)
    found: dict[str, dict[str, Errors]] = {}
    for variant in VARIANTS:
        factor = sigma[:, None] if variant.balances and sigma is not None else 1.0
        back = roundtrip(keys / factor, values, variant.policy, ids[sample])
        errors = found[variant.label] = {}
        for label, part in parts.items():
            mixed = [
                torch.where(part[:, None], new, old)
                for new, old in ((back.k * factor, keys), (back.v, values))
            ]
            output, found_weights = attention(mixed[0][0], mixed[1][0])
            divergence = (weights.exp() * (weights - found_weights)).sum(-1).mean()
            errors[label] = Errors(
                bits=back.bits_per_value,
                keys=_relative(mixed[0][:, :, part], keys[:, :, part]),
                values=_relative(mixed[1][:, :, part], values[:, :, part]),
                output=_relative(output, exact),
                divergence=float(divergence),
            )
    return found


@dataclass(frozen=True)
class _Attention:
    """Queries (KV heads, group, queries, head_dim), and which keys they do not see."""

    queries: torch.Tensor
    hidden: torch.Tensor
    scaling: float

    def __call__(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and logarithms of the weights; keys and values are (KV heads, keys, head_dim)."""
        scores = self.queries @ keys[:, None].mT * self.scaling
        # A finite number: the divergence of what is hidden from both is 0.
        weights = scores.masked_fill(self.hidden, torch.finfo(scores.dtype).min / 2).log_softmax(-1)
        return weights.exp() @ values[:, None], weights


def _paged(ids: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
    """By modality and for all, (tokens,) bool: which are in full pages."""
    parts = {}
    for modality in Modality:
        places = (ids == int(modality)).nonzero()[:, 0]
        whole = len(places) // PAGE_TOKENS * PAGE_TOKENS
        if whole:
            part = torch.zeros(len(ids), dtype=torch.bool)
            part[places[:whole]] = True
            parts[modality.label] = part.to(device)
    if parts:
        parts[ALL] = torch.stack(list(parts.values())).any(0)
    return parts


def _relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm().clamp(min=1e-30))
