"""Snapshot: copy of the tables, pages and states of a cache, independent of its store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from oscar_mm.cache.layer import OscarLayer
from oscar_mm.cache.page_store import LayerShape
from oscar_mm.cache.states import LinearLayer, Marks
from oscar_mm.cache.step_plan import StepPlan
from oscar_mm.cache.tables_file import SavedTables, renumbered
from oscar_mm.cache.window_pages import ZEROS
from oscar_mm.policy import PLAIN, Bits


class PackedLayer(NamedTuple):
    """Copy of the slots of an attention layer.

    Attributes:
        shape: shape and dtype of the layer's keys and values.
        slots: bits -> contents of the slots of that kind, in the order of the slot numbers.
        sigma: balancing vectors of the layer; see ``Basis``.
    """

    shape: LayerShape
    slots: dict[Bits, torch.Tensor]
    sigma: torch.Tensor | None

    @classmethod
    def of(cls, layer: OscarLayer, slots: dict[Bits, list[int]]) -> PackedLayer:
        """Copy the contents of these slots of a layer."""
        pools = {**layer.pages, PLAIN: layer.recent}
        copied = {
            bits: pool.storage[layer.pool_indices(bits, slots[bits])]
            for bits, pool in pools.items()
        }
        shape = LayerShape(layer.kv_heads, layer.head_dim, layer.dtype)
        return cls(shape, copied, layer.sigma)


@dataclass(frozen=True)
class Snapshot:
    """Contents of a cache between forward passes; it can be pickled.

    Attributes:
        tables: tables of the sequences, with slots numbered from 0.
        layers: layers of the cache; None for a layer without tokens.
        marks: copies of states that the cache can be cropped to.
    """

    tables: SavedTables
    layers: list[PackedLayer | LinearLayer | None]
    marks: Marks

    @classmethod
    def of(cls, cache: Any) -> Snapshot:
        """Copy the contents of an ``OscarCache``.

        Raises:
            RuntimeError: during a forward pass, or after an interrupted one.
        """
        cache.check_complete()
        tables, slots = renumbered(cache.kv_manager)
        layers: list[PackedLayer | LinearLayer | None] = []
        for layer in cache.layers:
            if isinstance(layer, LinearLayer):
                layers.append(layer.fork())
            else:
                layers.append(PackedLayer.of(layer, slots) if layer.is_initialized else None)
        return cls(tables, layers, cache.marks.fork())

    def placed(self, cache: Any) -> None:
        """Restore the contents into an empty ``OscarCache`` on the devices of the copies."""
        for index, found in enumerate(self.layers):
            if isinstance(found, LinearLayer):
                cache.layers.append(found)
                cache.store.count_states_of(cache)
                continue
            layer = OscarLayer(cache, index)
            cache.layers.append(layer)
            if found is not None:
                layer.use_pools(*found.shape, found.slots[PLAIN].device)
                layer.sigma = found.sigma
        cache.marks = self.marks.fork()
        fill(cache, self.tables, lambda layer: self._slots_of(layer.index))

    def _slots_of(self, index: int) -> dict[Bits, torch.Tensor]:
        layer = self.layers[index]
        return layer.slots if isinstance(layer, PackedLayer) else {}


def fill(
    cache: Any, tables: SavedTables, slots_of: Callable[[OscarLayer], dict[Bits, torch.Tensor]]
) -> None:
    """Allocate slots for an empty cache and copy the saved slots into them.

    Args:
        cache: an empty ``OscarCache`` whose layers already have their pools.
        tables: tables of the sequences.
        slots_of: function that returns bits -> contents of a layer's slots, in the order of the
            slot numbers in the tables.
    """
    ids = {
        bits: slots.allocate(tables.counts[bits]) for bits, slots in cache.store.allocators.items()
    }
    cache.kv_manager.hold(tables.sequences(ids))
    for bits, slots in ids.items():
        cache.store.allocators[bits].release(slots)
    layers: Sequence[OscarLayer] = cache.packed_layers
    found = {layer.index: slots_of(layer) for layer in layers}
    cache.store.place_saved(ids, found)
    cache.store.reserve()
    for layer in layers:
        pools = {**layer.pages, PLAIN: layer.recent}
        for bits, saved in found[layer.index].items():
            pool = pools[bits].storage
            indices = torch.tensor(layer.pool_indices(bits, ids[bits]), dtype=torch.long)
            if layer.places is not None and bits in layer.places:
                stored = indices > ZEROS
                indices, saved = indices[stored], saved[stored.to(saved.device)]
            pool[indices.to(layer.device)] = saved.to(layer.device)
    if layers:
        cache.replayed(StepPlan())
