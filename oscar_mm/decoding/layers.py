"""TokenLayers: a decoder's forward pass for one token of each row, in few launches.

A step of transformers' modules launches some forty small operations a layer, between which memory
stands still. Here the same arithmetic takes seven: two norms, the gate and both residual sums are
part of the products around them (``oscar_mm.ops.linear``). The modules stay the owners of weights,
embeddings, frequencies of RoPE and mixtures of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from oscar_mm.attention import attend
from oscar_mm.cache.cache import OscarCache
from oscar_mm.ops.linear import Norm, linear
from oscar_mm.ops.mixture import Experts, mixture_kernels
from oscar_mm.ops.rope import rope_

KNOWN_LAYERS = (
    "LlamaDecoderLayer",
    "MistralDecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen3VLTextDecoderLayer",
    "Qwen3VLMoeTextDecoderLayer",
    "Qwen3OmniMoeThinkerTextDecoderLayer",
)
"""Classes of transformers with this arithmetic."""
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
Weights = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor | None, ...]]


@dataclass(frozen=True)
class _Layer:
    """A decoder layer's weights."""

    attention: nn.Module
    attention_norm: Norm
    projections: Weights
    head_norms: tuple[Norm, Norm] | None
    output: Weights
    mlp_norm: Norm
    mlp: nn.Module
    gate_and_up: Weights | None
    down: Weights | None
    experts: Experts | None
    """Of a mixture of experts, which has no other weights."""

    @classmethod
    def of(cls, layer: nn.Module) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        head_norms = None
        if hasattr(attention, "q_norm"):
            head_norms = _norm(attention.q_norm), _norm(attention.k_norm)
        dense = hasattr(mlp, "gate_proj")
        return cls(
            attention,
            _norm(layer.input_layernorm),
            _weights(attention, *_PROJECTIONS),
            head_norms,
            _weights(attention, "o_proj"),
            _norm(layer.post_attention_layernorm),
            mlp,
            _weights(mlp, "gate_proj", "up_proj") if dense else None,
            _weights(mlp, "down_proj") if dense else None,
            None if dense else _experts(mlp),
        )

    def __call__(
        self, rows: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, cache: OscarCache
    ) -> torch.Tensor:
        """(rows, hidden size) after the layer."""
        attention, head_dim = self.attention, self.attention.head_dim
        states = linear(rows, *self.projections, norm=self.attention_norm)
        heads = states.view(len(rows), -1, head_dim)
        query_heads, kv_heads = (len(one) // head_dim for one in self.projections[0][:2])
        rope_(heads[:, : query_heads + kv_heads], query_heads, cosine, sine, self.head_norms)
        sizes = (query_heads, kv_heads, kv_heads)
        query, key, value = (x.unsqueeze(2) for x in heads.split(sizes, 1))
        key, value = cache.update(key, value, attention.layer_idx)
        found, _ = attend(attention, query, key, value, None, scaling=attention.scaling)
        rows = linear(found.reshape(len(rows), -1), *self.output, residual=rows)
        if self.experts is not None:
            return self._by_experts(rows)
        between = linear(rows, *self.gate_and_up, norm=self.mlp_norm, gated=True)
        return linear(between, *self.down, residual=rows)

    def _by_experts(self, rows: torch.Tensor) -> torch.Tensor:
        kernels = mixture_kernels(rows, self.experts)
        if kernels is not None:
            return kernels(rows, self.mlp_norm, self.experts)
        return rows + self.mlp(self.mlp_norm.at_once(rows)[:, None])[:, 0]


class TokenLayers:
    """A model, for one token of each row at a time.

    Args:
        model: of transformers, with attention "oscar"; ``can_take`` must hold of it.
    """

    def __init__(self, model: nn.Module) -> None:
        decoder = model.get_decoder()
        self._embed, self._rotary = decoder.embed_tokens, decoder.rotary_emb
        self._layers = [_Layer.of(layer) for layer in decoder.layers]
        self._norm = _norm(decoder.norm)
        head = model.get_output_embeddings()
        self._head = (head.weight,), (head.bias,)

    @staticmethod
    def can_take(model: nn.Module) -> bool:
        """Whether the decoder is of a known kind, and nobody has changed how its modules run."""
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        layers = getattr(decoder, "layers", ())
        config = model.config.get_text_config(decoder=True)
        return (
            type(head) is nn.Linear
            and config.hidden_act == "silu"
            and getattr(config, "sliding_window", None) is None
            and all(type(layer).__name__ in KNOWN_LAYERS for layer in layers)
            and all(_is_plain(module) for module in (model, head, *decoder.modules()))
            and len({weight.device for weight in decoder.parameters()} | {head.weight.device}) == 1
        )

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, cache: OscarCache
    ) -> torch.Tensor:
        """Logits, (batch, vocabulary).

        Args:
            ids: (batch, 1) tokens.
            positions: (batch, 1), or (axes, batch, 1) with M-RoPE, of which transformers' models
                take the last three.
            cache: takes the tokens' keys and values.
        """
        hidden = self._embed(ids)
        angles = self._rotary(hidden, positions[-3:] if positions.ndim == 3 else positions)
        cosine, sine = (x.expand(len(ids), 1, -1)[:, 0].contiguous() for x in angles)
        cache.attend_packed(None)
        rows = hidden[:, 0]
        for layer in self._layers:
            rows = layer(rows, cosine, sine, cache)
        return linear(rows, *self._head, norm=self._norm)


def _norm(module: nn.Module) -> Norm:
    return Norm(module.weight, module.variance_epsilon)


def _weights(module: nn.Module, *names: str) -> Weights:
    found = [getattr(module, name) for name in names]
    return tuple(one.weight for one in found), tuple(one.bias for one in found)


def _experts(mlp: nn.Module) -> Experts:
    router, experts = mlp.gate, mlp.experts
    normalized = getattr(router, "norm_topk_prob", True)
    weights = router.weight, experts.gate_up_proj, experts.down_proj
    return Experts(*weights, router.top_k, normalized)


def _is_plain(module: nn.Module) -> bool:
    """No hooks of others, no forward of its own, no weights that are more than tensors."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return (
        all(getattr(hook, "__module__", "").startswith("oscar_mm.") for hook in hooks)
        and "forward" not in vars(module)
        and all(type(weight) is nn.Parameter for weight in module.parameters(recurse=False))
        and (type(module) is nn.Linear or not isinstance(module, nn.Linear))
    )
