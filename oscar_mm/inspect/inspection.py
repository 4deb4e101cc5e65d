"""Inspection: norms, outlier channels and quantization errors of every layer for one prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch

from oscar_mm.compare.teacher_forcing import ForcedCache
from oscar_mm.engine.prompt import Prompt, forward
from oscar_mm.errors import InputError
from oscar_mm.inspect.quantization_errors import ALL, Errors, LayerStates, measure_errors, sampled
from oscar_mm.modality import Modality
from oscar_mm.quant.balance import sigma_of_norms, sigmas_of_model
from oscar_mm.quant.basis import Basis

LONG = 3.0
"""A key counts as long if its norm is more than this many times the median of its modality."""
_CHUNK_TOKENS = 4096
"""Number of tokens to convert to float32 at a time."""


@dataclass(frozen=True)
class Layer:
    """Statistics for one layer.

    Attributes:
        index: index of the layer.
        norms: norms of the layer's keys by modality.
        channels: ratio of the largest rms of a key channel to the median rms, by transform ("raw",
            "rotated", ...).
        errors: quantization errors by label of the variant, then by modality and "all"; there are
            none for a modality without a full page.
    """

    index: int
    norms: Norms
    channels: dict[str, float]
    errors: dict[str, dict[str, Errors]]


@dataclass(frozen=True)
class Inspection:
    """Statistics for a prompt.

    Attributes:
        tokens: number of tokens in the prompt by modality.
        quantized: number of tokens per layer used to measure the errors.
        qk_norm: whether the model normalizes its keys, head by head.
        layers: statistics for each layer, in order.
    """

    tokens: dict[str, int]
    quantized: int
    qk_norm: bool
    layers: list[Layer]

    @property
    def is_sample(self) -> bool:
        """Whether only a part of the prompt was quantized."""
        return self.quantized < sum(self.tokens.values())

    @property
    def has_pages(self) -> bool:
        """Whether any modality has enough tokens (128) to fill a page."""
        return bool(self.parts)

    def mean_errors(self, variant: str, part: str = ALL) -> Errors:
        """Return the errors of a variant for a modality or "all", averaged over layers."""
        rows = [astuple(layer.errors[variant][part]) for layer in self.layers]
        return Errors(*(sum(column) / len(rows) for column in zip(*rows, strict=True)))

    @property
    def parts(self) -> list[str]:
        """Modalities that have errors, and "all"; empty if there is no full page."""
        return list(next(iter(self.layers[0].errors.values()), {}))

    def to_dict(self) -> dict[str, Any]:
        """Return all statistics as a dict for JSON."""
        return asdict(self) | {
            "layers": [
                asdict(layer)
                | {"norm_ratio": layer.norms.ratio, "norm_ratio_scaled": layer.norms.scaled_ratio}
                for layer in self.layers
            ]
        }


@torch.inference_mode()
def inspect_prompt(model: Any, prompt: Prompt) -> Inspection:
    """Prefill a prompt once, and measure the keys, values and attention of each layer.

    At most one layer's keys and values are in memory at a time. For a long prompt, a sample of
    full pages is quantized (``oscar_mm.inspect.quantization_errors.sampled``).

    Args:
        model: model with attention "oscar" in its decoder, as pipelines load it.
        prompt: prompt of a single row.

    Raises:
        InputError: if keys or values are NaN, infinite or beyond float16.
    """
    ids = prompt.modalities[0]
    sample = sampled(ids)
    layers: list[Layer] = []
    normed: list[bool] = []
    sigmas = sigmas_of_model(model)

    def look(states: LayerStates) -> None:
        normed.append(sigma_of_norms(states.module, states.keys.shape[-1]) is not None)
        try:
            layers.append(_measured(states, sigmas.get(states.index), ids, sample))
        except InputError as error:
            raise InputError(f"layer {states.index}: {error}") from None

    forward(model, prompt, Probe(look))
    counts = Counter(Modality(number).label for number in ids.tolist())
    return Inspection(dict(counts), len(sample), all(normed), layers)


def _measured(
    states: LayerStates, sigma: torch.Tensor | None, ids: torch.Tensor, sample: torch.Tensor
) -> Layer:
    sigma = None if sigma is None else sigma.to(states.keys.device)
    return Layer(
        index=states.index,
        norms=measure_norms(states.keys, sigma, ids.to(states.keys.device)),
        channels=channel_outliers(states.keys, sigma),
        errors=measure_errors(states, sigma, ids, sample),
    )


@dataclass(frozen=True)
class Spread:
    """Distribution of the norms of one modality.

    Attributes:
        mean, p5, median, p95: mean, and percentiles 5, 50 and 95.
        long: fraction of norms above ``LONG`` times the median.
    """

    mean: float
    p5: float
    median: float
    p95: float
    long: float

    @classmethod
    def of(cls, norms: torch.Tensor) -> Spread:
        """Compute the spread of a tensor of norms, of any shape."""
        ordered = norms.flatten().sort().values
        p5, median, p95 = (ordered[round(q * (len(ordered) - 1))] for q in (0.05, 0.5, 0.95))
        long = (ordered > LONG * median).float().mean()
        return cls(*(float(x) for x in (ordered.mean(), p5, median, p95, long)))


@dataclass(frozen=True)
class Norms:
    """Norms of a layer's keys by modality, after balancing, as in the cache.

    Attributes:
        tokens: norm of a token's keys over all KV heads, divided by the square root of the number
            of heads.
        heads: norm of a token's key in one head, divided by the median of that head.
        scaled: ``heads`` after token scaling "shared", which makes all ``tokens`` equal. (After
            "per_head", every norm is 1.)
    """

    tokens: dict[str, Spread]
    heads: dict[str, Spread]
    scaled: dict[str, Spread]

    @property
    def ratio(self) -> float:
        """Ratio of the largest to the smallest median of ``tokens`` among modalities."""
        return _ratio(self.tokens)

    @property
    def scaled_ratio(self) -> float:
        """Ratio of the largest to the smallest median of ``scaled`` among modalities."""
        return _ratio(self.scaled)

    @property
    def long(self) -> float:
        """Largest fraction of long tokens in any modality."""
        return max(spread.long for spread in self.tokens.values())


def measure_norms(keys: torch.Tensor, sigma: torch.Tensor | None, ids: torch.Tensor) -> Norms:
    """Measure the norms of (KV heads, tokens, head_dim) keys with (tokens,) modality ``ids``."""
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
    """Return the ratio of the largest to the median rms of a head's key channels, for the worst
    head.

    Args:
        keys: (KV heads, tokens, head_dim) after RoPE.
        sigma: (KV heads or 1, head_dim) balancing vector; None for no balancing.

    Returns:
        The ratio for "raw", "rotated", "balanced", and "balanced, rotated" keys.
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


class Probe(ForcedCache):
    """Stand-in for a cache while a model with attention "oscar" prefills a prompt.

    Attention within the prompt is exact. At most one layer's keys and values are in memory at a
    time.

    Args:
        look: function called with the states of each layer, for a single row without padding.
    """

    def __init__(self, look: Callable[[LayerStates], None]) -> None:
        def show(
            index: int,
            module: torch.nn.Module,
            queries: torch.Tensor,
            keys: torch.Tensor,
            values: torch.Tensor,
            scaling: float,
        ) -> None:
            look(LayerStates(index, module, queries[0], keys[0], values[0], scaling))

        super().__init__(look=show)
