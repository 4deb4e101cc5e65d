"""MemoryReport: the bytes that a cache holds, by modality and by kind, against 16 bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oscar_mm.modality import Modality

if TYPE_CHECKING:
    from oscar_mm.cache.cache import OscarCache
    from oscar_mm.cache.layer import OscarLayer

KINDS = ("codes", "scales", "norms", "tails", "tables", "unused")
_SHARED = "shared"
_TAILS = "tails: tokens outside of full pages of 128, in the model's dtype"


@dataclass(frozen=True)
class MemoryReport:
    """What a cache holds. Every byte is in exactly one modality and in exactly one kind.

    Attributes:
        kv_bytes: all bytes held: pools (used and free slots), balancing vectors, tables.
        bf16_bytes: bytes of the same tokens as plain 16-bit keys and values.
        values: key and value elements stored (2 * layers * KV heads * head_dim * tokens).
        by_modality: bytes of "text", "image", "video", "audio", and "shared" (tables, balancing
            vectors and free slots).
        by_kind: bytes of "codes", "scales" (and zeros), "norms", "tails" (tokens in the model's
            dtype: recent ones, sinks, incomplete pages), "tables" (page tables, token map,
            balancing vectors), "unused" (free slots of the pools).
        tokens: stored tokens by modality, summed over the batch; of shared slots counted once
            for each sequence.
    """

    kv_bytes: int
    bf16_bytes: int
    values: int
    by_modality: dict[str, int]
    by_kind: dict[str, int]
    tokens: dict[str, int]

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
            "tokens": dict(self.tokens),
            "by_modality": dict(self.by_modality),
            "by_kind": dict(self.by_kind),
        }

    def __str__(self) -> str:
        """A table of a few lines."""
        if not self.kv_bytes:
            return "KV cache: empty"
        per_token = self.bf16_bytes / max(1, sum(self.tokens.values()))
        rows = [("KV cache", "tokens", "held", "in 16 bit", "ratio")]
        for name, held in self.by_modality.items():
            tokens = self.tokens.get(name, 0)
            if held and name != _SHARED:
                plain = per_token * tokens
                rows.append(
                    (name, f"{tokens:,}", _size(held), _size(plain), f"{plain / held:.2f}x")
                )
        if self.by_modality.get(_SHARED):
            rows.append(("tables, free", "", _size(self.by_modality[_SHARED]), "", ""))
        rows.append(
            (
                "all",
                f"{sum(self.tokens.values()):,}",
                _size(self.kv_bytes),
                _size(self.bf16_bytes),
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
        kinds = ", ".join(f"{kind} {_size(size)}" for kind, size in self.by_kind.items() if size)
        bits = f"{self.bits_per_value:.2f} bits per value: {kinds}"
        mostly_tails = 2 * self.by_kind["tails"] > self.kv_bytes
        return "\n".join(
            [lines[0], rule, *lines[1:-1], rule, lines[-1], bits, *[_TAILS] * mostly_tails]
        )


def measure(cache: OscarCache) -> MemoryReport:
    """Add up the tensors that a cache holds, layer by layer, and its tables."""
    by_kind = dict.fromkeys(KINDS, 0)
    by_modality = {modality.label: 0 for modality in Modality} | {_SHARED: 0}
    tokens = {modality.label: 0 for modality in Modality}
    for stream in cache.ledger.streams():
        tokens[stream.modality.label] += stream.tokens
    # Slots that sequences share are held once.
    pages: dict[int, dict[int, str]] = {bits: {} for bits in cache.ledger.allocators}
    for stream in cache.ledger.streams():
        pages[stream.bits].update(dict.fromkeys(stream.pages, stream.modality.label))
        pages[16].update(dict.fromkeys(stream.blocks, stream.modality.label))
    counts = {
        bits: {label: list(slots.values()).count(label) for label in tokens}
        for bits, slots in pages.items()
    }
    values = 0
    for layer in cache.layers:
        if not layer.is_initialized:
            continue
        values += 2 * layer.kv_heads * layer.head_dim * sum(tokens.values())
        _add_layer(layer, counts, by_kind, by_modality)
    by_kind["tables"] += cache.ledger.table_bytes
    by_modality[_SHARED] += cache.ledger.table_bytes
    return MemoryReport(
        kv_bytes=sum(by_kind.values()),
        bf16_bytes=2 * values,
        values=values,
        by_modality=by_modality,
        by_kind=by_kind,
        tokens=tokens,
    )


def _add_layer(
    layer: OscarLayer,
    counts: dict[int, dict[str, int]],
    by_kind: dict[str, int],
    by_modality: dict[str, int],
) -> None:
    """Add one layer's pools. Within a forward pass a layer may be a step behind the tables: its
    bytes are all counted, as unused where the tables speak of slots that it does not have yet."""
    for bits, pool in {**layer.pages, 16: layer.blocks}.items():
        free = pool.storage.nbytes
        for label, count in counts[bits].items():
            held = min(count * pool.slot_bytes, free)
            free -= held
            by_modality[label] += held
            if bits == 16:
                by_kind["tails"] += held
                continue
            for kind, size in layer.formats[bits].bytes_by_kind.items():
                by_kind[kind] += size * (held // max(1, pool.slot_bytes))
        by_kind["unused"] += free
        by_modality[_SHARED] += free
    if layer.sigma is not None:
        by_kind["tables"] += layer.sigma.nbytes
        by_modality[_SHARED] += layer.sigma.nbytes


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
