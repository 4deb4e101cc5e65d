"""The decode loop: a prompt in one pass (or in chunks), then token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from oscar_mm.cache.cache import OscarCache
from oscar_mm.modality import PADDING, Span, spans_of
from oscar_mm.prefill import prefill_in_chunks
from oscar_mm.sampling import Sampling


@dataclass(frozen=True)
class Prompt:
    """What a model reads before it answers.

    Attributes:
        inputs: arguments of the model's forward: input_ids (batch, tokens), pixel values, grids,
            attention_mask if there is padding (on the left), ...; no positions.
        positions: (rows, batch, tokens) or (batch, tokens) position ids of the prompt.
        next_position: (batch,) RoPE position of the first new token.
        modalities: (batch, tokens) int8 on the CPU, -1 for padding.
    """

    inputs: dict[str, torch.Tensor]
    positions: torch.Tensor
    next_position: torch.Tensor
    modalities: torch.Tensor

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
    sampling: Sampling,
    *,
    end_tokens: frozenset[int],
    prefill_chunk: int | None = None,
) -> Iterator[list[int | None]]:
    """Answer a prompt; an iterator of one token per row and step, None for rows that have ended.

    The token that ends a row is not given. The cache ends up with the prompt and all tokens given,
    where max_new_tokens or the caller ends the answer without the last.

    Args:
        model: a model of transformers that generates, with attention "oscar" in its decoder.
        cache: where the past is; it may hold earlier turns.
        end_tokens: ids that end a row.
        prefill_chunk: tokens, see ``oscar_mm.prefill``; None for the whole prompt at once.

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
    processors, generator = sampling.processors(), sampling.generator(logits.device)
    seen = prompt.inputs["input_ids"].to(logits.device)
    ended = torch.zeros(len(seen), dtype=torch.bool)
    position = prompt.next_position
    for step in range(sampling.max_new_tokens):
        tokens = _choose(logits, seen, sampling, processors, generator)
        ids = tokens.tolist()
        ended |= torch.tensor([token in end_tokens for token in ids])
        if ended.all():
            return
        yield [None if done else token for token, done in zip(ids, ended.tolist(), strict=True)]
        if step + 1 == sampling.max_new_tokens:
            return
        seen = torch.cat([seen, tokens[:, None]], dim=1)
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


def _choose(
    logits: torch.Tensor,
    seen: torch.Tensor,
    sampling: Sampling,
    processors: Any,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """(batch,) next tokens from (batch, vocabulary) logits."""
    logits = logits.float()
    if bool(logits.isnan().any()):
        raise FloatingPointError("the model's logits are NaN: its weights or inputs are broken")
    scores = processors(seen, logits)
    if not sampling.temperature:
        return scores.argmax(-1)
    return torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0]
