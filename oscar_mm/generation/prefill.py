"""Prefill of long prompts: towers read a part at a time, the decoder reads at once or in chunks.

So features and temporaries of the towers exist for one part of the media at a time. In chunks, the
activations of the decoder exist for one chunk at a time too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from oscar_mm.cache.cache import OscarCache
from oscar_mm.generation import chunked_modules
from oscar_mm.generation.decoder_inputs import copied, embedded_parts, joined, length, sliced
from oscar_mm.generation.prompt import Prompt


def prefill(
    model: Any, prompt: Prompt, cache: OscarCache, chunk: int | None = None
) -> torch.Tensor:
    """Read a prompt; the towers read its media some at a time.

    In one go, attention over the prompt is exact. In chunks, activations take the room of a chunk
    instead of the prompt's. The price: a later chunk reads the packed history of earlier ones, so
    attention over the prompt is no longer exact (with policy "bf16" it is), and it is slower.
    Towers read a medium whole, but a video without sound some frames at a time; they read all
    media of a batch of several rows at once.

    Args:
        model: a model of transformers that generates.
        prompt: what to read.
        cache: expects the prompt's modalities, see ``OscarCache.expect``.
        chunk: tokens, at least 1; None for one go.

    Returns:
        (batch, vocabulary) logits of the last token.
    """
    decoder = model.get_decoder()
    # Half a chunk: parts that wait for their chunk to fill take room as well.
    most = (
        chunked_modules.MOST_TOKENS
        if chunk is None
        else min(chunked_modules.MOST_TOKENS, max(1, chunk // 2))
    )
    parts = embedded_parts(model, prompt, cache, most)
    for arguments in _in_chunks(parts, prompt.tokens if chunk is None else chunk):
        with _in_place(decoder, arguments):
            last = decoder(**arguments).last_hidden_state[:, -1:].clone()
        del arguments  # before the towers read on
    return model.get_output_embeddings()(last)[:, -1]


@contextmanager
def _in_place(decoder: Any, arguments: dict[str, Any]) -> Iterator[None]:
    """Inside, layers write their outputs over the embeddings, which nobody reads again.

    The decoder would keep the memory of its embeddings to its end anyway.
    """
    cache, place = arguments["past_key_values"], arguments["inputs_embeds"]

    def put(_: Any, __: tuple, kwargs: dict[str, Any], output: Any) -> torch.Tensor | None:
        ours = kwargs.get("past_key_values") is cache and isinstance(output, torch.Tensor)
        alike = ours and (output.device, output.dtype) == (place.device, place.dtype)
        return place.copy_(output) if alike else None

    hooks = [layer.register_forward_hook(put, with_kwargs=True) for layer in decoder.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _in_chunks(parts: Iterable[dict[str, Any]], chunk: int) -> Iterator[dict[str, Any]]:
    """The decoder's arguments, ``chunk`` tokens at a time."""
    waiting: list[dict[str, Any]] = []
    for part in parts:
        waiting.append(part)
        del part
        while (tokens := sum(map(length, waiting))) >= chunk:
            whole = joined(waiting)
            if tokens > chunk:
                # A copy frees the whole, but would be too large for a long medium.
                rest = sliced(whole, chunk, tokens)
                waiting.append(copied(rest) if tokens < 2 * chunk else rest)
                whole = sliced(whole, 0, chunk)
                del rest
            yield whole
            del whole
    if waiting:
        yield joined(waiting)
