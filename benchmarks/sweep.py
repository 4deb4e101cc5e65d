"""A benchmark of several full-size models: its command line, its record, and models that fail."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.cache_variants import WAYS, Oscar, Run, Way
from benchmarks.decoder import Decoder
from benchmarks.profiling import allocated, copy_bandwidth, kernels_of, release
from benchmarks.random_model import RELEASED
from benchmarks.record import Record, Said, command, device_name, finish, now, parser
from oscar_mm.decoding.choice import Choices
from oscar_mm.ranks import Ranks

MODELS = ("qwen3-vl-8b", "llava-1.6-vicuna-7b", "qwen3-vl-30b-a3b", "qwen3-omni-30b-a3b")
_PRETENDED_BANDWIDTH = 1e10
"""Of a rehearsal."""

Rows = list[dict[str, Any]]


def options_of(
    benchmark: str, description: str | None, contexts: Sequence[int]
) -> argparse.ArgumentParser:
    """The options that such benchmarks have in common."""
    options = parser(f"benchmarks.{benchmark}", description)
    options.add_argument("--models", type=_names(RELEASED), default=MODELS, help="with commas")
    options.add_argument(
        "--contexts", type=numbers, default=tuple(contexts), help="tokens, with commas"
    )
    options.add_argument(
        "--add", action="store_true", help="keep the file's rows that are not measured again"
    )
    options.add_argument("--tiny", action="store_true", help="a rehearsal with tiny models")
    return options


def add_ways(options: argparse.ArgumentParser, default: Sequence[str] | None) -> None:
    """Let the ways be chosen."""
    options.add_argument(
        "--ways", type=_names(WAYS), default=default, help=f"of {', '.join(WAYS)}, with commas"
    )


def sweep(
    benchmark: str,
    arguments: Sequence[str],
    chosen: argparse.Namespace,
    notes: list[str],
    measure: Callable[[Decoder, float], Iterator[dict[str, Any]]],
    report: Callable[[Rows], None],
    cell: Sequence[str],
) -> int:
    """Measure model by model; each row is printed and in the file as soon as it is there.

    Args:
        benchmark: module below ``benchmarks``.
        arguments: of the command line; ``chosen`` is what ``options_of`` made of them.
        notes: of the record.
        measure: rows of a decoder, given the bandwidth of a copy in bytes per second.
        report: prints tables and verdicts.
        cell: fields that are alike in rows of which a later run replaces an earlier one's.

    Returns:
        0; 1 if a model or a cell failed (for want of memory is no failure); 2 without a GPU.
    """
    on_gpu = torch.cuda.is_available()
    if not (chosen.tiny or on_gpu):
        print(f"benchmarks.{benchmark} needs a CUDA device; --tiny runs anywhere", file=sys.stderr)
        return 2
    device = torch.device("cuda" if on_gpu else "cpu")
    bandwidth = copy_bandwidth() if on_gpu else _PRETENDED_BANDWIDTH
    said, failures, seconds = Said(), {}, {}
    line = command(f"benchmarks.{benchmark}", arguments)
    extra = {"warnings": said.messages, "failures": failures, "seconds": seconds}
    record = Record(benchmark, line, device_name(device.type), [], notes, extra)
    earlier, new = [], []
    if chosen.add and record.path(chosen.out).is_file():
        earlier = Record.load(record.path(chosen.out)).rows
    release(device)  # the copy's gigabytes
    for name in chosen.models:
        start = perf_counter()
        try:
            for row in measure(Decoder(name, device, tiny=chosen.tiny), bandwidth):
                new.append(row | {"command": line})
                earlier = [one for one in earlier if any(one[x] != row[x] for x in cell)]
                record.rows = earlier + new
                record.write(chosen.out)
                print(_line(row), flush=True)
        except Exception as error:  # the other models are worth having
            traceback.print_exc()
            failures[name] = f"{type(error).__name__}: {error}"
        release(device)
        seconds[name] = perf_counter() - start
        record.write(chosen.out)
        print(f"{name}: {seconds[name]:.0f} s", flush=True)
    said.close()
    report(sorted(record.rows, key=lambda row: (row["model"], row["context"], row["batch"])))
    for what in (*said.messages, *(f"FAILED {name}: {why}" for name, why in failures.items())):
        print(what)
    finish(record, chosen.out)
    broken = any(row.get("out_of_memory") is False for row in new)
    return int(broken or bool(failures))


def _line(row: dict[str, Any]) -> str:
    what = f"{row['model']}, {row['way']}, {row['batch']} x {row['context']:,}: "
    if "error" in row:
        return what + row["error"]
    return what + f"{row['ms']:.2f} ms, {row['tokens_per_s']:.1f} tokens/s"


def _names(known: Sequence[str] | dict[str, Any]) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if unknown := sorted(set(found) - set(known)):
            raise argparse.ArgumentTypeError(
                f"no such name: {', '.join(unknown)}; choose from {', '.join(known)}"
            )
        return found

    return names


def numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(map(int, text.split(",")))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give whole numbers from 1, with commas")
    return found


WARM_UP, STEPS = 8, 16
WITHIN = 0.01
"""Of the allocator's peak: how far our own report may be off."""


def measure(
    decoder: Decoder,
    way: Way,
    rows: int,
    context: int,
    bandwidth: float,
    *,
    kernels: bool = False,
) -> dict[str, Any]:
    """Fill a cache, run steps on it, give everything back.

    Args:
        rows: of the batch.
        context: tokens of each row before the first step.
        bandwidth: bytes per second that the floor of a step is computed with.
        kernels: whether one more step is looked into, see ``benchmarks.profiling``.

    Returns:
        a row of the record. "error" says why it holds no figures, "out_of_memory" that it was for
        want of memory. "memory", on a GPU: "report", our own count of weights and cache; "peak",
        the most that the allocator had handed out while steps ran; "held", what it has handed out
        more at the end than before; both as asked for.
    """
    row: dict[str, Any] = {
        "model": decoder.name,
        "way": way.title,
        "batch": rows,
        "context": context,
        "date": now(),
    }
    why = way.missing()
    if why is not None:
        return row | {"error": why}
    decoder.model.set_attn_implementation({"text_config": way.attention})
    try:
        with torch.inference_mode() if way.inference else torch.no_grad():
            row |= _measured(decoder, way, rows, context, bandwidth, kernels)
    except Exception as error:  # the other cells are worth having
        row["error"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        row["out_of_memory"] = _out_of_memory(error)
    # Here, where no traceback holds the frames of what failed any longer.
    way.finish()
    release(decoder.device)
    return row


def _measured(
    decoder: Decoder, way: Way, rows: int, context: int, bandwidth: float, kernels: bool
) -> dict[str, Any]:
    before, start = allocated(decoder.device), perf_counter()
    run = way.begin(decoder, rows, context, WARM_UP + STEPS + 2 * kernels)
    allocated(decoder.device)  # waits, and begins a new peak
    filled = perf_counter() - start
    stepping = Stepping(run, decoder.device, rows)
    milliseconds = step_ms(stepping)
    after, kv_bytes = allocated(decoder.device), run.kv_bytes()
    weights = decoder.weights(rows)
    row = {
        "copy_bytes_per_second": bandwidth,
        "weights": weights,
        "kv_bytes": kv_bytes,
        "fill_s": filled,
        "ms": milliseconds,
        "tokens_per_s": 1e3 * rows / milliseconds,
        "floor_ms": 1e3 * (weights + kv_bytes) / bandwidth,
        "captures": len(run.captures),
        "ours": isinstance(way, Oscar),
    }
    if after:
        row["memory"] = {
            "report": decoder.resident + kv_bytes,
            "peak": after["peak"],
            "held": after["requested"] - before["requested"],
        }
    if kernels:
        stepping.once(last=True)
        row["kernels"] = kernels_of(partial(stepping.once, last=True), decoder.device)
    return row


class Stepping:
    """Steps one after the other, in the order of ``oscar_mm.decoding.loop.decode``."""

    def __init__(self, run: Run, device: torch.device, rows: int) -> None:
        self._run, self._choose = run, Choices([], Ranks())
        # Rows that begin alike would choose the same experts.
        self._tokens = 1 + torch.arange(rows, device=device)
        self._ended = torch.zeros(rows, dtype=torch.bool)

    def once(self, *, last: bool = False) -> None:
        """From tokens on the host to the next ones there.

        Args:
            last: of all steps, so that none is launched ahead.
        """
        choice = self._choose(self._run.step(self._tokens, self._ended))
        self._tokens = choice.tokens
        if self._run.ahead is not None and not last:
            self._run.ahead(self._tokens, self._ended)
        choice.listed()


def step_ms(stepping: Stepping) -> float:
    """Median of the steps after the warm-up."""
    times = []
    for _ in range(WARM_UP + STEPS):
        start = perf_counter()
        stepping.once()
        times.append(perf_counter() - start)
    return 1e3 * median(times[WARM_UP:])


def agrees(row: dict[str, Any]) -> bool | None:
    """Whether report and peak of ours are within 1%; None where there is no allocator to ask."""
    if "memory" not in row or not row["ours"]:
        return None
    return abs(row["memory"]["peak"] / row["memory"]["report"] - 1) <= WITHIN


def _out_of_memory(error: BaseException) -> bool:
    said = str(error)
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in said for words in ("out of memory", "ALLOC_FAILED")
    )
