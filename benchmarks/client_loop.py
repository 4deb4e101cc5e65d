"""Compare our engine with vLLM's where many clients send short prompts, without HTTP.

python -m benchmarks.client_loop [--models qwen3-vl-8b] [--prompts 500,2000,8000]
    [--clients 16,64,256 | --rate 6] [--new-tokens 400] [--seconds 20]

Each engine runs in its own process, with random weights: ours, then vLLM's if it is installed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import count, pairwise
from pathlib import Path
from queue import Empty, SimpleQueue
from time import perf_counter, sleep
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.random_model import RANDOM_MODELS, endless_pipeline, words
from benchmarks.record import Record, Row, command, device_name, finish, merge_rows, parser, show
from benchmarks.vllm_attention import engine_options, model_folder, tokens_of
from benchmarks.vllm_process import CHILD, rows_of_child, vllm_versions, write_rows
from oscar_mm.apps.server_process import freeze_loaded, short_thread_turns
from oscar_mm.engine.message import Message, first_turn
from oscar_mm.engine.request import Request
from oscar_mm.engine.warm_up import warm_up
from oscar_mm.pipelines.pipeline import Pipeline

OURS, VLLM = "oscar_mm", "vLLM"
_WARM_UP = 0.25
"""Share of a run before the steady-state window."""
_TEXTS = 12
_AT_ONCE = 256
"""Maximum number of requests that vLLM runs at a time, as many as ours."""
BOUNDS = {
    ("qwen3-vl-8b", 2000, 64): 1.3,
    ("qwen3-vl-8b", 500, 256): 1.2,
    ("qwen3-vl-30b-a3b", 2000, 64): 1.7,
    ("qwen3-vl-8b-fp8", 2000, 64): 1.2,
    ("qwen3-vl-30b-a3b-fp8", 2000, 64): 1.2,
}
"""Required ratio of our tokens/s to vLLM's, by model, tokens of a prompt, and clients."""
NOTES = [
    "Closed loop: as soon as an answer ends, its client sends the next request; a client's first "
    "answer is shorter, by chance. With a rate, requests arrive at random (Poisson). Answers are "
    "greedy and end at their limit. No prompt begins like another.",
    f"Figures are of the time after the first {_WARM_UP:.0%} of the seconds. First token: from "
    "sending the request, with the queue. Between tokens: two tokens of the same answer.",
    "Random weights, in bf16 unless the model's name ends in another format, the same for both "
    "engines. Ours: policy standard, a thread of the same process prepares the next requests from "
    "texts, whose prompts have up to two tokens more than vLLM's. vLLM: the model's decoder alone, "
    "token ids as prompts, bf16 KV, CUDA graphs without torch.compile, its own token budget for a "
    "step.",
]


@dataclass(frozen=True)
class Loop:
    """Load of one run.

    Attributes:
        model: name of a released model.
        prompt: tokens of each prompt.
        new_tokens: tokens of each answer.
        seconds: time in which requests are sent.
        clients: number of clients in a closed loop, or 0 for Poisson arrivals.
        rate: arrivals per second.
    """

    model: str
    prompt: int
    new_tokens: int
    seconds: float
    clients: int = 0
    rate: float = 0.0

    def first_lengths(self) -> list[int]:
        """Return the answer lengths of the requests that are sent at the beginning."""
        generator = random.Random(0)
        return [generator.randint(1, self.new_tokens) for _ in range(self.clients)]

    def arrivals(self) -> Iterator[float]:
        """Yield the arrival times in seconds, in a closed loop none."""
        generator, at = random.Random(0), 0.0
        while self.rate and (at := at + generator.expovariate(self.rate)) < self.seconds:
            yield at


class Meter:
    """Times at which tokens of requests arrived.

    Attributes:
        start: time at which the run began.
    """

    def __init__(self) -> None:
        self.start = perf_counter()
        self._times: dict[int, list[float]] = {}

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return perf_counter() - self.start

    def sent(self, number: int, at: float | None = None) -> None:
        """Record that a request was sent, now or ``at`` seconds after the beginning."""
        self._times[number] = [self.seconds if at is None else at]

    def received(self, number: int, tokens: int, at: float) -> None:
        """Record that ``tokens`` tokens of a request arrived, at a time of ``perf_counter``."""
        self._times[number] += [at - self.start] * tokens

    def row(self, loop: Loop) -> Row:
        """Return the figures of the steady-state window."""
        begin, end = _WARM_UP * loop.seconds, loop.seconds
        firsts, gaps, tokens = list[float](), list[float](), 0
        for sent, *times in self._times.values():
            tokens += sum(begin <= at < end for at in times)
            gaps += [after - before for before, after in pairwise(times) if begin <= after < end]
            if times and begin <= times[0] < end:
                firsts.append(times[0] - sent)
        return {
            "requests": len(self._times),
            "tokens/s": round(tokens / (end - begin), 1),
            **{
                f"{name} p{share} ms": round(float(np.percentile(of, share)) * 1e3, 1)
                for name, of in (("first token", firsts), ("between tokens", gaps))
                for share in (50, 99)
                if of
            },
        }


class Arrival(NamedTuple):
    """Tokens of a request that have arrived.

    Attributes:
        number: number of the request.
        tokens: number of new tokens.
        ended: whether the answer has ended.
        at: ``perf_counter`` when they arrived.
    """

    number: int
    tokens: int
    ended: bool
    at: float


def run(
    loop: Loop,
    send: Callable[[int, int], None],
    step: Callable[[float], Iterable[Arrival]],
) -> Row:
    """Run a load on an engine and return its figures.

    Args:
        loop: the load.
        send: function that submits a request with a number and an answer length.
        step: function that lets the engine run, at most for the given seconds if no token arrives,
            and returns the tokens that have arrived.
    """
    meter, numbers = Meter(), count()

    def begin(length: int, at: float | None = None) -> None:
        number = next(numbers)
        meter.sent(number, at)
        send(number, length)

    for length in loop.first_lengths():
        begin(length)
    arrivals = loop.arrivals()
    following = next(arrivals, loop.seconds)
    while (now := meter.seconds) < loop.seconds:
        while now >= following and following < loop.seconds:
            begin(loop.new_tokens, following)
            following = next(arrivals, loop.seconds)
        for number, tokens, ended, at in step(min(following, loop.seconds) - now):
            meter.received(number, tokens, at)
            if ended and loop.clients:
                begin(loop.new_tokens)
    return meter.row(loop)


def texts(pipe: Pipeline, tokens: int) -> list[str]:
    """Return texts of as few words as make prompts of at least ``tokens`` tokens."""

    def length(text: str) -> int:
        return pipe.read_request(_asked(0, text), 1).tokens

    found = list[str]()
    for seed in range(_TEXTS):
        text = words(2 * tokens, seed).split()
        least = bisect_left(range(len(text)), tokens, key=lambda n: length(" ".join(text[:n])))
        found.append(" ".join(text[:least]))
    return found


def _asked(number: int, text: str) -> list[Message]:
    """Return the question of a request; no two begin alike, so that no prefix is shared."""
    return first_turn(f"{number:06} {text}")


def ours(pipe: Pipeline, texts: Sequence[str], loop: Loop) -> Row:
    """Run a load on our engine.

    Args:
        pipe: pipeline whose model never ends an answer before its limit.
        texts: texts of requests, in turn.
        loop: the load.
    """
    warm_up(pipe.engine, loop.clients or _AT_ONCE)
    freeze_loaded()  # As in the server.
    numbers = count()

    def request(most: int) -> Request:
        number = next(numbers)
        sampling = pipe.sampling({"max_new_tokens": most, "temperature": 0}, ())
        asked = _asked(number, texts[number % len(texts)])
        return pipe.new_request(pipe.read_request(asked, most), sampling, perf_counter())

    started = request(2)  # Compiles what is still missing.
    pipe.engine.submit(started)
    started.complete()
    running, arrived = dict[int, Request](), SimpleQueue[list[Arrival]]()
    seen = dict[int, int]()

    def look() -> None:
        """Note the new tokens after a step, in the engine thread."""
        now, arrivals = perf_counter(), list[Arrival]()
        for number, answer in list(running.items()):
            ended, tokens = answer.ended, len(answer.tokens)
            if ended:
                del running[number]
            if ended or tokens > seen[number]:
                arrivals.append(Arrival(number, tokens - seen[number], ended, now))
                seen[number] = tokens
        arrived.put(arrivals)

    with (
        short_thread_turns(),  # As in the server.
        ThreadPoolExecutor(1) as reader,
        pipe.engine.keep_stepping(look),
    ):
        first = [request(length) for length in loop.first_lengths()]
        ahead = [reader.submit(request, loop.new_tokens) for _ in range(max(loop.clients, 8))]

        def send(number: int, length: int) -> None:
            if number < len(first):
                answer = first[number]
            else:
                answer = ahead.pop(0).result()
                ahead.append(reader.submit(request, length))
            seen[number], running[number] = 0, answer
            pipe.engine.submit(answer)

        def step(idle: float) -> Iterator[Arrival]:
            with suppress(Empty):
                yield from arrived.get(timeout=max(idle, 1e-3))
                while True:
                    yield from arrived.get_nowait()

        row = run(loop, send, step)
        for answer in (*list(running.values()), *(future.result() for future in ahead)):
            answer.cancel()
    pipe.engine.call(lambda: None)  # Wait for the step under way.
    return row


def vllms(engine: Any, loop: Loop) -> Row:
    """Run a load on vLLM's engine (``vllm.LLM.llm_engine``)."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    live = set[int]()

    def send(number: int, length: int) -> None:
        params = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            max_tokens=length,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": tokens_of(loop.prompt, (loop.prompt, number))}
        engine.add_request(f"{loop.clients}-{loop.prompt}-{number}", prompt, params)
        live.add(number)

    def step(idle: float) -> Iterator[Arrival]:
        if not live:
            sleep(max(idle, 0.0))
            return
        outputs, now = engine.step(), perf_counter()
        for output in outputs:
            number = int(output.request_id.rpartition("-")[2])
            if output.finished:
                live.discard(number)
            yield Arrival(number, len(output.outputs[0].token_ids), output.finished, now)

    row = run(loop, send, step)
    engine.abort_request([f"{loop.clients}-{loop.prompt}-{number}" for number in live])
    while engine.has_unfinished_requests():
        engine.step()
    return row


def child(spec: dict[str, Any]) -> None:
    """Run the loads of one engine, and write a line of JSON to a file for each row."""
    loops = [Loop(**loop) for loop in spec["loops"]]
    model = loops[0].model
    if spec["engine"] == VLLM:
        from vllm import LLM

        folder = model_folder(model, Path(spec["folder"]))
        longest = max(loop.prompt + loop.new_tokens for loop in loops)
        # Like those of filled caches, but prompts are computed, by vLLM's own budget for a step.
        weights = RANDOM_MODELS[model].weights
        options = engine_options("auto", folder, longest, filled=True, weights=weights)
        del options["kv_transfer_config"], options["max_num_batched_tokens"]
        engine: Any = LLM(**options).llm_engine

        def measure(loop: Loop) -> Row:
            return vllms(engine, loop)
    else:
        pipe = endless_pipeline(model, tiny=spec["tiny"], device=spec["device"])

        def measure(loop: Loop) -> Row:
            return ours(pipe, texts(pipe, loop.prompt), loop)

    def rows() -> Iterator[Row]:
        for loop in loops:
            row = {"engine": spec["engine"], **asdict(loop), **measure(loop)}
            print(json.dumps(row), flush=True)
            yield row

    write_rows(spec["rows"], rows())


def measured(spec: dict[str, Any], seconds: float) -> list[Row]:
    """Return the rows of a child process; if it fails or times out, the last row is an error."""
    found, error = rows_of_child("benchmarks.client_loop", spec, seconds)
    if error:
        found.append({"engine": spec["engine"], "model": spec["loops"][0]["model"], "error": error})
    return found


def ratios(rows: Iterable[Row]) -> Iterator[tuple[str, float, float | None]]:
    """Yield our tokens/s by vLLM's: a description of the load, the ratio, and its bound if any."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        if "error" not in row:
            load = row["model"], row["prompt"], row["clients"], row["rate"]
            found.setdefault(load, {})[row["engine"]] = row["tokens/s"]
    for (model, prompt, clients, rate), speeds in found.items():
        if speeds.keys() >= {OURS, VLLM}:
            who = f"{clients} clients" if clients else f"{rate:g} requests/s"
            least = BOUNDS.get((model, prompt, clients))
            yield f"{model}, {who}, {prompt} tokens", speeds[OURS] / speeds[VLLM], least


def report(rows: Sequence[Row]) -> None:
    """Print a table, and our tokens/s by vLLM's."""

    def line(row: Row) -> tuple[str, ...]:
        if "error" in row:
            return row["engine"], row["model"], row["error"], "", "", "", ""
        who = f"{row['clients']} clients" if row["clients"] else f"{row['rate']:g}/s"
        pairs = (
            f"{row.get(f'{name} p50 ms')} / {row.get(f'{name} p99 ms')}"
            for name in ("first token", "between tokens")
        )
        return (
            *(row["engine"], row["model"], who, f"{row['prompt']:,}"),
            *(f"{row['tokens/s']:,}", *pairs),
        )

    columns = ("engine", "model", "load", "prompt", "tokens/s", "first p50 / p99")
    show("Short prompts, times in ms", (*columns, "between p50 / p99"), map(line, rows))
    for what, ratio, least in ratios(rows):
        line = f"{what}: {ratio:.2f} of vLLM's tokens/s"
        if least is not None:
            line += f", at least {least}: {'met' if ratio >= least else 'NOT met'}"
        print(line)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark: measure, print and record; return the exit code, 1 if a run failed."""
    if list(arguments[:1]) == [CHILD]:
        child(json.loads(arguments[1]))
        return 0
    options_parser = parser("benchmarks.client_loop", __doc__)
    options_parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = options_parser.add_argument
    add("--models", default="qwen3-vl-8b", help=f"comma-separated: {', '.join(RANDOM_MODELS)}")
    add("--engines", default=f"{OURS},{VLLM}", help="comma-separated")
    add("--prompts", default="500,2000,8000", help="tokens of a prompt, comma-separated")
    add("--clients", help="numbers of clients, comma-separated; default without --rate: 16,64,256")
    add("--rate", help="arrivals per second, comma-separated")
    add("--new-tokens", type=int, default=400, help="tokens of an answer")
    add("--seconds", type=float, default=20.0, help="seconds of each run")
    add("--limit", type=float, default=590.0, help="time limit of an engine's process, in seconds")
    add("--tiny", action="store_true", help="trial run with tiny models, without vLLM")
    add("--add", action="store_true", help="keep the file's rows of other runs")
    options = options_parser.parse_args(arguments)
    closed = options.clients or ("" if options.rate else "16,64,256")
    loads: list[dict[str, Any]] = [{"clients": int(x)} for x in closed.split(",") if x]
    loads += [{"rate": float(x)} for x in (options.rate or "").split(",") if x]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, has_vllm = list[Row](), not options.tiny and find_spec("vllm") is not None
    for model in options.models.split(","):
        loops = [
            Loop(model, int(prompt), options.new_tokens, options.seconds, **load)
            for prompt in options.prompts.split(",")
            for load in loads
        ]
        for engine in options.engines.split(","):
            if engine == OURS or has_vllm:
                spec = {"engine": engine, "loops": [asdict(loop) for loop in loops]}
                spec |= {"device": device, "tiny": options.tiny}
                rows += measured(spec, options.limit)
    line = command("benchmarks.client_loop", arguments)
    facts = {"versions": vllm_versions()} if has_vllm else {}
    record = Record("client_loop", line, device_name(device), rows, NOTES, **facts)
    if options.add and (earlier := record.earlier(options.out)) is not None:
        cell = ("model", "engine", "prompt", "clients", "rate", "new_tokens")
        kept, new = ([row for row in x if "error" not in row] for x in (earlier.rows, rows))
        failed = [row for row in rows if "error" in row]
        record.rows = [*merge_rows(kept, new, cell, lambda *_: True), *failed]
        record.command = f"{earlier.command}; {record.command}"
    report(record.rows)
    finish(record, options.out)
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
