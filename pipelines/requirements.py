"""What the packed cache needs of a model: checked in its configuration, modules and logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from oscar_mm.admission.capacity import heads_by_layer
from oscar_mm.cache.cache import OscarCache, as_argument
from oscar_mm.cache.states import layers_of_states
from oscar_mm.errors import InputError
from oscar_mm.modules import computing_device

LATENT = "keys and values of different sizes (latent attention)"
_KINDS = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
"""Types of layers whose keys and values the cache keeps."""
_HYBRIDS = frozenset({"qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"})
"""Model types of decoders with Gated DeltaNet layers, whose states the cache keeps."""
_TWO_WAY = frozenset({"gemma4_unified", "git", "paligemma"})
"""Model types whose media tokens also attend to later ones."""
_OTHER = "attention of another kind: its logits with the cache differ from those without one"
_TOKENS = 16
"""Number of tokens of ``check_logits``."""
_DIFFERENCE = 0.25
"""Largest difference of logits, as a share of their norm, which is due to rounding: in 16-bit
precision a token may take another expert."""
_ALIBI = frozenset({"bloom", "mpt"})


def check_fits(source: str, config: Any, *, states: bool = True) -> None:
    """Refuse a model whose configuration says that its attention does not fit the cache.

    Args:
        source: name of the model, for the error message.
        config: transformers configuration.
        states: whether the caller supports the states of Qwen3.5 and Qwen3-Next.

    Raises:
        InputError: names the model, what does not fit, and which models fit.
    """
    _refuse(source, config, _of_config(config, states))


def check_modules(source: str, model: PreTrainedModel, writer: PreTrainedModel) -> None:
    """Refuse a model whose modules the engine does not know how to run.

    Args:
        source: name of the model, for the error message.
        model: the model, with or without weights.
        writer: the part of it that generates text.

    Raises:
        InputError: see ``check_fits``.
    """
    _refuse(source, model.config, _of_modules(model, writer))


@torch.inference_mode()
def check_logits(source: str, writer: PreTrainedModel) -> None:
    """Refuse a model that computes something else with the cache than without a cache.

    No configuration tells all that attention may do. Two short passes over tokens 1, 2, 3, ... are
    compared; a page of 16 bit loses nothing, so that only rounding may differ.

    Args:
        source: name of the model, for the error message.
        writer: the part of a loaded model that generates text.

    Raises:
        InputError: see ``check_fits``.
    """
    device = computing_device(writer.get_input_embeddings())
    vocabulary = writer.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(1, 1 + _TOKENS, device=device)[None] % vocabulary
    expected = writer(input_ids=ids, use_cache=False).logits[:, -1].float()
    try:
        found = _cached_logits(writer, ids)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # The attention wants the past as one tensor.
        found = torch.full_like(expected, torch.nan)
    differs = not float((found - expected).norm()) < _DIFFERENCE * float(expected.norm())
    _refuse(source, writer.config, iter([_OTHER] if differs else []))


def _cached_logits(writer: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    cache = OscarCache("bf16")
    first, second = ids.split(_TOKENS // 2, dim=1)
    writer(input_ids=first, **as_argument(cache))
    return writer(input_ids=second, **as_argument(cache)).logits[:, -1].float()


def _refuse(source: str, config: Any, found: Iterator[str]) -> None:
    if (what := next(found, None)) is not None:
        raise InputError(
            f"model {source}: {config.model_type} has {what}, which the packed cache does not "
            "support; use a model whose decoder has multi-head or grouped-query attention in all "
            "layers, such as Llama, Mistral or Qwen3"
        )


def _of_config(config: Any, with_states: bool) -> Iterator[str]:
    text = config.get_text_config(decoder=True)
    known = {"linear_attention"} if with_states and text.model_type in _HYBRIDS else set()
    if config.is_encoder_decoder:
        yield "an encoder and cross-attention to it"
    if getattr(text, "kv_lora_rank", None):
        yield LATENT
    if (channels := getattr(text, "v_head_dim", None)) and channels != heads_by_layer(config)[0][1]:
        yield "keys and values of different sizes"
    if states := {*layers_of_states(config)} - known:
        yield f"layers of {', '.join(sorted(states))}, which keep states instead of keys and values"
    if others := {*(getattr(text, "layer_types", None) or ())} - _KINDS - known:
        yield f"layers of {', '.join(sorted(others))}"
    if config.model_type in _ALIBI or getattr(text, "alibi", False):
        yield "ALiBi, positions that are added to attention scores"
    if getattr(text, "attn_logit_softcapping", None):
        yield "soft-capped attention scores"
    if getattr(text, "num_kv_shared_layers", None):
        yield "layers that share keys and values"
    if getattr(text, "hidden_size_per_layer_input", None):
        yield "embeddings of its own for each layer"
    two_way = getattr(text, "use_bidirectional_attention", None)
    in_images = text.model_type == "gemma4_text" and two_way == "vision"
    if config.model_type in _TWO_WAY or (two_way and not in_images):
        yield "two-way attention among tokens"


def _of_modules(model: PreTrainedModel, writer: PreTrainedModel) -> Iterator[str]:
    if not getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None):
        yield "no context length in its configuration (max_position_embeddings)"
    # Hybrids do not set the flag, though their attention layers use the interface.
    hybrid = model.config.get_text_config(decoder=True).model_type in _HYBRIDS
    if not (writer._supports_attention_backend or hybrid):
        yield "attention of its own, not transformers' interface"
    layers = getattr(writer.get_decoder(), "layers", ())
    if not layers or not all(hasattr(layer, "mlp") for layer in layers):
        yield "a decoder whose layers are not a list named layers, each with an mlp"
