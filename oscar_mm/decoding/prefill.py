"""Prefill in chunks: bounds the activations of very long prompts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from oscar_mm.cache.cache import OscarCache

_PER_TOKEN = {"inputs_embeds": 1, "position_ids": -1, "cache_position": 0, "visual_pos_masks": 1}
"""Arguments of a decoder with one entry per token, and the dimension of the tokens."""


def prefill_in_chunks(
    model: nn.Module, inputs: dict[str, Any], cache: OscarCache, chunk: int
) -> torch.Tensor:
    """Read a prompt ``chunk`` tokens at a time; the towers still run once, over everything.

    Activations of the decoder are those of ``chunk`` tokens instead of the whole prompt. The price:
    a later chunk reads the packed history of earlier ones, so attention over the prompt is no
    longer exact (with policy "bf16" it is), and it is slower.

    Args:
        model: a model of transformers that generates.
        inputs: arguments of its forward, positions included.
        cache: told of the prompt's modalities before.
        chunk: tokens, at least 1.

    Returns:
        (batch, vocabulary) logits of the last token.
    """
    decoder = model.get_decoder()
    whole: dict[str, Any] = {}

    # The model itself embeds the prompt, media included, whatever its family: its own call of the
    # decoder is cut down to the first chunk, and the other chunks follow from the same arguments.
    # Calls with another cache are other threads' and none of ours.
    def keep_first_chunk(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
        if kwargs.get("past_key_values") is not cache:
            return None
        if args:
            raise NotImplementedError(f"{type(module).__name__} takes positional arguments")
        whole.update(kwargs)
        return args, _sliced(whole, slice(0, min(chunk, kwargs["inputs_embeds"].shape[1])))

    hook = decoder.register_forward_pre_hook(keep_first_chunk, with_kwargs=True)
    try:
        output = model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
    finally:
        hook.remove()
    tokens = whole["inputs_embeds"].shape[1]
    if tokens <= chunk:
        return output.logits[:, -1]
    for start in range(chunk, tokens, chunk):
        output = decoder(**_sliced(whole, slice(start, min(start + chunk, tokens))))
    return model.get_output_embeddings()(output.last_hidden_state[:, -1:])[:, -1]


def _sliced(arguments: dict[str, Any], part: slice) -> dict[str, Any]:
    """A decoder's arguments for some of the tokens."""
    sliced = dict(arguments)
    for name, dim in _PER_TOKEN.items():
        if isinstance(value := arguments.get(name), torch.Tensor):
            sliced[name] = value.narrow(dim, part.start, part.stop - part.start)
    mask = arguments.get("attention_mask")
    if mask is not None:
        past = mask.shape[1] - arguments["inputs_embeds"].shape[1]
        sliced["attention_mask"] = mask[:, : past + part.stop]
    visual = arguments.get("visual_pos_masks")
    if visual is not None and arguments.get("deepstack_visual_embeds") is not None:
        # Features are listed token by token, row after row.
        order = (visual.flatten().cumsum(0) - 1).view_as(visual)
        chosen = order[:, part][visual[:, part]]
        layers = arguments["deepstack_visual_embeds"]
        sliced["deepstack_visual_embeds"] = [layer[chosen.to(layer.device)] for layer in layers]
    return sliced
