"""Decoder: a full-size model with random weights as decode steps see it, and what a step reads."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.conversation import TINY, Bench, Load
from benchmarks.random_model import RELEASED

MOST_POSITIONS = 1 << 19
_TOWERS = ("visual", "vision", "audio", "projector")
_PIECE_ELEMENTS = 1 << 26
"""Random keys made at a time: 128 MB of bfloat16."""


class Decoder:
    """A model's decoder.

    Args:
        name: of ``RELEASED``.
        device: where it runs.
        tiny: the same in small.

    Attributes:
        model: of transformers; its kernels are compiled and checked.
        config: of the decoder.
        axes: leading axes of its position ids.
        attentions: its attention modules, layer by layer.
        resident: bytes of all weights, towers included.
    """

    def __init__(self, name: str, device: torch.device, *, tiny: bool) -> None:
        released = RELEASED[name].with_positions(MOST_POSITIONS)
        bench = Bench(released.tiny() if tiny else released, TINY if tiny else Load(), device)
        bench.warm_up()
        bench.pipe.store.trim()  # pools of the chat of the warm-up
        self.name, self.device, self.model = name, device, bench.pipe.model
        self.config = self.model.config.get_text_config(decoder=True)
        self.axes = () if released.family == "llava_next" else (4,)
        self.attentions = [
            module for module in self.model.get_decoder().modules() if hasattr(module, "k_proj")
        ]
        self.resident = bench.made["weights"]

    def weights(self, rows: int) -> float:
        """Bytes that a step of so many rows reads, of experts those that it is likely to choose."""
        total = 0.0
        for name, weight in self.model.named_parameters():
            if "embed_tokens" in name or any(tower in name for tower in _TOWERS):
                continue
            share = 1.0
            if ".experts." in name:
                most = self.config.num_experts
                share = 1 - (1 - self.config.num_experts_per_tok / most) ** rows
            total += share * weight.nbytes
        return total

    @property
    def token_bytes(self) -> int:
        """Of a token's keys and values in 16 bit, all layers."""
        config = self.config
        return 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim

    def states(
        self, rows: int, tokens: int, generator: torch.Generator, heads: int | None = None
    ) -> torch.Tensor:
        """Random bfloat16 (rows, heads, tokens, head_dim); by default of all KV heads."""
        size = (rows, heads or self.config.num_key_value_heads, tokens, self.config.head_dim)
        return torch.randn(size, generator=generator, device=self.device, dtype=torch.bfloat16)

    def pieces(self, rows: int, tokens: int, whole: int) -> Iterator[tuple[int, int]]:
        """First token of each piece to fill a cache with, and the one after its last.

        Args:
            whole: pieces are multiples of so many tokens, but the last.
        """
        row = rows * self.config.num_key_value_heads * self.config.head_dim
        piece = max(1, _PIECE_ELEMENTS // (row * whole)) * whole
        for start in range(0, tokens, piece):
            yield start, min(tokens, start + piece)
