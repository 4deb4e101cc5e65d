"""`oscar-mm bench`: ways to store the KV cache, compared on a user's model and questions."""

import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard

import typer

import oscar_mm
from oscar_mm.apps import options, progress
from oscar_mm.apps.audio_qa.marking import normalized
from oscar_mm.apps.audio_qa.rows import Row, read_rows
from oscar_mm.errors import InputError
from oscar_mm.whole_file import writing

if TYPE_CHECKING:
    from oscar_mm.compare.paged import Paged

bench = typer.Typer(help="Compare ways to store the KV cache.", rich_markup_mode=None)

_CAPTION = (
    "page, held: bits per value of full pages, and of all that a cache holds. KL: of the "
    "next-token distribution, 16-bit cache against method, in 0.001 nats, +- its standard error. "
    "agree: tokens whose likeliest successor is the same; same: answers of which all are."
)
_RIGHT = "right: free answers that contain the given one."


@bench.callback()
def _group() -> None:
    """Compare ways to store the KV cache."""


@bench.command()
def accuracy(
    questions: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="JSONL: an object with id, images, audio or videos (paths relative to the file), "
            "question and, if known, answer on each line. Or CSV with these columns.",
        ),
    ],
    model: options.Model = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A method, or part of names; may be repeated."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The first N questions only.")
    ] = None,
    max_new_tokens: options.MaxNewTokens = 64,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the rows of the table as JSON.")
    ] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Compare methods on your questions: bits per value against what is left of the answers.

    The model answers each question with a 16-bit cache. Then each method reads these answers:
    its next-token distributions are compared with those of the 16-bit cache. Where the file has
    an answer, each policy also answers freely, and is right if its text contains one.
    """
    rows = _rows(questions)[:limit]
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise InputError(f"--out {out}: must be a file in a folder that exists")
    model = options.chosen_model(model, hears=any(row.audio for row in rows))
    progress.on_loading()
    from oscar_mm.compare.checkpoint import Comparison  # brings torch
    from oscar_mm.compare.methods import REFERENCE, main_methods, selected
    from oscar_mm.pipelines import pipeline_for

    known = main_methods()
    chosen = selected(known, methods or [])
    if not chosen:
        names = "; ".join(one.name for one in known)
        raise InputError(f"--methods {' '.join(methods or [])}: in no name of {names}")
    chosen = [known[0], *(one for one in chosen if one.name != REFERENCE)]
    pipe = pipeline_for(model)(model, device=device, dtype=dtype)
    comparison = Comparison(pipe, chosen, max_new_tokens)
    compared = 0
    for number, row in enumerate(rows, 1):
        compared += _add(comparison, row, max_new_tokens)
        if sys.stderr.isatty():
            print(f"\r{number} of {len(rows)} questions", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if not compared:
        raise InputError(f"{questions}: none of its {len(rows)} questions could be compared")
    found = comparison.rows()
    _show(model, compared, found)
    if out is not None:
        record = {
            "model": model,
            "questions": str(questions),
            "compared": compared,
            "max_new_tokens": max_new_tokens,
            "oscar_mm": oscar_mm.__version__,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "policies": {one.name: asdict(one.policy) for one in chosen if _is_policy(one)},
            "rows": found,
        }
        with writing(f"--out {out}"):
            out.write_text(json.dumps(record, indent=1) + "\n")


def _rows(path: Path) -> list[Row]:
    if not path.is_file():
        raise InputError(f"--questions {path}: no such file")
    return read_rows(path)


def _is_policy(method: Any) -> "TypeGuard[Paged]":
    from oscar_mm.compare.paged import Paged

    return isinstance(method, Paged)


def _add(comparison: Any, row: Row, max_new_tokens: int) -> bool:
    """Compare on one question; one that cannot be asked is named, and the others go on."""
    pipe = comparison.pipe
    try:
        if row.error:
            raise InputError(row.error)
        pipe.check_texts(row.question, None)
        prompt = pipe.prepare(row.question, pipe.read_media(**row.media), None)
        pipe.check_length(prompt, max_new_tokens)
    except InputError as error:
        print(f"oscar-mm: {row.where}: {error}", file=sys.stderr)
        return False
    right = [normalized(answer) for answer in row.answer]

    def is_right(text: str) -> bool:
        return any(answer in normalized(text) for answer in right)

    if comparison.add(prompt, is_right if right else None):
        return True
    print(f"oscar-mm: {row.where}: the model's answer is empty", file=sys.stderr)
    return False


def _show(model: str, compared: int, rows: list[dict[str, Any]]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    heads = ("method", "page", "held", "KL", "+-", "agree", "same")
    graded = any(row.get("right") is not None for row in rows)
    table = Table(
        title=f"{model}: {compared} questions",
        title_justify="left",
        box=SIMPLE,
        pad_edge=False,
        collapse_padding=True,
    )
    for head in (*heads, *(["right"] * graded)):
        table.add_column(head, justify="left" if head == "method" else "right", no_wrap=True)

    def number(value: float | None, factor: float, form: str) -> str:
        return "" if value is None else f"{factor * value:{form}}"

    packed = any(row.get("page_bits", 16) < 16 for row in rows)
    missing: dict[str, list[str]] = {}
    for row in rows:
        if "missing" in row:
            missing.setdefault(row["missing"], []).append(row["method"])
            continue
        cells = [
            row["method"],
            number(row["page_bits"], 1, ".2f"),
            number(row["held_bits"], 1, ".2f"),
            number(row["kl"], 1000, ".3g"),
            number(row["kl_error"] if row["prompts"] > 1 else None, 1000, ".2g"),
            *(number(row[key], 100, ".1f") for key in ("agreement", "exact")),
        ]
        table.add_row(*cells, *([number(row["right"], 100, ".1f")] * graded))
    console = Console(highlight=False, markup=False)
    console.print(table)
    console.print(f"{_CAPTION} {_RIGHT if graded else ''}".strip())
    if not packed:
        console.print("Nothing was stored in fewer bits: no prompt fills a page of 128 tokens.")
    for reason, names in missing.items():
        console.print(f"not compared, {reason}: {'; '.join(names)}")
