"""What the default policy must reach on the pocket models, and whether it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot
from statistics import mean
from typing import Any

from oscar_mm.compare.methods import COMPACT, DEFAULT, FINE, PUBLISHED, REFERENCE

Rows = Sequence[dict[str, Any]]
ALL = "all models"
ABLE = 0.5
"""Exact match of the 16-bit cache below which a task is not judged by it: the model guesses."""


@dataclass(frozen=True)
class Bound:
    """One demand on one model, or on all.

    Attributes:
        model: its name, or "all models".
        what: in words.
        found, limit: numbers; found must be at most the limit, or, with ``least``, at least it.
        where: the task that is nearest to the limit or beyond it, if it is about single tasks.
        error: standard error of what was found, from the differences between prompts.
    """

    model: str
    what: str
    found: float
    limit: float
    where: str = ""
    least: bool = False
    error: float | None = None

    @property
    def met(self) -> bool:
        """Whether it is."""
        return self.found >= self.limit if self.least else self.found <= self.limit

    def __str__(self) -> str:
        """A line for people."""
        sign = ">=" if self.least else "<="
        where = f" ({self.where})" if self.where else ""
        verdict = "met" if self.met else "NOT met"
        found = f"{self.found:.3g}" + ("" if self.error is None else f" ± {self.error:.2g}")
        return f"{verdict:8} {self.model}: {self.what}: {found} {sign} {self.limit:g}{where}"


def verdict(rows: Rows) -> list[Bound]:
    """Every bound that the rows of ``benchmarks.accuracy`` can say something about."""
    found = []
    for name in dict.fromkeys(row["model"] for row in rows):
        found += _of_one([row for row in rows if row["model"] == name], name)
    if len({row["model"] for row in rows}) > 1:
        found += _divergence(rows, ALL)
    return found


def not_judged(rows: Rows) -> list[str]:
    """Tasks that a model cannot do, which say something about KL only."""
    return [
        f"{row['model']}: {row['task']}: the 16-bit cache has {100 * row['exact']:.0f}%"
        for row in rows
        if row["method"] == REFERENCE and row["condition"] == "plain" and row["exact"] < ABLE
    ]


def _of_one(rows: Rows, name: str) -> list[Bound]:
    bounds = []
    default = _by_task(rows, DEFAULT)
    if default:
        fewest = min(row["prompts"] for row in default.values())
        bounds.append(Bound(name, "prompts in a cell", fewest, 500, least=True))
        packed = [row["page_bits"] for row in default.values() if row["packed_share"]]
        widest = max(packed, default=16.0)
        bounds.append(Bound(name, "bits per value of a page", round(widest, 4), 2.95))
    for condition in ("plain", "stress"):
        exact = {
            task: row
            for task, row in _by_task(rows, REFERENCE, condition).items()
            if row["exact"] >= ABLE
        }
        lost = {
            task: 100 * (exact[task]["exact"] - row["exact"])
            for task, row in _by_task(rows, DEFAULT, condition).items()
            if task in exact
        }
        for family, limit in (("ask", 1.0), ("copy", 3.0)):
            of_family = {task: x for task, x in lost.items() if exact[task]["family"] == family}
            if of_family:
                worst = max(of_family, key=of_family.get)
                what = f"points of exact match lost, {family}, {condition}"
                bounds.append(Bound(name, what, of_family[worst], limit, worst))
    return bounds + _divergence(rows, name)


def _divergence(rows: Rows, name: str) -> list[Bound]:
    demands = (
        *((DEFAULT, "plain", 0.5), (DEFAULT, "stress", 0.25)),
        *((COMPACT, "plain", 1.0), (COMPACT, "stress", 0.25), (FINE, "plain", 0.7)),
    )
    bounds = []
    for method, condition, limit in demands:
        found = divergence_ratio(rows, method, PUBLISHED, condition)
        if found is not None:
            what = f"mean KL of {method} to that of {PUBLISHED}, {condition}"
            bounds.append(Bound(name, what, found[0], limit, error=found[1]))
    return bounds


def divergence_ratio(
    rows: Rows, method: str, other: str, condition: str
) -> tuple[float, float] | None:
    """Mean KL over tasks of one method to that of another, and its standard error.

    The two are taken as independent, though they answer the same prompts: the error is rather too
    large. None where one was not measured.
    """
    means, errors = [], []
    for one in (method, other):
        of_one = [
            row
            for row in rows
            if row["method"] == one and row["condition"] == condition and "kl" in row
        ]
        if not of_one:
            return None
        means.append(mean(row["kl"] for row in of_one))
        errors.append(hypot(*(row["kl_error"] for row in of_one)) / len(of_one))
    if not all(means):
        return None
    ratio = means[0] / means[1]
    relative = (error / own for error, own in zip(errors, means, strict=True))
    return ratio, ratio * hypot(*relative)


def _by_task(rows: Rows, method: str, condition: str = "plain") -> dict[str, dict[str, Any]]:
    return {
        row["task"]: row
        for row in rows
        if row["method"] == method and row["condition"] == condition and "kl" in row
    }
