"""Measure how much quantizing the weights while loading degrades a language model on real text.

python -m benchmarks.weight_formats
python -m benchmarks.weight_formats --model qwen2.5-coder-1.5b --passages 4 --add

Models and texts are those of ``benchmarks.language``; the KV cache stays in 16-bit precision.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from benchmarks import language_models
from benchmarks.language import load, python_texts
from benchmarks.language_models import MODELS, PACKAGES
from benchmarks.record import Record, Row, device_name, exit_code, finish, merge_rows, parser, show
from oscar_mm import InputError
from oscar_mm.compare.comparison import passages
from oscar_mm.fast_decode.quantized_modules import QuantizedLinear
from oscar_mm.files import read_text
from oscar_mm.pipelines.weight_formats import FORMATS, quantize

JUDGED = 128
GENERATED = 64
NOTES = [
    "A model reads each passage, and its distributions of the next token at the last "
    f"{JUDGED} tokens are compared with those of the model whose weights are not quantized. "
    "float32 arithmetic, on a CPU. The GGUF files of the models have 4 to 8 bits a weight "
    "themselves; these weights, dequantized, count as not quantized.",
    "Formats are those of `weights=`: fp8 has a scale for each block of 128 x 128 weights, int4 a "
    "scale and a zero point for each group of 128. Embeddings and output layer are not quantized.",
    "kl: in nats; perplexity_ratio: perplexity divided by that of the model without quantization; "
    "agreement: share of tokens whose likeliest next token is the same. same: number of the "
    f"{GENERATED} greedy tokens after the passage before the first that differs. ..._error: "
    "standard errors over passages.",
]


class Reading(NamedTuple):
    """What a model makes of a passage.

    Attributes:
        log_probabilities: (judged tokens, vocabulary) of the next tokens.
        following: (judged tokens,) ids of the tokens that follow.
        answer: greedy tokens after the passage.
    """

    log_probabilities: Tensor
    following: Tensor
    answer: list[int]


@torch.inference_mode()
def read(model: Any, ids: Tensor) -> Reading:
    """Read a passage.

    Args:
        model: causal language model.
        ids: (1, tokens), more than ``JUDGED``.
    """
    ids = ids.to(model.device)
    logits = model(ids[:, :-1], use_cache=False).logits[0, -JUDGED:]
    generated = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=GENERATED, do_sample=False
    )
    answer = generated[0, ids.shape[1] :].tolist()
    return Reading(log_softmax(logits.float(), -1), ids[0, -JUDGED:], answer)


def differences(found: Reading, exact: Reading) -> dict[str, float]:
    """Return what a passage's row contains; see ``NOTES``."""
    of_found, of_exact = found.log_probabilities, exact.log_probabilities
    loss, exact_loss = (cross_entropy(x, exact.following) for x in (of_found, of_exact))
    same = takewhile(lambda pair: pair[0] == pair[1], zip(found.answer, exact.answer, strict=False))
    return {
        "kl": float(kl_div(of_found, of_exact, reduction="batchmean", log_target=True)),
        "perplexity_ratio": float((loss - exact_loss).exp()),
        "agreement": float((of_found.argmax(-1) == of_exact.argmax(-1)).float().mean()),
        "same": float(len(list(same))),
    }


def dequantize(model: nn.Module) -> int:
    """Replace quantized products by ordinary ones with the same weights, which a CPU multiplies
    faster; return how many there were."""
    found = [(name, x) for name, x in model.named_modules() if isinstance(x, QuantizedLinear)]
    for name, module in found:
        plain = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
        plain.weight = nn.Parameter(module.matrix.dequantized(torch.float32), requires_grad=False)
        plain.bias = module.bias
        model.set_submodule(name, plain)
    return len(found)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each format.

    Raises:
        InputError: if the model cannot be loaded or the texts are too short.
    """
    texts = {str(x): read_text(x) for x in options.text} if options.text else python_texts()
    exact = list[Reading]()
    released = MODELS.get(options.model)
    for form in ("16 bit", *FORMATS):
        text_model = load(options.model, options.packages, options.device)
        model = text_model.model
        model.set_attn_implementation("sdpa")
        model.generation_config.eos_token_id = None  # Answers have the same length.
        if form in FORMATS:
            quantize(model, model.get_decoder(), form)
            if not dequantize(model):
                raise InputError(f"--model {options.model}: has no products to quantize")
        found = passages(text_model.tokenizer, texts, options.tokens, options.passages, JUDGED)
        readings = [read(model, ids) for ids in found]
        if form not in FORMATS:
            exact = readings
            continue
        pairs = zip(readings, exact, strict=True)
        rows = [differences(reading, other) for reading, other in pairs]
        yield {
            "model": released.title if released else options.model,
            "format": form,
            "context": options.tokens,
            "passages": len(rows),
            **_averages(rows),
        }


def _averages(rows: Sequence[dict[str, float]]) -> Row:
    """Return the mean over passages of each figure, and its standard error."""
    averages: Row = {}
    for name in rows[0]:
        values = torch.tensor([row[name] for row in rows], dtype=torch.float64)
        averages[name] = float(values.mean())
        error = float(values.std() / len(rows) ** 0.5) if len(rows) > 1 else None
        averages[f"{name}_error"] = error
    return averages


def report(rows: Sequence[Row]) -> None:
    """Print a table."""

    def pair(row: Row, key: str, factor: float, form: str, less: float = 0) -> str:
        value, error = format(factor * (row[key] - less), form), row[f"{key}_error"]
        return value if error is None else f"{value} ± {factor * error:{form.replace('+', '')}}"

    show(
        "Quantized weights against the same model without",
        ("model", "weights", "n", "KL x 1000", "ppl, %", "top 1, %", f"same of {GENERATED}"),
        (
            (
                *(row["model"], row["format"], str(row["passages"])),
                pair(row, "kl", 1000, ".1f"),
                pair(row, "perplexity_ratio", 100, "+.1f", less=1),
                pair(row, "agreement", 100, ".1f"),
                pair(row, "same", 1, ".0f"),
            )
            for row in rows
        ),
    )


def arguments_of(line: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    options = parser("benchmarks.weight_formats", __doc__)
    add = options.add_argument
    add("--model", default=language_models.DEFAULT, help="as of benchmarks.language")
    add("--packages", type=Path, default=PACKAGES, help="as of benchmarks.language")
    add("--text", type=Path, action="append", help="text files instead of Python's own texts")
    add("--tokens", type=int, default=1024, help="tokens per passage")
    add("--passages", type=int, default=16, help="number of passages")
    add("--device", default="cpu", help="cpu or cuda")
    add("--add", action="store_true", help="keep the file's rows of other models")
    return options.parse_args(line)


def run(options: argparse.Namespace, line: str) -> None:
    """Measure and record format by format, so that an interrupted run keeps its rows."""
    if min(options.tokens, options.passages) < 1:
        raise InputError("--tokens and --passages must be 1 or more")
    started = time.perf_counter()
    name = device_name(torch.device(options.device).type)
    record = Record("weight_formats", line, name, [], NOTES)
    if options.add and (earlier := record.earlier(options.out)):
        record = record.continuing(earlier)
    cell = ("model", "format", "context")
    for row in measure(options):
        record.rows = merge_rows(record.rows, [row], cell, lambda *_: True)
        record.write(options.out)
    print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr)
    report(record.rows)
    finish(record, options.out)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code, 2 for invalid input."""
    return exit_code(
        "benchmarks.weight_formats", arguments, lambda line: run(arguments_of(arguments), line)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
