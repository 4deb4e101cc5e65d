"""The decode loop: a prompt in one pass (or in chunks), then token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from oscar_mm.cache.cache import OscarCache
from oscar_mm.decoding import pieces
from oscar_mm.decoding.pieces import in_pieces
from oscar_mm.decoding.prefill import prefill
from oscar_mm.decoding.prompt import Prompt, forward
from oscar_mm.decoding.sampling import Chooser, Sampling
from oscar_mm.decoding.steps import DecodeSteps
from oscar_mm.modality import PADDING
from oscar_mm.ranks import Ranks


@torch.inference_mode()
def read(
    model: nn.Module, prompt: Prompt, cache: OscarCache, prefill_chunk: int | None = None
) -> torch.Tensor:
    """Read a prompt into a cache; (batch, vocabulary) logits of the last token.

    Args:
        model: a model of transformers that generates, with attention "oscar" in its decoder.
        cache: where the past is; it may hold earlier turns.
        prefill_chunk: tokens, see ``oscar_mm.decoding.prefill``; None for the whole prompt at once.
    """
    cache.expect(prompt.modalities)
    with in_pieces(model, prompt.modalities.numel()):
        if prompt.tokens > (prefill_chunk or pieces.MOST_TOKENS):
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

    The token that ends a row is not given. The cache ends up with the prompt and all tokens given,
    where max_new_tokens or the caller ends the answer without the last.

    Args:
        model: a model of transformers that generates, with attention "oscar" in its decoder.
        cache: where the past is; it may hold earlier turns.
        sampling: of all rows, or of each.
        end_tokens: ids that end a row.
        prefill_chunk: tokens, see ``oscar_mm.decoding.prefill``; None for the whole prompt at once.
        history: for each row the (tokens,) ids of what the cache holds, for the repetition penalty.
        ended: (batch,) bool on the CPU, which rows have ended. A caller may keep it and end a row
            between two steps.

    Raises:
        FloatingPointError: the model's logits are NaN.
    """
    logits = read(model, prompt, cache, prefill_chunk)
    count = len(prompt.modalities)
    samplings = [sampling] * count if isinstance(sampling, Sampling) else list(sampling)
    choosers = _choosers(prompt, samplings, history, logits.device)
    ended = torch.zeros(count, dtype=torch.bool) if ended is None else ended
    position, step, ranks = prompt.next_position, 0, Ranks.of(model)
    steps = DecodeSteps(model, cache, prompt.positions.shape[:-2], prompt.positions.device)
    while True:
        tokens, listed = _choose(logits, choosers, ranks)
        step += 1
        ended |= torch.tensor([token in end_tokens for token in listed])
        if ended.all():
            return
        yield [None if done else token for token, done in zip(listed, ended.tolist(), strict=True)]
        ended |= torch.tensor([step >= one.max_new_tokens for one in samplings])
        if ended.all():
            return
        # A row that has ended goes on as padding: it is not stored.
        logits = steps(tokens, position, ended)
        position = position + 1


def _choosers(
    prompt: Prompt,
    samplings: Sequence[Sampling],
    history: Sequence[torch.Tensor] | torch.Tensor | None,
    device: torch.device,
) -> list[Chooser | None]:
    """One for each row; None where the likeliest token is taken."""
    ids = prompt.inputs["input_ids"].to(device)
    real = (prompt.modalities != PADDING).to(device)
    choosers: list[Chooser | None] = []
    for row, sampling in enumerate(samplings):
        seen = ids[row][real[row]]
        if history is not None:
            seen = torch.cat([history[row].to(device), seen])
        choosers.append(Chooser(sampling, seen) if sampling.changes_logits else None)
    return choosers


def _choose(
    logits: torch.Tensor, choosers: Sequence[Chooser | None], ranks: Ranks
) -> tuple[torch.Tensor, list[int]]:
    """(batch,) next tokens from (batch, vocabulary) logits, there and on the host.

    What rank 0 chooses all ranks take: by themselves they sample, and may round, differently.
    """
    logits = logits.float()
    broken, tokens = logits.isnan().any(), logits.argmax(-1)
    if any(choosers) and not broken:  # sampling from NaN would end the CUDA context
        for row, chooser in enumerate(choosers):
            if chooser is not None:
                tokens[row] = chooser.choose(logits[row])
    chosen = torch.cat([tokens, broken[None]])
    ranks.agree(chosen)
    # Both in one copy: each makes the host wait for the device.
    *listed, broken = chosen.tolist()
    if broken:
        raise FloatingPointError("the model's logits are NaN: its weights or inputs are broken")
    return chosen[:-1], listed
