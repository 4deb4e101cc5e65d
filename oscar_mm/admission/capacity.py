"""Capacity: bytes of a conversation and how many fit a GPU, by a model's shape; devices' memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oscar_mm.cache.slot_growth import bytes_over_time, slot_growth
from oscar_mm.modality import Modality
from oscar_mm.pages.layout import PageFormat
from oscar_mm.policy import PLAIN, Bits, KVPolicy

HIDDEN_STATES = 6
"""Hidden states that are alive at once while a prompt is read, at the least.

LLaVA with grouped queries has six: the layer's input and its norm, and queries on their way through
RoPE with keys and values. Qwen's features and wider queries, towers and experts come on top. The
number is low, so that no request is refused that would run.
"""


def free_bytes(device: torch.device) -> int | None:
    """Bytes of a CUDA device that torch and pools can still take; None for other devices."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + cached


def activation_bytes(tokens: int, hidden_size: int, itemsize: int) -> int:
    """Fewest bytes that reading so many tokens at once takes beside their keys and values."""
    return HIDDEN_STATES * tokens * hidden_size * itemsize


RESERVED = 0.1
"""Share of a GPU's memory that is left for activations and the allocator."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model that decide on the bytes of its weights, keys and values.

    Attributes:
        layers: of the decoder, without those that keep a state instead of keys and values.
        kv_heads: of a layer.
        head_dim: channels of a head.
        parameters: of the whole model, towers included.
    """

    layers: int
    kv_heads: int
    head_dim: int
    parameters: int

    @classmethod
    def of(cls, config: Any, parameters: int) -> ModelShape:
        """The shape of a model by its configuration of transformers."""
        text = config.get_text_config()
        heads = text.num_attention_heads
        return cls(
            layers=text.num_hidden_layers - len(layers_of_states(config)),
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            parameters=parameters,
        )

    def slot_bytes(self, policy: KVPolicy, itemsize: int = 2) -> dict[Bits, int]:
        """Bytes of a page of one layer by bits; under ``PLAIN``, bytes of a token in 16 bit.

        Args:
            policy: how keys and values are stored.
            itemsize: bytes of a number that is not packed.
        """
        sizes = {PLAIN: 2 * self.kv_heads * self.head_dim * itemsize}
        for bits in policy.packed_bits:
            sizes[bits] = PageFormat.of(policy, bits, self.kv_heads, self.head_dim).page_bytes
        return sizes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in 16 bit."""
        return 2 * self.parameters

    def kv_bytes(self, policy: KVPolicy, tokens: Mapping[str, int]) -> int:
        """Bytes of the pages and tokens in 16 bit of a conversation whose latest tokens are text.

        Tables and free slots are not in it: the first are below 1% of any long conversation, the
        second depend on what else the store holds.

        Args:
            policy: how keys and values are stored.
            tokens: by modality ("text", "image", "video", "audio"), text first of all.
        """
        text = tokens.get(Modality.TEXT.label, 0)
        sinks = min(text, policy.sinks)
        media = [(one, tokens.get(one.label, 0)) for one in Modality if one is not Modality.TEXT]
        order = [(Modality.TEXT, sinks), *media, (Modality.TEXT, text - sinks)]
        row = np.concatenate([np.full(count, int(one), np.int8) for one, count in order])
        held = slot_growth(policy, row, 0).held
        return self.layers * int(bytes_over_time(held, self.slot_bytes(policy))[0])

    def conversations(self, gpu_bytes: float, policy: KVPolicy, tokens: Mapping[str, int]) -> int:
        """How many such conversations fit beside the weights; 0 where these alone do not."""
        room = gpu_bytes * (1 - RESERVED) - self.weight_bytes
        return max(0, int(room // max(1, self.kv_bytes(policy, tokens))))


def layers_of_states(config: Any) -> list[str]:
    """Kinds of the layers that keep a state instead of keys and values, one for each such layer.

    Args:
        config: of transformers, which names them "linear_attention", "mamba", ...
    """
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    return [kind for kind in kinds if "attention" not in kind or "linear" in kind]
