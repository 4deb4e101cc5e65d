"""Memory report: size of a cache by modality and by kind, compared with 16-bit precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from oscar_mm.cache.block_table import PagePlaces, SlotSet
from oscar_mm.cache.kv_manager import KVCacheManager
from oscar_mm.cache.layer import OscarLayer
from oscar_mm.cache.page_store import LayerPools, alike
from oscar_mm.modality import Modality
from oscar_mm.pages.layout import PAGE_TOKENS
from oscar_mm.policy import PLAIN, Bits
from oscar_mm.sizes import format_bytes

KINDS = ("codes", "scales", "norms", "tails", "states", "marks", "tables", "unused")
_SHARED = "shared"
_SPEECH = "speech"
_TAILS = "tails: tokens outside of pages, not packed"


@dataclass(frozen=True)
class MemoryReport:
    """Memory usage of a cache. Every byte is counted in one modality and in one kind.

    Slots that caches share (``OscarCache.fork``) appear in the report of each of these caches. Free
    slots of the store that ``PageStore.trim`` would return to the device appear in a cache's report
    only while no other cache owns slots of the store.

    Attributes:
        kv_bytes: total bytes: pools (used and free slots), states of linear-attention layers,
            balancing vectors, tables.
        bf16_bytes: bytes that the same tokens would take as plain 16-bit keys and values, plus the
            states, without marks.
        values: number of stored key and value elements (2 * layers * KV heads * head_dim * tokens).
        by_modality: bytes by modality: "text", "image", "video", "audio", of spoken answers also
            "speech", and "shared" (tables, balancing vectors, states and free slots).
        by_kind: bytes by kind: "codes", "scales" (and zeros), "norms", "tails" (unpacked tokens:
            the window, sinks, tokens waiting for a page), "states" (linear attention), "marks"
            (copies of states, to which a cache can be cropped: ends of turns), "tables"
            (page tables, token map, balancing vectors), "unused" (free slots of the pools, and
            spare slots and states for the next tokens of an answer).
        tokens: number of stored tokens by modality, summed over the batch; tokens in shared slots
            count once per sequence.
        shared_bytes: bytes, included in kv_bytes, of slots that other caches also own.
        by_device: bytes by device; page tables and the token map are on "cpu".
        ranks: number of processes that store the heads of the same layers; 1 without tensor
            parallelism. The report covers one process.
        speech_values: number of ``values`` that a talker stores for its speech; see
            ``with_speech``.
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
    speech_values: int = 0

    def with_speech(self, talker: MemoryReport) -> MemoryReport:
        """Return a report that also includes a talker's cache, as modality "speech"."""
        shared = talker.by_modality[_SHARED]
        own = {_SPEECH: talker.kv_bytes - shared, _SHARED: self.by_modality[_SHARED] + shared}
        return replace(
            self,
            kv_bytes=self.kv_bytes + talker.kv_bytes,
            bf16_bytes=self.bf16_bytes + talker.bf16_bytes,
            values=self.values + talker.values,
            by_modality=self.by_modality | own,
            by_kind={kind: size + talker.by_kind[kind] for kind, size in self.by_kind.items()},
            tokens=self.tokens | {_SPEECH: sum(talker.tokens.values())},
            shared_bytes=self.shared_bytes + talker.shared_bytes,
            by_device=dict(Counter(self.by_device) + Counter(talker.by_device)),
            speech_values=talker.values,
        )

    @property
    def ratio(self) -> float:
        """Compression factor compared with 16-bit precision, bf16_bytes / kv_bytes; 1.0 for an
        empty cache."""
        return self.bf16_bytes / self.kv_bytes if self.kv_bytes else 1.0

    @property
    def bits_per_value(self) -> float:
        """Stored bits per key or value element, including all overhead; 0.0 for an empty cache."""
        return self.kv_bytes * 8 / self.values if self.values else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers as a JSON-serializable dict."""
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
        """Format the report as a short table."""
        if not self.kv_bytes:
            return "KV cache: empty"
        others = sum(self.tokens.values()) - self.tokens.get(_SPEECH, 0)
        per_token = 2 * (self.values - self.speech_values) / max(1, others)
        rows = [("KV cache", "tokens", "stored", "16-bit", "ratio")]
        for name, stored in self.by_modality.items():
            tokens = self.tokens.get(name, 0)
            if stored and name != _SHARED:
                plain = 2 * self.speech_values if name == _SPEECH else per_token * tokens
                rows.append(
                    (
                        name,
                        f"{tokens:,}",
                        format_bytes(stored),
                        format_bytes(plain),
                        f"{plain / stored:.2f}x",
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
            notes.append(f"for one rank; each of the {self.ranks} ranks stores the same amount")
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], bits, *notes])


def token_bytes(kv_manager: KVCacheManager, start: int, stop: int, row: int = 0) -> int:
    """Return the bytes that tokens ``start`` to ``stop - 1`` of a row take in pages and slots.

    Tables and unused parts of pages are excluded; padding takes no bytes.
    """
    return span_bytes(kv_manager, [(start, stop)], row)[0]


def span_bytes(
    kv_manager: KVCacheManager, spans: Sequence[tuple[int, int]], row: int = 0
) -> list[int]:
    """Return ``token_bytes`` of several spans, (start, stop) each, in one pass over the tokens."""
    sequence, ends = kv_manager.tables[row], np.array(spans, dtype=np.int64).reshape(-1, 2)
    total = np.zeros(len(ends))
    for code, stream in sequence.streams.items():
        # Number of the stream's tokens before the start and before the end of each span.
        both = np.searchsorted(sequence.positions(code), ends)
        packed = np.diff(np.minimum(both, stream.packed))[:, 0]
        in_16_bit = np.diff(both)[:, 0] - packed
        for bits, tokens, whole in (
            (stream.bits, packed, PAGE_TOKENS),
            (PLAIN, in_16_bit, 1),
        ):
            total += kv_manager.store.bytes_of({bits: 1}) * tokens / whole
    return np.rint(total).astype(np.int64).tolist()


def measure(
    kv_manager: KVCacheManager,
    packed: Sequence[OscarLayer],
    states: Sequence[torch.Tensor],
    marks: Sequence[torch.Tensor],
    unused: Sequence[torch.Tensor] = (),
) -> MemoryReport:
    """Measure the memory usage of a cache: its tensors, layer by layer, and its tables.

    Args:
        kv_manager: KV cache manager of the cache.
        packed: layers that have received keys and values.
        states, marks, unused: states of linear-attention layers, their copies, and the tensors for
            the states after the next step.
    """
    kv_manager.store.collect()
    kv_manager.store.sweep()
    by_kind: dict[str, int] = dict.fromkeys(KINDS, 0)
    by_modality = {modality.label: 0 for modality in Modality} | {_SHARED: 0}
    tokens = {modality.label: 0 for modality in Modality}
    for stream in kv_manager.streams():
        tokens[stream.modality.label] += stream.tokens
    stored = SlotSet.of(kv_manager.streams())
    shared_in = cache(partial(stored.shared, kv_manager.allocators))
    counted = cache(stored.by_modality)
    spare, alone = kv_manager.spare, kv_manager.holds_all(stored)
    by_device: Counter[str] = Counter()
    values = shared_bytes = 0
    stored_tokens = sum(tokens.values())
    own = Counter[torch.device]()
    for layer in packed:
        own[layer.device] += layer.own_bytes
    for device, size in own.items():
        by_kind["tables"] += size
        by_modality[_SHARED] += size
        by_device[str(device)] += size
    store = kv_manager.store
    whole = len(packed) == len(store.layers)
    for pools, layers in store.alike() if whole else alike(store.layers[x.index] for x in packed):
        values += layers * 2 * pools.kv_heads * pools.head_dim * stored_tokens
        before = sum(by_kind.values())
        _add_pools(pools, layers, counted, spare, by_kind, by_modality, alone=alone)
        shared = shared_in(pools.places)
        shared_bytes += layers * sum(
            shared[bits] * pool.slot_bytes for bits, pool in pools.by_bits.items()
        )
        by_device[str(pools.device)] += sum(by_kind.values()) - before
    for kind, tensors in (("states", states), ("marks", marks), ("unused", unused)):
        for tensor in tensors:
            by_kind[kind] += tensor.nbytes
            by_modality[_SHARED] += tensor.nbytes
            by_device[str(tensor.device)] += tensor.nbytes
    by_device["cpu"] += kv_manager.table_bytes
    by_kind["tables"] += kv_manager.table_bytes
    by_modality[_SHARED] += kv_manager.table_bytes
    return MemoryReport(
        kv_bytes=sum(by_kind.values()),
        bf16_bytes=2 * values + by_kind["states"],
        values=values,
        by_modality=by_modality,
        by_kind=by_kind,
        tokens=tokens,
        shared_bytes=shared_bytes,
        by_device=dict(by_device),
        ranks=kv_manager.store.ranks.count,
    )


def _add_pools(
    pools: LayerPools,
    layers: int,
    counted: Callable[[Bits, PagePlaces | None], Counter[str]],
    spare: int,
    by_kind: dict[str, int],
    by_modality: dict[str, int],
    *,
    alone: bool,
) -> None:
    """Add the bytes of the pools of layers that are alike to ``by_kind`` and ``by_modality``.

    During a forward pass, a layer may be one step behind the tables; slots that its pools do not
    have yet are not counted.

    Args:
        pools: pools of one of the layers.
        layers: number of layers.
        counted: ``SlotSet.by_modality`` of the cache's slots.
        spare: number of 16-bit slots reserved for the next tokens.
        alone: whether to include the free slots of the pools.
    """
    for bits, pool in pools.by_bits.items():
        stored = 0
        for label, count in counted(bits, pools.places).items():
            there = min(count, pool.capacity - stored)
            stored += there
            by_modality[label] += layers * there * pool.slot_bytes
            if bits == PLAIN:
                by_kind["tails"] += layers * there * pool.slot_bytes
                continue
            for kind, size in pools.formats[bits].bytes_by_kind.items():
                by_kind[kind] += layers * there * size
        waiting = min(spare, pool.capacity - stored) if bits == PLAIN else 0
        unused = waiting * pool.slot_bytes
        if alone:
            unused += pool.free_bytes(stored + waiting)
        by_kind["unused"] += layers * unused
        by_modality[_SHARED] += layers * unused
