"""Prompt: what a model reads before it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

from oscar_mm.modality import MediumSpan, Span, spans_of


@dataclass(frozen=True)
class Prompt:
    """What a model reads before it answers.

    Attributes:
        inputs: arguments of the model's forward: input_ids (batch, tokens), pixel values, grids,
            attention_mask if there is padding (on the left), ...; no positions. What shows media
            may wait on the CPU until it is read, see ``arguments``.
        positions: (rows, batch, tokens) or (batch, tokens) position ids of the prompt, on the
            device where the model reads.
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

    def arguments(self) -> dict[str, torch.Tensor]:
        """``inputs``, all on the device where the model reads."""
        device = self.positions.device
        return {name: tensor.to(device) for name, tensor in self.inputs.items()}

    def positions_after(self, count: int) -> torch.Tensor:
        """Position ids of so many text tokens that follow, shaped and typed as ``positions``."""
        steps = torch.arange(count, device=self.positions.device)
        following = (self.next_position + steps).expand(*self.positions.shape[:-1], -1)
        if following.ndim == 3:
            # The first row counts tokens; media take fewer positions than tokens in the others.
            row = self.positions[:1, :, -1:] + 1 + steps
            following = torch.cat([row, following[1:]])
        return following.to(self.positions.dtype)

    @property
    def spans(self) -> list[list[Span]]:
        """Runs of tokens of one modality, for each row."""
        return [spans_of(row) for row in self.modalities.tolist()]


def forward(model: Any, prompt: Prompt, cache: Cache) -> torch.Tensor:
    """The forward pass of a model over a prompt as a whole.

    Returns:
        (batch, vocabulary) logits of the last token.
    """
    output = model(
        **prompt.arguments(),
        position_ids=prompt.positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1]
