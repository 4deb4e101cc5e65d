"""Batch view: the rows of several caches as one batch for a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from oscar_mm.cache.block_table import SequenceTable
from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.kv_manager import KVCacheManager
from oscar_mm.cache.layer import OscarLayer, layers_unstorable
from oscar_mm.cache.page_store import PageStore
from oscar_mm.cache.states import LinearLayer, StateRow
from oscar_mm.cache.step_plan import StepPlan
from oscar_mm.errors import InputError


class BatchView(OscarCache):
    """Cache whose rows are several caches of one row each.

    The caches keep their rows: a step on the view adds a token to each cache, and a step that does
    not reach all layers leaves all the caches incomplete. The view owns no slots. If attention is
    causal and unbounded, its rows may differ in length without padding. All rows have the same
    query-key balancing vectors.

    The states of linear-attention layers stay in the rows' caches (``state_rows``) until a layer of
    transformers asks for those of the batch. Then they are copied into tensors of the whole batch,
    and the rows' caches refer to their parts of these tensors, until ``clear_row`` or padding gives
    them copies of their own.

    Args:
        store: page store of all the caches.
    """

    def __init__(self, store: PageStore) -> None:
        super().__init__(store.policy, store=store)
        self.kv_manager = KVCacheManager(store, owns_slots=False)
        self._caches: list[OscarCache | None] = []
        self._joined = False
        """Whether the states of the rows are in tensors of the batch."""

    def set_rows(self, caches: Sequence[OscarCache | None]) -> None:
        """Set the rows of the batch.

        Args:
            caches: caches that ``can_take`` accepts, with at most one row each; None marks a
                padding row, whose output is ignored.
        """
        self._caches = list(caches)
        self.kv_manager.sequences[:] = [_row_of(cache) for cache in caches]
        self._apply_rows()

    def set_row(self, place: int, cache: OscarCache) -> None:
        """Replace an empty row with a cache that ``can_take`` accepts."""
        self._caches[place] = cache
        self.kv_manager.sequences[place] = _row_of(cache)
        self._apply_rows()

    def _apply_rows(self) -> None:
        """Take layers from the rows if there are none, and drop what belonged to earlier rows."""
        self.kv_manager.changes += 1
        if not self.layers:
            source = next(
                (cache for cache in self._caches if cache is not None and cache.layers), None
            )
            if source is not None:
                self.take_layers(source)
                self.replayed(StepPlan())
        self._joined, self._idle = False, frozenset()
        only = self._caches[0] if len(self._caches) == 1 else None
        self.hidden = None if only is None else only.hidden
        self._drop_states()

    def take_layers(self, source: OscarCache) -> None:
        """Add copies of the layers of another cache, without its states."""
        super().take_layers(source)
        self._drop_states()

    def _drop_states(self) -> None:
        for index in self.linear_by_index:
            self.layers[index] = LinearLayer()

    def _join_states(self) -> None:
        """Move the states of the rows into tensors of the batch, unless they are there already."""
        if self._joined:
            return
        self._joined, rows = True, [cache for cache in self._caches if cache is not None]
        for index in self.linear_by_index if rows else ():
            # A padding row may have any state.
            layers = [(cache or rows[0]).layers[index] for cache in self._caches]
            self.layers[index] = batch = LinearLayer.joined(layers)
            for place, cache in enumerate(self._caches):
                if cache is not None and place not in self._idle:
                    cache.layers[index] = batch.row(place)

    def state_rows(self) -> list[StateRow | None]:
        """Return where the states of each row with a new token are."""
        return [
            None if x is None or place in self._idle else StateRow(x.layers, x.spares, 0)
            for place, x in enumerate(self._caches)
        ]

    def can_spare_states(self, modalities: np.ndarray) -> bool:
        """Return whether each row has tensors of its own."""
        return not self._joined

    def take_spares(self) -> bool:
        """Continue from the states of an earlier step, see ``OscarCache.take_spares``."""
        rows = list(filter(None, self.state_rows())) if self.linear_layers else []
        if not all(row.spares for row in rows):
            return False
        for row in rows:
            row.take_spares()
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the convolution states of the batch, which layers write to in place."""
        self._join_states()
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the recurrent states of the batch."""
        self._join_states()
        return super().get_recurrent_state(layer_idx, state_idx)

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Return whether the rows have states, see ``OscarCache.has_previous_state``."""
        self._join_states()
        return super().has_previous_state(layer_idx, state_idx)

    def _part_states(self, place: int) -> None:
        """Give the cache of a row copies of its states, which later steps do not change."""
        if not self._joined:
            return
        if (cache := self._caches[place]) is not None:
            for index, layer in cache.linear_by_index.items():
                cache.layers[index] = layer.fork()

    def can_take(self, cache: OscarCache) -> bool:
        """Return whether a cache can be a row of this view.

        The cache must have the same store and balancing vectors.
        """
        return cache.store is self.store and balanced_alike(self, cache)

    def settle(self) -> None:
        """Create the layers of caches that were empty before their prompt was prefilled."""
        for cache in self._caches:
            if cache is not None and not cache.layers:
                cache.take_layers(self)

    def clear_row(self, place: int) -> None:
        """Replace a finished row with an empty row; a step that is already launched stays valid."""
        self._part_states(place)
        self._caches[place] = None
        if all(cache is None for cache in self._caches):
            self._drop_states()
        self.kv_manager.sequences[place] = SequenceTable()

    def expect(
        self, modalities: torch.Tensor | None = None, *, attention_mask: torch.Tensor | None = None
    ) -> None:
        """Announce the next tokens, see ``OscarCache.expect``; padding does not change states."""
        super().expect(modalities, attention_mask=attention_mask)
        if modalities is not None:
            for place in self._idle:
                self._part_states(place)

    def begin(self, modalities: np.ndarray | Sequence[np.ndarray]) -> StepPlan:
        """Begin the next forward pass of the rows; see ``OscarCache.begin``."""
        step = super().begin(modalities)
        for cache in self._caches:
            if cache is not None:
                cache.kv_manager.changes += 1
                cache.step = step
        return step

    def check_overflow(self, layer: OscarLayer, tokens: int) -> None:
        """Defer the check to ``pop_overflow``, since an overflow affects one row, not all rows."""
        if layer.device.type == "cpu" or tokens > 1:
            self.unchecked = True

    def pop_overflow(self) -> bool:
        """Return whether keys or values of any row could not be stored since the last call."""
        if not self.unchecked:
            return False
        self.unchecked = False
        found = layers_unstorable(self.packed_layers, self.store.ranks)
        for layer in found:
            layer.overflow.zero_()
        return bool(found)

    def fork(self) -> OscarCache:
        """Raise InputError; fork the caches of the rows instead."""
        raise InputError("a BatchView cannot be forked: fork the caches of its rows")

    def __reduce__(self) -> tuple[Any, ...]:
        """Raise InputError; pickle the caches of the rows instead."""
        raise InputError("a BatchView cannot be pickled: pickle the caches of its rows")


def _row_of(cache: OscarCache | None) -> SequenceTable:
    if cache is None:
        return SequenceTable()
    if not cache.kv_manager.sequences:
        cache.kv_manager.sequences.append(SequenceTable())
    return cache.kv_manager.sequences[0]


def balanced_alike(one: OscarCache, other: OscarCache) -> bool:
    """Return whether two caches have the same query-key balancing vectors in all layers.

    A cache whose vectors are not known yet matches any other cache. A chat saved by an earlier
    version keeps the vectors of that version.
    """
    mine, theirs = one.balancing, other.balancing
    if mine is None or theirs is None:
        return True
    return all(_equal(mine.get(index), theirs.get(index)) for index in mine.keys() | theirs.keys())


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one is other or torch.equal(one, other)
