"""Plot: KL against bits per value, one panel for asking and one for copying, plain and stress."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

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
