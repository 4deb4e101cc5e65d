"""Attention "oscar" for transformers: attends over packed pages, without unpacking the past.

``model.set_attn_implementation("oscar")`` (for multimodal models
``{"text_config": "oscar"}``) works with any cache: with an ``OscarCache`` it reads pages, with
another one, or without, it is transformers' own "sdpa".

Two functions are registered when this module is imported: the attention itself, and the mask
function of the same name. Transformers calls the latter once a forward pass, before any layer, and
without one it would drop the padding mask silently.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

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
    sliding_window: int | None = None,
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
        sliding_window: tokens that a query sees, itself included; None for all.

    Returns:
        (batch, tokens, query heads, head_dim) and None.
    """
    chunk = getattr(key, "oscar_chunk", None)
    if chunk is None:
        if sliding_window is not None:
            kwargs["sliding_window"] = sliding_window
        sdpa = AttentionInterface()[_SDPA]
        return sdpa(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if attention_mask is not None:
        raise NotImplementedError(
            "attention 'oscar' with an OscarCache takes a 2-D attention_mask (padding) only; "
            "use attn_implementation='sdpa' for a mask of your own"
        )
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"attention 'oscar' does not support this model's {name}; use "
                "attn_implementation='eager', with which an OscarCache works too"
            )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    return chunk.attend(module, query, key, value, scaling, sliding_window).transpose(1, 2), None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Mask function: tells the cache of the padding; builds a mask only for other caches.

    ``kv_length`` is what ``Cache.get_mask_sizes`` returned; of an ``OscarCache`` it is an int that
    knows its cache, the one thread of contact between mask and cache that transformers leaves.
    """
    cache = getattr(kv_length, "cache", None)
    if cache is None:
        return AttentionMaskInterface()[_SDPA](
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            attention_mask=attention_mask,
            **kwargs,
        )
    cache.attend_packed(None if attention_mask is None else attention_mask[:, -q_length:])
    return None


AttentionInterface.register(IMPLEMENTATION, attend)
AttentionMaskInterface.register(IMPLEMENTATION, mask)
