"""One cell of a table: decode steps of one model with one cache, timed, and the memory of it."""

from __future__ import annotations

import gc
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.allocator import allocated
from benchmarks.decoder import Decoder
from benchmarks.record import now
from benchmarks.step_kernels import kernels_of
from benchmarks.ways import Oscar, Step, Way

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
    run = way.begin(decoder, rows, context, WARM_UP + STEPS + kernels)
    allocated(decoder.device)  # waits, and begins a new peak
    filled = perf_counter() - start
    milliseconds = step_ms(run.step, decoder.device, rows, context)
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
        step = Stepping(run.step, decoder.device, rows, context + WARM_UP + STEPS)
        row["kernels"] = kernels_of(step.once, decoder.device)
    return row


class Stepping:
    """Steps one after the other, each with a wait for its tokens.

    Args:
        context: tokens of each row before the first step.
    """

    def __init__(self, step: Step, device: torch.device, rows: int, context: int) -> None:
        self._step = step
        # Rows that begin alike would choose the same experts.
        self._tokens = 1 + torch.arange(rows, device=device)
        self._position = torch.full((rows,), context, device=device)
        self._ended = torch.zeros(rows, dtype=torch.bool)

    def once(self) -> None:
        """From tokens to the host's choice of the next."""
        logits = self._step(self._tokens, self._position, self._ended)
        self._tokens = logits.float().argmax(-1)
        self._tokens.tolist()
        self._position = self._position + 1


def step_ms(step: Step, device: torch.device, rows: int, context: int) -> float:
    """Median of the steps after the warm-up."""
    stepping, times = Stepping(step, device, rows, context), []
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
