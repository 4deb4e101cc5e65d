"""Decoder: the decoder of a full-size model with random weights, and what a decode step reads."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.conversation import POLICY, TINY, Bench, Sizes
from benchmarks.random_model import RELEASED

MOST_POSITIONS = 1 << 19
_TOWERS = ("visual", "vision", "audio", "projector")
_PIECE_ELEMENTS = 1 << 26
"""Elements of the random keys of a piece: 128 MB of bfloat16."""


class Decoder:
    """A model's decoder.

    Args:
        name: key of ``RELEASED``.
        device: where the model runs.
        tiny: whether it is the same model in small.

    Attributes:
        model: the transformers model, whose kernels are compiled and checked.
        pipe: a pipeline of the model, which holds nothing.
        config: configuration of the decoder.
        axes: leading axes of the position ids.
        attentions: the attention modules, layer by layer.
        resident: bytes of all weights, with those of towers.
    """

    def __init__(self, name: str, device: torch.device, *, tiny: bool) -> None:
        released = RELEASED[name].with_positions(MOST_POSITIONS)
        bench = Bench(released.tiny() if tiny else released, TINY if tiny else Sizes(), device)
        bench.warm_up()
        bench.pipe.store.trim()  # frees the pools of the warm-up's chat
        self.name, self.device, self.model = name, device, bench.pipe.model
        self.pipe = bench.pipe.with_policy(POLICY)  # without the steps that the warm-up captured
        self.config = self.model.config.get_text_config(decoder=True)
        self.axes = () if released.family == "llava_next" else (4,)
        self.attentions = [
            module for module in self.model.get_decoder().modules() if hasattr(module, "k_proj")
        ]
        self.resident = bench.facts["weights"]

    def weights(self, rows: int) -> float:
        """Weight bytes that a step of so many rows reads; of experts the expected choice."""
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
        """Bytes of a token's keys and values in 16 bit, in all layers."""
        config = self.config
        return 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim

    def states(
        self, rows: int, tokens: int, generator: torch.Generator, heads: int | None = None
    ) -> torch.Tensor:
        """Random bfloat16 (rows, heads, tokens, head_dim); all KV heads by default."""
        size = (rows, heads or self.config.num_key_value_heads, tokens, self.config.head_dim)
        return torch.randn(size, generator=generator, device=self.device, dtype=torch.bfloat16)

    def pieces(self, rows: int, tokens: int, multiple: int) -> Iterator[tuple[int, int]]:
        """Start and stop of the pieces that fill a cache.

        Args:
            rows: of the batch.
            tokens: of each row.
            multiple: each piece but the last is a multiple of so many tokens.
        """
        row = rows * self.config.num_key_value_heads * self.config.head_dim
        piece = max(1, _PIECE_ELEMENTS // (row * multiple)) * multiple
        for start in range(0, tokens, piece):
            yield start, min(tokens, start + piece)
