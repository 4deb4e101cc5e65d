"""The decode loop: a prompt in one pass (or in chunks), then token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from oscar_mm.cache.cache import OscarCache
from oscar_mm.modality import PADDING, MediumSpan, Span, spans_of
from oscar_mm.prefill import prefill_in_chunks
from oscar_mm.sampling import Chooser, Sampling


@dataclass(frozen=True)
class Prompt:
    """What a model reads before it answers.

    Attributes:
        inputs: arguments of the model's forward: input_ids (batch, tokens), pixel values, grids,
            attention_mask if there is padding (on the left), ...; no positions.
        positions: (rows, batch, tokens) or (batch, tokens) position ids of the prompt.
        next_position: (batch,) RoPE position of the first new token.
        modalities: (batch, tokens) int8 on the CPU, -1 for padding.
        media: the images, videos and recordings of a single row, in its order.
    """

    inputs: dict[str, torch.Tensor]
    positions: torch.Tensor
    next_position: torch.Tensor
    modalities: torch.Tensor
    media: tuple[MediumSpan, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of a row, padding included."""
        return self.modalities.shape[1]

    @property
    def spans(self) -> list[list[Span]]:
        """Runs of tokens of one modality, for each row."""
        return [spans_of(row) for row in self.modalities.tolist()]


@torch.inference_mode()
def decode(
    model: nn.Module,
    prompt: Prompt,
    cache: OscarCache,
    sampling: Sampling | Sequence[Sampling],
    *,
    end_tokens: frozenset[int],
    prefill_chunk: int | None = None,
    history: torch.Tensor | None = None,
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
        prefill_chunk: tokens, see ``oscar_mm.prefill``; None for the whole prompt at once.
        history: (batch, tokens) ids of what the cache holds, for the repetition penalty.
        ended: (batch,) bool on the CPU, which rows have ended. A caller may keep it and end a row
            between two steps.

    Raises:
        FloatingPointError: the model's logits are NaN.
    """
    cache.expect(prompt.modalities)
    arguments = {**prompt.inputs, "position_ids": prompt.positions}
    if prefill_chunk is None or prompt.tokens <= prefill_chunk:
        output = model(**arguments, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits = output.logits[:, -1]
    else:
        logits = prefill_in_chunks(model, arguments, cache, prefill_chunk)
    count = len(prompt.modalities)
    samplings = [sampling] * count if isinstance(sampling, Sampling) else list(sampling)
    choosers = _choosers(prompt, samplings, history, logits.device)
    ended = torch.zeros(count, dtype=torch.bool) if ended is None else ended
    position, step = prompt.next_position, 0
    while True:
        tokens = _choose(logits, choosers)
        step += 1
        listed = tokens.tolist()
        ended |= torch.tensor([token in end_tokens for token in listed])
        if ended.all():
            return
        yield [None if done else token for token, done in zip(listed, ended.tolist(), strict=True)]
        ended |= torch.tensor([step >= one.max_new_tokens for one in samplings])
        if ended.all():
            return
        # A row that has ended goes on as padding: it is not stored.
        cache.expect(torch.where(ended, PADDING, 0)[:, None])
        rows = prompt.positions.shape[:-2]
        output = model(
            input_ids=tokens[:, None].to(prompt.positions.device),
            position_ids=position.view(*[1] * len(rows), -1, 1).expand(*rows, -1, 1),
            past_key_values=cache,
            use_cache=True,
        )
        logits = output.logits[:, -1]
        position = position + 1


def _choosers(
    prompt: Prompt,
    samplings: Sequence[Sampling],
    history: torch.Tensor | None,
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


def _choose(logits: torch.Tensor, choosers: Sequence[Chooser | None]) -> torch.Tensor:
    """(batch,) next tokens from (batch, vocabulary) logits."""
    logits = logits.float()
    if bool(logits.isnan().any()):
        raise FloatingPointError("the model's logits are NaN: its weights or inputs are broken")
    tokens = logits.argmax(-1)
    for row, chooser in enumerate(choosers):
        if chooser is not None:
            tokens[row] = chooser.choose(logits[row])
    return tokens
