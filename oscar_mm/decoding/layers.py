"""TokenLayers: a decoder's forward pass for one token of each row, in few launches.

A step of transformers' modules launches some forty small operations a layer, between which memory
stands still. Here the same arithmetic takes seven: two norms, the gate and both residual sums are
part of the products around them (``oscar_mm.ops.linear``). The modules stay the owners of weights,
embeddings, frequencies of RoPE and mixtures of experts.

Layers may be on several devices, which makes as many parts, and divided among ranks.
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

from oscar_mm.attention import attend
from oscar_mm.cache.cache import OscarCache
from oscar_mm.decoding.graphs import Record
from oscar_mm.decoding.known import devices, is_divided
from oscar_mm.ops.linear import Norm, linear
from oscar_mm.ops.mixture import Experts, mixture_kernels
from oscar_mm.ops.rope import rope_
from oscar_mm.ranks import Ranks, is_dtensor, own_part

States = tuple[torch.Tensor, ...]


class _Product(NamedTuple):
    """Weights of one launch of ``linear``.

    Attributes:
        weights, biases: as of ``linear``; of a rank its part.
        ranks: among which the inputs are divided, so that what they find is added up.
    """

    weights: States
    biases: tuple[torch.Tensor | None, ...]
    ranks: Ranks = Ranks()

    @classmethod
    def of(cls, *modules: Any) -> _Product:
        weights, biases = (
            tuple(own_part(getattr(one, kind)) for one in modules) for kind in ("weight", "bias")
        )
        return cls(weights, biases, Ranks.of(modules[0]) if is_divided(modules[0], 1) else Ranks())

    def __call__(
        self,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """As ``linear``; divided by inputs it has neither norm nor gate."""
        if self.ranks.count == 1:
            return linear(x, *self[:2], norm=norm, residual=residual, gated=gated)
        if self.ranks.rank == 0:
            found = linear(x, *self[:2], residual=residual)
        else:
            found = linear(x, self.weights)
        self.ranks.add_up(found)
        return found


@dataclass(frozen=True)
class _Layer:
    """A decoder layer's weights."""

    attention: Any
    attention_norm: Norm
    projections: _Product
    head_norms: tuple[Norm, Norm] | None
    output: _Product
    mlp_norm: Norm
    mlp: nn.Module
    gate_and_up: _Product | None
    down: _Product | None
    experts: Experts | None
    """Of a mixture that is whole; one that is divided is left to its module."""

    @classmethod
    def of(cls, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        head_norms = None
        if hasattr(attention, "q_norm"):
            head_norms = _norm(attention.q_norm), _norm(attention.k_norm)
        dense = hasattr(mlp, "gate_proj")
        return cls(
            attention,
            _norm(layer.input_layernorm),
            _Product.of(attention.q_proj, attention.k_proj, attention.v_proj),
            head_norms,
            _Product.of(attention.o_proj),
            _norm(layer.post_attention_layernorm),
            mlp,
            _Product.of(mlp.gate_proj, mlp.up_proj) if dense else None,
            _Product.of(mlp.down_proj) if dense else None,
            None if dense else _experts(mlp),
        )

    def __call__(
        self, rows: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, cache: OscarCache
    ) -> torch.Tensor:
        """(rows, hidden size) after the layer."""
        attention, head_dim = self.attention, self.attention.head_dim
        states = self.projections(rows, norm=self.attention_norm)
        heads = states.view(rows.shape[0], -1, head_dim)
        query_heads, kv_heads = (x.shape[0] // head_dim for x in self.projections.weights[:2])
        rope_(heads[:, : query_heads + kv_heads], query_heads, cosine, sine, self.head_norms)
        sizes = (query_heads, kv_heads, kv_heads)
        query, key, value = (x.unsqueeze(2) for x in heads.split(sizes, 1))
        key, value = cache.update(key, value, attention.layer_idx)
        found, _ = attend(attention, query, key, value, None, scaling=attention.scaling)
        rows = self.output(found.reshape(rows.shape[0], -1), residual=rows)
        if self.gate_and_up is None or self.down is None:
            return self._by_experts(rows)
        between = self.gate_and_up(rows, norm=self.mlp_norm, gated=True)
        return self.down(between, residual=rows)

    def _by_experts(self, rows: torch.Tensor) -> torch.Tensor:
        kernels = None if self.experts is None else mixture_kernels(rows, self.experts)
        if self.experts is not None and kernels is not None:
            return kernels(rows, self.mlp_norm, self.experts)
        return rows + self.mlp(self.mlp_norm.at_once(rows)[:, None])[:, 0]


@dataclass(frozen=True)
class _Part:
    """Layers one after the other on a device.

    Attributes:
        kept: what comes from another device, at addresses that stay.
    """

    device: torch.device
    layers: Sequence[_Layer]
    kept: list[torch.Tensor] = field(default_factory=list)

    def brought(self, states: States) -> States:
        """The states on this device."""
        if all(x.device == self.device for x in states):
            return states
        if not self.kept:
            self.kept.extend(torch.empty_like(x, device=self.device) for x in states)
        for mine, x in zip(self.kept, states, strict=True):
            mine.copy_(x, non_blocking=True)
        return tuple(self.kept)


class TokenLayers:
    """A model, for one token of each row at a time, of an answer's rows.

    Args:
        model: of transformers, with attention "oscar"; ``oscar_mm.decoding.known`` must know it.
    """

    def __init__(self, model: Any) -> None:
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        self._embed = decoder.embed_tokens
        self._rotary = _beside(self._embed, decoder.rotary_emb)
        places = [(x.input_layernorm.weight.device, _Layer.of(x)) for x in decoder.layers]
        ends = [(self._embed.weight.device, None), *places, (head.weight.device, None)]
        self._parts = [
            _Part(device, [layer for _, layer in some if layer is not None])
            for device, some in groupby(ends, key=lambda place: place[0])
        ]
        norm = _norm(decoder.norm)
        self._norm = norm._replace(weight=norm.weight.to(head.weight.device))
        self._head = head
        self._whole_head = None if is_divided(head) else _Product.of(head)

    @property
    def devices(self) -> set[torch.device]:
        """Those that it computes on."""
        return {part.device for part in self._parts}

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, cache: OscarCache
    ) -> torch.Tensor:
        """Logits, (batch, vocabulary), where the ids are.

        Args:
            ids: (batch, 1) tokens.
            positions: (batch, 1), or (axes, batch, 1) with M-RoPE, of which transformers' models
                take the last three.
            cache: takes the tokens' keys and values.
        """
        states = ids, positions
        for part in self._parts:
            states = self._computed(part, part.brought(states), cache)
        return states[0].to(ids.device)

    def recorded(
        self, record: Record, ids: torch.Tensor, positions: torch.Tensor, cache: OscarCache
    ) -> Callable[[], torch.Tensor]:
        """The same as a function that does it again, each part recorded; called once before.

        Args:
            record: of ``oscar_mm.decoding.graphs``.
            ids, positions: at addresses that stay.
        """
        given = ids, positions
        replays = [
            record(partial(self._computed, part, tuple(part.kept) or given, cache), part.device)
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
        """What the next part is given; at last the logits alone."""
        if part is self._parts[0]:
            states = self._begun(*states)
            cache.attend_packed(None)
        rows, cosine, sine = states
        for layer in part.layers:
            rows = layer(rows, cosine, sine, cache)
        cache.end_step(layer.attention.layer_idx for layer in part.layers)
        if part is not self._parts[-1]:
            return rows, cosine, sine
        if self._whole_head is not None:
            return (self._whole_head(rows, norm=self._norm),)
        return (self._head(self._norm.at_once(rows)),)

    def _begun(self, ids: torch.Tensor, positions: torch.Tensor) -> States:
        """Embeddings, (batch, hidden size), and angles' cosines and sines, (batch, head_dim)."""
        hidden = self._embed(ids)
        angles = self._rotary(hidden, positions[-3:] if positions.ndim == 3 else positions)
        cosine, sine = (x.expand(len(ids), 1, -1)[:, 0].contiguous() for x in angles)
        return hidden[:, 0], cosine, sine


def _beside(embed: Any, rotary: nn.Module) -> nn.Module:
    """RoPE's frequencies where the embeddings are; accelerate puts them where layers end."""
    device = embed.weight.device
    if devices(rotary) == {device}:
        return rotary
    copied = copy.deepcopy(rotary)
    remove_hook_from_module(copied)
    return copied.to(device)


def _norm(module: Any) -> Norm:
    return Norm(own_part(module.weight), module.variance_epsilon)


def _experts(mlp: Any) -> Experts | None:
    router, experts = mlp.gate, mlp.experts
    weights = router.weight, experts.gate_up_proj, experts.down_proj
    if any(map(is_dtensor, weights)):
        return None
    normalized = getattr(router, "norm_topk_prob", True)
    return Experts(*weights, router.top_k, normalized)
