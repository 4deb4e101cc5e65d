"""Report of a verification: tables for the terminal, and one row of markdown."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from oscar_mm.apps.tables import Column, table_of
from oscar_mm.compare.methods import REFERENCE

QUALITY = (
    Column("KL", "kl", 1000, ".3g"),
    Column("+-", "kl_error", 1000, ".3g"),
    Column("top 1", "agreement", 100, ".1f"),
    Column("ppl", "perplexity_ratio", format_spec=".4f"),
    Column("same", "exact", 100, ".1f"),
    Column("until", "same", format_spec=".1f"),
    Column("right", "right", 100, ".1f"),
)
SPEED = (
    Column("KV, MB", "kv_bytes", 1e-6, ".4g"),
    Column("smaller", "memory_ratio"),
    Column("tokens/s", "tokens_per_s", format_spec=".1f"),
    Column("from", "tokens_per_s_low", format_spec=".1f"),
    Column("to", "tokens_per_s_high", format_spec=".1f"),
    Column("first, ms", "first_token_s", 1000, ".1f"),
    Column("from", "first_token_s_low", 1000, ".1f"),
    Column("to", "first_token_s_high", 1000, ".1f"),
)
PASTED = (
    *(column for column in QUALITY if column.head not in ("+-", "until")),
    *(column for column in SPEED if column.head in ("smaller", "tokens/s", "first, ms")),
)
"""Columns of the row to paste, after those about model, machine and questions."""
_PLAIN_WIDTH = 120
"""Width, in columns, of output that does not go to a terminal."""
_QUALITY_CAPTION = (
    "KL: divergence of the next-token distribution while the 16-bit answer is decoded token by "
    "token, 16-bit cache against format, in 0.001 nats, +- its standard error. top 1: tokens whose "
    "likeliest successor is the same, in %. ppl: perplexity of the 16-bit answers, divided by the "
    "16-bit cache's. same: free answers that equal the 16-bit answer, in %. until: mean number of "
    "their tokens before the first that differs."
)
_RIGHT = "right: free answers that contain the given one, in %."
_SPEED_CAPTION = (
    "KV, smaller: mean size of a cache after its answer, and how many times smaller that is than "
    "the same tokens in 16-bit precision. tokens/s: decode speed; first: time from the decoded "
    "media to the first token; median of {repeats} answers of {new_tokens} tokens to a prompt of "
    "{prompt_tokens:,}, after one for warm-up; from, to: their range."
)
_FLOAT32 = (
    "The weights are float32, so the 16-bit cache keeps keys and values in float32, at twice the "
    "size; --dtype bfloat16 keeps 16 bits."
)


def print_report(record: Mapping[str, Any]) -> None:
    """Print the tables and the row to paste.

    Args:
        record: ``Verification.record``.
    """
    from rich.console import Console

    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    console = Console(width=width, highlight=False, markup=False)
    rows = record["rows"]
    title = f"{record['model']['id']}: {rows[0]['prompts']} of {record['asked']} questions, "
    title += f"{rows[0]['tokens']} decode steps"
    if idle := [row["method"] for row in rows[1:] if not row["packs"]]:
        console.print(f"{', '.join(idle)}: nothing was packed, because no prompt is long enough.")
    console.print(table_of(title, QUALITY, rows))
    graded = rows[0]["right"] is not None
    console.print(f"{_QUALITY_CAPTION} {_RIGHT if graded else ''}".strip())
    title = f"{record['device']}, {record['dtype']}"
    console.print(table_of(title, SPEED, rows))
    console.print(_SPEED_CAPTION.format(**record["speed"]))
    if record["dtype"] == "float32":
        console.print(_FLOAT32)
    for line in _task_lines(record["tasks"]):
        console.print(line)
    console.print("\nThe row for docs/results.md:", soft_wrap=True)
    console.print(pasted_row(record), soft_wrap=True)


def pasted_row(record: Mapping[str, Any]) -> str:
    """Return a row of the table in docs/results.md, with a line per format in its cells."""
    model, rows = record["model"], record["rows"]
    revision = f"<br>{model['revision'][:10]}" if model["revision"] else ""
    names = ("oscar_mm", "torch", "transformers")
    used = ", ".join(f"{name} {record['versions'][name]}" for name in names)
    cells = [
        model["id"].replace("|", "\\|") + revision,
        f"{record['device']}, {record['dtype']}",
        used,
        f"{rows[0]['prompts']} of {record['asked']}, {rows[0]['tokens']} steps",
        "<br>".join(row["method"] for row in rows),
        *("<br>".join(column.cell(row) for row in rows) for column in PASTED),
    ]
    return f"| {' | '.join(cells)} |"


def _task_lines(tasks: Mapping[str, Any] | None) -> Sequence[str]:
    """Return a line for each metric of lmms-eval's tasks, with the number of each format."""
    if tasks is None:
        return []
    results = tasks["results"]
    return [
        f"{task}, {metric}: "
        + ", ".join(f"{name} {numbers[task][metric]:.4g}" for name, numbers in results.items())
        for task, metrics in results.get(REFERENCE, {}).items()
        for metric in metrics
        if "stderr" not in metric
    ]
