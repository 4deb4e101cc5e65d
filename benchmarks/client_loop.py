"""Compare our engine with vLLM's where many clients send short prompts, without HTTP.

python -m benchmarks.client_loop [--models qwen3-vl-8b] [--prompts 500,2000,8000]
    [--clients 16,64,256 | --rate 6] [--pictures 1] [--new-tokens 400] [--seconds 20]

Each engine runs in its own process, with random weights: ours, then vLLM's if it is installed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
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

from benchmarks.loop_prompts import SIDE, VLLMPrompts, asked, texts
from benchmarks.random_model import RANDOM_MODELS, endless_pipeline
from benchmarks.record import Record, Row, command, device_name, finish, merge_rows, parser, show
from benchmarks.vllm_attention import engine_options, model_folder, tokens_of
from benchmarks.vllm_process import (
    CHILD,
    rows_of_child,
    vllm_versions,
    wait_to_begin,
    waiting_worker,
    write_rows,
)
from oscar_mm.apps.server_process import freeze_loaded, short_thread_turns
from oscar_mm.engine.request import Request
from oscar_mm.engine.warm_up import warm_up
from oscar_mm.pipelines.pipeline import Pipeline

OURS, VLLM = "oscar_mm", "vLLM"
_WARM_UP = 0.25
"""Share of a run before the steady-state window."""
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
    f"With pictures: {SIDE} x {SIDE} random pixels, new in each request, before the text; the "
    "tokens of a prompt are those of its text, and the pictures' come on top. Both engines get the "
    "same prompts, which another thread of the caller prepares ahead in the engine's own way; "
    "towers run in the engines. vLLM: the whole model, no caches of pictures.",
]


@dataclass(frozen=True)
class Loop:
    """Load of one run.

    Attributes:
        model: name of a released model.
        prompt: tokens of each prompt, without its pictures.
        new_tokens: tokens of each answer.
        seconds: time in which requests are sent.
        clients: number of clients in a closed loop, or 0 for Poisson arrivals.
        rate: arrivals per second.
        pictures: pictures of each prompt.
    """

    model: str
    prompt: int
    new_tokens: int
    seconds: float
    clients: int = 0
    rate: float = 0.0
    pictures: int = 0

    @property
    def ahead(self) -> int:
        """Number of requests that are prepared ahead, beyond those of the beginning."""
        return max(self.clients, 8)

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
        question = asked(number, texts[number % len(texts)], loop.pictures)
        return pipe.new_request(pipe.read_request(question, most), sampling, perf_counter())

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
        ahead = deque(reader.submit(request, loop.new_tokens) for _ in range(loop.ahead))
        wait(ahead)

        def send(number: int, length: int) -> None:
            if number < len(first):
                answer = first[number]
            else:
                answer = ahead.popleft().result()
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
    shown = sum(span.tokens for span in started.prompt.media)
    return row | ({"picture tokens": shown} if loop.pictures else {})


def vllms(engine: Any, prompt: Callable[[int], Any], loop: Loop) -> Row:
    """Run a load on vLLM's engine (``vllm.LLM.llm_engine``).

    Args:
        engine: the engine.
        prompt: function that prepares the prompt of a request, given the request's number.
        loop: the load.
    """
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
        ready = ahead.popleft().result()
        ahead.append(reader.submit(prompt, number + loop.clients + loop.ahead))
        engine.add_request(f"{loop.clients}-{loop.prompt}-{number}", ready, params)
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

    with ThreadPoolExecutor(1) as reader:
        ahead = deque(reader.submit(prompt, i) for i in range(loop.clients + loop.ahead))
        wait(ahead)
        row = run(loop, send, step)
        for future in ahead:
            future.cancel()
    engine.abort_request([f"{loop.clients}-{loop.prompt}-{number}" for number in live])
    while engine.has_unfinished_requests():
        engine.step()
    return row


def vllm_engine(
    loops: Sequence[Loop], folder: Path, worker: dict[str, str]
) -> Callable[[Loop], Row]:
    """Start vLLM with the model of some loads; return a function that measures one of them.

    Args:
        loops: the loads.
        folder: folder for the files of the model.
        worker: further arguments of ``vllm.LLM``, see ``waiting_worker``.
    """
    from vllm import LLM

    [model], [pictures] = ({getattr(x, name) for x in loops} for name in ("model", "pictures"))
    if pictures:
        source = VLLMPrompts(model, folder)
        found = {x.prompt: texts(source.tokens, x.prompt) for x in loops}
        longest = max(source.tokens(text, pictures) for of in found.values() for text in of)
    else:
        model_folder(model, folder)
        longest = max(loop.prompt for loop in loops)
    longest += max(loop.new_tokens for loop in loops)
    # Like those of filled caches, but prompts are computed, by vLLM's own budget for a step.
    weights = RANDOM_MODELS[model].weights
    options = engine_options("auto", folder, longest, filled=True, weights=weights)
    del options["kv_transfer_config"], options["max_num_batched_tokens"]
    if pictures:
        options |= source.options(pictures)
    engine: Any = LLM(**options, **worker).llm_engine

    def measure(loop: Loop) -> Row:
        def ids(number: int) -> dict[str, list[int]]:
            return {"prompt_token_ids": tokens_of(loop.prompt, (loop.prompt, number))}

        def shown(number: int) -> Any:
            choices = found[loop.prompt]
            prompt = source.prompt(number, choices[number % len(choices)], pictures)
            return engine.renderer.render_cmpl([prompt])[0]

        if not pictures:
            return vllms(engine, ids, loop)
        places = shown(0)["mm_placeholders"]["image"]
        row = vllms(engine, shown, loop)
        return row | {"picture tokens": sum(place.length for place in places)}

    return measure


def our_engine(pipe: Pipeline) -> Callable[[Loop], Row]:
    """Return a function that measures a load on our engine; see ``ours`` for the pipeline."""

    def length(text: str) -> int:
        return pipe.read_request(asked(0, text), 1).tokens

    def measure(loop: Loop) -> Row:
        return ours(pipe, texts(length, loop.prompt), loop)

    return measure


def child(spec: dict[str, Any]) -> None:
    """Run the loads of one engine, and write a line of JSON to a file for each row."""
    loops = [Loop(**loop) for loop in spec["loops"]]
    if spec["engine"] == VLLM:
        measure = vllm_engine(loops, Path(spec["folder"]), waiting_worker(spec))
    else:
        wait_to_begin(spec)
        measure = our_engine(
            endless_pipeline(loops[0].model, tiny=spec["tiny"], device=spec["device"])
        )

    def rows() -> Iterator[Row]:
        for loop in loops:
            row = {"engine": spec["engine"], **asdict(loop), **measure(loop)}
            print(json.dumps(row), flush=True)
            yield row

    write_rows(spec["rows"], rows())


def with_error(spec: dict[str, Any], rows: list[Row], error: str | None) -> list[Row]:
    """Return the rows of a child process, and one more with its error, if any."""
    if error is None:
        return rows
    model = spec["loops"][0]["model"]
    return [*rows, {"engine": spec["engine"], "model": model, "error": error}]


def measured(spec: dict[str, Any], seconds: float) -> list[Row]:
    """Return the rows of a child process; if it fails or times out, the last row is an error."""
    return with_error(spec, *rows_of_child("benchmarks.client_loop", spec, seconds))


def ratios(rows: Iterable[Row]) -> Iterator[tuple[str, float, float | None]]:
    """Yield our tokens/s by vLLM's: a description of the load, the ratio, and its bound if any."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        if "error" not in row:
            load = row["model"], row["prompt"], row["pictures"], row["clients"], row["rate"]
            found.setdefault(load, {})[row["engine"]] = row["tokens/s"]
    for (model, prompt, pictures, clients, rate), speeds in found.items():
        if speeds.keys() >= {OURS, VLLM}:
            who = f"{clients} clients" if clients else f"{rate:g} requests/s"
            least = None if pictures else BOUNDS.get((model, prompt, clients))
            shown = f", pictures: {pictures}" if pictures else ""
            yield f"{model}, {who}, {prompt} tokens{shown}", speeds[OURS] / speeds[VLLM], least


def report(rows: Sequence[Row]) -> None:
    """Print a table, and our tokens/s by vLLM's."""

    def line(row: Row) -> tuple[str, ...]:
        if "error" in row:
            return row["engine"], row["model"], row["error"], "", "", "", ""
        who = f"{row['clients']} clients" if row["clients"] else f"{row['rate']:g}/s"
        shown = f" + {row['picture tokens']:,}" if row["pictures"] else ""
        pairs = (
            f"{row.get(f'{name} p50 ms')} / {row.get(f'{name} p99 ms')}"
            for name in ("first token", "between tokens")
        )
        return (
            *(row["engine"], row["model"], who, f"{row['prompt']:,}{shown}"),
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
    add("--pictures", type=int, default=0, help="pictures of a prompt, besides its tokens")
    add("--new-tokens", type=int, default=400, help="tokens of an answer")
    add("--seconds", type=float, default=20.0, help="seconds of each run")
    add("--limit", type=float, default=590.0, help="time limit of an engine's process, in seconds")
    add("--tiny", action="store_true", help="trial run with tiny models, without vLLM")
    add("--add", action="store_true", help="keep the file's rows of other runs")
    options = options_parser.parse_args(arguments)
    models = options.models.split(",")
    if options.pictures and any(RANDOM_MODELS[model].weights for model in models):
        options_parser.error("--pictures requires models with weights in 16 bits")
    closed = options.clients or ("" if options.rate else "16,64,256")
    loads: list[dict[str, Any]] = [{"clients": int(x)} for x in closed.split(",") if x]
    loads += [{"rate": float(x)} for x in (options.rate or "").split(",") if x]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, has_vllm = list[Row](), not options.tiny and find_spec("vllm") is not None
    common = {name: getattr(options, name) for name in ("new_tokens", "seconds", "pictures")}
    for model in models:
        loops = [
            Loop(model, int(prompt), **common, **load)
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
        cell = ("model", "engine", "prompt", "pictures", "clients", "rate", "new_tokens")
        old = ({"pictures": 0} | row for row in earlier.rows)
        kept, new = ([row for row in x if "error" not in row] for x in (old, rows))
        failed = [row for row in rows if "error" in row]
        record.rows = [*merge_rows(kept, new, cell, lambda *_: True), *failed]
        record.command = f"{earlier.command}; {record.command}"
    report(record.rows)
    finish(record, options.out)
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
