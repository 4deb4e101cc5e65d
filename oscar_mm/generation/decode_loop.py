"""The decode loop: reads a prompt in one pass or in chunks, then decodes token by token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from oscar_mm.cache.cache import OscarCache
from oscar_mm.fast_decode.decode_steps import DecodeSteps
from oscar_mm.generation import chunked_modules
from oscar_mm.generation.chunked_modules import in_pieces
from oscar_mm.generation.prefill import prefill
from oscar_mm.generation.prompt import Prompt, forward
from oscar_mm.generation.sampling import Choices, Sampling
from oscar_mm.ranks import Ranks


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
def decode(
    model: nn.Module,
    prompt: Prompt,
    cache: OscarCache,
    sampling: Sampling | Sequence[Sampling],
    *,
    end_tokens: frozenset[int],
    prefill_chunk: int | None = None,
    history: Sequence[torch.Tensor] | torch.Tensor | None = None,
    ended: torch.Tensor | None = None,
) -> Iterator[list[int | None]]:
    """Answer a prompt; an iterator of one token per row and step, None for rows that have ended.

    The token that ends a row is left out. The cache ends up with prompt and answer, without the
    last token where max_new_tokens or the caller ends the answer.

    Args:
        model: a model of transformers that generates, with attention "oscar" in its decoder.
        prompt: of one row or several.
        cache: holds the past, such as earlier turns.
        sampling: for all rows, or for each row one.
        end_tokens: ids that end a row.
        prefill_chunk: tokens that are read at a time; None for all at once.
        history: for each row the (tokens,) ids that the cache holds, for the repetition penalty.
        ended: (batch,) bool on the CPU, which rows have ended. The caller may set it for a row
            between two steps.

    Raises:
        FloatingPointError: the model's logits are NaN.
    """
    logits = read_prompt(model, prompt, cache, prefill_chunk)
    rows = len(prompt.modalities)
    samplings = [sampling] * rows if isinstance(sampling, Sampling) else list(sampling)
    most = torch.tensor([one.max_new_tokens for one in samplings])
    choose = Choices.after(prompt, samplings, history, logits.device, Ranks.of(model))
    ended = torch.zeros(rows, dtype=torch.bool) if ended is None else ended
    axes, device = prompt.positions.shape[:-2], prompt.positions.device
    steps = DecodeSteps(model, cache, axes, prompt.next_position, device)
    for count in itertools.count(1):
        choice, full = choose(logits), most <= count
        # The device goes on, where it can, while the host waits for the tokens.
        steps.ahead(choice.tokens, ended | full)
        listed = choice.listed()
        ended |= torch.tensor([token in end_tokens for token in listed])
        if ended.all():
            return
        yield [None if done else token for token, done in zip(listed, ended.tolist(), strict=True)]
        ended |= full
        if ended.all():
            return
        # A row that has ended goes on as padding: it is not stored.
        logits = steps(choice.tokens, ended)
