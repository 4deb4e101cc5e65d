"""Bounds of the decode kernel: what each policy must reach on each shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MEASURES = ("cold", "graph")
MOST_ERROR = 2e-3
"""Largest relative error of an output in bfloat16, whose own rounding is 1.7e-3."""


@dataclass(frozen=True)
class Shape:
    """Decode attention of one new token; ``context`` counts it too."""

    batch: int
    query_heads: int
    kv_heads: int
    context: int
    head_dim: int = 128

    def __str__(self) -> str:
        heads = f"{self.query_heads}/{self.kv_heads}"
        wide = "" if self.head_dim == 128 else f" d{self.head_dim}"
        return f"{self.batch} x {heads} x {self.context:,}{wide}"


QWEN_BATCH = Shape(8, 32, 8, 32768)
OMNI_BATCH = Shape(16, 32, 4, 32768)
LLAVA_BATCH = Shape(4, 32, 32, 16384)
QWEN_LONG = Shape(1, 32, 8, 131072)
OMNI_LONG = Shape(1, 32, 4, 131072)
QWEN_SHORT = Shape(1, 32, 8, 8192)
HEAD_64 = Shape(8, 32, 8, 32768, head_dim=64)
SHAPES = (QWEN_LONG, QWEN_BATCH, QWEN_SHORT, LLAVA_BATCH, OMNI_LONG, OMNI_BATCH, HEAD_64)
QUICK = (QWEN_BATCH, QWEN_SHORT)
_LARGE = (QWEN_BATCH, OMNI_BATCH, LLAVA_BATCH)


@dataclass(frozen=True)
class Bound:
    """A policy must reach at least ``least`` of a figure ("floor_share", "speedup") on shapes."""

    policy: str
    figure: str
    least: float
    shapes: tuple[Shape, ...]


BOUNDS = (
    Bound("compact", "floor_share", 0.7, _LARGE),
    Bound("compact", "speedup", 5.0, (*_LARGE, QWEN_LONG)),
    Bound("compact", "speedup", 4.0, (OMNI_LONG,)),
    Bound("compact", "speedup", 2.0, (QWEN_SHORT,)),
    Bound("standard", "floor_share", 0.85, _LARGE),
    Bound("standard", "speedup", 4.0, (*_LARGE, QWEN_LONG)),
    Bound("standard, 2 bit", "floor_share", 0.85, _LARGE),
    Bound("standard, 2 bit", "speedup", 5.0, (*_LARGE, QWEN_LONG)),
    # What the kernels claim in general, on the shapes where compact must reach 5x.
    Bound("oscar", "speedup", 4.0, (*_LARGE, QWEN_LONG)),
    Bound("compact, 4 bit", "speedup", 2.5, (*_LARGE, QWEN_LONG)),
)


def rate(row: dict[str, Any], peers: list[dict[str, Any]], bandwidth: float) -> None:
    """Add to a row its floor, its share of the floor and its speedup over the best peer.

    Args:
        row: has "bytes" that a call must read, and microseconds or None in "us", by measure.
        peers: rows of the 16-bit kernels on the same shape.
        bandwidth: bytes per second of a copy in the same run.
    """
    row["floor_us"] = row["bytes"] / bandwidth * 1e6
    row["floor_share"], row["speedup"] = {}, {}
    for measure in MEASURES:
        us = row["us"][measure]
        best = min((p["us"][measure] for p in peers if p["us"][measure]), default=None)
        row["floor_share"][measure] = row["floor_us"] / us if us else None
        row["speedup"][measure] = best / us if us and best else None


def check(shape: Shape, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Bounds of a rated row: its value by each measure, and whether the value meets the bound."""
    checks = []
    for bound in BOUNDS:
        if bound.policy == row["name"] and shape in bound.shapes:
            values = row[bound.figure]
            met = {m: None if values[m] is None else values[m] >= bound.least for m in MEASURES}
            checks.append(
                {"figure": bound.figure, "least": bound.least, "found": values, "met": met}
            )
    return checks


def verdict(met: dict[str, bool | None]) -> str:
    """ "met" if every measure meets the bound, else which measures do not, or are missing."""
    missed = [measure for measure in MEASURES if met[measure] is False]
    if missed:
        return f"NOT met ({', '.join(missed)})"
    missing = [measure for measure in MEASURES if met[measure] is None]
    if len(missing) == len(MEASURES):
        return "not measured"
    return f"met ({missing[0]} not measured)" if missing else "met"
