"""A decode step of whole models with random weights, by context, batch and cache.

python -m benchmarks.decode_step [--models qwen3-vl-8b,...] [--contexts 2048,...] [--batches 1,...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.cache_variants import VARIANTS, Decoder
from benchmarks.record import show
from benchmarks.sweep import (
    STEPS,
    WARM_UP,
    WITHIN,
    Rows,
    add_variants,
    measure_cell,
    numbers,
    options_of,
    report_agrees,
    sweep,
)

CONTEXTS, TINY_CONTEXTS = (2048, 32768, 131072, 262144), (300,)
BATCHES = (1,)
COMPILED = "static-compiled"
COMPILED_CELL = ("qwen3-vl-8b", 32768)
"""Model and context of the compiled peer unless --ways names it: it compiles for a minute."""
AT_MOST = 1.3
"""Bound of a step of one row in its floors, for our presets as a graph."""
BOUND_CONTEXTS = (2048, 32768, 131072)
_BOUND = [VARIANTS[name].title for name in ("compact-graph", "standard-graph")]
NOTES = [
    "Random weights of the released shapes; caches are filled with random keys and values of text "
    "and images. A step is the time from tokens on the host to the next ones there; tokens/s are "
    "of all rows.",
    "graph: as our decode loop does, it launches the next step before the host waits for the "
    "tokens of that step, except a step that packs pages. All others begin a step when the host "
    "has its tokens, as `generate` does.",
    "floor: bytes of the decoder's weights (of a mixture of experts the expected choice of so many "
    "tokens) and of the KV cache as held, by the bandwidth of a copy in the same run.",
    f"ms: median of {STEPS} steps after {WARM_UP}. captures: number of captured graphs. "
    "transformers' caches run eagerly with attention sdpa, except the compiled StaticCache, which "
    "runs as in `generate`.",
    "report: weights and KV cache as the cache counts them; peak: most bytes that the allocator "
    "had handed out while steps ran.",
]


def rows_of(
    decoder: Decoder,
    bandwidth: float,
    contexts: Sequence[int],
    batches: Sequence[int],
    variants: Sequence[str] | None,
    *,
    kernels: bool = False,
) -> Iterator[dict[str, Any]]:
    """A row for each batch, context and cache variant."""
    for batch in batches:
        for context in contexts:
            for name, variant in VARIANTS.items():
                if variants is None:
                    left_out = name == COMPILED and (decoder.name, context) != COMPILED_CELL
                else:
                    left_out = name not in variants
                if not left_out:
                    yield measure_cell(decoder, variant, batch, context, bandwidth, kernels=kernels)


def report(rows: Rows) -> None:
    """Print a table and verdicts."""
    show(
        "A decode step",
        ("model", "batch", "context", "way", "KV GB", "ms", "tokens/s", "of floor", "report/peak"),
        ((*_place(row), *(_figures(row))) for row in rows),
    )
    for row in rows:
        if "kernels" in row:
            kernels, cell = row["kernels"], " ".join(_place(row))
            show(
                f"{cell}: {kernels['launches']:,} launches in {kernels['span_ms']:.2f} ms",
                ("kernel", "launches", "ms busy", "ms added"),
                ((n[:90], str(c), f"{b:.3f}", f"{a:.3f}") for n, c, b, a in kernels["most"]),
            )
        if "memory" not in row:
            continue
        place = f"{row['model']}, {row['way']}, {row['batch']} x {row['context']:,} tokens"
        if row["way"] in _BOUND and row["batch"] == 1:
            floors = row["ms"] / row["floor_ms"]
            if row["context"] in BOUND_CONTEXTS:
                verdict = "met" if floors <= AT_MOST else "NOT met"
                print(f"{place}: {floors:.2f} floors, at most {AT_MOST}: {verdict}")
        if report_agrees(row) is False:
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
    """Measure, print and record; returns what ``sweep`` returns."""
    parser = options_of("decode_step", __doc__, CONTEXTS)
    parser.add_argument("--batches", type=numbers, default=BATCHES, help="rows, with commas")
    parser.add_argument("--kernels", action="store_true", help="also what a step launches")
    add_variants(parser, None)
    options = parser.parse_args(arguments)
    contexts = TINY_CONTEXTS if options.tiny and options.contexts == CONTEXTS else options.contexts

    def cells(decoder: Decoder, bandwidth: float) -> Iterator[dict[str, Any]]:
        grid = (contexts, options.batches, options.ways)
        return rows_of(decoder, bandwidth, *grid, kernels=options.kernels)

    cell = ("model", "way", "context", "batch")
    return sweep("decode_step", arguments, options, NOTES, cells, report, cell)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
