"""Bounds of the decode kernel: what the project promises of each shape and policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MEASURES = ("cold", "graph")
MOST_ERROR = 2e-3
"""Of an output in bfloat16, whose own rounding is 1.7e-3."""


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
    """``figure`` ("floor_share" or "speedup") of a policy is to be at least ``least``."""

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
    # The kernels' general claims, held where compact is to reach 5x.
    Bound("oscar", "speedup", 4.0, (*_LARGE, QWEN_LONG)),
    Bound("compact, 4 bit", "speedup", 2.5, (*_LARGE, QWEN_LONG)),
)


def rate(row: dict[str, Any], peers: list[dict[str, Any]], bandwidth: float) -> None:
    """Add to a row its floor, its share of it, its speedup over the best peer, by each measure.

    Args:
        row: with "bytes" that a call must read, and microseconds or None in "us", by measure.
        peers: rows of the 16-bit kernels on the same shape.
        bandwidth: bytes per second of the run's own copy.
    """
    row["floor_us"] = row["bytes"] / bandwidth * 1e6
    row["floor_share"], row["speedup"] = {}, {}
    for measure in MEASURES:
        spent = row["us"][measure]
        best = min((p["us"][measure] for p in peers if p["us"][measure]), default=None)
        row["floor_share"][measure] = row["floor_us"] / spent if spent else None
        row["speedup"][measure] = best / spent if spent and best else None


def check(shape: Shape, row: dict[str, Any]) -> list[dict[str, Any]]:
    """The bounds of a rated row: what was found by each measure, and whether that meets it."""
    found = []
    for bound in BOUNDS:
        if bound.policy == row["name"] and shape in bound.shapes:
            values = row[bound.figure]
            met = {m: None if values[m] is None else values[m] >= bound.least for m in MEASURES}
            found.append(
                {"figure": bound.figure, "least": bound.least, "found": values, "met": met}
            )
    return found


def verdict(met: dict[str, bool | None]) -> str:
    """ "met" if every measure that there is meets the bound, else by which it is not met."""
    missed = [measure for measure in MEASURES if met[measure] is False]
    if missed:
        return f"NOT met ({', '.join(missed)})"
    absent = [measure for measure in MEASURES if met[measure] is None]
    if len(absent) == len(MEASURES):
        return "not measured"
    return f"met ({absent[0]} not measured)" if absent else "met"
