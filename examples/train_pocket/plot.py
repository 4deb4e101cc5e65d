"""Draws the curves of one or several calls of ``train.py`` for each model.

python -m examples.train_pocket.plot OUT.png RUN/pocket-vl/curve.jsonl [...]

Curves of one model (the name of their folder) are joined: later calls continue from the weights of
earlier ones.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from examples.train_pocket.curriculum import FINDING

SMOOTH = 9  # lines of a curve, 20 steps each, in one mean of copying


def joined(paths: list[Path]) -> dict[str, list[dict[str, Any]]]:
    """Lines of each model, with seconds that count on from call to call."""
    curves: dict[str, list[dict[str, Any]]] = {}
    for path in paths:
        lines = curves.setdefault(path.parent.name, [])
        before = lines[-1]["seconds"] if lines else 0.0
        for line in map(json.loads, path.read_text().splitlines()):
            if "loss" in line:
                lines.append(line | {"seconds": before + line["seconds"]})
    return curves


def draw(curves: dict[str, list[dict[str, Any]]], out: Path) -> None:
    """Draw a panel for each model: exact match on training data against seconds."""
    figure, panels = pyplot.subplots(
        1, len(curves), figsize=(4.6 * len(curves), 4.4), sharey=True, squeeze=False
    )
    for panel, (name, lines) in zip(panels[0], curves.items(), strict=True):
        for kind, noun, style in (("read", "pictures", "-"), ("hear", "clips", "--")):
            for number in ("1", "8", "30") if kind == "read" else ("1", "10"):
                points = [
                    (x["seconds"], x[kind][number]) for x in lines if number in x.get(kind, {})
                ]
                if points:
                    panel.plot(
                        *zip(*points, strict=True),
                        style,
                        label=f"{number} {noun}" if number != "1" else f"1 {noun[:-1]}",
                    )
        copied = [(line["seconds"], line["copy"]) for line in lines if "copy" in line]
        windows = [copied[at : at + SMOOTH] for at in range(0, len(copied), SMOOTH)]
        means = [tuple(map(mean, zip(*window, strict=True))) for window in windows]
        if means:
            panel.plot(*zip(*means, strict=True), "k:", label="copying out, any number")
        for kind, noun in (("finding", "pictures"), ("finding_clips", "clips")):
            stages = [(x["seconds"], x[kind][0] / len(FINDING)) for x in lines if kind in x]
            if stages:
                label = f"finding among {noun}: stages reached"
                panel.step(*zip(*stages, strict=True), label=label, linewidth=1, where="post")
        panel.set(title=name, xlabel="seconds of training", ylim=(0, 1.02))
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    panels[0][0].set_ylabel("exact match (all kinds of questions)")
    figure.tight_layout()
    figure.savefig(out, dpi=110, metadata={"Software": None})


def main() -> None:
    """Draw the curves that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("curves", type=Path, nargs="+")
    arguments = parser.parse_args()
    draw(joined(arguments.curves), arguments.out)


if __name__ == "__main__":
    main()
