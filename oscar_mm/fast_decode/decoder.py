"""Fast decoder: run a decoder's forward pass for one token per row, in few launches.

A step of transformers' modules launches about forty small kernels per layer, which leaves
memory bandwidth idle in between. Here the same arithmetic takes seven launches: two norms, the gate
and both residual sums are fused into the matrix products next to them
(``oscar_mm.fast_decode.linear``). The weights, embeddings, RoPE frequencies and mixtures of experts
still belong to the modules.

Layers may be spread over several devices, with one part per device, and divided among ranks.
``supports`` decides which models may run this way. It recognizes the hooks of oscar_mm, the hooks
of accelerate that only move tensors from one device to the next, and the hooks of transformers that
divide a layer among ranks. A model with any other hook runs as transformers' modules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from accelerate.hooks import remove_hook_from_module
from torch import nn
from torch.nn.functional import silu
from transformers.activations import ACT2FN

from oscar_mm.attention import attend
from oscar_mm.cache.cache import OscarCache
from oscar_mm.fast_decode.experts import expert_kernels
from oscar_mm.fast_decode.experts_torch import Experts, MixtureArguments
from oscar_mm.fast_decode.linear import linear
from oscar_mm.fast_decode.linear_torch import Norm
from oscar_mm.fast_decode.low_rank import LowRank, base_of, computes_as_known, is_lora
from oscar_mm.fast_decode.quantized_modules import QuantizedExperts, QuantizedLinear
from oscar_mm.fast_decode.rope import rope_
from oscar_mm.modules import devices, modules_of, run_as_written
from oscar_mm.tensor_parallel import TPGroup, is_dtensor, local_shard

Capture = Callable[[Callable[[], Any], torch.device], Callable[[], Any]]
"""Function that turns work on fixed tensors of a device into a replay of that work, possibly
without running it."""
KNOWN_LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"}
"""Decoder layer classes of transformers' language models with this arithmetic;
``Family.fast_layers`` are added."""
_SHARDED_BY = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0),
    **dict.fromkeys(("o_proj", "down_proj"), 1),
}
"""Products that are divided among ranks, and the dimension: 0 if a rank computes some outputs from
all inputs, 1 if it computes partial sums of all outputs from some inputs."""


def supports(model: Any) -> bool:
    """Return whether the decoder is of a supported kind and its modules run unmodified."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    layers, modules = getattr(decoder, "layers", ()), modules_of(decoder)
    return (
        type(head) is nn.Linear
        and getattr(model.config.get_text_config(decoder=True), "hidden_act", None) == "silu"
        and has_full_attention(model)
        and all(type(layer).__name__ in KNOWN_LAYERS for layer in layers)
        and run_as_written((model, head, *(x for x in modules if not is_lora(x))))
        and all(computes_as_known(x) for x in modules if is_lora(x))
        and all(len(devices(layer)) == 1 and _has_known_parts(layer) for layer in layers)
        and all(map(_is_sharded_as_known, layers))
        and all(map(_is_quantized_as_known, layers))
    )


def has_full_attention(model: Any) -> bool:
    """Return whether every token attends to all earlier ones, without a sliding window."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "sliding_window", None) is None


def is_sharded(module: nn.Module, dimension: int | None = None) -> bool:
    """Return whether a rank has only a part of a module's weights.

    Args:
        dimension: dimension along which the weights are divided; None for any.
    """
    # Only a DTensor has placements.
    placements = getattr(module._parameters.get("weight"), "placements", ())
    return any(one.is_shard(dimension) for one in placements)


def _has_known_parts(layer: Any) -> bool:
    """Return whether all norms are RMS norms and the gate is silu; either may be replaced."""
    mlp, names = layer.mlp, ("q_norm", "k_norm", "input_layernorm", "post_attention_layernorm")
    norms = [one for name, one in layer.named_modules() if name.rpartition(".")[2] in names]
    gate = getattr(mlp if hasattr(mlp, "gate_proj") else mlp.experts, "act_fn", None)
    return type(gate) is type(ACT2FN["silu"]) and all(hasattr(x, "variance_epsilon") for x in norms)


def _is_sharded_as_known(layer: Any) -> bool:
    """Return whether the layer is either undivided or divided by heads and MLP inner width."""
    divided = {module for module in modules_of(layer) if is_sharded(module)}
    for block in (layer.self_attn, layer.mlp):
        products = {one: name for name, one in block.named_children() if name in _SHARDED_BY}
        as_known = {one for one, name in products.items() if is_sharded(one, _SHARDED_BY[name])}
        if as_known and as_known != products.keys():
            return False
        divided -= as_known
    return not divided


def _is_quantized_as_known(layer: Any) -> bool:
    """Return whether the weights of each launch have the same format, and no other order."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    gate_and_up = (mlp.gate_proj, mlp.up_proj) if hasattr(mlp, "gate_proj") else ()
    own = [one for one in modules_of(layer) if isinstance(one, QuantizedLinear)]
    return all(one.permutation is None for one in own) and all(
        len({one.matrix.bits if one in own else 16 for one in map(base_of, launch)}) <= 1
        for launch in (projections, gate_and_up)
    )


States = tuple[torch.Tensor, ...]


class _Product(NamedTuple):
    """Weights of one launch of ``linear``.

    Attributes:
        weights, biases, scales, zeros: see ``linear``; the local shards if there are several ranks.
        ranks: group of ranks that divide the inputs and sum the outputs.
        low_rank: what LoRA adapters add; None without adapters.
    """

    weights: States
    biases: tuple[torch.Tensor | None, ...]
    scales: States = ()
    zeros: States = ()
    ranks: TPGroup = TPGroup()
    low_rank: LowRank | None = None

    @classmethod
    def of(cls, *adapted: Any, dtype: torch.dtype) -> _Product:
        """Collect the weights of modules.

        Args:
            adapted: linear modules, perhaps with LoRA around them.
            dtype: dtype of the activations.
        """
        modules = [base_of(module) for module in adapted]
        weights, biases = (
            tuple(local_shard(getattr(one, kind)) for one in modules) for kind in ("weight", "bias")
        )
        own = [one for one in modules if isinstance(one, QuantizedLinear)]
        scales = tuple(one.scales for one in own)
        zeros = tuple(one.zeros for one in own if one.zeros is not None)
        ranks = TPGroup.of(modules[0]) if is_sharded(modules[0], 1) else TPGroup()
        return cls(weights, biases, scales, zeros, ranks, LowRank.of(adapted, dtype))

    def __call__(
        self,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """Compute ``linear``; if the weights are divided by input, without norm and gate."""
        weights, biases, scales, zeros, *_ = self
        if self.ranks.count == 1:
            around = {"norm": norm, "residual": residual, "scales": scales, "zeros": zeros}
            if self.low_rank is None or not self.low_rank.acts:
                return linear(x, weights, biases, gated=gated, **around)
            found = linear(x, weights, biases, **around)
            self.low_rank.add_(found, x, norm)
            if not gated:
                return found
            gate, up = found.chunk(2, 1)
            return silu(gate).mul_(up)
        if self.ranks.rank == 0:
            found = linear(x, weights, biases, residual=residual)
        else:
            found = linear(x, weights)
        self.ranks.all_reduce(found)
        return found


@dataclass(frozen=True)
class FastLayer:
    """Weights of a decoder layer, and its forward pass in few launches."""

    attention: Any
    attention_norm: Norm
    projections: _Product
    heads: tuple[int, ...]
    """Number of query, key and value heads of this rank."""
    head_norms: tuple[Norm, Norm] | None
    output: _Product
    mlp_norm: Norm
    mlp: nn.Module
    gate_and_up: _Product | None
    down: _Product | None
    experts: Experts | None
    """Weights of an undivided mixture; None if it is divided and so runs as its own module."""

    @classmethod
    def of(cls, layer: Any) -> FastLayer:
        """Collect the weights of a transformers layer that ``supports`` accepts."""
        attention, mlp = layer.self_attn, layer.mlp
        head_norms = None
        if hasattr(attention, "q_norm"):
            head_norms = _norm(attention.q_norm), _norm(attention.k_norm)
        dense = hasattr(mlp, "gate_proj")
        product = partial(_Product.of, dtype=layer.input_layernorm.weight.dtype)
        projections = product(attention.q_proj, attention.k_proj, attention.v_proj)
        return cls(
            attention,
            _norm(layer.input_layernorm),
            projections,
            tuple(weight.shape[0] // attention.head_dim for weight in projections.weights),
            head_norms,
            product(attention.o_proj),
            _norm(layer.post_attention_layernorm),
            mlp,
            product(mlp.gate_proj, mlp.up_proj) if dense else None,
            product(mlp.down_proj) if dense else None,
            None if dense else _experts(mlp),
        )

    def __call__(
        self, rows: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, cache: OscarCache
    ) -> torch.Tensor:
        """Run the layer on one token per row, (rows, hidden size)."""
        return self.feed_forward(self.attended(rows, len(rows), cosine, sine, cache))

    def attended(
        self,
        rows: torch.Tensor,
        batch: int,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        cache: OscarCache,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output of the attention block as a new (tokens, hidden size) tensor.

        Args:
            rows: (tokens, hidden size) hidden states, one sequence after the other.
            batch: number of sequences.
            cosine, sine: (tokens, head_dim).
            cache: cache that stores the tokens' keys and values.
            mask: see ``oscar_mm.attention.attend``.
        """
        heads = self.projected(rows)
        self.turn_(heads, cosine, sine)
        return self.output(self.attend(heads, batch, cache, mask), residual=rows)

    def projected(self, rows: torch.Tensor) -> torch.Tensor:
        """Project (tokens, hidden size) to (tokens, query, key and value heads, head_dim)."""
        states = self.projections(rows, norm=self.attention_norm)
        return states.view(len(rows), -1, self.attention.head_dim)

    def turn_(self, heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> None:
        """Apply norms and RoPE to query and key heads, in place."""
        queries, keys, _ = self.heads
        rope_(heads[:, : queries + keys], queries, cosine, sine, self.head_norms)

    def attend(
        self,
        heads: torch.Tensor,
        batch: int,
        cache: OscarCache,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention output, (tokens, query heads * head_dim); see ``attended``."""
        attention, sides = self.attention, heads.split(self.heads, 1)
        query, key, value = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in sides)
        key, value = cache.update(key, value, attention.layer_idx)
        found, _ = attend(attention, query, key, value, mask, scaling=attention.scaling)
        return found.reshape(len(heads), -1)

    def feed_forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the output of the MLP or mixture of experts as a new (tokens, hidden size)
        tensor."""
        if self.gate_and_up is None or self.down is None:
            return self._by_experts(rows)
        between = self.gate_and_up(rows, norm=self.mlp_norm, gated=True)
        return self.down(between, residual=rows)

    def _by_experts(self, rows: torch.Tensor) -> torch.Tensor:
        kernels = None if self.experts is None else expert_kernels(rows, self.experts)
        if self.experts is not None and kernels is not None:
            return kernels(MixtureArguments(rows, *self.mlp_norm, *self.experts))
        return rows + self.mlp(self.mlp_norm.at_once(rows)[None])[0]


@dataclass(frozen=True)
class _Part:
    """Consecutive layers on one device.

    Attributes:
        kept: tensors at fixed addresses for hidden states from another device.
    """

    device: torch.device
    layers: Sequence[FastLayer]
    kept: list[torch.Tensor] = field(default_factory=list)

    def brought(self, states: States) -> States:
        """Return the hidden states on the part's device."""
        if all(x.device == self.device for x in states):
            return states
        if not self.kept:
            self.kept.extend(torch.empty_like(x, device=self.device) for x in states)
        for mine, x in zip(self.kept, states, strict=True):
            mine.copy_(x, non_blocking=True)
        return tuple(self.kept)


class FastDecoder:
    """A model that runs decode steps with one token per row.

    Args:
        model: transformers model with attention "oscar" that ``supports`` accepts.
    """

    def __init__(self, model: Any) -> None:
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        self._embed = decoder.embed_tokens
        self._rotary = _beside(self._embed, decoder.rotary_emb)
        places = [(x.input_layernorm.weight.device, FastLayer.of(x)) for x in decoder.layers]
        ends = [(self._embed.weight.device, None), *places, (head.weight.device, None)]
        self._parts = [
            _Part(device, [layer for _, layer in some if layer is not None])
            for device, some in groupby(ends, key=lambda place: place[0])
        ]
        norm = _norm(decoder.norm)
        self._norm = norm._replace(weight=norm.weight.to(head.weight.device))
        self._head = head
        self._whole_head = None if is_sharded(head) else _Product.of(head, dtype=norm.weight.dtype)

    @property
    def devices(self) -> set[torch.device]:
        """Devices on which the layers run."""
        return {part.device for part in self._parts}

    @property
    def layers(self) -> list[FastLayer]:
        """All layers, in order."""
        return [layer for part in self._parts for layer in part.layers]

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, cache: OscarCache
    ) -> torch.Tensor:
        """Compute (batch, vocabulary) logits on the device of the ids.

        Args:
            ids: (batch, 1) tokens.
            positions: (batch, 1), or (axes, batch, 1) with M-RoPE, whose last three axes
                transformers' models use.
            cache: cache that stores the tokens' keys and values.
        """
        states = ids, positions
        for part in self._parts:
            states = self._computed(part, part.brought(states), cache)
        return states[0].to(ids.device)

    def captured(
        self, capture: Capture, ids: torch.Tensor, positions: torch.Tensor, cache: OscarCache
    ) -> Callable[[], torch.Tensor]:
        """Capture the computation part by part and return its replay; call the decoder once
        beforehand.

        Args:
            capture: function that captures a part.
            ids, positions: inputs at fixed addresses.
        """
        given = ids, positions
        replays = [
            capture(partial(self._computed, part, tuple(part.kept) or given, cache), part.device)
            for part in self._parts
        ]

        def replay() -> torch.Tensor:
            states = given
            for part, again in zip(self._parts, replays, strict=True):
                part.brought(states)
                states = again()
            return states[0].to(ids.device)

        return replay

    def _computed(self, part: _Part, states: States, cache: OscarCache) -> States:
        """Return the inputs of the next part, or, for the last part, only the logits."""
        if part is self._parts[0]:
            states = self.embedded(*states)
            cache.attend_packed(None)
        rows, cosine, sine = states
        for layer in part.layers:
            rows = layer(rows, cosine, sine, cache)
        cache.end_step(layer.attention.layer_idx for layer in part.layers)
        if part is not self._parts[-1]:
            return rows, cosine, sine
        return (self.logits(rows),)

    def embedded(self, ids: torch.Tensor, positions: torch.Tensor) -> States:
        """Return (tokens, hidden size) embeddings, and (tokens, head_dim) cosines and sines of
        RoPE.

        Args:
            ids: (batch, tokens per row).
            positions: (batch, tokens per row), or (axes, batch, tokens per row), see ``__call__``.
        """
        hidden = self._embed(ids)
        angles = self._rotary(hidden, positions[-3:] if positions.ndim == 3 else positions)
        cosine, sine = (x.expand(*ids.shape, -1).flatten(0, 1).contiguous() for x in angles)
        return hidden.flatten(0, 1), cosine, sine

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return (rows, vocabulary) logits of the last layer's (rows, hidden size) outputs."""
        if self._whole_head is not None:
            return self._whole_head(rows, norm=self._norm)
        return self._head(self._norm.at_once(rows))


def _beside(embed: Any, rotary: nn.Module) -> nn.Module:
    """Return the RoPE module on the embeddings' device; accelerate moves it to the last layer's
    device."""
    device = embed.weight.device
    if devices(rotary) == {device}:
        return rotary
    copied = copy.deepcopy(rotary)
    remove_hook_from_module(copied)
    return copied.to(device)


def _norm(module: Any) -> Norm:
    return Norm(local_shard(module.weight), module.variance_epsilon)


def _experts(mlp: Any) -> Experts | None:
    router, experts = mlp.gate, mlp.experts
    weights = router.weight, experts.gate_up_proj, experts.down_proj
    if any(map(is_dtensor, weights)):
        return None
    normalized = getattr(router, "norm_topk_prob", True)
    scales = experts.scales if isinstance(experts, QuantizedExperts) else []
    return Experts(*weights, router.top_k, normalized, scales)
