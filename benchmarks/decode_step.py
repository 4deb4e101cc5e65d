"""A decode step of whole models with random weights, by context, batch and cache.

python -m benchmarks.decode_step [--models qwen3-vl-8b,...] [--contexts 2048,...] [--batches 1,...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.cache_variants import WAYS
from benchmarks.decoder import Decoder
from benchmarks.record import show
from benchmarks.sweep import (
    STEPS,
    WARM_UP,
    WITHIN,
    Rows,
    add_ways,
    agrees,
    measure,
    numbers,
    options_of,
    sweep,
)

CONTEXTS, TINY_CONTEXTS = (2048, 32768, 131072, 262144), (300,)
BATCHES = (1,)
COMPILED = "static-compiled"
COMPILED_CELL = ("qwen3-vl-8b", 32768)
"""Model and context of the compiled peer where ways are not chosen: it compiles for a minute."""
AT_MOST = 1.3
"""Of a step's floor: the bound for one row of our presets, as a graph."""
BOUND_CONTEXTS = (2048, 32768, 131072)
_BOUND = [WAYS[name].title for name in ("compact-graph", "standard-graph")]
NOTES = [
    "Random weights of the released shapes; caches are filled with random keys and values of text "
    "and images. A step is the time from tokens on the host to the next ones there; tokens/s are "
    "of all rows.",
    "As in our own decode loop, graph launches the next step before the host waits for the tokens "
    "that it is fed with, but for a step that packs pages. All others begin a step when the host "
    "has its tokens, as `generate` does.",
    "floor: bytes of the decoder's weights (of a mixture the experts that so many tokens are "
    "expected to choose) and of the KV cache as held, by the bandwidth of this run's own copy.",
    f"ms: median of {STEPS} steps after {WARM_UP}. graph: captured, with captures as often as "
    "told. transformers' caches with attention sdpa, eagerly, but for the compiled StaticCache, "
    "which runs as in `generate`.",
    "report: weights and KV cache as counted by the cache; peak: the most that the allocator had "
    "handed out while steps ran.",
]


def rows_of(
    decoder: Decoder,
    bandwidth: float,
    contexts: Sequence[int],
    batches: Sequence[int],
    ways: Sequence[str] | None,
    *,
    kernels: bool = False,
) -> Iterator[dict[str, Any]]:
    """A row for each batch, context and way."""
    for batch in batches:
        for context in contexts:
            for name, way in WAYS.items():
                if ways is None:
                    left_out = name == COMPILED and (decoder.name, context) != COMPILED_CELL
                else:
                    left_out = name not in ways
                if not left_out:
                    yield measure(decoder, way, batch, context, bandwidth, kernels=kernels)


def report(rows: Rows) -> None:
    """Print a table and verdicts."""
    show(
        "A decode step",
        ("model", "batch", "context", "way", "KV GB", "ms", "tokens/s", "of floor", "report/peak"),
        ((*_place(row), *(_figures(row))) for row in rows),
    )
    for row in rows:
        if "kernels" in row:
            seen, cell = row["kernels"], " ".join(_place(row))
            show(
                f"{cell}: {seen['launches']:,} launches in {seen['span_ms']:.2f} ms",
                ("kernel", "launches", "ms busy", "ms added"),
                ((n[:90], str(c), f"{b:.3f}", f"{a:.3f}") for n, c, b, a in seen["most"]),
            )
        if "memory" not in row:
            continue
        place = f"{row['model']}, {row['way']}, {row['batch']} x {row['context']:,} tokens"
        if row["way"] in _BOUND and row["batch"] == 1:
            found = row["ms"] / row["floor_ms"]
            if row["context"] in BOUND_CONTEXTS:
                verdict = "met" if found <= AT_MOST else "NOT met"
                print(f"{place}: {found:.2f} floors, at most {AT_MOST}: {verdict}")
        if agrees(row) is False:
            memory = row["memory"]
            print(
                f"{place}: peak {memory['peak'] / 1e9:.2f} GB, report "
                f"{memory['report'] / 1e9:.2f} GB, within {WITHIN:.0%}: NOT met"
            )


def _place(row: dict[str, Any]) -> tuple[str, ...]:
    return row["model"], str(row["batch"]), f"{row['context']:,}", row["way"]


def _figures(row: dict[str, Any]) -> tuple[str, ...]:
    if "error" in row:
        return (row["error"][:30], "-", "-", "-", "-")
    memory = row.get("memory")
    return (
        f"{row['kv_bytes'] / 1e9:.3f}",
        f"{row['ms']:.2f}",
        f"{row['tokens_per_s']:.1f}",
        f"{row['ms'] / row['floor_ms']:.2f}x",
        "-" if memory is None else f"{memory['report'] / memory['peak']:.4f}",
    )


def main(arguments: Sequence[str]) -> int:
    """Measure, print and record, model by model; see ``sweep`` for what it returns."""
    options = options_of("decode_step", __doc__, CONTEXTS)
    options.add_argument("--batches", type=numbers, default=BATCHES, help="rows, with commas")
    options.add_argument("--kernels", action="store_true", help="also what a step launches")
    add_ways(options, None)
    chosen = options.parse_args(arguments)
    contexts = TINY_CONTEXTS if chosen.tiny and chosen.contexts == CONTEXTS else chosen.contexts

    def cells(decoder: Decoder, bandwidth: float) -> Iterator[dict[str, Any]]:
        grid = (contexts, chosen.batches, chosen.ways)
        return rows_of(decoder, bandwidth, *grid, kernels=chosen.kernels)

    cell = ("model", "way", "context", "batch")
    return sweep("decode_step", arguments, chosen, NOTES, cells, report, cell)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
