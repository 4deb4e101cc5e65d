"""`oscar-mm bench`: compare methods of storing the KV cache on the user's model and questions."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard

import typer

import oscar_mm
from oscar_mm.apps import options, terminal
from oscar_mm.apps.audio_qa.rows import Row, contains_answer, read_rows
from oscar_mm.apps.tables import Column, table_of
from oscar_mm.errors import InputError
from oscar_mm.files import read_text, writing
from oscar_mm.models import check_source

if TYPE_CHECKING:
    from oscar_mm.compare.paged import Paged

bench = typer.Typer(help="Compare ways to store the KV cache.", rich_markup_mode=None)

_TOKENS, _PASSAGES = 1024, 8


_SHARED_COLUMNS = (
    Column("page", "page_bits"),
    Column("held", "held_bits"),
    Column("KL", "kl", 1000, ".3g"),
    Column("+-", "kl_error", 1000, ".2g"),
    Column("agree", "agreement", 100, ".1f"),
)
_QUESTION_COLUMNS = (
    *_SHARED_COLUMNS,
    Column("same", "exact", 100, ".1f"),
    Column("right", "right", 100, ".1f"),
)
_TEXT_COLUMNS = (
    *_SHARED_COLUMNS,
    Column("ppl", "perplexity", format_spec=".3g"),
    Column("rise", "perplexity_ratio", 100, "+.1f", offset=1),
    Column("+-", "perplexity_ratio_error", 100, ".1f"),
)
_CAPTION = (
    "page, held: bits per value of full pages, and of the whole cache. KL: divergence of the "
    "next-token distribution, 16-bit cache against method, in 0.001 nats, +- its standard error. "
    "agree: tokens whose likeliest successor is the same, in %."
)
_SAME_NOTE = "same: answers in which all tokens agree, in %."
_RIGHT_NOTE = "right: free answers that contain the given one, in %."
_PERPLEXITY_NOTE = "ppl: perplexity of the text itself; rise: over the 16-bit cache's, in %."


@bench.callback()
def _group() -> None:
    """Compare methods of storing the KV cache."""


@bench.command()
def accuracy(
    questions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSONL: an object with id, images, audio or videos (paths relative to the file), "
            "question and, if known, answer on each line. Or CSV with these columns.",
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Text file for a language model, instead of questions; repeatable.",
        ),
    ] = None,
    model: options.Model = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A method, or part of its name; repeatable."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Use only the first N questions.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help=f"Tokens per passage of --text; default: {_TOKENS}."),
    ] = None,
    passages: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help=f"Number of passages, spread over --text; default: {_PASSAGES}.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Maximum tokens of an answer; with --text, tokens scored after a passage.",
        ),
    ] = 64,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the rows of the table as JSON.")
    ] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Compare bits per value and quality of cache methods on your own questions or text.

    The model answers each question with a 16-bit cache. It then reads these answers again with each
    method's cache, and its next-token distributions are compared with those of the 16-bit cache. If
    the file contains an answer to the question, each policy also generates a free-form answer,
    which is right if it contains the answer from the file.

    With --text, a language model reads passages of the text. Each method stores the keys and values
    of a passage, and the model reads the tokens that follow it with the restored keys and values.
    """
    if (questions is None) == (not text):
        raise InputError("pass either --questions FILE or, for a language model, --text FILE")
    for name, value, other in (
        ("--limit", limit, text and "--questions"),
        ("--tokens", tokens, questions and "--text"),
        ("--passages", passages, questions and "--text"),
    ):
        if value is not None and other:
            raise InputError(f"{name} requires {other}")
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise InputError(f"--out {out}: must be a file in an existing folder")
    if questions is not None:
        rows = _rows(questions)[:limit]
        model = options.model_or_bundled(model, supports_audio=any(row.audio for row in rows))
        selected_methods = _select_methods(methods or [])
        about = _compare_questions(
            questions, rows, model, selected_methods, max_new_tokens, device, dtype
        )
    else:
        texts = {str(path): read_text(path) for path in text or []}
        if model is None:
            raise InputError(options.TEXT_NEEDS_MODEL)
        check_source(model)
        selected_methods = _select_methods(methods or [])
        sizes = (tokens or _TOKENS, passages or _PASSAGES, max_new_tokens)
        about = _compare_texts(texts, model, selected_methods, sizes, device, dtype)
    if out is not None:
        record = {
            "model": model,
            "max_new_tokens": max_new_tokens,
            "oscar_mm": oscar_mm.__version__,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "policies": {
                method.name: asdict(method.policy)
                for method in selected_methods
                if _is_policy(method)
            },
            **about,
        }
        with writing(f"--out {out}"):
            out.write_text(json.dumps(record, indent=1) + "\n")


def _select_methods(names: list[str]) -> list[Any]:
    """Return the 16-bit cache, followed by the methods that match the names."""
    terminal.quiet_transformers()
    from oscar_mm.compare.methods import REFERENCE, main_methods, selected  # imports torch

    available = main_methods()
    selected_methods = selected(available, names)
    if not selected_methods:
        names_available = "; ".join(method.name for method in available)
        raise InputError(
            f"--methods {' '.join(names)}: matches no method; available: {names_available}"
        )
    return [available[0], *(method for method in selected_methods if method.name != REFERENCE)]


def _compare_questions(
    questions: Path,
    rows: list[Row],
    model: str,
    methods: list[Any],
    max_new_tokens: int,
    device: str | None,
    dtype: str | None,
) -> dict[str, Any]:
    """Compare methods on questions and print a table.

    Returns:
        The rows of the table, and a description of what was compared.
    """
    from oscar_mm.compare.comparison import Comparison
    from oscar_mm.pipelines import pipeline_for
    from oscar_mm.pipelines.text import is_text_model

    if is_text_model(model):
        raise InputError(f"{model} is a language model: pass --text FILE, not --questions")
    pipe = pipeline_for(model)(model, device=device, dtype=dtype)
    comparison = Comparison(pipe, methods, max_new_tokens)
    compared = 0
    for number, row in enumerate(rows, 1):
        compared += _add_question(comparison, row, max_new_tokens)
        terminal.print_progress(number, len(rows), "questions")
    if not compared:
        raise InputError(f"{questions}: none of its {len(rows)} questions could be compared")
    table = comparison.rows()
    graded = any(row.get("right") is not None for row in table)
    columns = _QUESTION_COLUMNS if graded else _QUESTION_COLUMNS[:-1]
    caption = f"{_CAPTION} {_SAME_NOTE} {_RIGHT_NOTE if graded else ''}".strip()
    _print_table(f"{model}: {compared} questions", columns, table, caption)
    return {"questions": str(questions), "compared": compared, "rows": table}


def _compare_texts(
    texts: dict[str, str],
    model: str,
    methods: list[Any],
    sizes: tuple[int, int, int],
    device: str | None,
    dtype: str | None,
) -> dict[str, Any]:
    """Compare methods on texts and print a table.

    Args:
        texts: texts by name.
        model: hub id or folder of a language model.
        methods: methods to compare.
        sizes: tokens per passage, number of passages, and scored tokens after each passage.
        device: torch device; None for the default.
        dtype: dtype of the weights; None for the default.

    Returns:
        The rows of the table, and a description of what was compared.
    """
    from oscar_mm.compare.comparison import PassageComparison, longest, passages
    from oscar_mm.pipelines.text import is_text_model, load_text_model

    tokens, count, judged = sizes
    if not is_text_model(model):
        raise InputError(options.TEXT_NEEDS_LANGUAGE_MODEL.format(model))
    language = load_text_model(model, device=device, dtype=dtype)
    if longest(tokens, judged) > language.context:
        raise InputError(
            f"--tokens {tokens}: a passage with the scored tokens that follow it takes up to "
            f"{longest(tokens, judged):,} tokens, but the context of {model} is only "
            f"{language.context:,}; reduce --tokens"
        )
    comparison = PassageComparison(language.model, methods, judged)
    pieces = passages(language.tokenizer, texts, tokens, count, judged)
    for number, ids in enumerate(pieces, 1):
        comparison.add(ids)
        terminal.print_progress(number, count, "passages")
    table = comparison.rows()
    title = f"{model}: {count} passages of {tokens:,} tokens and more"
    _print_table(title, _TEXT_COLUMNS, table, f"{_CAPTION} {_PERPLEXITY_NOTE}")
    about = {"texts": list(texts), "tokens": tokens, "passages": count}
    return about | {"rows": table}


def _rows(path: Path) -> list[Row]:
    if not path.is_file():
        raise InputError(f"--questions {path}: no such file")
    return read_rows(path)


def _is_policy(method: Any) -> "TypeGuard[Paged]":
    from oscar_mm.compare.paged import Paged

    return isinstance(method, Paged)


def _add_question(comparison: Any, row: Row, max_new_tokens: int) -> bool:
    """Compare methods on a question; if this fails, print the reason and return False."""
    from oscar_mm.engine.message import first_turn
    from oscar_mm.media.part import media_parts

    pipe = comparison.pipe
    try:
        if row.error:
            raise InputError(row.error)
        shown: dict[str, Any] = dict(row.media)
        prompt = pipe.read_request(first_turn(row.question, media_parts(**shown)), max_new_tokens)
    except InputError as error:
        print(f"oscar-mm: {row.where}: {error}", file=sys.stderr)
        return False
    if comparison.add(prompt, partial(contains_answer, row) if row.answer else None):
        return True
    print(f"oscar-mm: {row.where}: the model's answer is empty", file=sys.stderr)
    return False


def _print_table(
    title: str, columns: Sequence[Column], rows: list[dict[str, Any]], caption: str
) -> None:
    from rich.console import Console

    packed = any(row.get("page_bits", 16) < 16 for row in rows)
    missing: dict[str, list[str]] = {}
    for row in rows:
        if "missing" in row:
            missing.setdefault(row["missing"], []).append(row["method"])
    console = Console(highlight=False, markup=False)
    if not packed:
        console.print("Nothing was packed: no prompt fills a page of 128 tokens.")
    console.print(table_of(title, columns, [row for row in rows if "missing" not in row]))
    console.print(caption)
    for reason, names in missing.items():
        console.print(f"not compared, {reason}: {'; '.join(names)}")
