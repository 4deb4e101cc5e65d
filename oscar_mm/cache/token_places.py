"""Held: where the tokens of some streams lie, in slots and places that all layers have alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from oscar_mm.cache.rows import Stream
from oscar_mm.pages.layout import PAGE_TOKENS
from oscar_mm.policy import Bits

WHOLE = (0, PAGE_TOKENS)


class Pages(NamedTuple):
    """Packed pages of one format.

    Attributes:
        slots: (n,) int32.
        used: first token of each page that counts, and the one after the last; None if all do.
    """

    slots: torch.Tensor
    used: list[tuple[int, int]] | None


class TokenPlaces(NamedTuple):
    """What a layer reads to have all tokens of some streams: one after the other, in pages first.

    Attributes:
        pages: bits -> pages.
        slots: (n,) int64, of the tokens in 16 bit.
    """

    pages: dict[Bits, Pages]
    slots: torch.Tensor

    @classmethod
    def of(cls, streams: Iterable[Stream], device: torch.device) -> TokenPlaces:
        """That of streams, for layers on a device."""
        packed: dict[Bits, list[Stream]] = {}
        slots: list[int] = []
        for stream in streams:
            if stream.pages:
                packed.setdefault(stream.bits, []).append(stream)
            slots += stream.slots
        return cls(
            {bits: _pages(found, device) for bits, found in packed.items()},
            torch.tensor(slots, dtype=torch.int64, device=device),
        )


def _pages(streams: list[Stream], device: torch.device) -> Pages:
    slots = [page for stream in streams for page in stream.pages]
    used = [
        tokens for stream in streams for tokens in zip(stream.starts, stream.stops, strict=True)
    ]
    return Pages(
        torch.tensor(slots, dtype=torch.int32, device=device),
        None if all(tokens == WHOLE for tokens in used) else used,
    )
