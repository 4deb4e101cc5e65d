"""Qwen3.5, dense and MoE: images and videos as in Qwen3-VL, linear attention in most layers."""

from __future__ import annotations

from oscar_mm.pipelines.families.qwen import QwenVL
from oscar_mm.pipelines.families.qwen3_vl import Qwen3VL
from oscar_mm.pipelines.registry import register_family


@register_family
class Qwen3_5(Qwen3VL):
    """Family of Qwen3.5; of four layers, three keep a state instead of keys and values."""

    model_types = ("qwen3_5", "qwen3_5_moe")
    name = "Qwen3.5"
    layout = QwenVL.layout  # The tower has no features for deeper layers.
    fast_layers = frozenset()
    released = ()
