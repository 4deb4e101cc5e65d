"""Engine: what an answer needs of a pipeline."""

from __future__ import annotations

from threading import RLock
from typing import Protocol

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.slot_growth import Growth
from oscar_mm.generation.family import Family
from oscar_mm.generation.prefix_cache import PrefixCache
from oscar_mm.generation.prompt import Prompt


class Reservations(Protocol):
    """Keeps room for answers; ``oscar_mm.admission.admission.Admission`` does."""

    def growth(
        self, prompt: Prompt, max_new_tokens: int, cache: OscarCache | None = None
    ) -> Growth:
        """Slots that a prompt of a single row and its answer will take."""
        ...

    def reserve(self, growth: Growth, prompt: Prompt, cache: OscarCache) -> object:
        """Make room for an answer; the room is kept until what is returned is dropped."""
        ...


class Engine(Protocol):
    """A loaded model, and what all of its answers share."""

    @property
    def family(self) -> Family:
        """The model, its processor and what is special about them."""
        ...

    @property
    def lock(self) -> RLock:
        """Held for each step of the model and each change of the store."""
        ...

    @property
    def prefixes(self) -> PrefixCache | None:
        """Beginnings of prompts that were read before; None if they are not kept."""
        ...

    @property
    def admission(self) -> Reservations:
        """Where an answer gets its room."""
        ...

    @property
    def prefill_chunk(self) -> int | None:
        """Tokens of a prompt that are read at a time; None for all at once."""
        ...
