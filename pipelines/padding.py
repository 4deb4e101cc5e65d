"""Prompts of single rows as one batch, padded on the left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn.functional import pad

from oscar_mm.decoding.prompt import Prompt
from oscar_mm.modality import PADDING
from oscar_mm.pipelines.base import Family


def left_padded(prompts: Sequence[Prompt], family: Family) -> Prompt:
    """One prompt of several rows.

    Args:
        prompts: of one row each, as ``family`` made them.
        family: joins what the rows show (``Family.join_media``).

    Returns:
        ``inputs`` has an attention_mask if the rows are of unequal length; there are no ``media``.
    """
    longest = max(prompt.tokens for prompt in prompts)
    before = [longest - prompt.tokens for prompt in prompts]

    def rows(parts: Iterable[torch.Tensor], filler: int, dim: int = 0) -> torch.Tensor:
        counted = zip(parts, before, strict=True)
        return torch.cat([pad(part, (count, 0), value=filler) for part, count in counted], dim=dim)

    # Never a placeholder of media, or the model would look for its features.
    filler = family.processor.tokenizer.pad_token_id or 0
    tensors: dict[str, list[torch.Tensor]] = {}
    for prompt in prompts:
        for name, tensor in prompt.inputs.items():
            tensors.setdefault(name, []).append(tensor)
    ids = rows(tensors.pop("input_ids"), filler)
    inputs = {name: family.join_media(name, parts) for name, parts in tensors.items()}
    modalities = rows((prompt.modalities for prompt in prompts), PADDING)
    if any(before):
        inputs["attention_mask"] = (modalities != PADDING).long().to(ids.device)
    return Prompt(
        inputs={"input_ids": ids} | inputs,
        positions=rows((prompt.positions for prompt in prompts), 0, dim=-2),
        next_position=torch.cat([prompt.next_position for prompt in prompts]),
        modalities=modalities,
    )
