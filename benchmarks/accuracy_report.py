"""Tables, verdict and plot of what ``benchmarks.accuracy`` recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.accuracy_bounds import not_judged, verdict
from benchmarks.accuracy_plot import plot, shared_tasks
from benchmarks.record import Record, console, show

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
