"""The largest batch that fits on a GPU and its throughput, in 16 bit and compact.

python -m benchmarks.throughput [--models qwen3-vl-8b,...] [--contexts 32768,131072]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.cache_variants import WAYS, Way
from benchmarks.decoder import Decoder
from benchmarks.profiling import room
from benchmarks.record import show
from benchmarks.sweep import (
    STEPS,
    WARM_UP,
    WITHIN,
    Rows,
    add_ways,
    agrees,
    measure,
    options_of,
    sweep,
)

CONTEXTS, TINY_CONTEXTS = (32768, 131072), (400,)
PLAIN, OURS = "dynamic", "compact-graph"
BOUND_CONTEXT, BATCH, SPEED = 131072, 5.0, 4.5
"""Where, and how many times the batch and the tokens per second of 16 bit are asked for."""
TINY_ROOM = 4_000_000
"""Bytes that a rehearsal has for caches."""
MOST_TRIES = 12
NOTES = [
    "Random weights of the released shapes; caches are filled with random keys and values of text "
    "and images. The first try is what memory has room for by arithmetic; what is out of memory "
    "is tried again with fewer rows, by a thirty-second, at least one.",
    f"Each batch runs {WARM_UP + STEPS} steps; ms is the median of the last {STEPS}, from tokens "
    "on the host to the next ones there. As in our own decode loop, graph launches the next step "
    "before the host waits for the tokens that it is fed with, but for a step that packs pages; "
    "DynamicCache begins a step when the host has its tokens, as in `generate`.",
    "floor: bytes of the decoder's weights (of a mixture the experts that so many tokens are "
    "expected to choose) and of the KV cache as held, by the bandwidth of this run's own copy.",
    "report: weights and KV cache as counted by the cache; peak: the most that the allocator had "
    "handed out while steps ran. DynamicCache needs a layer's keys or values twice in each step.",
    "Our pools are made as large as the batch needs at once, as PageStore makes them for a prompt.",
]


def largest(
    decoder: Decoder, way: Way, context: int, bandwidth: float, free: int
) -> Iterator[dict[str, Any]]:
    """A row for each batch that was tried; the last one is the largest that fits, if any does.

    Args:
        free: bytes of the device that nobody holds.
    """
    rows = free // way.row_bytes(decoder, context, WARM_UP + STEPS)
    for _ in range(MOST_TRIES):
        if not rows:
            return
        row = measure(decoder, way, rows, context, bandwidth)
        yield row | {"free": free, "row_bytes": way.row_bytes(decoder, context, WARM_UP + STEPS)}
        if not row.get("out_of_memory"):
            return
        rows -= max(1, rows // 32)


def rows_of(
    decoder: Decoder, bandwidth: float, contexts: Sequence[int], ways: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """All tries for each context and way."""
    for context in contexts:
        for name in ways:
            free = room(decoder.device) if decoder.device.type == "cuda" else TINY_ROOM
            yield from largest(decoder, WAYS[name], context, bandwidth, free)


def bounds(rows: Rows) -> list[dict[str, Any]]:
    """What compact is held against, for each model and context: found and whether it is met."""
    best = {(row["model"], row["context"], row["way"]): row for row in rows if "error" not in row}
    found: list[dict[str, Any]] = []

    def hold(place: str, figure: str, value: float, least: float | None) -> None:
        met = None if least is None else value >= least
        found.append({"place": place, "figure": figure, "found": value, "least": least, "met": met})

    for (model, context, way), ours in best.items():
        plain = best.get((model, context, WAYS[PLAIN].title))
        if way != WAYS[OURS].title or plain is None:
            continue
        place, bound = f"{model}, {context:,} tokens", context == BOUND_CONTEXT
        batch = ours["batch"] / plain["batch"]
        speed = ours["tokens_per_s"] / plain["tokens_per_s"]
        hold(place, "batch / 16 bit", batch, BATCH if bound else None)
        hold(place, "tokens per second / 16 bit", speed, SPEED if bound else None)
    return found


def report(rows: Rows) -> None:
    """Print a table and verdicts."""
    columns = ("batch", "KV GB", "ms", "tokens/s", "of floor", "report GB", "peak GB", "captures")
    done = [row for row in rows if "error" not in row]
    show(
        "The largest batch",
        ("model", "context", "way", *columns),
        ((row["model"], f"{row['context']:,}", row["way"], *_figures(row)) for row in done),
    )
    for one in bounds(rows):
        verdict = {None: "", True: ": met", False: ": NOT met"}[one["met"]]
        least = "" if one["least"] is None else f", at least {one['least']}"
        print(f"{one['place']}: {one['figure']} {one['found']:.2f}{least}{verdict}")
    for row in done:
        if (same := agrees(row)) is not None:
            off = row["memory"]["peak"] / row["memory"]["report"] - 1
            print(
                f"{row['model']}, {row['context']:,} tokens, {row['way']}: peak against report "
                f"{off:+.2%}, within {WITHIN:.0%}: {'met' if same else 'NOT met'}"
            )


def _figures(row: dict[str, Any]) -> tuple[str, ...]:
    memory = row.get("memory")
    return (
        str(row["batch"]),
        f"{row['kv_bytes'] / 1e9:.2f}",
        f"{row['ms']:.2f}",
        f"{row['tokens_per_s']:.1f}",
        f"{row['ms'] / row['floor_ms']:.2f}x",
        *("-" if memory is None else f"{memory[x] / 1e9:.2f}" for x in ("report", "peak")),
        str(row["captures"]),
    )


def main(arguments: Sequence[str]) -> int:
    """Measure, print and record, model by model; see ``sweep`` for what it returns."""
    options = options_of("throughput", __doc__, CONTEXTS)
    add_ways(options, (PLAIN, OURS))
    chosen = options.parse_args(arguments)
    contexts = TINY_CONTEXTS if chosen.tiny and chosen.contexts == CONTEXTS else chosen.contexts

    def tries(decoder: Decoder, bandwidth: float) -> Iterator[dict[str, Any]]:
        return rows_of(decoder, bandwidth, contexts, chosen.ways)

    cell = ("model", "way", "context")
    return sweep("throughput", arguments, chosen, NOTES, tries, report, cell)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
