"""Draw the figures of docs/policies.md from the records in benchmarks/results.

python docs/policy_figures.py
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
MEMORY, LANGUAGE = "memory-intel-r-xeon-r-processor", "language-nvidia-h200"
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
PARTS = {
    "codes": "codes",
    "scales": "scales, zero points, centers",
    "norms": "norms",
    "tails": "tokens in 16-bit precision",
    "tables": "tables",
}
"""Kinds of the memory report, and their names in the legend."""
COLOURS = ("#0072b2", "#e69f00", "#cc79a7", "#999999", "#009e73", "#d55e00", "#56b4e9")
"""Colours that people with impaired colour vision can tell apart (Okabe and Ito)."""
LINES = {"kivi": "--"}
"""Styles of lines that would otherwise hide another line."""
POLICIES = {
    "standard, keys 4 bit": "standard, 4-bit keys",
    "standard": "standard",
    "compact": "compact",
    "channel": "channel",
    "OScaR, published": "oscar",
    "KIVI": "kivi",
    "QuaRot": "quarot",
}
"""Names of the language record's methods, and of their policies."""
MODELS = {
    "SmolLM2-135M-Instruct": "SmolLM2-135M",
    "Qwen2.5-Coder-0.5B-Instruct": "Qwen2.5-Coder-0.5B",
    "Qwen2.5-Coder-1.5B-Instruct": "Qwen2.5-Coder-1.5B",
    "Gemma-3-270M": "Gemma 3 270M",
}


def rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of a record."""
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def memory_rows() -> list[dict[str, Any]]:
    """Return the rows of ``benchmarks.memory`` of policies that pack tokens."""
    return [row for row in rows(MEMORY) if row["preset"] != "bf16"]


def bits_figure() -> Figure:
    """Draw what the bits of a cache consist of after 1K and 32K tokens."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, context in zip(axes, (1024, 32768), strict=True):
        shown = [row for row in memory_rows() if row["context"] == context]
        names, left = [row["preset"] for row in shown], [0.0] * len(shown)
        for (kind, label), colour in zip(PARTS.items(), COLOURS, strict=False):
            bits = [16 * row["by_kind"][kind] / row["bf16_bytes"] for row in shown]
            axis.barh(names, bits, left=left, label=label, color=colour)
            left = [sum(pair) for pair in zip(left, bits, strict=True)]
        for place, total in enumerate(left):
            axis.text(total + 0.05, place, f"{total:.2f}", va="center", fontsize=8)
        axis.set(title=f"{context:,} tokens", xlabel="bits per value held", xlim=(0, 5.2))
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def memory_figure() -> Figure:
    """Draw how many times smaller than a 16-bit cache a cache is, over its tokens."""
    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axis = figure.subplots()
    for name, colour in zip(
        dict.fromkeys(r["preset"] for r in memory_rows()), COLOURS, strict=False
    ):
        own = [row for row in memory_rows() if row["preset"] == name]
        tokens, ratios = [row["context"] for row in own], [row["ratio"] for row in own]
        axis.plot(
            tokens, ratios, marker="o", markersize=4, label=name, color=colour, ls=LINES.get(name)
        )
    axis.set_xscale("log", base=2)
    ticks = sorted({row["context"] for row in memory_rows()})
    axis.set_xticks(ticks, [f"{x // 1024}K" if x >= 1024 else str(x) for x in ticks])
    axis.set(xlabel="tokens", ylabel="times smaller than in 16 bits", ylim=(1, None))
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right", ncols=2)
    return figure


def error_figure() -> Figure:
    """Draw the divergence while decoding, by policy and model."""
    measured = {
        (row["model"], row["method"]): row
        for row in rows(LANGUAGE)
        if row["context"] == 1024 and row.get("decoded_kl")
    }
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axis = figure.subplots()
    for (model, title), colour, marker in zip(
        MODELS.items(), COLOURS[:2] + COLOURS[4:6], "osD^", strict=True
    ):
        own = [(place, measured.get((model, name))) for place, name in enumerate(POLICIES)]
        found = [(place, row) for place, row in own if row]
        axis.errorbar(
            [1000 * row["decoded_kl"] for _, row in found],
            [place for place, _ in found],
            xerr=[1000 * row["decoded_kl_error"] for _, row in found],
            fmt=marker,
            label=title,
            color=colour,
        )
    axis.set_yticks(range(len(POLICIES)), list(POLICIES.values()))
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlabel("KL divergence from the 16-bit cache, thousandths of a nat (less is better)")
    axis.grid(axis="x", which="both", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4)
    return figure


FIGURES = {
    "policy_bits": (bits_figure, MEMORY),
    "policy_memory": (memory_figure, MEMORY),
    "policy_error": (error_figure, LANGUAGE),
}
"""Figures by file name, each with the record that it shows."""


def digest(name: str) -> str:
    """Return a hash of the rows of a record, which its figures contain."""
    return hashlib.sha256(json.dumps(rows(name)).encode()).hexdigest()


def main(folder: Path = IMAGES) -> None:
    """Write all figures to a folder as SVG files, whose text can be searched."""
    folder.mkdir(exist_ok=True)
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "policies", "font.size": 9}
    ):
        for name, (draw, record) in FIGURES.items():
            about = {"Date": None, "Description": f"{record} {digest(record)}"}
            draw().savefig(folder / f"{name}.svg", metadata=about)


if __name__ == "__main__":
    main()
