"""How many conversations like this fit on a GPU: from a model's shape alone."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from oscar_mm.admission.capacity import ModelShape
from oscar_mm.admission.gpus import GPUS
from oscar_mm.policy import KVPolicy
from oscar_mm.sizes import format_bytes

MODELS = {
    "Qwen3-VL-2B": ModelShape(28, 8, 128, 2_100_000_000),
    "Qwen3-VL-4B": ModelShape(36, 8, 128, 4_400_000_000),
    "Qwen3-VL-8B": ModelShape(36, 8, 128, 8_800_000_000),
    "Qwen3-VL-32B": ModelShape(64, 8, 128, 33_400_000_000),
    "Qwen3-VL-30B-A3B": ModelShape(48, 4, 128, 31_100_000_000),
    "Qwen3-Omni-30B-A3B": ModelShape(48, 4, 128, 35_300_000_000),
    "LLaVA-v1.6-Mistral-7B": ModelShape(32, 8, 128, 7_600_000_000),
    "LLaVA-v1.6-Vicuna-7B": ModelShape(32, 32, 128, 7_100_000_000),
    "LLaVA-v1.6-Vicuna-13B": ModelShape(40, 40, 128, 13_400_000_000),
}
"""Layers, KV heads, head_dim and parameters, about, of published checkpoints."""

LENGTHS = {"this long": 0, "8K tokens": 8192, "32K tokens": 32768, "128K tokens": 131072}
"""Tokens of a conversation with this mix of modalities; 0 for as many as there are."""
_EXAMPLE = {"text": 1, "image": 7}
"""The mix before anything was said."""


def how_many(
    stored: Mapping[str, int], policy: KVPolicy, gpu: str, shape: ModelShape, length: str
) -> str:
    """Two counts and how they come about.

    Args:
        stored: tokens of the conversation by modality.
        policy: of the conversation.
        gpu: a key of ``oscar_mm.admission.gpus.GPUS``.
        shape: of the model.
        length: a key of LENGTHS.
    """
    mix = stored if sum(stored.values()) else _EXAMPLE
    wanted = LENGTHS[length] or sum(stored.values()) or 1024
    tokens = scaled(mix, wanted)
    plain = KVPolicy.preset("bf16")
    room = GPUS[gpu] * 1e9
    packed, whole = (shape.conversations(room, one, tokens) for one in (policy, plain))
    if not whole and not packed:
        weights = format_bytes(shape.weight_bytes)
        return f'<p class="fits none">Weights of {weights} leave no room on this GPU.</p>'
    one, other = (format_bytes(shape.kv_bytes(policy, tokens)) for policy in (policy, plain))
    total = sum(tokens.values())
    return (
        f'<p class="fits"><strong>{packed:,}</strong> conversations like this fit, '
        f"<b>{whole:,}</b> in 16 bit.</p>"
        f'<p class="how">{total:,} tokens: {escape(one)} each instead of {escape(other)}, beside '
        f"weights of {format_bytes(shape.weight_bytes)}. By the formats, not measured.</p>"
    )


def scaled(mix: Mapping[str, int], total: int) -> dict[str, int]:
    """So many tokens of a mix of modalities; the rest of the division is text."""
    count = sum(mix.values())
    tokens = {name: total * part // count for name, part in mix.items()}
    tokens["text"] = tokens.get("text", 0) + total - sum(tokens.values())
    return tokens
