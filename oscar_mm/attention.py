"""Attention "oscar" for transformers: attends over packed pages, without unpacking the past.

``model.set_attn_implementation("oscar")`` (for multimodal models
``{"text_config": "oscar"}``) works with any cache: with an ``OscarCache`` it reads pages, with
another one, or without, it is transformers' own "sdpa".

Two functions are registered when this module is imported: the attention itself, and the mask
function of the same name. Transformers calls the latter before any layer, once a forward pass for
each kind of layer, and without one it would drop the padding mask silently. Where the model asks
for more than causal attention (windows, chunks, images whose tokens see each other), or hides
tokens that the cache holds, the mask is built and the past unpacked, a layer at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface

from oscar_mm.errors import InputError

IMPLEMENTATION = "oscar"
_SDPA = "sdpa"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments of other models' attention that change its result and that pages do not know."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of transformers' AttentionInterface.

    Args:
        module: the attention layer.
        query: (batch, query heads, tokens, head_dim).
        key: what ``Cache.update`` returned: of an ``OscarCache`` in a forward pass with this
            attention the new tokens only, carrying ``oscar_chunk``, the rest of the work.
        value: likewise.
        attention_mask: what the mask function returned.
        scaling: factor of the scores; head_dim ** -0.5 by default.

    Returns:
        (batch, tokens, query heads, head_dim) and None.

    Raises:
        NotImplementedError: with an ``OscarCache``, what pages cannot do.
    """
    chunk = getattr(key, "oscar_chunk", None)
    if chunk is None:
        sdpa = AttentionInterface()[_SDPA]
        return sdpa(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if kwargs.get("output_attentions"):
        raise NotImplementedError(
            "attention 'oscar' does not keep the weights that output_attentions asks for; use "
            "attn_implementation='eager', with which an OscarCache works too"
        )
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"attention 'oscar' does not support this model's {name}; use "
                "attn_implementation='eager', with which an OscarCache works too"
            )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    return chunk.attend(module, query, key, value, scaling, attention_mask).transpose(1, 2), None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Mask function: tells the cache of the padding; None where causal attention is all there is.

    ``kv_length`` is what ``Cache.get_mask_sizes`` returned; of an ``OscarCache`` it is an int that
    knows its cache, the one thread of contact between mask and cache that transformers leaves.

    Args:
        attention_mask: (batch, tokens of the cache and new ones) bool, False for what nobody sees;
            of the new ones alone all others are seen.
        local_size: tokens that a window or a chunk holds.
        allow_is_causal_skip: transformers' word that up to ``local_size`` tokens the mask is
            causal, but for padding.

    Returns:
        (batch, 1, new tokens, all tokens) bool or None.

    Raises:
        InputError: the attention_mask is of another length.
    """
    cache = getattr(kv_length, "cache", None)
    if cache is not None:
        if attention_mask is not None:
            attention_mask = _of_all(attention_mask, q_length, kv_length)
        hides = cache.attend_packed(attention_mask)
        causal = allow_is_causal_skip and (local_size is None or kv_length <= local_size)
        if causal and not hides:
            return None
        # None would stand for causal attention.
        allow_is_causal_skip = kwargs["allow_is_bidirectional_skip"] = False
    return AttentionMaskInterface()[_SDPA](
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        **kwargs,
    )


def _of_all(mask: torch.Tensor, new: int, tokens: int) -> torch.Tensor:
    """A mask of the new tokens, or of more than there are, for past and new tokens."""
    if mask.shape[1] == new:
        return pad(mask, (tokens - new, 0), value=1)
    if mask.shape[1] < tokens:
        raise InputError(
            f"attention_mask covers {mask.shape[1]} tokens; it must cover the {new} new ones, or "
            f"those in the cache and the new ones, {tokens}"
        )
    return mask[:, :tokens]


AttentionInterface.register(IMPLEMENTATION, attend)
AttentionMaskInterface.register(IMPLEMENTATION, mask)
