"""Time decode steps of complete models with random weights, by context, batch and cache.

python -m benchmarks.decode_step [--models qwen3-vl-8b,...] [--contexts 2048,...] [--batches 1,...]
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.cache_variants import VARIANTS, CacheVariant, Decoder, FilledCache, Oscar
from benchmarks.profiling import allocated, copy_bandwidth, kernel_launches, release
from benchmarks.random_model import RANDOM_MODELS
from benchmarks.record import (
    Record,
    Row,
    WarningLog,
    command,
    device_name,
    device_of,
    finish,
    now,
    parser,
    show,
)
from oscar_mm.engine.sampling import SampledTokens, Sampler
from oscar_mm.tensor_parallel import TPGroup

MODELS = ("qwen3-vl-8b", "llava-1.6-vicuna-7b", "qwen3-vl-30b-a3b", "qwen3-omni-30b-a3b")
CONTEXTS, TINY_CONTEXTS = (2048, 32768, 131072, 262144), (300,)
BATCHES = (1,)
COMPILED = "static-compiled"
COMPILED_CELL = ("qwen3-vl-8b", 32768)
"""Model and context for which the compiled StaticCache runs if --ways does not name it; compiling
takes a minute."""
AT_MOST = 1.3
"""Maximum time of a single-row step relative to its floor, for our presets with CUDA graphs."""
AT_MOST_QUANTIZED = {
    "qwen3-vl-8b-fp8": 1.2,
    "qwen3-vl-8b-int4": 1.3,
    "qwen3-vl-30b-a3b-fp8": 1.6,
}
"""Like ``AT_MOST``, for models with quantized weights, by model."""
BOUND_CONTEXTS = (2048, 32768, 131072)
_BOUND = [VARIANTS[name].title for name in ("compact-graph", "standard-graph")]
WARM_UP, STEPS = 8, 16
WITHIN = 0.01
"""Maximum relative difference between our memory report and the peak of the allocator."""
_PRETENDED_BANDWIDTH = 1e10
"""Bandwidth assumed in a tiny run on a CPU, in bytes per second."""
NOTES = [
    "Random weights of the released shapes; caches are filled with random keys and values of text "
    "and images. A step is the time from tokens on the host to the next ones there; tokens/s are "
    "of all rows.",
    "graph: as our decode loop does, it launches the next step before the host waits for the "
    "tokens of that step, except a step that packs pages. All others begin a step when the host "
    "has its tokens, as `generate` does.",
    "floor: bytes of the decoder's weights (of a mixture of experts the expected choice of so many "
    "tokens) and of the KV cache as held, states twice (read and written), by the bandwidth of a "
    "copy in the same run.",
    f"ms: median of {STEPS} steps after {WARM_UP}. captures: number of captured graphs. "
    "transformers' caches run eagerly with attention sdpa, except the compiled StaticCache, which "
    "runs as in `generate`.",
    "report: weights and KV cache as the cache counts them; peak: most bytes that the allocator "
    "had handed out while steps ran.",
]


def measure_cell(
    decoder: Decoder,
    variant: CacheVariant,
    rows: int,
    context: int,
    bandwidth: float,
    *,
    kernels: bool = False,
) -> Row:
    """Fill a cache, time decode steps with the cache, and free everything.

    Args:
        decoder: decoder that runs the steps.
        variant: kind of the cache.
        rows: number of rows in the batch.
        context: tokens of each row before the first step.
        bandwidth: bytes per second, for the floor of a step.
        kernels: whether a profiler lists the kernels of one more step.

    Returns:
        A row of the record. If the row has no figures, "error" is the reason, and "out_of_memory"
        is whether it was a lack of memory. On a GPU, "memory" contains "report", our own count of
        the bytes of weights and cache; "peak", the maximum bytes allocated while steps ran; and
        "held", the increase in allocated bytes from start to end. "peak" and "held" count requested
        bytes.
    """
    row: Row = {
        "model": decoder.name,
        "way": variant.title,
        "batch": rows,
        "context": context,
        "date": now(),
    }
    why = variant.missing()
    if why is not None:
        return row | {"error": why}
    decoder.model.set_attn_implementation({"text_config": variant.attention})
    with torch.inference_mode() if variant.inference else torch.no_grad():
        row |= attempt(lambda: _measured(decoder, variant, rows, context, bandwidth, kernels))
    # At this point, no traceback keeps the frames of a failed cell alive.
    variant.release()
    release(decoder.device)
    return row


def attempt(figures: Callable[[], Row]) -> Row:
    """Return the figures of a cell or, if it fails, a row with "error" and "out_of_memory".

    Thus a failed cell does not prevent other cells from running.
    """
    try:
        return figures()
    except Exception as error:
        message = (str(error).splitlines() or [""])[0]
        return {
            "error": f"{type(error).__name__}: {message}",
            "out_of_memory": _out_of_memory(error),
        }


def _measured(
    decoder: Decoder,
    variant: CacheVariant,
    rows: int,
    context: int,
    bandwidth: float,
    kernels: bool,
) -> Row:
    before, start = allocated(decoder.device), perf_counter()
    cache = variant.fill(decoder, rows, context, WARM_UP + STEPS + 2 * kernels)
    allocated(decoder.device)  # Synchronizes, and starts a new peak.
    fill_s = perf_counter() - start
    loop = DecodeLoop(cache, decoder.device, rows)
    milliseconds, _ = step_ms(loop.step)
    after, kv_bytes = allocated(decoder.device), cache.kv_bytes()
    weights = decoder.weights(rows)
    row = {
        "copy_bytes_per_second": bandwidth,
        "weights": weights,
        "kv_bytes": kv_bytes,
        "fill_s": fill_s,
        "ms": milliseconds,
        "tokens_per_s": 1e3 * rows / milliseconds,
        "floor_ms": 1e3 * (weights + kv_bytes + cache.more_bytes()) / bandwidth,
        "captures": len(cache.captures),
        "ours": isinstance(variant, Oscar),
    }
    if after:
        row["memory"] = {
            "report": decoder.resident + kv_bytes,
            "peak": after["peak"],
            "held": after["requested"] - before["requested"],
        }
    if kernels:
        loop.step(last=True)
        row["kernels"] = kernel_launches(partial(loop.step, last=True), decoder.device)
    return row


class DecodeLoop:
    """Greedy steps in the order of our decode loop: launch the next step, then wait for tokens."""

    def __init__(self, cache: FilledCache, device: torch.device, rows: int) -> None:
        self._cache, self._choose = cache, Sampler([None] * rows, device, TPGroup())
        # The rows differ, because equal rows would choose the same experts.
        self._tokens = 1 + torch.arange(rows, device=device)
        self._ended = torch.zeros(rows, dtype=torch.bool)

    def step(self, *, last: bool = False) -> None:
        """Run one step, from tokens on the host to the next tokens on the host.

        Args:
            last: whether this is the last step, so that no further step is launched ahead.
        """
        choice = self._choose(self._cache.step(self._tokens, self._ended))
        self._tokens = choice.tokens
        if self._cache.ahead is not None and not last:
            self._cache.ahead(self._tokens, self._ended)
        choice.listed()


def step_ms(step: Callable[[], None]) -> tuple[float, float]:
    """Return two medians of steps after the warm-up, in milliseconds.

    The first is the full time of a step; the second excludes the time that the host waits for
    tokens.
    """
    times, host = [], []
    waits: list[float] = []
    listed = SampledTokens.listed

    def timed(tokens: SampledTokens) -> list[int]:
        start = perf_counter()
        try:
            return listed(tokens)
        finally:
            waits.append(perf_counter() - start)

    with patch.object(SampledTokens, "listed", timed):
        for _ in range(WARM_UP + STEPS):
            waits.clear()
            start = perf_counter()
            step()
            times.append(perf_counter() - start)
            host.append(times[-1] - sum(waits))
    return 1e3 * median(times[WARM_UP:]), 1e3 * median(host[WARM_UP:])


def report_agrees(row: Row) -> bool | None:
    """Return whether our report is within 1% of the peak; None for other caches and on a CPU."""
    if "memory" not in row or not row["ours"]:
        return None
    return abs(row["memory"]["peak"] / row["memory"]["report"] - 1) <= WITHIN


def _out_of_memory(error: BaseException) -> bool:
    message = str(error)
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in message for words in ("out of memory", "ALLOC_FAILED")
    )


def rows_of(
    decoder: Decoder,
    bandwidth: float,
    contexts: Sequence[int],
    batches: Sequence[int],
    variants: Sequence[str] | None,
    *,
    kernels: bool = False,
) -> Iterator[Row]:
    """Yield a row for each batch, context and cache variant."""
    for batch in batches:
        for context in contexts:
            for name, variant in VARIANTS.items():
                if variants is None:
                    left_out = name == COMPILED and (decoder.name, context) != COMPILED_CELL
                else:
                    left_out = name not in variants
                if not left_out:
                    yield measure_cell(decoder, variant, batch, context, bandwidth, kernels=kernels)


def report(rows: Sequence[Row]) -> None:
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
        place = f"{_cell(row)} tokens"
        if row["way"] in _BOUND and row["batch"] == 1:
            floors = row["ms"] / row["floor_ms"]
            if row["context"] in BOUND_CONTEXTS:
                at_most = AT_MOST_QUANTIZED.get(row["model"], AT_MOST)
                verdict = "met" if floors <= at_most else "NOT met"
                print(f"{place}: {floors:.2f} floors, at most {at_most}: {verdict}")
        if report_agrees(row) is False:
            memory = row["memory"]
            print(
                f"{place}: peak {memory['peak'] / 1e9:.2f} GB, report "
                f"{memory['report'] / 1e9:.2f} GB, within {WITHIN:.0%}: NOT met"
            )


def _place(row: Row) -> tuple[str, ...]:
    return row["model"], str(row["batch"]), f"{row['context']:,}", row["way"]


def _figures(row: Row) -> tuple[str, ...]:
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


def options_of(
    benchmark: str, description: str | None, contexts: Sequence[int]
) -> argparse.ArgumentParser:
    """Create a command-line parser with the options that all sweeps share."""
    options = parser(f"benchmarks.{benchmark}", description)
    options.add_argument(
        "--models", type=_names(RANDOM_MODELS), default=MODELS, help="models, comma-separated"
    )
    options.add_argument(
        "--contexts",
        type=numbers,
        default=tuple(contexts),
        help="tokens of context, comma-separated",
    )
    options.add_argument(
        "--add", action="store_true", help="keep the file's rows that are not measured again"
    )
    options.add_argument("--tiny", action="store_true", help="trial run with tiny models")
    return options


def add_variants(
    options: argparse.ArgumentParser,
    default: Sequence[str] | None,
    variants: Sequence[str] = tuple(VARIANTS),
) -> None:
    """Add the command-line option that selects cache variants."""
    options.add_argument(
        "--ways",
        type=_names(variants),
        default=default,
        help=f"{', '.join(variants)}; comma-separated",
    )


def sweep(
    benchmark: str,
    arguments: Sequence[str],
    options: argparse.Namespace,
    notes: list[str],
    rows_of: Callable[[Decoder, float], Iterator[Row]],
    report: Callable[[Sequence[Row]], None],
    cell: Sequence[str],
) -> int:
    """Measure one model after another; print and record each row immediately.

    Args:
        benchmark: name of the module in ``benchmarks``.
        arguments: arguments of the command line.
        options: the arguments as parsed by ``options_of``.
        notes: notes of the record.
        rows_of: function that measures a decoder; its second argument is the bandwidth of a copy in
            bytes per second.
        report: function that prints tables and verdicts.
        cell: fields that identify a cell; with --add, new rows of a cell replace its old rows.

    Returns:
        The exit code: 1 if a model or a cell failed, not counting a lack of memory; 2 without a
        GPU; otherwise 0.
    """
    device = device_of(benchmark, tiny=options.tiny)
    if device is None:
        return 2
    bandwidth = copy_bandwidth() if device.type == "cuda" else _PRETENDED_BANDWIDTH
    warnings, failures, seconds = WarningLog(), {}, {}
    line = command(f"benchmarks.{benchmark}", arguments)
    extra = {"warnings": warnings.messages, "failures": failures, "seconds": seconds}
    record = Record(benchmark, line, device_name(device.type), [], notes, extra)
    earlier, new = [], []
    if options.add and (previous := record.earlier(options.out)):
        earlier = previous.rows
    release(device)  # Free the memory of the bandwidth test, which is gigabytes.
    for name in options.models:
        start = perf_counter()
        try:
            for row in rows_of(Decoder(name, device, tiny=options.tiny), bandwidth):
                new.append(row | {"command": line})
                earlier = [old for old in earlier if any(old[x] != row[x] for x in cell)]
                record.rows = earlier + new
                record.write(options.out)
                print(_line(row), flush=True)
        except Exception as error:  # Continue with the other models.
            traceback.print_exc()
            failures[name] = f"{type(error).__name__}: {error}"
        release(device)
        seconds[name] = perf_counter() - start
        record.write(options.out)
        print(f"{name}: {seconds[name]:.0f} s", flush=True)
    warnings.close()
    report(sorted(record.rows, key=lambda row: (row["model"], row["context"], row["batch"])))
    for message in (
        *warnings.messages,
        *(f"FAILED {name}: {why}" for name, why in failures.items()),
    ):
        print(message)
    finish(record, options.out)
    broken = any(row.get("out_of_memory") is False for row in new)
    return int(broken or bool(failures))


def _cell(row: Row) -> str:
    return f"{row['model']}, {row['way']}, {row['batch']} x {row['context']:,}"


def _line(row: Row) -> str:
    if "error" in row:
        return f"{_cell(row)}: {row['error']}"
    return f"{_cell(row)}: {row['ms']:.2f} ms, {row['tokens_per_s']:.1f} tokens/s"


def _names(choices: Sequence[str] | dict[str, Any]) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        if unknown := sorted(set(chosen) - set(choices)):
            raise argparse.ArgumentTypeError(
                f"unknown names: {', '.join(unknown)}; choose from {', '.join(choices)}"
            )
        return chosen

    return names


def numbers(text: str) -> tuple[int, ...]:
    """Parse an option with comma-separated whole numbers, each at least 1."""
    try:
        values = tuple(map(int, text.split(",")))
    except ValueError:
        values = ()
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be whole numbers from 1, with commas")
    return values


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark: measure, print and record; return the exit code, see ``sweep``."""
    parser = options_of("decode_step", __doc__, CONTEXTS)
    parser.add_argument(
        "--batches", type=numbers, default=BATCHES, help="batch sizes, comma-separated"
    )
    parser.add_argument("--kernels", action="store_true", help="also list the kernels of a step")
    add_variants(parser, None)
    options = parser.parse_args(arguments)
    contexts = TINY_CONTEXTS if options.tiny and options.contexts == CONTEXTS else options.contexts

    def cells(decoder: Decoder, bandwidth: float) -> Iterator[Row]:
        grid = (contexts, options.batches, options.ways)
        return rows_of(decoder, bandwidth, *grid, kernels=options.kernels)

    cell = ("model", "way", "context", "batch")
    return sweep("decode_step", arguments, options, NOTES, cells, report, cell)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
