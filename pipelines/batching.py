"""Which requests run together, and their prompts as one batch, padded on the left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.join import can_join
from oscar_mm.errors import InputError
from oscar_mm.generation.family import Family
from oscar_mm.generation.prompt import Prompt
from oscar_mm.generation.sampling import Sampling
from oscar_mm.modality import PADDING


@dataclass(frozen=True, eq=False)
class Prepared:
    """A request that was read.

    Attributes:
        index: place of the request.
        prompt: what the model is to read.
        sampling: how to answer.
        seconds: that this took.
        past: a cache that holds what comes before the prompt, shared with others: it is not
            changed. None for nothing.
        past_ids: (tokens,) ids of what it holds.
    """

    index: int
    prompt: Prompt
    sampling: Sampling
    seconds: float
    past: OscarCache | None = None
    past_ids: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """Of the whole prompt."""
        return self.prompt.tokens + (0 if self.past is None else self.past.get_seq_length())

    @property
    def nbytes(self) -> int:
        """Of the prompt's tensors, processed media included."""
        return sum(tensor.nbytes for tensor in self.prompt.inputs.values())


@dataclass(frozen=True)
class Batching:
    """How requests are put together.

    Attributes:
        batch_size: most requests that run at once.
        max_tokens: most tokens that run at once, padding and room for the answers included; a
            request that is over it by itself runs alone.
        max_padding: largest share of padding in the row of a request, 0 to 1.

    Raises:
        InputError: a value that is not allowed.
    """

    batch_size: int = 8
    max_tokens: int = 32_768
    max_padding: float = 0.5

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InputError(f"{name}={value!r}: must be a whole number, at least 1")
        share = self.max_padding
        if type(share) not in (int, float) or not 0 <= share <= 1:
            raise InputError(f"max_padding={share!r}: must be a share from 0 to 1")

    def batches(self, requests: Iterable[Prepared]) -> list[list[Prepared]]:
        """Requests in batches, longest first, each with those of nearly its length."""
        batches: list[list[Prepared]] = []
        for request in sorted(requests, key=lambda one: -one.tokens):
            if batches and self._fits([*batches[-1], request]):
                batches[-1].append(request)
            else:
                batches.append([request])
        return batches

    def _fits(self, batch: list[Prepared]) -> bool:
        longest, shortest = batch[0].tokens, batch[-1].tokens
        answer = max(one.sampling.max_new_tokens for one in batch)
        return (
            len(batch) <= self.batch_size
            and len(batch) * (longest + answer) <= self.max_tokens
            and longest - shortest <= self.max_padding * longest
            and can_join([one.past for one in batch if one.past is not None])
        )


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
