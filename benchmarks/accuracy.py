"""Measure how much quantizing the KV cache reduces the accuracy of the pocket models' answers.

python -m benchmarks.accuracy
python -m benchmarks.accuracy --model pocket-vl --prompts 16 --tasks "read 30 images" --device cpu
python -m benchmarks.accuracy --report     # tables, verdict and plot of recorded results
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import accuracy_report
from benchmarks.record import Record, Row, device_name, exit_code, finish, merge_rows, parser
from benchmarks.tasks import TASKS, Conversations, Task, conversations, load, outlier_channels
from examples.train_pocket.configs import NAMES, Pocket
from examples.train_pocket.evaluate import SEED
from examples.train_pocket.studio import Studio, load_atlases
from oscar_mm import KVPolicy, OscarCache
from oscar_mm.cache.cache import as_argument
from oscar_mm.compare.methods import (
    DEFAULT,
    REFERENCE,
    Method,
    StoredPast,
    ablation_methods,
    bits_per_value,
    main_methods,
    selected,
)
from oscar_mm.compare.teacher_forcing import IGNORE, Scores, answer_logits, as_recorded
from oscar_mm.engine.decode_runner import decode
from oscar_mm.engine.prompt import Prompt
from oscar_mm.engine.sampling import Sampling
from oscar_mm.errors import InputError
from oscar_mm.modality import PADDING

PROMPTS, GENERATED = {"cuda": 512, "cpu": 8}, {"cuda": 64, "cpu": 2}
CONDITIONS = ("plain", "stress")
MODELS, ATLASES = Path("oscar_mm") / "models", Path("build") / "pocket"
NOTES = [
    "Each conversation shows its media first, and the method stores their keys and values. Then "
    "the model reads question and answer (teacher forcing) with the past that the method gives "
    "back. Question and answer stay in 16 bit, and for all methods alike the first 4 tokens, the "
    "last 32 and incomplete pages of 128 of a modality; rows of KVarN, TurboQuant and ExLlamaV3 as "
    "benchmarks.language says of them.",
    "exact: share of answers whose every token is the likeliest one, as greedy decoding needs. "
    "agreement and kl: of the judged tokens, against the 16-bit cache; kl in nats. margin: mean "
    "squared error of the logit of the 16-bit cache's likeliest token less those of the next four. "
    "kl_error and margin_error: standard errors over prompts.",
    "A conversation has one question: 'read' one medium, 'find' the medium with a text, 'list' "
    "what three say, 'ask' any of the questions about receipts or shapes, 'copy' all of them out. "
    "With images and clips it has one question about each.",
    "page_bits: bits per value of a full page; held_bits: bits per value of everything that a "
    "cache of one conversation holds, with 16-bit rest, tables and unused slots.",
    "stress: the weights make two rotary pairs of each layer's keys 8 and 16 times as large and "
    "the queries as much smaller. The 16-bit cache answers the same: logit_shift is the largest "
    "difference of its logits. Balancing from the weights takes these factors out again: then a "
    "method's numbers are those of the plain model.",
    "The model runs in float32; keys and values are rounded to bfloat16 first. Fonts and voices "
    "are those of the training, the media are new.",
]


class Cell:
    """Scores of all methods for one task under one condition."""

    def __init__(self, methods: Sequence[Method]) -> None:
        self.methods = methods
        self.scores = {method.name: Scores() for method in methods}
        self.figures: dict[str, dict[str, Any]] = {method.name: {} for method in methods}

    def add(self, model: Any, talks: Conversations) -> torch.Tensor:
        """Score all methods on a batch and return the logits of the 16-bit cache."""
        layers, ids, forced = talks.record(model).layers, talks.ids, talks.forced
        exact = answer_logits(model, as_recorded(layers), len(ids), forced)
        for method in self.methods:
            figures = self.figures[method.name]
            if reason := method.missing(layers, ids):
                figures["missing"] = reason
                continue
            past = StoredPast(method, layers, ids)
            logits = answer_logits(model, past, len(ids), forced)
            self.scores[method.name].add(forced, exact, logits)
            if not figures:
                report = method.memory(layers, ids)
                figures |= {
                    "page_bits": bits_per_value(past.stored_bytes, past.stored_values),
                    "held_bits": None if report is None else report.bits_per_value,
                    "packed_share": past.stored_values / (2 * layers[0].keys.numel() * len(layers)),
                }
        return exact

    def rows(self) -> Iterator[Row]:
        """Yield a row of the table for each method."""
        for name, figures in self.figures.items():
            scores = {} if "missing" in figures else self.scores[name].summary()
            yield {"method": name} | figures | scores


def measure(
    studio: Studio,
    model: Any,
    tasks: Sequence[Task],
    methods: Sequence[Method],
    ablation: Sequence[Method],
    prompts: int,
    seed: int = SEED,
    conditions: Sequence[str] = CONDITIONS,
) -> Iterator[Row]:
    """Yield a row for each task, condition and method."""
    devices = [torch.cuda.current_device()] if studio.writer.device.type == "cuda" else []
    for task in tasks:
        compared = [*methods, *(ablation if task.ablate else ())]
        cells = {condition: Cell(compared) for condition in conditions}
        started, shift, tokens = time.perf_counter(), 0.0, 0
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            for talks in conversations(studio, task, prompts):
                tokens, first = len(talks.ids), None
                for condition, cell in cells.items():
                    stressed = condition == "stress"
                    with outlier_channels(model, seed) if stressed else nullcontext():
                        exact = cell.add(model, talks)
                    first = exact if first is None else first
                    shift = max(shift, float((exact - first).abs().max()))
        seconds = time.perf_counter() - started
        print(f"{task.name}: {tokens} tokens, {seconds:.0f} s", file=sys.stderr, flush=True)
        for condition, cell in cells.items():
            place = {"task": task.name, "family": task.family, "context": tokens}
            place |= {"condition": condition, "logit_shift": shift}
            for row in cell.rows():
                yield place | row


POLICIES = {REFERENCE: KVPolicy.preset("bf16"), DEFAULT: KVPolicy.preset(DEFAULT)}
_ROOM = 8
"""Number of tokens by which an answer may be longer than the right answer."""


def generate(
    studio: Studio, pocket: Pocket, tasks: Sequence[Task], prompts: int, seed: int
) -> Iterator[Row]:
    """Yield a row for each task and policy: exact match of greedy answers to conversations.

    The media form a first turn. Question and answer form a second turn, so that both attend to the
    packed cache.

    Args:
        studio: studio that creates the conversations.
        pocket: model that answers the conversations, in any dtype.
        tasks: tasks with one question per conversation.
        prompts: minimum number of conversations.
        seed: seed of the conversations.
    """
    device = studio.writer.device
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    ends = frozenset([pocket.processor.tokenizer.eos_token_id])
    for task in tasks:
        answers: dict[str, list[list[int]]] = {method: [] for method in POLICIES}
        expected: list[list[int]] = []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            for talks in conversations(studio, task, prompts):
                expected += _right_answers(talks)
                for method, policy in POLICIES.items():
                    answers[method] += greedy_answers(pocket, talks, policy, ends)
        for method, replies in answers.items():
            yield {
                "task": task.name,
                "family": task.family,
                "condition": "generated",
                "method": method,
                "prompts": len(replies),
                "exact": _equal_share(replies, expected),
                "as_16_bit": _equal_share(replies, answers[REFERENCE]),
            }


@torch.inference_mode()
def greedy_answers(
    pocket: Pocket, talks: Conversations, policy: KVPolicy, end_tokens: frozenset[int]
) -> list[list[int]]:
    """Generate greedy answers for all rows at once, and return them as token ids."""
    model, rows = pocket.generator, len(talks.forced.ids)
    cache = OscarCache(policy, model=model)
    cache.expect(talks.ids.expand(rows, -1))
    model.get_decoder()(**talks.prefix_in(model.dtype), **as_argument(cache), use_cache=True)
    longest = max(map(len, _right_answers(talks))) + _ROOM
    sampling = Sampling(max_new_tokens=longest, temperature=0)
    answers: list[list[int]] = [[] for _ in range(rows)]
    for step in decode(model, _question(talks), cache, sampling, end_tokens=end_tokens):
        for row, token in enumerate(step):
            if token is not None:
                answers[row].append(token)
    return answers


def _question(talks: Conversations) -> Prompt:
    """Return the questions of all rows as one turn, padded on the left."""
    forced = talks.forced
    # The question ends at the first token that is followed by a scored token of the answer.
    counts = (forced.targets != IGNORE).int().argmax(1) + 1
    longest = int(counts.max())
    place = torch.arange(longest, device=counts.device) - (longest - counts)[:, None]
    real, place = place >= 0, place.clamp(min=0)
    positions = forced.positions.gather(-1, place.expand(*forced.positions.shape[:-1], longest))
    last = positions[..., -1] if positions.ndim == 2 else positions[0, :, -1]
    return Prompt(
        inputs={"input_ids": forced.ids.gather(1, place)},
        positions=positions,
        next_position=last + 1,
        modalities=torch.where(real, 0, PADDING).to("cpu", torch.int8),
    )


def _right_answers(talks: Conversations) -> list[list[int]]:
    """Return the token ids of the right answers, without their end tokens."""
    rows: list[Tensor] = [target[target != IGNORE] for target in talks.forced.targets.cpu()]
    return [row[:-1].tolist() for row in rows]


def _equal_share(answers: Sequence[list[int]], expected: Sequence[list[int]]) -> float:
    equal = [answer == other for answer, other in zip(answers, expected, strict=True)]
    return sum(equal) / len(equal)


def arguments_of(line: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    options = parser("benchmarks.accuracy", __doc__)
    options.add_argument(
        "--model", action="append", choices=NAMES, help="model to measure; all three by default"
    )
    options.add_argument("--models", type=Path, default=MODELS, help="folder of the models")
    options.add_argument("--random", action="store_true", help="random weights, for a trial run")
    options.add_argument("--atlases", type=Path, default=ATLASES, help="folder of the atlases")
    options.add_argument(
        "--prompts", type=int, help="prompts per task; default: 512 on a GPU, 8 on a CPU"
    )
    options.add_argument(
        "--generate", type=int, help="prompts to answer freely; default: 64 on a GPU, 2 on a CPU"
    )
    options.add_argument("--tasks", action="append", default=[], help="a name or part of it")
    options.add_argument("--methods", action="append", default=[], help="a name or part of it")
    options.add_argument("--no-ablation", action="store_true", help="only the main table")
    options.add_argument(
        "--condition",
        action="append",
        choices=CONDITIONS,
        help="condition to measure; both by default",
    )
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--seed", type=int, default=SEED)
    options.add_argument(
        "--add",
        action="store_true",
        help="keep the file's rows, except cells that now have as many prompts or more",
    )
    options.add_argument("--report", action="store_true", help="show the recorded results")
    return options.parse_args(line)


def _free_answers(
    options: argparse.Namespace,
    name: str,
    studio: Studio,
    tasks: Sequence[Task],
    device: torch.device,
) -> list[Row]:
    """Return the rows of ``generate``; on a GPU in bfloat16, for which the packed cache has
    kernels."""
    count = GENERATED[device.type] if options.generate is None else options.generate
    folder = None if options.random else options.models / name
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    one_question = [task for task in tasks if task.ablate]
    if not count or not one_question:
        return []
    pocket = load(name, folder, device, dtype)
    rows = generate(studio, pocket, one_question, count, options.seed)
    return [{"model": name} | row for row in rows]


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark for each model, or report recorded results; return the exit code."""
    options = arguments_of(arguments)
    if options.report:
        return accuracy_report.main(options.out, options.model or NAMES)
    return exit_code("benchmarks.accuracy", arguments, lambda line: _run(options, line))


def _continuing(record: Record, folder: Path) -> Record:
    """Return a record that starts with the rows of an earlier run, if the folder contains one."""
    earlier = record.earlier(folder)
    if earlier is None:
        return record
    prompts = min(record.extra["prompts"], earlier.extra["prompts"])
    return replace(record.continuing(earlier), extra=record.extra | {"prompts": prompts})


def _merge(rows: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Merge old and new rows; for each cell, keep the row with more prompts, else the new row."""
    cell = ("task", "condition", "method")
    return merge_rows(
        rows, new, cell, lambda row, old: row.get("prompts", 0) >= old.get("prompts", 0)
    )


def _run(options: argparse.Namespace, line: str) -> int:
    device = torch.device(options.device)
    prompts = options.prompts or PROMPTS[device.type]
    tables = (main_methods(), [] if options.no_ablation else ablation_methods())
    known = [method.name for method in (*tables[0], *tables[1])]
    for text in options.methods:
        if not any(text in name for name in known):
            raise InputError(f"--methods {text}: matches none of these methods: {'; '.join(known)}")
    names = options.methods and [REFERENCE, *options.methods]
    compared = {method.name for method in selected([*tables[0], *tables[1]], names)}
    main_table, ablation = (
        [method for method in table if method.name in compared] for table in tables
    )
    measured = []
    for name in options.model or NAMES:
        tasks = selected(TASKS[name], options.tasks)
        if not tasks:
            continue
        pocket = load(name, None if options.random else options.models / name, device)
        audio = any(task.clips for task in TASKS[name])
        studio = Studio(pocket, *load_atlases(options.atlases, device, audio), plain=True)
        extra = {"seed": options.seed, "prompts": prompts, "model": name}
        record = Record(f"accuracy-{name}", line, device_name(device.type), [], NOTES, extra)
        if options.add:
            record = _continuing(record, options.out)
        for task in tasks:
            rows = measure(
                studio,
                pocket.generator,
                [task],
                main_table,
                ablation,
                prompts,
                options.seed,
                options.condition or CONDITIONS,
            )
            record.rows = _merge(record.rows, [{"model": name} | row for row in rows])
            record.write(options.out)  # Keep the measured rows if a later step fails.
        record.rows = _merge(record.rows, _free_answers(options, name, studio, tasks, device))
        finish(record, options.out)
        measured.append(name)
    if not measured:
        print(f"benchmarks.accuracy: no task has {options.tasks} in its name", file=sys.stderr)
        return 2
    return accuracy_report.main(options.out, measured)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
