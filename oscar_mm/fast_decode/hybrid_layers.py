"""Layers of hybrids (Qwen3-Next, Qwen3.5): Gated DeltaNet, and attention with an output gate.

Their norms are centered (``CenteredNorm``); with more than two rows, with quantized weights
or with adapters, they take a launch of their own. RoPE rotates only the first channels of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.states import StateTable
from oscar_mm.fast_decode.centered_norm import CenteredNorm
from oscar_mm.fast_decode.delta import DeltaArguments, DeltaShape, Parts, delta
from oscar_mm.fast_decode.layers import FastLayer, FeedForward, Product, norm_of
from oscar_mm.fast_decode.linear_torch import Norm
from oscar_mm.fast_decode.low_rank import base_of
from oscar_mm.fast_decode.quantized_modules import QuantizedLinear
from oscar_mm.fast_decode.rope import rope_

HYBRID_LAYERS = {"Qwen3_5DecoderLayer", "Qwen3_5MoeDecoderLayer", "Qwen3NextDecoderLayer"}
"""Decoder layer classes of transformers with this arithmetic."""


def is_hybrid(layer: Any) -> bool:
    """Return whether a decoder layer is of a known hybrid."""
    return type(layer).__name__ in HYBRID_LAYERS


def has_hybrid_parts(layer: Any) -> bool:
    """Return whether a hybrid's layer has centered norms, and a convolution without a bias."""
    names = ("q_norm", "k_norm", "input_layernorm", "post_attention_layernorm")
    norms = [one for name, one in layer.named_modules() if name.rpartition(".")[2] in names]
    mixer = getattr(layer, "linear_attn", None)
    return all(hasattr(one, "eps") for one in norms) and (
        mixer is None or (mixer.activation == "silu" and mixer.conv1d.bias is None)
    )


def hybrid_launches(layer: Any) -> tuple[tuple[Any, ...], ...]:
    """Return the projections of each launch before attention or Gated DeltaNet.

    Gated DeltaNet has one launch if all weights have the same format, otherwise one for ``mixed``
    and one for ``gates``, see ``DeltaArguments``.
    """
    mixer = getattr(layer, "linear_attn", None)
    if mixer is None:
        return ((layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),)
    mixed, gates = _projections_of(mixer)
    together = mixed + gates
    return (together,) if len(set(map(weight_bits, together))) == 1 else (mixed, gates)


def weight_bits(module: Any) -> int:
    """Return the bits of a linear module's weights, 16 unless they are quantized by us."""
    base = base_of(module)
    return base.matrix.bits if isinstance(base, QuantizedLinear) else 16


def _projections_of(mixer: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the projections to ``mixed`` and to ``gates``."""
    if hasattr(mixer, "in_proj_qkvz"):
        return (mixer.in_proj_qkvz,), (mixer.in_proj_ba,)
    return (mixer.in_proj_qkv, mixer.in_proj_z), (mixer.in_proj_b, mixer.in_proj_a)


@dataclass(frozen=True, kw_only=True)
class DeltaLayer(FeedForward):
    """A layer with Gated DeltaNet, for decode steps of one token per row."""

    index: int
    """Index of the layer."""
    table: StateTable
    """Addresses of the states of the rows."""
    mixer_norm: Norm | CenteredNorm
    mixed: Product
    """Projections to ``mixed``, and to ``gates`` unless there is a second launch."""
    gates: Product | None
    convolution: torch.Tensor
    mixer: Any
    shape: DeltaShape
    parts_of_heads: Parts
    output: Product
    cache_layers: tuple[int, ...] = ()

    @classmethod
    def of(cls, layer: Any, table: StateTable) -> DeltaLayer:
        """Collect the weights of a transformers layer that ``supports`` accepts."""
        mixer, product = (
            layer.linear_attn,
            partial(Product.of, dtype=layer.input_layernorm.weight.dtype),
        )
        mixed, *gates = hybrid_launches(layer)
        shape = DeltaShape(mixer.num_k_heads, mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim)
        return cls(
            index=mixer.layer_idx,
            table=table,
            mixer_norm=norm_of(layer.input_layernorm),
            mixed=product(*mixed),
            gates=product(*gates[0]) if gates else None,
            convolution=mixer.conv1d.weight.squeeze(1),
            mixer=mixer,
            shape=shape,
            parts_of_heads=(
                shape.by_key_head if hasattr(mixer, "in_proj_qkvz") else shape.one_after_the_other
            ),
            output=product(mixer.out_proj),
            **cls.parts(layer),
        )

    def __call__(
        self, rows: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, cache: OscarCache
    ) -> torch.Tensor:
        """Run the layer on one token per row, (rows, hidden size); may overwrite ``rows``."""
        mixer, norm = self.mixer, self.mixer.norm
        if self.gates is None:
            both, count = self.mixed(rows, norm=self.mixer_norm), 2 * self.shape.value_heads
            mixed, gates = both[:, :-count], both[:, -count:]
        else:
            x = self.mixer_norm.at_once(rows)
            mixed, gates = self.mixed(x), self.gates(x)
        found = delta(
            DeltaArguments(
                *(mixed, gates, self.table.of(self.index), self.convolution),
                *(mixer.A_log, mixer.dt_bias, norm.weight, norm.variance_epsilon),
                *(self.shape, self.parts_of_heads),
            )
        )
        return self.feed_forward(self.output(found, residual=rows, in_place=True))


class GatedLayer(FastLayer):
    """A layer whose attention has an output gate, which the query projection also computes."""

    def attended(
        self,
        rows: torch.Tensor,
        batch: int,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        cache: OscarCache,
        mask: torch.Tensor | None = None,
        *,
        in_place: bool = False,
    ) -> torch.Tensor:
        """Return the output of the attention block, see ``FastLayer.attended``."""
        asked, *others = self.turned(rows, cosine, sine)
        found = self.attend_to([asked[:, ::2], *others], batch, cache, mask)
        return self.gated(found, asked, rows, in_place=in_place)

    def gated(
        self,
        found: torch.Tensor,
        asked: torch.Tensor,
        rows: torch.Tensor,
        *,
        in_place: bool = False,
    ) -> torch.Tensor:
        """Apply the gates to the output of attention; return the output of the attention block.

        Args:
            found: (tokens, query heads * head_dim): output of attention.
            asked: queries with their gates, see ``turned``.
            rows, in_place: see ``FastLayer.attended``.
        """
        passed = found * asked[:, 1::2].sigmoid().flatten(1)
        return self.output(passed, residual=rows, in_place=in_place)

    def turned(
        self, rows: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Project tokens and apply RoPE; the arguments are those of ``FastLayer.attended``.

        Returns:
            Queries, each followed by its gate: (tokens, 2 * query heads, head_dim); then keys and
            values: (tokens, KV heads, head_dim).
        """
        heads, (queries, keys, _) = self.projected(rows), self.heads
        turning = heads[:, : queries + keys]
        rope_(turning, queries // 2, cosine, sine, self.head_norms, gated=True)
        return heads.split(self.heads, 1)
