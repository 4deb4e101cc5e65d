"""One cell of a table: decode steps of one model with one cache, timed, and the memory of it."""

from __future__ import annotations

import gc
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.allocator import allocated
from benchmarks.decoder import Decoder
from benchmarks.record import now
from benchmarks.step_kernels import kernels_of
from benchmarks.ways import Oscar, Run, Way
from oscar_mm.generation.sampling import Choices
from oscar_mm.ranks import Ranks

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
        kernels: whether one more step is looked into, see ``benchmarks.step_kernels``.

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


def release(device: torch.device) -> None:
    """Give memory that nobody uses back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def room(device: torch.device) -> int:
    """Bytes that a GPU has left for this process."""
    release(device)
    return torch.cuda.mem_get_info(device)[0]


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
    """Steps one after the other, in the order of ``oscar_mm.generation.decode_loop.decode``."""

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
