"""Attention "oscar" for transformers: attends to packed pages without unpacking the past.

Select it by ``model.set_attn_implementation("oscar")``, or ``{"text_config": "oscar"}`` for
multimodal models. It works with any cache: with an ``OscarCache`` it reads pages; with another
cache, or without a cache, it is equivalent to transformers' own "sdpa", which ignores the learned
sinks (``s_aux``) of some models; here they count.

Importing this module registers two functions under this name: the attention function and the mask
function. Transformers calls the mask function before all layers, once per forward pass and layer
type; without one, it would silently drop the padding mask. In a layer with a sliding window, a
decode step reads only the pages and tokens inside the window, and a longer pass unpacks only what
the windows of its tokens contain. If the model needs more than that (attention within chunks,
images with bidirectional attention), or masks cached tokens, the mask is built and the past is
unpacked, one layer at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from oscar_mm.errors import InputError
from oscar_mm.ops.sinks import with_sink_key
from oscar_mm.ops.window_mask import window_mask
from oscar_mm.torch_modes import eager

IMPLEMENTATION = "oscar"
_SDPA = "sdpa"
_UNSUPPORTED = ("softcap", "position_bias")
"""Arguments of some models' attention that change the result; attention to pages does not support
them."""
_UNEQUAL = (
    "local attention to {:,} tokens: rows of a batch may differ in length only if this is the "
    "sliding_window of the model's configuration and each row has one new token; pass each row "
    "alone"
)


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
    """Compute attention for transformers' AttentionInterface, to packed pages if there are any.

    Args:
        module: the attention layer.
        query: (batch, query heads, tokens, head_dim).
        key: (batch, KV heads, tokens, head_dim) from ``Cache.update``. An ``OscarCache`` returns
            only the new tokens, and sets the tensor's attribute ``oscar_chunk`` to an object that
            attends to past and new tokens.
        value: same shape as ``key``, from ``Cache.update``.
        attention_mask: result of the mask function.
        scaling: factor by which scores are multiplied; head_dim ** -0.5 by default.

    Returns:
        The output, (batch, tokens, query heads, head_dim), and None.

    Raises:
        NotImplementedError: if the model requests attention weights, or an attention option that an
            ``OscarCache`` does not support.
    """
    chunk, sinks = getattr(key, "oscar_chunk", None), kwargs.get("s_aux")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if chunk is None and sinks is not None:
        states = with_sink_key(query, key, value, attention_mask, sinks, scale)
        output = scaled_dot_product_attention(
            *states, dropout_p=dropout, scale=scale, enable_gqa=True
        )
        return output.transpose(1, 2), None
    if chunk is None:
        sdpa = AttentionInterface()[_SDPA]
        return sdpa(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if kwargs.get("output_attentions"):
        raise NotImplementedError(
            "attention 'oscar' does not return the weights that output_attentions asks for; use "
            "attn_implementation='eager', which also works with an OscarCache"
        )
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"attention 'oscar' does not support this model's {name}; use "
                "attn_implementation='eager', which also works with an OscarCache"
            )
    sinks = None if sinks is None else sinks.detach().float()
    output = chunk.attend(module, query, key, value, scale, attention_mask, sinks)
    return output.transpose(1, 2), None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Build a mask for transformers' AttentionMaskInterface, and pass padding to the cache.

    ``kv_length`` comes from ``Cache.get_mask_sizes``. ``OscarCache`` returns an int that carries a
    reference to the cache, since transformers provides no other access to it here.

    Args:
        attention_mask: (batch, past and new tokens) bool, False for masked tokens. If it covers
            only the new tokens, all past tokens stay visible.
        local_size: number of tokens in a window or a chunk.
        allow_is_causal_skip: whether the mask, apart from padding, is causal up to ``local_size``
            tokens.
        config: configuration of the decoder.

    Returns:
        (batch, 1, new tokens, all tokens) bool; None for plain causal attention. For the sliding
        windows of an ``OscarCache``, see ``oscar_mm.ops.window_mask``; a decode step has such a
        mask even if the window contains all tokens, since rows may differ in length.

    Raises:
        InputError: if ``attention_mask`` covers neither just the new tokens nor all tokens.
        NotImplementedError: if the rows of the cache differ in length and need different masks.
    """
    cache = getattr(kv_length, "cache", None)
    if cache is not None:
        kv_length, attention_mask, hides = _announced(cache, attention_mask, q_length, kv_length)
        is_plain = allow_is_causal_skip and not hides
        if local_size is not None:
            slides = is_plain and cache.reads_windows and _slides(config, local_size)
            if cache.rows_differ and not (slides and q_length == 1):
                raise NotImplementedError(_UNEQUAL.format(local_size))
            if slides and (q_length == 1 or kv_length > local_size):
                return window_mask(local_size, kwargs.get("device"))
        if is_plain and (local_size is None or kv_length <= local_size):
            return None
        # If skipping were allowed, sdpa's mask function could return None, which means causal
        # attention.
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
        config=config,
        **kwargs,
    )


def _slides(config: Any, local_size: int) -> bool:
    """Return whether ``local_size`` is the size of a decoder's sliding windows, not of chunks."""
    chunk = getattr(config, "attention_chunk_size", None)
    return getattr(config, "sliding_window", None) == local_size != chunk


@eager
def _announced(
    cache: Any, mask: torch.Tensor | None, new: int, tokens: int
) -> tuple[int, torch.Tensor | None, bool]:
    """Pass the mask of a forward pass to a cache.

    Returns:
        Number of past and new tokens, the mask for all of them, and whether it hides past tokens.
    """
    mask = None if mask is None else _for_all_tokens(mask, new, tokens)
    return int(tokens), mask, cache.attend_packed(mask)


def _for_all_tokens(mask: torch.Tensor, new: int, tokens: int) -> torch.Tensor:
    """Extend a mask for the new tokens to past and new tokens, or cut a mask that is too long."""
    if mask.shape[1] == new:
        return pad(mask, (tokens - new, 0), value=1)
    if mask.shape[1] < tokens:
        raise InputError(
            f"attention_mask covers {mask.shape[1]} tokens; it must cover the {new} new tokens, or "
            f"all {tokens} cached and new tokens"
        )
    return mask[:, :tokens]


AttentionInterface.register(IMPLEMENTATION, attend)
AttentionMaskInterface.register(IMPLEMENTATION, mask)
