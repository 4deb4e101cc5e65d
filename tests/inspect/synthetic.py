"""Layers with known troubles, as a probe would show them."""

import torch

from oscar_mm.inspect.inspection import Inspection, Layer, channel_outliers, measure_norms
from oscar_mm.inspect.quantization_errors import LayerStates, measure_errors, sampled
from tests.quant.synthetic import multimodal


def states(seed: int = 0, **troubles: float) -> tuple[LayerStates, torch.Tensor]:
    """A layer of 2 KV heads and modality ids: text and 3 times as much image, some audio."""
    even = {"outliers": 1.0, "imbalance": 1.0, "long": 1.0}
    queries, keys, values, ids = multimodal(
        seed, kv_heads=2, group=2, tokens=1024, head_dim=64, **even | troubles
    )
    module = torch.nn.Module()
    return LayerStates(seed, module, queries[0], keys[0], values[0], 64**-0.5), ids


def inspection(**troubles: float) -> Inspection:
    layers = []
    for seed in range(2):
        shown, ids = states(seed, **troubles)
        found = measure_errors(shown, None, ids, sampled(ids))
        norms = measure_norms(shown.keys, None, ids)
        layers.append(Layer(seed, norms, channel_outliers(shown.keys, None), found))
    tokens = {"text": 256, "image": 640, "audio": 128}
    return Inspection(tokens, 1024, False, layers)
