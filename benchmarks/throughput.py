"""Find the largest batch that fits on a GPU and its throughput, in 16-bit precision and compact.

python -m benchmarks.throughput [--models qwen3-vl-8b,...] [--contexts 32768,131072]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

from benchmarks.cache_variants import VARIANTS, CacheVariant, Decoder
from benchmarks.decode_step import (
    STEPS,
    WARM_UP,
    WITHIN,
    add_variants,
    measure_cell,
    options_of,
    report_agrees,
    sweep,
)
from benchmarks.profiling import free_bytes
from benchmarks.record import Row, show

CONTEXTS, TINY_CONTEXTS = (32768, 131072), (400,)
PLAIN, OURS = "dynamic", "compact-graph"
BOUND_CONTEXT, BATCH, SPEED = 131072, 5.0, 4.5
"""Context for which the bounds apply; minimum batch and minimum tokens per second, both relative to
the 16-bit cache."""
TINY_ROOM = 4_000_000
"""Memory for caches in a tiny run, in bytes."""
MAX_TRIES = 12
NOTES = [
    "Random weights of the released shapes; caches are filled with random keys and values of text "
    "and images. The first batch is the one that memory has room for by arithmetic. A batch that "
    "runs out of memory is followed by one with a thirty-second fewer rows, at least one fewer.",
    f"Each batch runs {WARM_UP + STEPS} steps; ms is the median of the last {STEPS}, from tokens "
    "on the host to the next ones there. As our decode loop does, graph launches the next step "
    "before the host waits for the tokens of that step, except a step that packs pages. "
    "DynamicCache begins a step when the host has its tokens, as in `generate`.",
    "floor: bytes of the decoder's weights (of a mixture of experts the expected choice of so many "
    "tokens) and of the KV cache as held, by the bandwidth of a copy in the same run.",
    "report: weights and KV cache as the cache counts them; peak: most bytes that the allocator "
    "had handed out while steps ran. DynamicCache needs a layer's keys or values twice in each "
    "step.",
    "Our pools are as large as the batch needs from the start, as PageStore makes them for a "
    "prompt.",
]


def largest(
    decoder: Decoder, variant: CacheVariant, context: int, bandwidth: float, free: int
) -> Iterator[Row]:
    """Yield a row for each batch tried; the last row is the largest batch that fits, if any does.

    Args:
        decoder: decoder that runs the steps.
        variant: kind of the cache.
        context: number of tokens of each row.
        bandwidth: bytes per second, for the floor of a step.
        free: number of unused bytes on the device.
    """
    row_bytes = variant.row_bytes(decoder, context, WARM_UP + STEPS)
    cells = until_it_fits(
        free // row_bytes, lambda rows: measure_cell(decoder, variant, rows, context, bandwidth)
    )
    for row in cells:
        yield row | {"free": free, "row_bytes": row_bytes}


def until_it_fits(rows: int, measure: Callable[[int], Row]) -> Iterator[Row]:
    """Yield the result of ``measure(rows)``, then of fewer rows as long as memory runs out."""
    for _ in range(MAX_TRIES):
        if not rows:
            return
        row = measure(rows)
        yield row
        if not row.get("out_of_memory"):
            return
        rows -= max(1, rows // 32)


def rows_of(
    decoder: Decoder, bandwidth: float, contexts: Sequence[int], variants: Sequence[str]
) -> Iterator[Row]:
    """Yield the rows of all batches tried, for each context and cache variant."""
    for context in contexts:
        for name in variants:
            free = free_bytes(decoder.device) if decoder.device.type == "cuda" else TINY_ROOM
            yield from largest(decoder, VARIANTS[name], context, bandwidth, free)


def bounds(rows: Sequence[Row]) -> list[Row]:
    """Return the bounds of the compact preset by model and context, with values and verdicts."""
    best = {(row["model"], row["context"], row["way"]): row for row in rows if "error" not in row}
    checks: list[Row] = []

    def check(place: str, figure: str, value: float, least: float | None) -> None:
        met = None if least is None else value >= least
        checks.append(
            {"place": place, "figure": figure, "found": value, "least": least, "met": met}
        )

    for (model, context, way), ours in best.items():
        plain = best.get((model, context, VARIANTS[PLAIN].title))
        if way != VARIANTS[OURS].title or plain is None:
            continue
        place, bound = f"{model}, {context:,} tokens", context == BOUND_CONTEXT
        batch = ours["batch"] / plain["batch"]
        speed = ours["tokens_per_s"] / plain["tokens_per_s"]
        check(place, "batch / 16 bit", batch, BATCH if bound else None)
        check(place, "tokens per second / 16 bit", speed, SPEED if bound else None)
    return checks


def report(rows: Sequence[Row]) -> None:
    """Print a table and verdicts."""
    columns = ("batch", "KV GB", "ms", "tokens/s", "of floor", "report GB", "peak GB", "captures")
    complete = [row for row in rows if "error" not in row]
    show(
        "The largest batch",
        ("model", "context", "way", *columns),
        ((row["model"], f"{row['context']:,}", row["way"], *_figures(row)) for row in complete),
    )
    for bound in bounds(rows):
        verdict = {None: "", True: ": met", False: ": NOT met"}[bound["met"]]
        least = "" if bound["least"] is None else f", at least {bound['least']}"
        print(f"{bound['place']}: {bound['figure']} {bound['found']:.2f}{least}{verdict}")
    for row in complete:
        if (agrees := report_agrees(row)) is not None:
            off = row["memory"]["peak"] / row["memory"]["report"] - 1
            print(
                f"{row['model']}, {row['context']:,} tokens, {row['way']}: peak against report "
                f"{off:+.2%}, within {WITHIN:.0%}: {'met' if agrees else 'NOT met'}"
            )


def _figures(row: Row) -> tuple[str, ...]:
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
    """Run the benchmark: measure, print and record; return the exit code, see ``sweep``."""
    parser = options_of("throughput", __doc__, CONTEXTS)
    add_variants(parser, (PLAIN, OURS))
    options = parser.parse_args(arguments)
    contexts = TINY_CONTEXTS if options.tiny and options.contexts == CONTEXTS else options.contexts

    def tries(decoder: Decoder, bandwidth: float) -> Iterator[Row]:
        return rows_of(decoder, bandwidth, contexts, options.ways)

    cell = ("model", "way", "context")
    return sweep("throughput", arguments, options, NOTES, tries, report, cell)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
