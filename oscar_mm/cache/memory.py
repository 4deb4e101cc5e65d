"""MemoryReport: the bytes that a cache holds, by modality and by kind, against 16 bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from oscar_mm.cache.slot_set import SlotSet
from oscar_mm.modality import Modality
from oscar_mm.pages.layout import PAGE_TOKENS
from oscar_mm.policy import PLAIN
from oscar_mm.sizes import format_bytes

if TYPE_CHECKING:
    from oscar_mm.cache.cache import OscarCache
    from oscar_mm.cache.store import LayerPools, PageStore

KINDS = ("codes", "scales", "norms", "tails", "states", "tables", "unused")
_SHARED = "shared"
_TAILS = "tails: tokens outside of pages, in the model's dtype"


@dataclass(frozen=True)
class MemoryReport:
    """What a cache holds. Every byte is in exactly one modality and in exactly one kind.

    Slots that caches share (``OscarCache.fork``) are in the report of each of them; free slots of
    a store are in a cache's report while no other cache holds slots of the store.

    Attributes:
        kv_bytes: all bytes held: pools (used and free slots), states of linear-attention layers,
            balancing vectors, tables.
        bf16_bytes: bytes of the same tokens as plain 16-bit keys and values, and of the states.
        values: key and value elements stored (2 * layers * KV heads * head_dim * tokens).
        by_modality: bytes of "text", "image", "video", "audio", and "shared" (tables, balancing
            vectors, states and free slots).
        by_kind: bytes of "codes", "scales" (and zeros), "norms", "tails" (tokens in the model's
            dtype: recent ones, sinks, those that wait for a page), "states" (of linear attention),
            "tables" (page tables, token map, balancing vectors), "unused" (free slots of the
            pools, and slots that the next tokens of an answer will take).
        tokens: stored tokens by modality, summed over the batch; of shared slots counted once
            for each sequence.
        shared_bytes: how many of kv_bytes other caches hold too.
        by_device: bytes by device; page tables and token map are on "cpu".
        ranks: processes that store the other heads of the same layers; 1 if there are none. The
            report is of one process.
    """

    kv_bytes: int
    bf16_bytes: int
    values: int
    by_modality: dict[str, int]
    by_kind: dict[str, int]
    tokens: dict[str, int]
    shared_bytes: int = 0
    by_device: dict[str, int] = field(default_factory=dict)
    ranks: int = 1

    @property
    def ratio(self) -> float:
        """bf16_bytes / kv_bytes: how many times smaller than 16 bit. 1.0 for an empty cache."""
        return self.bf16_bytes / self.kv_bytes if self.kv_bytes else 1.0

    @property
    def bits_per_value(self) -> float:
        """Bits held per key or value element, everything counted. 0.0 for an empty cache."""
        return self.kv_bytes * 8 / self.values if self.values else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All numbers, ready for JSON."""
        return {
            "kv_bytes": self.kv_bytes,
            "bf16_bytes": self.bf16_bytes,
            "ratio": self.ratio,
            "bits_per_value": self.bits_per_value,
            "shared_bytes": self.shared_bytes,
            "tokens": dict(self.tokens),
            "by_modality": dict(self.by_modality),
            "by_kind": dict(self.by_kind),
            "by_device": dict(self.by_device),
            "ranks": self.ranks,
        }

    def __str__(self) -> str:
        """A table of a few lines."""
        if not self.kv_bytes:
            return "KV cache: empty"
        per_token = 2 * self.values / max(1, sum(self.tokens.values()))
        rows = [("KV cache", "tokens", "held", "in 16 bit", "ratio")]
        for name, held in self.by_modality.items():
            tokens = self.tokens.get(name, 0)
            if held and name != _SHARED:
                plain = per_token * tokens
                rows.append(
                    (
                        name,
                        f"{tokens:,}",
                        format_bytes(held),
                        format_bytes(plain),
                        f"{plain / held:.2f}x",
                    )
                )
        if self.by_modality.get(_SHARED):
            name = "states, tables, free" if self.by_kind.get("states") else "tables, free"
            rows.append((name, "", format_bytes(self.by_modality[_SHARED]), "", ""))
        rows.append(
            (
                "all",
                f"{sum(self.tokens.values()):,}",
                format_bytes(self.kv_bytes),
                format_bytes(self.bf16_bytes),
                f"{self.ratio:.2f}x",
            )
        )
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [
            row[0].ljust(widths[0])
            + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
            for row in rows
        ]
        rule = "-" * len(lines[0])
        kinds = ", ".join(
            f"{kind} {format_bytes(size)}" for kind, size in self.by_kind.items() if size
        )
        bits = f"{self.bits_per_value:.2f} bits per value: {kinds}"
        notes = [_TAILS] if 2 * self.by_kind["tails"] > self.kv_bytes else []
        if self.shared_bytes:
            notes.append(f"shared with other caches: {format_bytes(self.shared_bytes)}")
        gpus = {name: size for name, size in self.by_device.items() if name != "cpu"}
        if len(gpus) > 1:
            notes.append(", ".join(f"{name} {format_bytes(gpus[name])}" for name in sorted(gpus)))
        if self.ranks > 1:
            notes.append(f"of one rank; {self.ranks} ranks hold as much each")
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], bits, *notes])


@dataclass(frozen=True)
class StoreReport:
    """Bytes of a store's pools, each once, whoever holds them.

    Attributes:
        used_bytes: of slots that some cache holds.
        free_bytes: of slots that nobody holds; they are used again before the pools grow.
        rounding_bytes: of no slot: a GPU gives a pool memory in pieces (2 MiB), and the last one is
            not full. Reports of a cache leave them out.
    """

    used_bytes: int
    free_bytes: int
    rounding_bytes: int = 0

    @property
    def pool_bytes(self) -> int:
        """What the pools take on their devices."""
        return self.used_bytes + self.free_bytes + self.rounding_bytes


def measure_store(store: PageStore) -> StoreReport:
    """Add up the pools of all layers."""
    used = slots = total = 0
    for pools in store.layers.values():
        for bits, pool in pools.by_bits.items():
            held = store.allocators[bits].used * pool.slot_bytes
            used += min(held, pool.storage.nbytes)
            slots += pool.storage.nbytes
            total += pool.device_bytes
    return StoreReport(used, slots - used, total - slots)


def token_bytes(cache: OscarCache, start: int, stop: int, row: int = 0) -> int:
    """Bytes that tokens ``start`` to ``stop - 1`` of a row take: their part of pages and slots.

    Tables and what is not in use of a page are in the whole report only; padding takes nothing.
    """
    return span_bytes(cache, [(start, stop)], row)[0]


def span_bytes(cache: OscarCache, spans: Sequence[tuple[int, int]], row: int = 0) -> list[int]:
    """``token_bytes`` of many spans, (start, stop) each, by one look at the tokens."""
    sequence, ends = cache.ledger.sequences[row], np.array(spans, dtype=np.int64).reshape(-1, 2)
    pools = [cache.store.layers[x.index].by_bits for x in cache.packed_layers]
    total = np.zeros(len(ends))
    for code, stream in sequence.streams.items():
        # Of the stream's tokens those before a span, and those before its end.
        both = np.searchsorted(sequence.positions(code), ends)
        packed = np.diff(np.minimum(both, stream.packed))[:, 0]
        in_16_bit = np.diff(both)[:, 0] - packed
        for bits, tokens, whole in (
            (stream.bits, packed, PAGE_TOKENS),
            (PLAIN, in_16_bit, 1),
        ):
            total += sum(by_bits[bits].slot_bytes for by_bits in pools) * tokens / whole
    return np.rint(total).astype(np.int64).tolist()


def measure(cache: OscarCache) -> MemoryReport:
    """Add up the tensors that a cache holds, layer by layer, and its tables."""
    ledger = cache.ledger
    ledger.store.collect()
    by_kind: dict[str, int] = dict.fromkeys(KINDS, 0)
    by_modality = {modality.label: 0 for modality in Modality} | {_SHARED: 0}
    tokens = {modality.label: 0 for modality in Modality}
    for stream in ledger.streams():
        tokens[stream.modality.label] += stream.tokens
    held = SlotSet.of(ledger.streams())
    shared, spare = held.shared(ledger.store), sum(len(row.spare) for row in ledger.sequences)
    taken = held.counts + Counter({PLAIN: spare})
    alone = all(slots.used == taken[bits] for bits, slots in ledger.allocators.items())
    by_device: Counter[str] = Counter()
    values = shared_bytes = 0
    for layer in cache.packed_layers:
        values += 2 * layer.kv_heads * layer.head_dim * sum(tokens.values())
        pools = cache.store.layers[layer.index]
        before = sum(by_kind.values())
        _add_pools(pools, held, None if alone else spare, by_kind, by_modality)
        shared_bytes += sum(shared[bits] * pool.slot_bytes for bits, pool in pools.by_bits.items())
        own = layer.bad.nbytes + (0 if layer.sigma is None else layer.sigma.nbytes)
        by_kind["tables"] += own
        by_modality[_SHARED] += own
        by_device[str(layer.device)] += sum(by_kind.values()) - before
    for state in (x for layer in cache.linear_layers for x in layer.states):
        by_kind["states"] += state.nbytes
        by_modality[_SHARED] += state.nbytes
        by_device[str(state.device)] += state.nbytes
    by_device["cpu"] += ledger.table_bytes
    by_kind["tables"] += ledger.table_bytes
    by_modality[_SHARED] += ledger.table_bytes
    return MemoryReport(
        kv_bytes=sum(by_kind.values()),
        bf16_bytes=2 * values + by_kind["states"],
        values=values,
        by_modality=by_modality,
        by_kind=by_kind,
        tokens=tokens,
        shared_bytes=shared_bytes,
        by_device=dict(by_device),
        ranks=ledger.store.ranks.count,
    )


def _add_pools(
    pools: LayerPools,
    slots: SlotSet,
    spare: int | None,
    by_kind: dict[str, int],
    by_modality: dict[str, int],
) -> None:
    """Add one layer's pools.

    Within a forward pass a layer may be a step behind the tables: its bytes are all counted, as
    unused where the tables speak of slots that it does not have yet.

    Args:
        slots: that the cache holds.
        spare: slots of 16 bit that the next tokens will take; None to count all free ones.
    """
    for bits, pool in pools.by_bits.items():
        free = pool.storage.nbytes
        for label, count in slots.by_modality(bits).items():
            held = min(count * pool.slot_bytes, free)
            free -= held
            by_modality[label] += held
            if bits == PLAIN:
                by_kind["tails"] += held
                continue
            for kind, size in pools.formats[bits].bytes_by_kind.items():
                by_kind[kind] += size * (held // max(1, pool.slot_bytes))
        unused = free
        if spare is not None:
            unused = min(spare * pool.slot_bytes, free) if bits == PLAIN else 0
        by_kind["unused"] += unused
        by_modality[_SHARED] += unused
