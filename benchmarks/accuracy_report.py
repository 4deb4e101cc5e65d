"""Tables, verdict and plot of what ``benchmarks.accuracy`` recorded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.record import Record, console, show
from oscar_mm.compare.methods import COMPACT, DEFAULT, FINE, PUBLISHED, REFERENCE

Rows = Sequence[dict[str, Any]]
GENERATED = "generated"
MEASURES = {
    "kl": ("KL x 1000", 1000, ".3g"),
    "margin": ("squared error of logit margins", 1, ".3g"),
    "exact": ("exact match, %", 100, ".1f"),
}


def main(folder: Path, models: Sequence[str]) -> int:
    """Tables of some models, verdict over all that were recorded in a folder, and the plot.

    Returns 2 if there are none.
    """
    records = [Record.load(path) for path in sorted(folder.glob("accuracy-pocket-*.json"))]
    if not records:
        print(f"{folder} has no record of benchmarks.accuracy")
        return 2
    for device in dict.fromkeys(record.device for record in records):
        of_device = [record for record in records if record.device == device]
        rows = [row for record in of_device for row in record.rows]
        seeds = sorted({record.extra["seed"] for record in of_device})
        console().print(f"\n{device}, seed {', '.join(map(str, seeds))}", style="bold")
        for name in dict.fromkeys(row["model"] for row in rows if row["model"] in models):
            tables([row for row in rows if row["model"] == name])
        for bound in verdict(rows):
            print(bound)
        for task in not_judged(rows):
            print(f"exact match not judged, {task}")
        plot(rows, folder, device)
    return 0


def tables(rows: Rows) -> None:
    """Of one model: bits and KL by task, then exact match by task; plain and stress."""
    name = rows[0]["model"]
    tasks = list(dict.fromkeys(row["task"] for row in rows if "kl" in row))
    _generated(name, [row for row in rows if row["condition"] == GENERATED])
    for condition in dict.fromkeys(row["condition"] for row in rows if "kl" in row):
        cells = {
            (row["method"], row["task"]): row
            for row in rows
            if row["condition"] == condition and "kl" in row
        }
        methods = list(dict.fromkeys(method for method, _ in cells))
        shared = {task for _, task in shared_tasks(list(cells.values()))}
        for measure, (unit, *_) in MEASURES.items():
            show(
                f"{name}, {condition}: {unit}",
                ("method", "prompts", "page", "held", "mean", *map(_short, tasks)),
                (
                    _line({task: cells.get((method, task)) for task in tasks}, shared, measure)
                    for method in methods
                ),
            )


def _generated(name: str, rows: Rows) -> None:
    if rows:
        show(
            f"{name}: free answers through the packed cache, %",
            ("task, policy", "prompts", "exact match", "same as 16 bit"),
            (
                (
                    f"{row['task']}, {row['method']}",
                    str(row["prompts"]),
                    *(f"{100 * row[key]:.1f}" for key in ("exact", "as_16_bit")),
                )
                for row in rows
            ),
        )


def _line(
    cells: dict[str, dict[str, Any] | None], shared: set[str], measure: str
) -> tuple[str, ...]:
    """Of a method, by task; the mean is over the shared tasks."""
    known = [cell for cell in cells.values() if cell is not None]
    held = [cell["held_bits"] for cell in known if cell["held_bits"] is not None]
    in_mean = [cell[measure] for task, cell in cells.items() if cell is not None and task in shared]
    _, factor, form = MEASURES[measure]
    return (
        known[0]["method"],
        str(min(cell["prompts"] for cell in known)),
        f"{min(cell['page_bits'] for cell in known):.2f}",
        f"{mean(held):.2f}" if held else "",
        f"{factor * mean(in_mean):{form}}" if in_mean and len(in_mean) == len(shared) else "",
        *("" if one is None else f"{factor * one[measure]:{form}}" for one in cells.values()),
    )


def _short(task: str) -> str:
    """A task's name in a column's head."""
    for long, short in ((" images", "i"), (" clips", "c"), (" + ", "+"), (", ", " ")):
        task = task.replace(long, short)
    return task


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


SHOWN = {
    "INT2 per token": "x",
    "KIVI": "s",
    "QuaRot": "v",
    "per token, least squares": "^",
    "OScaR, published": "D",
    "compact": "o",
    "compact, balance None": "<",
    "compact, norm plain": ">",
    "compact, key group 64": "h",
    "compact, groups 32": "P",
    "compact, 4 bit": "*",
}
_FLOOR = 1e-7


def plot(rows: Sequence[dict[str, Any]], folder: Path, device: str) -> Path | None:
    """Write ``accuracy-<device>.png``; None, with a word about it, without matplotlib."""
    try:
        from matplotlib import pyplot
    except ImportError:
        print("no plot: matplotlib is not installed; `--report` draws it from the records")
        return None
    families = [one for one in ("ask", "copy") if any(row["family"] == one for row in rows)]
    conditions = list(dict.fromkeys(row["condition"] for row in rows if "kl" in row))
    figure, axes = pyplot.subplots(
        len(conditions),
        len(families),
        figsize=(5.2 * len(families), 3.8 * len(conditions)),
        sharex=True,
        sharey="col",
        squeeze=False,
        layout="constrained",
    )
    for across, family in zip(axes.T, families, strict=True):
        for axis, condition in zip(across, conditions, strict=True):
            chosen = [
                row
                for row in rows
                if (row["family"], row["condition"]) == (family, condition) and "kl" in row
            ]
            for name, (bits, kl) in _points(chosen).items():
                colour = "black" if name not in ("compact", "compact, groups 32") else "tab:red"
                axis.plot(bits, kl, SHOWN[name], label=name, color=colour, fillstyle="none")
            axis.set_yscale("log")
            axis.set_title(f"{family}, {condition}")
            axis.grid(True, which="both", alpha=0.2)
            if axis is across[-1]:
                axis.set_xlabel("bits per value of a page")
            axis.set_ylabel("KL to the 16-bit cache, nats")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize="small")
    models = ", ".join(dict.fromkeys(row["model"] for row in rows))
    figure.suptitle(f"Mean over tasks of {models}")
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    path = folder / f"accuracy-{slug}.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(path)
    return path


def shared_tasks(rows: Sequence[dict[str, Any]]) -> set[tuple[str, str]]:
    """Model and task, where most of the shown methods were measured: means are over these.

    A run of a few methods may have added others.
    """
    counts = Counter((row["model"], row["task"]) for row in rows if row["method"] in SHOWN)
    most: Counter[str] = Counter()
    for (model, _), count in counts.items():
        most[model] = max(most[model], count)
    return {cell for cell, count in counts.items() if count == most[cell[0]]}


def _points(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Method to bits and KL: means over the tasks that all shown methods were measured on."""
    shared = shared_tasks(rows)
    points = {}
    for name in SHOWN:
        own = [row for row in rows if row["method"] == name]
        own = [row for row in own if (row["model"], row["task"]) in shared]
        if own and {(row["model"], row["task"]) for row in own} == shared:
            bits = min(row["page_bits"] for row in own)
            points[name] = (bits, max(_FLOOR, mean(row["kl"] for row in own)))
    return points
