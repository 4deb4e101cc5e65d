"""StepReplay: decode steps of a cache that a graph replays, without the code of its layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.step import FixedTables, Step


class StepReplay:
    """Prepares the decode steps of a cache for a graph, which reads their tables where it found
    them when it was captured.

    ``OscarCache.begin`` begins a step and ``OscarCache.replayed`` ends it; between the two a step
    that ``fix`` accepts may be replayed as long as ``version`` is that of the capture.

    Args:
        cache: that the steps add tokens to.
        rows: of its batch.
    """

    def __init__(self, cache: OscarCache, rows: int) -> None:
        self._cache, self._tables = cache, FixedTables(rows, cache.policy)

    @property
    def is_ready(self) -> bool:
        """Whether layers have asked for their tables: before that nothing can be captured."""
        return self._tables.known

    @property
    def version(self) -> tuple[int, ...]:
        """The same as long as a capture holds: tables and pools stay where they are. ``fix`` lets
        pools grow, so what was asked for before a step is fixed may not hold for it."""
        return self._tables.version, *self._cache.version

    def fix(self, step: Step) -> bool:
        """Write what a step needs to where a graph reads it.

        Returns:
            False if the step does what no graph has in it: it is as before then.
        """
        if not self._tables.takes(step):
            return False
        self._cache.store.reserve()
        # No graph has these copies in it.
        for layer in self._cache.packed_layers if step.copies else ():
            layer.copy_pages(step)
        step.copies = []
        self._tables.write(step)
        # A row that has ended is computed like the others, and nobody looks at what comes of it.
        step.fixed, step.real = self._tables, None
        if step.fillings and not self._cache.policy.by_token:
            self._pack_whole_pages(step)
        return True

    def foretell(self, modalities: np.ndarray) -> Step | None:
        """The step that ``OscarCache.begin`` would give, fixed; the cache stays as it is.

        Args:
            modalities: (batch, 1) int8 modality ids, -1 for padding.

        Returns:
            None where a page would be copied or packed as a whole, a pool would grow, or no token
            would be stored.
        """
        step = self._cache.ledger.foretold(modalities)
        if step is None or (step.fillings and not self._cache.policy.by_token):
            return None
        return step if self.fix(step) else None

    @contextmanager
    def rehearsal(self, step: Step) -> Iterator[None]:
        """Let layers that run meanwhile carry out this step, for a capture or before its time.

        Afterwards the cache's own step, and what layers have done of this one, are as before.
        """
        cache = self._cache
        before, cache.step = cache.step, step
        try:
            yield
        finally:
            cache.step = before
            step.restart()

    def _pack_whole_pages(self, step: Step) -> None:
        """Pack the pages that leave the window, before the step.

        Otherwise that comes after attention, whose tables still list the slots of 16 bit: they are
        read, and not written to before the new token is.
        """
        for layer in self._cache.packed_layers:
            # None of the new tokens is packed, so any tokens stand for them.
            some = layer.recent.storage[:1, 0, :, None, :].expand(len(step.past), -1, -1, -1)
            layer.pack(some, some, step)
        step.filled()
