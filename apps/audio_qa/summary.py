"""Summary: accuracy by group, throughput, peak memory and failures of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from oscar_mm.sizes import format_bytes


@dataclass(frozen=True)
class Work:
    """What this process, or its workers, did for the run.

    Attributes:
        rows: answered or failed.
        seconds: from the first row to the last, without loading the model.
        cpu_seconds: of processors that worked on them, all threads.
        audio_seconds: of the recordings that were read, each once where rows share it.
        kv_peak_bytes: most bytes that pools of pages and blocks took, of one worker.
        process_peak_bytes: most resident memory of one process; on a GPU its allocated memory.
    """

    rows: int
    seconds: float
    cpu_seconds: float
    audio_seconds: float
    kv_peak_bytes: int
    process_peak_bytes: int


def summarize(results: Iterable[Mapping[str, Any]], work: Work) -> dict[str, Any]:
    """Counts and accuracies of all rows of an output, and the rates of this run's work."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    rows = list(results)
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    hours = work.seconds / 3600
    return {
        **_counts(rows),
        "groups": {name: _counts(groups[name]) for name in sorted(groups) if name},
        "throughput": {
            "rows_per_s": _share(work.rows, work.seconds),
            "audio_hours_per_hour": _share(work.audio_seconds / 3600, hours),
        },
        "work": asdict(work),
        "failures": {row["id"]: row["error"] for row in rows if row["error"] is not None},
    }


def _counts(rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    answered = [row for row in rows if row["error"] is None]
    chosen = [row for row in answered if row["choice"] is not None]
    free = [row for row in answered if row["choice"] is None]
    held = sum(row["kv_bytes"] for row in answered)
    in_16_bit = sum(row["kv_bytes"] * (row["kv_ratio"] or 0) for row in answered)
    return {
        "rows": len(rows),
        "failed": len(rows) - len(answered),
        "accuracy": _accuracy(answered),
        "choice_accuracy": _accuracy(chosen),
        "exact_match": _accuracy(free),
        "marked": sum(row["correct"] is not None for row in answered),
        "mean_tokens": _share(sum(row["tokens"] for row in answered), len(answered)),
        "mean_kv_bytes": _share(held, len(answered)),
        "kv_ratio": _share(in_16_bit, held),
    }


def _accuracy(rows: list[Mapping[str, Any]]) -> float | None:
    """Share of right ones among those whose answer is known; rows with an error do not count."""
    marked = [row["correct"] for row in rows if row["correct"] is not None]
    return _share(sum(marked), len(marked))


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def show(summary: Mapping[str, Any]) -> None:
    """Print the table."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE, pad_edge=False)
    for column in ("", "rows", "failed", "accuracy", "choices", "exact", "tokens", "KV", "ratio"):
        table.add_column(column, justify="right" if column else "left", no_wrap=bool(column))
    for name, counts in [*summary["groups"].items(), ("all", summary)]:
        table.add_row(
            # As it is: no markup, and half of a surrogate pair as JSON escapes it.
            Text(name.encode(errors="backslashreplace").decode()),
            f"{counts['rows']:,}",
            f"{counts['failed']:,}",
            *(_percent(counts[key]) for key in ("accuracy", "choice_accuracy", "exact_match")),
            f"{counts['mean_tokens'] or 0:,.0f}",
            format_bytes(counts["mean_kv_bytes"] or 0),
            f"{counts['kv_ratio'] or 0:.2f}x",
        )
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(table)
    work, rates = summary["work"], summary["throughput"]
    kept, taken = (format_bytes(work[f"{kind}_peak_bytes"]) for kind in ("kv", "process"))
    print(
        f"{work['rows']:,} rows in {work['seconds']:.1f} s, "
        f"{rates['audio_hours_per_hour'] or 0:.1f} hours of audio per hour; most memory: "
        f"KV {kept}, process {taken}"
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"
