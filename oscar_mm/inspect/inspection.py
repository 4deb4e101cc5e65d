"""Inspection: the figures of every layer for one prompt."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch

from oscar_mm.errors import InputError
from oscar_mm.generation.prompt import Prompt, forward
from oscar_mm.inspect.norms import Norms, channel_outliers, measure_norms
from oscar_mm.inspect.probe import LayerStates, Probe
from oscar_mm.inspect.quantization_errors import ALL, Errors, measure_errors, sampled
from oscar_mm.modality import Modality
from oscar_mm.quant.basis import sigma_from_prompt, sigma_of_weights


@dataclass(frozen=True)
class Layer:
    """Figures of one layer.

    Attributes:
        index: number of the layer.
        norms: norms of its keys by modality.
        channels: largest over median rms of key channels, by transform ("raw", "rotated", ...).
        errors: quantization errors by variant's label, then by modality and "all"; a modality
            without a full page has none.
    """

    index: int
    norms: Norms
    channels: dict[str, float]
    errors: dict[str, dict[str, Errors]]


@dataclass(frozen=True)
class Inspection:
    """Figures of a prompt.

    Attributes:
        tokens: tokens of the prompt by modality.
        quantized: tokens of each layer on which the errors were measured.
        qk_norm: whether the model normalizes its keys, head by head.
        layers: figures of all layers, in order.
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
        """Whether any modality has the 128 tokens that fill a page."""
        return bool(self.parts)

    def mean_errors(self, variant: str, part: str = ALL) -> Errors:
        """Errors of a variant for a modality or "all", mean over layers."""
        rows = [astuple(layer.errors[variant][part]) for layer in self.layers]
        return Errors(*(sum(column) / len(rows) for column in zip(*rows, strict=True)))

    @property
    def parts(self) -> list[str]:
        """Modalities that have errors, and "all"; empty without a full page."""
        return list(next(iter(self.layers[0].errors.values()), {}))

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON."""
        return asdict(self) | {
            "layers": [
                asdict(layer)
                | {"norm_ratio": layer.norms.ratio, "norm_ratio_scaled": layer.norms.scaled_ratio}
                for layer in self.layers
            ]
        }


@torch.inference_mode()
def inspect_prompt(model: Any, prompt: Prompt) -> Inspection:
    """Read a prompt once and measure the keys, values and attention of every layer on the way.

    The keys and values of at most one layer are in memory. For a long prompt a sample of whole
    pages is quantized (``oscar_mm.inspect.quantization_errors.sampled``).

    Args:
        model: model with attention "oscar" in its decoder, as pipelines load it.
        prompt: prompt of a single row.

    Raises:
        InputError: keys or values are NaN, infinite or beyond float16.
    """
    ids = prompt.modalities[0]
    sample = sampled(ids)
    layers: list[Layer] = []
    normed: list[bool] = []

    def look(states: LayerStates) -> None:
        normed.append(sigma_of_weights(states.module, states.keys.shape[-1]) is not None)
        try:
            layers.append(_measured(states, ids, sample))
        except InputError as error:
            raise InputError(f"layer {states.index}: {error}") from None

    forward(model, prompt, Probe(look))
    counts = Counter(Modality(number).label for number in ids.tolist())
    return Inspection(dict(counts), len(sample), all(normed), layers)


def _measured(states: LayerStates, ids: torch.Tensor, sample: torch.Tensor) -> Layer:
    # Balancing "auto", the default of the cache.
    sigma = sigma_of_weights(states.module, states.keys.shape[-1])
    if sigma is None:
        sigma = sigma_from_prompt(states.queries[None], states.keys[None])
    sigma = sigma.to(states.keys.device)
    return Layer(
        index=states.index,
        norms=measure_norms(states.keys, sigma, ids.to(states.keys.device)),
        channels=channel_outliers(states.keys, sigma),
        errors=measure_errors(states, sigma, ids, sample),
    )
