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
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from accelerate.hooks import remove_hook_from_module
from torch import nn
from transformers.activations import ACT2FN

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.states import StateRow, StateTable, layers_of_states
from oscar_mm.fast_decode.centered_norm import CenteredNorm
from oscar_mm.fast_decode.drafts import Drafts, FastDrafts
from oscar_mm.fast_decode.hybrid_layers import (
    HYBRID_LAYERS,
    DeltaLayer,
    GatedLayer,
    has_hybrid_parts,
    hybrid_launches,
    is_hybrid,
    weight_bits,
)
from oscar_mm.fast_decode.layers import FastLayer, Product, is_sharded, norm_of
from oscar_mm.fast_decode.linear_torch import Norm
from oscar_mm.fast_decode.low_rank import computes_as_known, is_lora
from oscar_mm.fast_decode.parallel import in_parallel
from oscar_mm.fast_decode.quantized_modules import QuantizedLinear
from oscar_mm.modules import devices, modules_of, run_as_written
from oscar_mm.ops.decode import takes_sinks

Capture = Callable[[Callable[[], Any], torch.device], Callable[[], Any]]
"""Function that turns work on fixed tensors of a device into a replay of that work, possibly
without running it."""
KNOWN_LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", *HYBRID_LAYERS}
"""Decoder layer classes of transformers' language models with this arithmetic;
``Family.fast_layers`` are added."""
States = tuple[torch.Tensor, ...]
_SHARDED_BY = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0),
    **dict.fromkeys(("in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"), 0),
    **dict.fromkeys(("o_proj", "down_proj", "out_proj"), 1),
}
"""Products that are divided among ranks, and the dimension: 0 if a rank computes some outputs from
all inputs, 1 if it computes partial sums of all outputs from some inputs. ``in_proj_qkv`` is cut
after loading, so it is an ordinary matrix."""


def supports(model: Any) -> bool:
    """Return whether the decoder is of a supported kind and its modules run unmodified."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    return (
        type(head) is nn.Linear
        and getattr(model.config.get_text_config(decoder=True), "hidden_act", None) == "silu"
        and has_full_attention(model)
        and run_as_written((model, head))
        and has_known_layers(decoder, KNOWN_LAYERS)
    )


def has_known_layers(decoder: Any, kinds: Collection[str]) -> bool:
    """Return whether a decoder's layers run unmodified, with the arithmetic of ``FastLayer``.

    Args:
        decoder: module with the layers, their embeddings and norms.
        kinds: names of the classes of layers with this arithmetic.
    """
    layers, modules = getattr(decoder, "layers", ()), modules_of(decoder)
    # In Molmo 2 O-7B, layers have different RoPE frequencies; the fused layers share one set.
    one_rope = {*getattr(decoder, "rope_types", ())} <= {"scaled"}
    return (
        one_rope
        and all(type(layer).__name__ in kinds for layer in layers)
        and run_as_written([x for x in modules if not is_lora(x)])
        and all(computes_as_known(x) for x in modules if is_lora(x))
        and all(len(devices(layer)) == 1 and _has_known_parts(layer) for layer in layers)
        and all(map(_is_sharded_as_known, layers))
        and all(map(_is_quantized_as_known, layers))
    )


def has_full_attention(model: Any) -> bool:
    """Return whether every token attends to all earlier ones, without a sliding window or
    chunks."""
    config = model.config.get_text_config(decoder=True)
    local = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return all(size is None for size in local)


def decodes_any_rows(model: Any) -> bool:
    """Return whether the rows of a decode step may differ in length, and a CUDA graph of the step
    serves all lengths: layers attend to all tokens or to a sliding window, none within chunks."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "attention_chunk_size", None) is None


def modules_are_capturable(model: Any, device: torch.device) -> bool:
    """Return whether a CUDA graph can contain a decode step of a model's own modules.

    Not if there are states, since a graph would keep their addresses, which change when rows join
    or leave the batch; nor attention sinks that the device's decode kernel does not take, since
    unpacking the past copies tables to the device, which a graph would not repeat.
    """
    return (
        decodes_any_rows(model)
        and not layers_of_states(model.config)
        and has_decode_kernel(model, device)
    )


def has_decode_kernel(model: Any, device: torch.device) -> bool:
    """Return whether the decode kernel of a device takes the model's attention sinks, if any."""
    has_sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    return not has_sinks or takes_sinks(device)


def _has_known_parts(layer: Any) -> bool:
    """Return whether all norms are RMS norms, of hidden states before a block or of single heads,
    and the gate is silu; either may be replaced."""
    if is_hybrid(layer) and not has_hybrid_parts(layer):
        return False
    attention: Any = getattr(layer, "self_attn", None)
    of_queries = getattr(getattr(attention, "q_norm", None), "weight", None)
    all_heads = of_queries is not None and of_queries.numel() != attention.head_dim
    if all_heads or getattr(layer, "norm_after", False):
        return False
    mlp, names = layer.mlp, ("q_norm", "k_norm", "input_layernorm", "post_attention_layernorm")
    norms = [one for name, one in layer.named_modules() if name.rpartition(".")[2] in names]
    gate = getattr(mlp if hasattr(mlp, "gate_proj") else mlp.experts, "act_fn", None)
    return type(gate) is type(ACT2FN["silu"]) and (
        is_hybrid(layer) or all(hasattr(x, "variance_epsilon") for x in norms)
    )


def _is_sharded_as_known(layer: Any) -> bool:
    """Return whether the layer is either undivided or divided by heads and MLP inner width."""
    divided = {module for module in modules_of(layer) if is_sharded(module)}
    names = ("self_attn", "linear_attn", "mlp")
    if (shared := getattr(layer.mlp, "shared_expert", None)) is not None:
        divided -= {*modules_of(shared)}  # ``SharedExpert.of`` checks these.
    for block in [getattr(layer, name) for name in names if hasattr(layer, name)]:
        products = {one: name for name, one in block.named_children() if name in _SHARDED_BY}
        as_known = {one for one, name in products.items() if is_sharded(one, _SHARDED_BY[name])}
        if as_known and as_known != products.keys():
            return False
        divided -= as_known
    return not divided


def _is_quantized_as_known(layer: Any) -> bool:
    """Return whether the weights of each launch have the same format, and no other order."""
    mlp, projections = layer.mlp, hybrid_launches(layer)
    gate_and_up = (mlp.gate_proj, mlp.up_proj) if hasattr(mlp, "gate_proj") else ()
    own = [one for one in modules_of(layer) if isinstance(one, QuantizedLinear)]
    return all(one.permutation is None for one in own) and all(
        len(set(map(weight_bits, launch))) <= 1 for launch in (*projections, gate_and_up)
    )


@dataclass(frozen=True)
class _Part:
    """Consecutive layers on one device.

    Attributes:
        kept: tensors at fixed addresses for hidden states from another device.
    """

    device: torch.device
    layers: Sequence[FastLayer | DeltaLayer]
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


class Verified(NamedTuple):
    """Drafts, and the model's own logits after each of them.

    Attributes:
        tokens: (1 + drafts,) ids: the last token of the answer, and the drafts after it.
        logits: (1 + drafts, vocabulary): logits after each token.
        hidden: (1 + drafts, hidden size): output of the decoder for each token.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    hidden: torch.Tensor


class FastDecoder:
    """A model that runs decode steps with one token per row.

    Args:
        model: transformers model with attention "oscar" that ``supports`` accepts.
    """

    def __init__(self, model: Any) -> None:
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        self._embed = decoder.embed_tokens
        self._rotary = _beside(self._embed, decoder.rotary_emb)
        self._states = StateTable()
        places = [(x.input_layernorm.weight.device, self._fast(x)) for x in decoder.layers]
        ends = [(self._embed.weight.device, None), *places, (head.weight.device, None)]
        self._parts = [
            _Part(device, [layer for _, layer in some if layer is not None])
            for device, some in groupby(ends, key=lambda place: place[0])
        ]
        norm = norm_of(decoder.norm)
        self._norm = norm._replace(weight=norm.weight.to(head.weight.device))
        self._head = head
        drafts = Drafts.of(model)
        self._drafts = None if drafts is None else FastDrafts(drafts)
        self._before: torch.Tensor | None = None
        """(rows, hidden size): output of the decoder for each row's token in the latest step."""
        self._whole_head = None if is_sharded(head) else Product.of(head, dtype=norm.weight.dtype)

    def _fast(self, layer: Any) -> FastLayer | DeltaLayer:
        if hasattr(layer, "linear_attn"):
            return DeltaLayer.of(layer, self._states)
        return (GatedLayer if is_hybrid(layer) else FastLayer).of(layer)

    @property
    def devices(self) -> set[torch.device]:
        """Devices on which the layers run."""
        return {part.device for part in self._parts}

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
        with self._with_states(cache):
            for part in self._parts:
                states = self._computed(part, part.brought(states), cache)
        return states[0].to(ids.device)

    @contextmanager
    def _with_states(self, cache: OscarCache) -> Iterator[None]:
        """Within the block, the step uses the states of the cache's rows."""
        if cache.linear_layers:
            self._states.begin(cache.state_rows(), to_spares=cache.to_spares)
        try:
            yield
        finally:
            self._states.end()

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
        with self._with_states(cache):
            replays = [
                capture(
                    partial(self._computed, part, tuple(part.kept) or given, cache), part.device
                )
                for part in self._parts
            ]

        def replay() -> torch.Tensor:
            states = given
            with self._with_states(cache):
                for part, again in zip(self._parts, replays, strict=True):
                    part.brought(states)
                    states = again()
            return states[0].to(ids.device)

        return replay

    def _computed(self, part: _Part, states: States, cache: OscarCache) -> States:
        """Return the inputs of the next part, or, for the last part, only the logits."""
        if part is self._parts[0]:
            hidden = first = self.embed(states[0])
            states = hidden.flatten(0, 1), *self.angles(hidden, states[1])
            cache.attend_packed(None)
        rows, cosine, sine = states
        if self._drafts is not None:  # Drafts read the embeddings, which layers may overwrite.
            rows = rows.clone()
        for layer in part.layers:
            rows = layer(rows, cosine, sine, cache)
        indices = [index for layer in part.layers for index in layer.cache_layers]
        if self._drafts is not None and self._drafts.is_complete_in(cache):
            self._store_for_drafts(self._drafts, first, rows, cosine, sine, cache)
            indices.append(self._drafts.index)
        if part is not self._parts[-1]:
            cache.end_step(indices)
            return rows, cosine, sine
        head, end = partial(self.logits, rows), partial(cache.end_step, indices)
        return (in_parallel(rows.device, head, end),)

    def _store_for_drafts(
        self,
        drafts: FastDrafts,
        embedded: torch.Tensor,
        rows: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        cache: OscarCache,
    ) -> None:
        """Store the keys and values of a step's tokens in the layer that later drafts read.

        For a row that has just joined, ``_before`` has the output of another row, so that the keys
        and values of one token are wrong. This can only make drafts worse, not answers.

        Args:
            drafts: launches of the draft module.
            embedded: (rows, 1, hidden size): embeddings of the tokens.
            rows: (rows, hidden size): output of the last layer, before the norm.
            cosine, sine: (rows, head_dim).
            cache: cache in the step.
        """
        if self._before is None:
            with torch.inference_mode(False):
                self._before = torch.zeros_like(rows)
        drafts.store(self._before[:, None], embedded, cosine, sine, cache)
        self._before.copy_(self._norm.at_once(rows))

    @contextmanager
    def chaining(self, rows: Sequence[StateRow]) -> Iterator[None]:
        """Within the block, each row of a pass begins with the states after the row before.

        Args:
            rows: rows of a ``StateChain``, one for each token.
        """
        self._states.begin(rows, to_spares=True, chained=True)
        try:
            yield
        finally:
            self._states.end()

    def verified(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        cache: OscarCache,
    ) -> Verified:
        """Draft the next tokens of a single row, and compute the logits after each.

        Args:
            ids: (1, 1): last token of the row.
            positions: (1 + drafts, 1), or (axes, 1 + drafts, 1), see ``__call__``; they also set
                the number of drafts.
            hidden: (1, hidden size): output of the decoder for the token before.
            cache: cache in a chained step, with the states in ``chaining``.
        """
        drafts, embedded = self._drafts, self.embed(ids)
        assert drafts is not None
        count, tokens, outputs = positions.shape[-2], [ids[0]], hidden
        cosine, sine = self.angles(embedded.expand(count, -1, -1), positions)
        embedded = embedded[0]
        cache.pack_first()
        for place in range(count - 1):
            angles = cosine[place : place + 1], sine[place : place + 1]
            rows = drafts(outputs, embedded[place:], angles, cache, place)
            tokens.append(self.draft(rows, drafts))
            outputs = drafts.norm.at_once(rows)
            embedded = torch.cat([embedded, self._embed(tokens[-1])])
        rows = embedded.clone()  # Layers may overwrite them.
        for layer in self._parts[0].layers:
            rows = layer(rows, cosine, sine, cache)
        outputs = self._norm.at_once(rows)
        # The output for the token before each draft is known only now.
        before = torch.cat([hidden, outputs[:-1]])[:, None]
        drafts.store(before, embedded[:, None], cosine, sine, cache)
        return Verified(torch.cat(tokens), self.logits(rows), outputs)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return (batch, tokens per row, hidden size) embeddings of (batch, tokens per row) ids."""
        return self._embed(ids)

    def angles(
        self, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (tokens, head_dim) cosines and sines of RoPE.

        Args:
            hidden: (batch, tokens per row, hidden size).
            positions: (batch, tokens per row), or (axes, batch, tokens per row), see ``__call__``.
        """
        if positions.ndim == 2 and hasattr(self._rotary, "mrope_section"):
            # Qwen3.5 without its tower; transformers 5.17 does not expand its positions.
            positions = positions.expand(3, -1, -1)
        found = self._rotary(hidden, positions[-3:] if positions.ndim == 3 else positions)
        cosine, sine = (x.expand(*hidden.shape[:2], -1).flatten(0, 1).contiguous() for x in found)
        return cosine, sine

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return (rows, vocabulary) logits of the last layer's (rows, hidden size) outputs."""
        return self._head_of(rows, self._norm)

    def draft(self, rows: torch.Tensor, drafts: FastDrafts) -> torch.Tensor:
        """Return (rows,) ids of drafts.

        Args:
            rows: (rows, hidden size): outputs of ``drafts``.
            drafts: launches of the draft module.
        """
        if drafts.head is not None:
            return drafts.head(rows, norm=drafts.norm).argmax(-1)
        return self._head_of(rows, drafts.norm).argmax(-1)

    def _head_of(self, rows: torch.Tensor, norm: Norm | CenteredNorm) -> torch.Tensor:
        if self._whole_head is not None:
            return self._whole_head(rows, norm=norm)
        return self._head(norm.at_once(rows))


def _beside(embed: Any, rotary: nn.Module) -> nn.Module:
    """Return the RoPE module on the embeddings' device; accelerate moves it to the last layer's
    device."""
    device = embed.weight.device
    if devices(rotary) == {device}:
        return rotary
    copied = copy.deepcopy(rotary)
    remove_hook_from_module(copied)
    return copied.to(device)
