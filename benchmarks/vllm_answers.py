"""Compare answers about images from vLLM with our pages with the answers of our own engine.

python -m benchmarks.vllm_answers [--models pocket-vl,pocket-llava] [--questions 200]
    [--policies "standard;standard:window=64"] [--ways graphs,eager,preempted,ngram,ranks]

Each way of running vLLM has its own process. vLLM and a GPU are required; "ranks" needs two GPUs.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.record import Record, Row, command, device_name, finish, merge_rows, parser, show
from benchmarks.serving import CARDS
from benchmarks.vllm_process import CHILD, run_child, vllm_versions
from oscar_mm.models import source_of
from oscar_mm.vllm_plugin import additional_config

_CONTENTS = Path("examples/media/contents.json")
_FEWEST, _MOST = 4, 16
_TOKENS = 16
"""Maximum number of tokens of an answer."""
_CONTEXT = 4096
_TOGETHER = 64
"""Maximum number of running requests."""
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    # 64 requests of up to 9 blocks each do not fit, so some are preempted and recomputed.
    "preempted": {"num_gpu_blocks_override": 60},
    "ngram": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 3,
        }
    },
    "ranks": {"tensor_parallel_size": 2},
}
"""Arguments of ``vllm.LLM`` for each way of running vLLM."""
MIN_EQUAL = 0.95
"""Minimum share of answers that should equal the answers of our engine."""
NOTES = [
    f"Greedy answers to questions about {_FEWEST} to {_MOST} pictures, half of which ask for the "
    "code in a picture and half for the picture with a code. Right: equal to what the picture "
    "shows. Same: equal to the answer of our own engine with the same policy, on the same GPU.",
    "exact: our own engine with its 16-bit cache.",
]


@dataclass(frozen=True)
class Question:
    """Question about some of the cards.

    Attributes:
        cards: indices into ``CARDS``, in the order of the images.
        text: text of the question.
        right: right answer.
    """

    cards: tuple[int, ...]
    text: str
    right: str


def questions(count: int, seed: int = 0) -> list[Question]:
    """Return questions about random cards; no card occurs twice in a question."""
    shown = list(json.loads(_CONTENTS.read_text())["cards"].values())
    generator = random.Random(seed)
    found = []
    while len(found) < count:
        cards = generator.sample(range(len(CARDS)), generator.randint(_FEWEST, _MOST))
        coded = [place for place, card in enumerate(cards) if isinstance(shown[card], str)]
        if not coded:
            continue
        place = generator.choice(coded)
        number, code = str(place + 1), shown[cards[place]]
        if len(found) % 2:
            text, right = f"Which picture says {code}?", number
        else:
            text, right = f"What is the code in picture {number}?", code
        found.append(Question(tuple(cards), text, right))
    return found


def our_answers(model: str, policy: str, asked: Sequence[Question]) -> list[str]:
    """Answer questions with our own engine, one at a time, and return the answers."""
    from oscar_mm import OscarVLPipeline

    pipe = OscarVLPipeline(model, policy=policy, device="cuda", dtype="bfloat16")
    answers = []
    for question in asked:
        images = [CARDS[card] for card in question.cards]
        answers.append(pipe(images, question.text, max_new_tokens=_TOKENS).text)
    return answers


def vllm_answers(model: str, policy: str, way: str, asked: Sequence[Question]) -> list[str]:
    """Answer all questions at once with vLLM, and return the answers."""
    from PIL import Image
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=source_of(model),
        dtype="bfloat16",
        attention_backend="CUSTOM",
        additional_config=additional_config(policy),
        max_model_len=_CONTEXT,
        max_num_seqs=_TOGETHER,
        gpu_memory_utilization=0.3,
        limit_mm_per_prompt={"image": _MOST},
        disable_log_stats=True,
        enable_flashinfer_autotune=False,
        **({"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}} | WAYS[way]),
    )
    cards = [Image.open(card).convert("RGB") for card in CARDS]
    talks = []
    for question in asked:
        shown = [{"type": "image_pil", "image_pil": cards[card]} for card in question.cards]
        parts = [*shown, {"type": "text", "text": question.text}]
        talks.append([{"role": "user", "content": parts}])
    params = SamplingParams(temperature=0.0, max_tokens=_TOKENS)
    found: Any = llm.chat(talks, params, use_tqdm=False)
    return [answer.outputs[0].text for answer in found]


def child(spec: dict[str, Any]) -> None:
    """Answer the questions with one way of running vLLM, and write the answers to a file."""
    asked = [Question(tuple(item["cards"]), item["text"], item["right"]) for item in spec["asked"]]
    model, policy, way = spec["model"], spec["policy"], spec["way"]
    if way == "ours":
        answers = our_answers(model, policy, asked)
    else:
        answers = vllm_answers(model, policy, way, asked)
    Path(spec["answers"]).write_text(json.dumps(answers))


def answered(
    model: str, policy: str, way: str, asked: Sequence[Question], seconds: float
) -> list[str] | str:
    """Answer questions in a process of its own; return the answers, or the error of the process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answers.json"
        spec = {"model": model, "policy": policy, "way": way, "answers": str(path)}
        spec["asked"] = [asdict(question) for question in asked]
        error = run_child("benchmarks.vllm_answers", spec, seconds)
        return error or json.loads(path.read_text())


def compare(
    common: Row, asked: Sequence[Question], answers: list[str] | str, ours: list[str] | str
) -> Row:
    """Return a row with the numbers of answers that are right and that equal our engine's."""
    if isinstance(answers, str):
        return common | {"error": answers}
    right = sum(
        answer.strip() == question.right for answer, question in zip(answers, asked, strict=True)
    )
    row = common | {"questions": len(asked), "right": right}
    if isinstance(ours, str):
        return row
    pairs = zip(answers, ours, strict=True)
    return row | {"same": sum(answer.strip() == other.strip() for answer, other in pairs)}


def rows_of(
    model: str, policies: Iterable[str], ways: Iterable[str], count: int, seconds: float
) -> Iterator[Row]:
    """Yield the rows of one model: first our 16-bit cache, then our engine and vLLM by policy."""
    asked = questions(count)
    exact = answered(model, "bf16", "ours", asked, seconds)
    common = {"model": model, "policy": "bf16", "way": "exact"}
    yield compare(common, asked, exact, exact)
    for policy in policies:
        ours = answered(model, policy, "ours", asked, seconds)
        yield compare({"model": model, "policy": policy, "way": "ours"}, asked, ours, ours)
        for way in ways:
            answers = answered(model, policy, way, asked, seconds)
            yield compare({"model": model, "policy": policy, "way": way}, asked, answers, ours)


def report(rows: Sequence[Row]) -> None:
    """Print a table and verdicts."""

    def line(row: Row) -> tuple[str, ...]:
        figures = (row.get("error") or row["questions"], row.get("right", ""), row.get("same", ""))
        return row["model"], row["policy"], row["way"], *map(str, figures)

    show("Answers", ("model", "policy", "way", "questions", "right", "same"), map(line, rows))
    for row in rows:
        if row["way"] in WAYS and "same" in row:
            share = row["same"] / row["questions"]
            verdict = "met" if share >= MIN_EQUAL else "NOT met"
            place = f"{row['model']}, {row['policy']}, {row['way']}"
            print(f"{place}: {share:.3f} the same, at least {MIN_EQUAL}: {verdict}")


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code, 1 if a run failed."""
    if list(arguments[:1]) == [CHILD]:
        child(json.loads(arguments[1]))
        return 0
    options_parser = parser("benchmarks.vllm_answers", __doc__)
    add = options_parser.add_argument
    add("--models", default="pocket-vl,pocket-llava", help="bundled models, comma-separated")
    add("--policies", default="standard", help='cache policies, separated by ";"')
    add(
        "--ways", default="graphs,eager,preempted,ngram", help=f"comma-separated: {', '.join(WAYS)}"
    )
    add("--questions", type=int, default=200)
    add("--limit", type=float, default=150.0, help="time limit of a process, in seconds")
    add("--add", action="store_true", help="add to the rows that the file has from other runs")
    options = options_parser.parse_args(arguments)
    ways = options.ways.split(",")
    if unknown := set(ways) - set(WAYS):
        options_parser.error(f"--ways {', '.join(unknown)}: choose from {', '.join(WAYS)}")
    rows: list[Row] = []
    for model in options.models.split(","):
        policies = options.policies.split(";")
        for row in rows_of(model, policies, ways, options.questions, options.limit):
            print(row, flush=True)
            rows.append(row)
    line = command("benchmarks.vllm_answers", arguments)
    record = Record(
        "vllm_answers", line, device_name("cuda"), rows, NOTES, versions=vllm_versions()
    )
    if options.add and (earlier := record.earlier(options.out)) is not None:
        cell = ("model", "policy", "way")
        merged = merge_rows(earlier.rows, rows, cell, lambda row, old: "error" not in row)
        record = replace(record.continuing(earlier), rows=merged)
    report(record.rows)
    finish(record, options.out)
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
