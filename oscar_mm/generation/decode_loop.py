"""The decode loop: reads a prompt in one pass or in chunks, then decodes token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn

from oscar_mm.cache.batch_view import BatchView
from oscar_mm.cache.cache import OscarCache
from oscar_mm.generation import chunked_modules
from oscar_mm.generation.chunked_modules import in_pieces
from oscar_mm.generation.decode_batch import DecodeBatch, DecodeRow
from oscar_mm.generation.prefill import prefill
from oscar_mm.generation.prompt import Prompt, forward
from oscar_mm.generation.sampling import Sampling
from oscar_mm.modality import PADDING


@torch.inference_mode()
def read_prompt(
    model: nn.Module, prompt: Prompt, cache: OscarCache, prefill_chunk: int | None = None
) -> torch.Tensor:
    """Read a prompt into a cache; (batch, vocabulary) logits of the last token.

    Args:
        model: a model of transformers that generates, with attention "oscar" in its decoder.
        prompt: of one row or several.
        cache: holds the past, such as earlier turns.
        prefill_chunk: tokens that are read at a time; None for all at once.
    """
    cache.expect(prompt.modalities)
    with in_pieces(model, prompt.modalities.numel()):
        if prompt.tokens > (prefill_chunk or chunked_modules.MOST_TOKENS):
            return prefill(model, prompt, cache, prefill_chunk)
        return forward(model, prompt, cache)


@torch.inference_mode()
def read_in_line(
    model: nn.Module,
    prompt: Prompt,
    lengths: Sequence[int],
    view: BatchView,
    *,
    every_token: bool = False,
) -> torch.Tensor:
    """Read short prompts in one pass, without padding; (prompts, vocabulary) logits of the last
    token of each, or of every token.

    Args:
        model: as of ``read_prompt``.
        prompt: all of them, see ``Family.in_line``.
        lengths: tokens of each.
        view: its rows are the prompts' caches.
    """
    ends = np.cumsum(lengths)
    view.begin(np.split(prompt.modalities[0].numpy(), ends[:-1]))
    last = range(prompt.tokens) if every_token else (ends - 1).tolist()
    logits = prefill(model, prompt, view, last=last)
    view.settle()
    return logits


@torch.inference_mode()
def decode(
    model: nn.Module,
    prompt: Prompt,
    cache: OscarCache,
    sampling: Sampling | Sequence[Sampling],
    *,
    end_tokens: frozenset[int],
    ended: torch.Tensor | None = None,
) -> Iterator[list[int | None]]:
    """Answer a prompt; an iterator of one token per row and step, None for rows that have ended.

    The token that ends a row is left out. The cache ends up with prompt and answer, without the
    last token where max_new_tokens or the caller ends the answer. Answers of a pipeline come from
    its ``Engine`` instead, whose rows come and go.

    Args:
        model: a model of transformers that generates, with attention "oscar" in its decoder.
        prompt: of one row or several, with padding on the left.
        cache: holds the past, such as earlier turns.
        sampling: for all rows, or for each row one.
        end_tokens: ids that end a row.
        ended: (batch,) bool on the CPU, which rows have ended. The caller may set it for a row
            between two steps.

    Raises:
        FloatingPointError: the model's logits are NaN.
    """
    logits = read_prompt(model, prompt, cache)
    count = len(prompt.modalities)
    samplings = [sampling] * count if isinstance(sampling, Sampling) else list(sampling)
    ids, positions = prompt.inputs["input_ids"].cpu(), prompt.next_position.tolist()
    real = prompt.modalities != PADDING
    rows = [
        DecodeRow(samplings[row], ids[row][real[row]], positions[row], end_tokens)
        for row in range(count)
    ]
    axes, device = prompt.positions.shape[:-2], prompt.positions.device
    batch = DecodeBatch(model, cache, axes, device)
    batch.seat(rows)
    batch.choose(logits)
    ended = torch.zeros(count, dtype=torch.bool) if ended is None else ended
    before = [0] * count
    while True:
        if (error := next((row.error for row in rows if row.error), None)) is not None:
            raise error
        fresh = [
            row.tokens[-1] if len(row.tokens) > known else None
            for row, known in zip(rows, before, strict=True)
        ]
        if fresh == [None] * count:
            return
        before = [len(row.tokens) for row in rows]
        yield fresh
        for row, over in zip(rows, ended.tolist(), strict=True):
            row.ended |= over
        if all(row.ended for row in rows):
            return
        batch.step()
