"""ChatEngine: what a chat needs of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from oscar_mm.admission.admission import Admission
from oscar_mm.cache.fair_lock import FairLock
from oscar_mm.cache.store import PageStore
from oscar_mm.generation.engine import Engine
from oscar_mm.generation.family import Family
from oscar_mm.generation.sampling import Sampling
from oscar_mm.media.media import MediaReader
from oscar_mm.policy import KVPolicy


class ChatEngine(Protocol):
    """A loaded model whose chats share a store of pages, and a budget if there is one."""

    @property
    def family(self) -> Family:
        """The model, its processor and what is special about them."""
        ...

    @property
    def engine(self) -> Engine:
        """Reads and answers."""
        ...

    @property
    def lock(self) -> FairLock:
        """Held for each step of the model and each change of the store."""
        ...

    @property
    def admission(self) -> Admission:
        """Checks sizes and keeps room."""
        ...

    @property
    def policy(self) -> KVPolicy:
        """How keys and values are stored."""
        ...

    @property
    def store(self) -> PageStore:
        """The pages of all chats."""
        ...

    @property
    def media_reader(self) -> MediaReader:
        """Reads what a turn shows."""
        ...

    def sampling(self, options: Mapping[str, Any], arguments: Sequence[str]) -> Sampling:
        """Options that a user gave as a ``Sampling``; ``arguments`` are other allowed names."""
        ...
