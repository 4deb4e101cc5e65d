"""Compare decode steps of answers constrained by a grammar with those of unconstrained answers.

python -m benchmarks.grammar [--model qwen3-vl-8b] [--rows 1,16,64] [--tokenizer FOLDER]

A model with random weights writes JSON objects whose strings are random tokens. The time for masks
grows with the tokenizer's vocabulary; --tokenizer selects the tokenizer of a released checkpoint.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoTokenizer

from benchmarks.decode_step import step_ms
from benchmarks.engine import next_step
from benchmarks.random_model import RELEASED, random_pipeline
from benchmarks.record import Record, Row, command, device_name, device_of, finish, parser, show
from oscar_mm.engine.grammar import Grammar, GrammarMask
from oscar_mm.engine.message import first_turn
from oscar_mm.engine.request import Request
from oscar_mm.media.media import Media
from oscar_mm.pipelines.pipeline import Pipeline


def _objects(text: dict[str, Any]) -> Grammar:
    """Return a grammar for an endless sequence of objects with a string and a number each."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", **text}, "size": {"type": "integer"}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
    return Grammar.cfg(f'start: (item ",")+\nitem: %json {json.dumps(schema)}')


GRAMMARS = {"plain": _objects({}), "bounded": _objects({"maxLength": 40})}
"""Grammars by name. Near a string's length limit, each token is checked separately, which takes
about a millisecond per answer."""
MAX_SHARE, BOUND_ROWS = 0.05, 16
_TOKENS = 2048
NOTES = [
    "ms: median of a step of all rows, from token to token on the host, as benchmarks.engine times "
    "it. mask ms: median of the host's time for the masks of a step, which is while the device "
    "works. more: what the grammar adds, as a share of the step without.",
    f"Target: at most {MAX_SHARE:.0%} at {BOUND_ROWS} rows that all have a grammar.",
]


def measured(pipe: Pipeline, rows: int, grammar: Grammar | None, guided: int) -> Row:
    """Measure the median milliseconds of a step and of its masks, and return a row.

    Args:
        pipe: pipeline that generates the answers.
        rows: number of answers.
        grammar: grammar of the constrained answers.
        guided: number of constrained answers.
    """
    fill, masks = GrammarMask._fill, list[float]()

    def timed(self: GrammarMask, scores: torch.Tensor) -> None:
        start = perf_counter()
        fill(self, scores)
        masks.append(perf_counter() - start)

    prompt = pipe.prepare(first_turn("Write JSON."), Media())
    answers = []
    for row in range(rows):
        options = {"max_new_tokens": _TOKENS, "temperature": 1.0, "seed": row}
        sampling = pipe.sampling(options | {"grammar": grammar if row < guided else None}, [])
        answer = Request(pipe.engine, prompt, pipe.new_cache(), sampling, perf_counter())
        pipe.engine.submit(answer)
        answers.append(answer)
    pipe.engine.run_until(lambda: all(answer.tokens or answer.ended for answer in answers))
    with patch.object(GrammarMask, "_fill", timed):
        ms, host_ms = step_ms(partial(next_step, answers))
    for answer in answers:
        if answer.ended:
            raise RuntimeError(
                f"an answer ended before all steps were timed; its error: {answer.error!r}"
            )
        answer.cancel()
        answer.cache.close()
    found: Row = {"rows": rows, "guided": guided, "ms": ms, "host_ms": host_ms}
    return found | ({"mask_ms": 1e3 * median(masks)} if masks else {})


def report(rows: Sequence[Row]) -> None:
    """Print a table and a verdict."""
    columns = ("grammar", "tokens", "rows", "with it", "ms", "host", "mask ms", "more")

    def line(row: Row) -> tuple[str, ...]:
        counts = (str(row[name]) for name in ("vocabulary", "rows", "guided"))
        times = (f"{row[name]:.3f}" if name in row else "" for name in ("ms", "host_ms", "mask_ms"))
        return row["grammar"], *counts, *times, f"{row['more']:.1%}" if "more" in row else ""

    show(f"Steps of {rows[0]['model']} with a grammar", columns, map(line, rows))
    for row in rows:
        if row["rows"] == row["guided"] == BOUND_ROWS:
            verdict = "met" if row["more"] <= MAX_SHARE else "NOT met"
            print(f"{row['grammar']}: {row['more']:.1%}, at most {MAX_SHARE:.0%}: {verdict}")


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code, 1 for a full-size model without a GPU."""
    options_parser = parser("benchmarks.grammar", __doc__)
    add = options_parser.add_argument
    add("--model", default="qwen3-vl-8b", choices=list(RELEASED))
    add(
        "--rows",
        default="1,16,64",
        help="numbers of answers that decode together, comma-separated",
    )
    add("--tokenizer", type=Path, help="folder of a released checkpoint's tokenizer")
    add("--tiny", action="store_true", help="trial run with a small model")
    options = options_parser.parse_args(arguments)
    device = device_of("grammar", tiny=options.tiny)
    if device is None:
        return 1
    pipe = random_pipeline(options.model, tiny=options.tiny, policy="standard")
    if options.tokenizer is not None:
        pipe.processor.tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    rows: list[Row] = []
    common = {"model": options.model, "vocabulary": len(pipe.processor.tokenizer)}
    for count in map(int, options.rows.split(",")):
        without = measured(pipe, count, None, 0)
        rows.append(common | {"grammar": "none"} | without)
        for (name, grammar), guided in product(GRAMMARS.items(), sorted({1, count})):
            row = measured(pipe, count, grammar, guided)
            rows.append(common | {"grammar": name} | row | {"more": row["ms"] / without["ms"] - 1})
    report(rows)
    line = command("benchmarks.grammar", arguments)
    finish(Record("grammar", line, device_name(device.type), rows, NOTES), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
