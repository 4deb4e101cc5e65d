"""Load test of an OpenAI server, by streaming clients in a closed loop or with Poisson arrivals.

python -m benchmarks.load [--model qwen3-vl-8b] [--clients 1,4,16,64 | --rate 2] [--leave 0.2]
python -m benchmarks.load --prompts text --engine   # also without HTTP, in this process
python -m benchmarks.load --clients 1 --greedy 60   # beside a user with 60 requests at a time
python -m benchmarks.load --against http://127.0.0.1:8000 ...

The server is `oscar-mm serve` in its own process or, with --against, a running one such as vLLM.
"""

from __future__ import annotations

import os
import random
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import openai
import torch

from benchmarks.client_loop import Loop, ours
from benchmarks.openai_server import Exchange, Load, Prompt, Server, server_figures, traffic, watch
from benchmarks.random_model import endless_pipeline, words
from benchmarks.record import Record, command, device_name, finish, merge_rows, parser, show
from benchmarks.serving import CARDS, CLIPS, image, serving, sound, text
from oscar_mm.pipelines.pipeline import Pipeline

CLIENTS = "1,4,16,64"
KINDS = ("text", "pictures", "recordings")
WARM_UP = 0.25
"""Share of a run that precedes the steady-state window."""
_VARIANTS = 12
"""Number of different prompts of each kind."""
SHARE = 0.95
"""Minimum tokens per second that clients should receive, relative to the engine alone."""
_WORDS = 20
"""Default number of words in a text."""
NOTES = [
    "Clients are openai.AsyncOpenAI in processes of their own and stream greedy answers. A model "
    "that the benchmark starts never ends an answer before max_tokens, and writes text with each "
    "token. Closed loop: each client sends its next request when the last one has ended; its first "
    "answer is shorter, by chance. Each text begins with a number that no other request has; "
    "pictures and recordings recur.",
    f"tokens/s, first token and between tokens are of pieces that arrive after the first "
    f"{WARM_UP:.0%} of the seconds in which clients send requests, and before their end. Of an "
    "answer with fewer pieces than tokens each piece counts for several. First token: from sending "
    "the request to the first piece, with the queue.",
    "longest wait: of any request, for its first piece, the next one or the end. least share: "
    "tokens of the client that got fewest, of the mean. client CPU: of the busiest process of "
    "clients; near 1 the clients are the bottleneck.",
    "engine alone: the same closed loop in one process and one thread, without server and clients; "
    "another thread reads the next requests ahead. of the engine's: the clients' tokens/s by its.",
    "KV, running, waiting: of /metrics, each half second. End: after the last answer, when the "
    "server still has the conversations that later requests can continue. RSS: of the server's "
    "processes.",
]


def words_of_tokens(server: Server, tokens: int) -> int:
    """Return how many words a prompt needs to have about ``tokens`` tokens at a server."""
    few, many = 50, 250
    counts = [
        server.prompt_tokens(Prompt("text", [text(words(count, 0))])) for count in (few, many)
    ]
    return max(1, round(few + (tokens - counts[0]) * (many - few) / (counts[1] - counts[0])))


def prompts(kinds: Sequence[str], count: int) -> list[Prompt]:
    """Create prompts in which the kinds take turns.

    Args:
        kinds: kinds of prompts, from ``KINDS``.
        count: number of words in a text.
    """
    made = []
    for place in range(_VARIANTS):
        for kind in kinds:
            if kind == "text":
                parts = [text(words(count, place))]
            elif kind == "pictures":
                cards = [CARDS[(place * 2 + at) % len(CARDS)] for at in range(1 + place % 4)]
                question = text(f"What is the code in picture {len(cards)}?")
                parts = [*(image(card.read_bytes()) for card in cards), question]
            else:
                clips = [CLIPS[(place * 2 + at) % len(CLIPS)] for at in range(1 + place % 2)]
                question = text(f"What was said in clip {len(clips)}?")
                parts = [*(sound(clip.read_bytes()) for clip in clips), question]
            made.append(Prompt(kind, parts))
    return made


def answered_kinds(server: Server, kinds: Sequence[str]) -> list[str]:
    """Return the kinds of prompts that a server answers; this also warms up the server."""
    answered = []
    for kind in kinds:
        try:
            server.prompt_tokens(prompts([kind], _WORDS)[0], new_tokens=8)
            answered.append(kind)
        except openai.BadRequestError as error:
            print(f"no {kind}: {error.message}")
    return answered


def milliseconds(times: Sequence[float], share: float) -> float | None:
    """Return a percentile of times in seconds, converted to milliseconds."""
    return round(float(np.percentile(times, share)) * 1000, 1) if times else None


def figures(exchanges: Sequence[Exchange], seconds: float, clients: int) -> dict[str, Any]:
    """Compute the figures of a run as observed by the clients.

    Args:
        exchanges: all exchanges of a run.
        seconds: time during which clients sent requests, in seconds.
        clients: number of clients in a closed loop; 0 for Poisson arrivals.
    """
    begin = WARM_UP * seconds
    firsts: list[float] = []
    gaps: list[float] = []
    tokens: defaultdict[int, float] = defaultdict(float)
    longest = 0.0
    for exchange in exchanges:
        pieces = exchange.pieces
        moments = [exchange.sent, *pieces, exchange.ended]
        longest = max(longest, *(after - before for before, after in pairwise(moments)))
        steady = [at for at in pieces if begin <= at < seconds]
        gaps += [b - a for a, b in pairwise(pieces) if begin <= b < seconds]
        if steady and steady[0] == pieces[0]:
            firsts.append(pieces[0] - exchange.sent)
        if steady:
            tokens[exchange.client] += len(steady) * exchange.tokens / len(pieces)
    total = sum(tokens.values())
    row = {
        "requests": len(exchanges),
        "by status": dict(sorted(Counter(exchange.status for exchange in exchanges).items())),
        "ended early": sum(x.status == "200" and x.tokens < x.asked for x in exchanges),
        "tokens/s": round(total / (seconds - begin), 1),
        "first token p50 ms": milliseconds(firsts, 50),
        "first token p99 ms": milliseconds(firsts, 99),
        "between tokens p50 ms": milliseconds(gaps, 50),
        "between tokens p99 ms": milliseconds(gaps, 99),
        "longest wait s": round(longest, 2),
    }
    if gaps:
        row["p99 / p50"] = round(float(np.percentile(gaps, 99) / np.percentile(gaps, 50)), 2)
    if clients and total:
        row["least share"] = round(min(tokens[at] for at in range(clients)) * clients / total, 2)
    return row


def measure(
    server: Server,
    messages: Sequence[Prompt],
    *,
    new_tokens: int,
    seconds: float,
    clients: int = 0,
    rate: float = 0.0,
    leave: float = 0.0,
    processes: int = 1,
    greedy: int = 0,
) -> dict[str, Any]:
    """Put a server under load, and return a row of the table.

    Args:
        server: server under test.
        messages: messages that clients send in turn.
        new_tokens: requested tokens per answer.
        seconds: time during which clients send requests, in seconds.
        clients: number of clients in a closed loop; 0 for Poisson arrivals.
        rate: Poisson arrivals per second.
        leave: share of requests whose client disconnects at a random token.
        processes: maximum number of client processes.
        greedy: number of requests that another user keeps open meanwhile, in a process of its own;
            they do not count. Requires ``clients``.
    """
    processes = min(processes, clients or processes)
    edges = [clients * place // processes for place in range(processes + 1)]
    # Use a new seed, so that a prefix cache does not contain the texts of an earlier run.
    seed = random.SystemRandom().getrandbits(32)
    loads = [
        Load(
            *(f"{server.root}/v1", server.key, server.model, server.options),
            *([*messages], new_tokens, seconds, edges[place + 1] - edges[place]),
            *(rate / processes, leave, edges[place], seed + place),
        )
        for place in range(processes)
    ]
    if greedy:
        other = {"clients": greedy, "first": -greedy, "leave": 0.0, "seed": seed + processes}
        options = server.options | {"user": "greedy"}
        loads.append(replace(loads[0], options=options, **other))
    with watch(server) as snapshots:
        done = traffic(loads)
    if greedy:
        done.exchanges = [exchange for exchange in done.exchanges if exchange.client >= 0]
    name = f"{clients} client{'s' * (clients > 1)}" if clients else f"{rate:g} requests/s"
    name += f", {greedy} requests of another user" if greedy else ""
    row = {"run": f"{name}, {leave:.0%} leave" if leave else name}
    row |= figures(done.exchanges, seconds, clients) | server_figures(snapshots)
    return row | {"client CPU": round(done.cpu, 2)}


def engine_alone(pipe: Pipeline, texts: Sequence[str], loop: Loop) -> dict[str, Any]:
    """Measure the row of a closed loop in this process, see ``benchmarks.client_loop.ours``."""
    speed = ours(pipe, texts, loop)["tokens/s"]
    return {"run": f"{loop.clients} answers, engine alone", "tokens/s": speed}


def table(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table with the rows, and verdicts."""

    def line(row: dict[str, Any]) -> list[str]:
        first, between = (
            f"{row[f'{name} p50 ms']} / {row[f'{name} p99 ms']}"
            for name in ("first token", "between tokens")
        )
        speeds = [row["tokens/s"], row.get("speedup", "-"), first, between]
        waits = [row.get("p99 / p50", "-"), row["longest wait s"], row.get("least share", "-")]
        kv = sum(row["KV bytes peak"].values()) / 1e6 if "KV bytes peak" in row else None
        sizes = ["-" if kv is None else f"{kv:.1f}", row.get("RSS MB peak", "-")]
        return [str(x) for x in (row["run"], row["requests"], *speeds, *waits, *sizes)]

    columns = ("run", "requests", "tokens/s", "speedup", "first p50 / p99", "between p50 / p99")
    more = ("ratio", "longest s", "least", "KV MB", "RSS MB")
    served = [row for row in rows if "requests" in row]
    show("Load, times in ms", (*columns, *more), map(line, served))
    for row in rows:
        if (share := row.get("of the engine's")) is not None:
            verdict = "met" if share >= SHARE else "NOT met"
            print(f"{row['run']}: {share:.2f} of the engine's own, at least {SHARE}: {verdict}")
    for row in served:
        names = ("by status", "ended early", "running peak", "waiting peak", "KV bytes peak")
        names += ("running end", "waiting end", "KV bytes end", "server's means ms", "client CPU")
        print(row["run"], {name: row[name] for name in names if name in row})


@contextmanager
def answering(
    url: str | None, model: str, device: str, tiny: bool, options: Sequence[str]
) -> Iterator[Server]:
    """Within the block, provide the server at ``url`` or, if that is None, a server of our own.

    The answers of our own server end only at their limit.
    """
    if url is not None:
        yield Server(url)
        return
    further = ("--model", model, "--device", device, *["--tiny"] * tiny, *options)
    with serving(*further, endless=True) as clients:
        yield Server(f"http://127.0.0.1:{clients.port}", clients.server)


def main(arguments: Sequence[str]) -> int:
    """Measure a run for each number of clients and each rate.

    Returns:
        The exit code; 2 if the server answers no kind of prompt.
    """
    line = parser("benchmarks.load", __doc__)
    line.add_argument("--against", metavar="URL", help="URL of a running server to measure instead")
    line.add_argument(
        "--model",
        default="pocket-omni",
        help="bundled model, or full-size model with random weights",
    )
    line.add_argument("--tiny", action="store_true", help="trial run with a tiny random model")
    line.add_argument(
        "--serve-options", default="", help='options of our server, e.g. "--running 64"'
    )
    line.add_argument("--device", choices=("cpu", "cuda"), help="device of the server")
    line.add_argument(
        "--clients", help=f"numbers of closed-loop clients; default without --rate: {CLIENTS}"
    )
    line.add_argument(
        "--greedy", type=int, default=0, help="requests that another user keeps open meanwhile"
    )
    line.add_argument("--rate", help="arrivals per second, comma-separated")
    line.add_argument("--leave", type=float, default=0.0, help="share of clients that disconnect")
    line.add_argument(
        "--prompts", default=",".join(KINDS), help="kinds of prompts, comma-separated"
    )
    line.add_argument("--prompt-tokens", type=int, help="tokens of text prompts")
    line.add_argument("--new-tokens", type=int, default=64, help="tokens of each answer")
    line.add_argument("--seconds", type=float, default=60.0, help="seconds of each run")
    line.add_argument(
        "--engine", action="store_true", help="also run without a server, with text prompts only"
    )
    line.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) // 4))
    line.add_argument("--add", action="store_true", help="keep the file's rows of other runs")
    options = line.parse_args(arguments)
    kinds = options.prompts.split(",")
    if unknown := set(kinds) - set(KINDS):
        line.error(f"unknown prompts: {', '.join(sorted(unknown))}; choose from {', '.join(KINDS)}")
    if not 0 <= options.leave <= 1:
        line.error("--leave must be from 0 to 1")
    closed = options.clients or ("" if options.rate else CLIENTS)
    runs: list[dict[str, Any]] = [{"clients": int(count)} for count in closed.split(",") if count]
    runs += [{"rate": float(rate)} for rate in (options.rate or "").split(",") if rate]
    if any(value <= 0 for run in runs for value in run.values()):
        line.error("--clients and --rate must be above 0")
    if options.greedy < 0 or (options.greedy and options.rate):
        line.error("--greedy must not be negative, and requires --clients instead of --rate")
    if options.engine and (options.against or kinds != ["text"] or options.rate):
        line.error("--engine requires --clients and --prompts text, and excludes --against")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    further = shlex.split(options.serve_options)
    rows: list[dict[str, Any]] = []
    with answering(options.against, options.model, device, options.tiny, further) as server:
        kinds = answered_kinds(server, kinds)
        if not kinds:
            return 2
        count = _WORDS
        if options.prompt_tokens:
            count = words_of_tokens(server, options.prompt_tokens)
        messages = prompts(kinds, count)
        facts = {
            "server": server.maker,
            "model": f"{server.model}{', tiny' * options.tiny}",
            "options": options.serve_options,
            "prompts": ",".join(kinds),
            "prompt tokens": options.prompt_tokens,
            "new tokens": options.new_tokens,
            "seconds": options.seconds,
        }
        for run in runs:
            row = measure(
                server,
                messages,
                new_tokens=options.new_tokens,
                seconds=options.seconds,
                leave=options.leave,
                processes=options.processes,
                greedy=options.greedy,
                **run,
            )
            rows.append(facts | row)
            single = next((x["tokens/s"] for x in rows if x["run"].startswith("1 client")), 0)
            if single and run.get("clients", 0) > 1:
                rows[-1]["speedup"] = round(row["tokens/s"] / single, 2)
            print(f"{row['run']}: {row['tokens/s']} tokens/s", flush=True)
    if options.engine:
        pipe = endless_pipeline(options.model, tiny=options.tiny, device=device)
        texts = [str(message.content[-1]["text"]) for message in messages]
        lengths = options.prompt_tokens or 0, options.new_tokens, options.seconds
        for run, row in zip(runs, list(rows), strict=True):
            loop = Loop(options.model, *lengths, **run)
            rows.append(facts | engine_alone(pipe, texts, loop))
            row["of the engine's"] = round(row["tokens/s"] / rows[-1]["tokens/s"], 3)
    table(rows)
    record = Record("load", command("benchmarks.load", arguments), device_name(device), rows, NOTES)
    if options.add and (earlier := record.earlier(options.out)):
        cell = [*facts, "run"]
        record.rows = merge_rows(earlier.rows, rows, cell, lambda *_: True)
        record.command = f"{earlier.command}; {record.command}"
    finish(record, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
