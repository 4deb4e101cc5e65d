"""Report of ``benchmarks.accuracy``: tables, verdict and plot of recorded results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.record import Record, Row, console, show
from oscar_mm.compare.methods import COMPACT, DEFAULT, FINE, PUBLISHED, REFERENCE

Rows = Sequence[Row]
GENERATED = "generated"
MEASURES = {
    "kl": ("KL x 1000", 1000, ".3g"),
    "margin": ("squared error of logit margins", 1, ".3g"),
    "exact": ("exact match, %", 100, ".1f"),
}
ALL = "all models"
ABLE = 0.5
"""Minimum exact match with the 16-bit cache; a model with a lower value is guessing."""
SHOWN = {
    "INT2 per token": "x",
    "KIVI": "s",
    "QuaRot": "v",
    "per token, least squares": "^",
    "OScaR, published": "D",
    "standard": "p",
    "compact": "d",
    "channel": "o",
    "channel, balance None": "<",
    "channel, norm plain": ">",
    "channel, key group 64": "h",
    "channel, groups 32": "P",
    "channel, 4 bit": "*",
}
_FLOOR = 1e-7


def tables(rows: Rows) -> None:
    """Print the bits and the measures of one model by task, for plain and stress conditions."""
    name = rows[0]["model"]
    tasks = list(dict.fromkeys(row["task"] for row in rows if "kl" in row))
    _free_answers(name, [row for row in rows if row["condition"] == GENERATED])
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


def _free_answers(name: str, rows: Rows) -> None:
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
    """Return the table row of a method; means are taken over the shared tasks."""
    measured = [cell for cell in cells.values() if cell is not None]
    held_bits = [cell["held_bits"] for cell in measured if cell["held_bits"] is not None]
    in_mean = [cell[measure] for task, cell in cells.items() if cell is not None and task in shared]
    _, factor, form = MEASURES[measure]
    return (
        measured[0]["method"],
        str(min(cell["prompts"] for cell in measured)),
        f"{min(cell['page_bits'] for cell in measured):.2f}",
        f"{mean(held_bits):.2f}" if held_bits else "",
        f"{factor * mean(in_mean):{form}}" if in_mean and len(in_mean) == len(shared) else "",
        *("" if cell is None else f"{factor * cell[measure]:{form}}" for cell in cells.values()),
    )


def _short(task: str) -> str:
    """Return a short name of a task for the header of a column."""
    for long, short in ((" images", "i"), (" clips", "c"), (" + ", "+"), (", ", " ")):
        task = task.replace(long, short)
    return task


@dataclass(frozen=True)
class Bound:
    """Requirement for the default policy with one model or with all models.

    Attributes:
        model: name of the model, or "all models".
        what: the requirement in words.
        value: the measured number.
        limit: maximum of the value, or its minimum if ``least`` is True.
        where: the worst task, if the requirement is about single tasks.
        error: standard error of the value, computed from the differences between prompts.
    """

    model: str
    what: str
    value: float
    limit: float
    where: str = ""
    least: bool = False
    error: float | None = None

    @property
    def met(self) -> bool:
        """True if the value is within the limit."""
        return self.value >= self.limit if self.least else self.value <= self.limit

    def __str__(self) -> str:
        """Return the line of the verdict for this bound."""
        sign = ">=" if self.least else "<="
        where = f" ({self.where})" if self.where else ""
        verdict = "met" if self.met else "NOT met"
        value = f"{self.value:.3g}" + ("" if self.error is None else f" ± {self.error:.2g}")
        return f"{verdict:8} {self.model}: {self.what}: {value} {sign} {self.limit:g}{where}"


def verdict(rows: Rows) -> list[Bound]:
    """Return all bounds that the given rows of ``benchmarks.accuracy`` are sufficient to check."""
    bounds = []
    for name in dict.fromkeys(row["model"] for row in rows):
        bounds += _model_bounds([row for row in rows if row["model"] == name], name)
    if len({row["model"] for row in rows}) > 1:
        bounds += _divergence(rows, ALL)
    return bounds


def not_judged(rows: Rows) -> list[str]:
    """Return the tasks that a model cannot do; for these, only the KL divergence is informative."""
    return [
        f"{row['model']}: {row['task']}: the 16-bit cache has {100 * row['exact']:.0f}%"
        for row in rows
        if row["method"] == REFERENCE and row["condition"] == "plain" and row["exact"] < ABLE
    ]


def _model_bounds(rows: Rows, name: str) -> list[Bound]:
    bounds = []
    default = _by_task(rows, DEFAULT)
    if default:
        fewest = min(row["prompts"] for row in default.values())
        bounds.append(Bound(name, "prompts in a cell", fewest, 500, least=True))
        page_bits = [row["page_bits"] for row in default.values() if row["packed_share"]]
        widest = max(page_bits, default=16.0)
        bounds.append(Bound(name, "bits per value of a page", round(widest, 4), 2.95))
    for condition in ("plain", "stress"):
        exact = {
            task: row
            for task, row in _by_task(rows, REFERENCE, condition).items()
            if row["exact"] >= ABLE
        }
        losses = {
            task: 100 * (exact[task]["exact"] - row["exact"])
            for task, row in _by_task(rows, DEFAULT, condition).items()
            if task in exact
        }
        for family, limit in (("ask", 1.0), ("copy", 3.0)):
            of_family = {task: x for task, x in losses.items() if exact[task]["family"] == family}
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
        ratio = divergence_ratio(rows, method, PUBLISHED, condition)
        if ratio is not None:
            what = f"mean KL of {method} to that of {PUBLISHED}, {condition}"
            bounds.append(Bound(name, what, ratio[0], limit, error=ratio[1]))
    return bounds


def divergence_ratio(
    rows: Rows, method: str, other: str, condition: str
) -> tuple[float, float] | None:
    """Return the ratio of two methods' mean KL over tasks, and the ratio's standard error.

    The standard error is computed as if the methods were independent. As they answer the same
    prompts, it is probably too large. Returns None if one of the methods was not measured.
    """
    means, errors = [], []
    for name in (method, other):
        own = [
            row
            for row in rows
            if row["method"] == name and row["condition"] == condition and "kl" in row
        ]
        if not own:
            return None
        means.append(mean(row["kl"] for row in own))
        errors.append(hypot(*(row["kl_error"] for row in own)) / len(own))
    if not all(means):
        return None
    ratio = means[0] / means[1]
    relative = (error / value for error, value in zip(errors, means, strict=True))
    return ratio, ratio * hypot(*relative)


def _by_task(rows: Rows, method: str, condition: str = "plain") -> dict[str, dict[str, Any]]:
    return {
        row["task"]: row
        for row in rows
        if row["method"] == method and row["condition"] == condition and "kl" in row
    }


def plot(rows: Rows, folder: Path, device: str) -> Path | None:
    """Plot KL against bits per value in ``accuracy-<device>.png``, and return the file's path.

    There are separate panels for asking and copying, and for plain and stress conditions. If
    matplotlib is not installed, a message is printed and None is returned.
    """
    try:
        from matplotlib import pyplot
    except ImportError:
        print("no plot: matplotlib is not installed; `--report` draws it from the records")
        return None
    families = [name for name in ("ask", "copy") if any(row["family"] == name for row in rows)]
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
            panel = [
                row
                for row in rows
                if (row["family"], row["condition"]) == (family, condition) and "kl" in row
            ]
            for name, (bits, kl) in _points(panel).items():
                ours = name in ("standard", "compact", "channel", "channel, groups 32")
                colour = "tab:red" if ours else "black"
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


def shared_tasks(rows: Rows) -> set[tuple[str, str]]:
    """Return the models and tasks over which means are taken: those with the most shown methods.

    Other tasks may come from runs with only a few methods.
    """
    counts = Counter((row["model"], row["task"]) for row in rows if row["method"] in SHOWN)
    most: Counter[str] = Counter()
    for (model, _), count in counts.items():
        most[model] = max(most[model], count)
    return {cell for cell, count in counts.items() if count == most[cell[0]]}


def _points(rows: Rows) -> dict[str, tuple[float, float]]:
    """Return the bits per value and the KL of each method, as means over the shared tasks."""
    shared = shared_tasks(rows)
    points = {}
    for name in SHOWN:
        own = [row for row in rows if row["method"] == name]
        own = [row for row in own if (row["model"], row["task"]) in shared]
        if own and {(row["model"], row["task"]) for row in own} == shared:
            bits = min(row["page_bits"] for row in own)
            points[name] = (bits, max(_FLOOR, mean(row["kl"] for row in own)))
    return points


def main(folder: Path, models: Sequence[str]) -> int:
    """Print tables of some models and a verdict on all records of a folder, and draw the plot.

    Returns:
        The exit code; 2 if the folder has no records.
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
