"""Measure how a client's long prompts delay another client's short questions in `oscar-mm serve`.

python -m benchmarks.long_prompts [--model pocket-vl] [--device cuda] [--chunks 1024,65536]

For each value of --chunks, a server is started with this value as its --prefill-chunk. The server
inherits OMP_NUM_THREADS.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.random_model import words
from benchmarks.record import Record, command, device_name, finish, merge_rows, parser, show
from benchmarks.serving import serving
from oscar_mm.thread_pool import thread_count

_ALONE = 5
"""Number of short questions to ask before the long prompt."""


NOTES = [
    "long: seconds from sending a request to its answer of one token. alone: while nobody else "
    "asks. beside: while another client sends short questions one after another, each of which no "
    "other request has, for an answer of one token.",
    "short: what these wait, in seconds; idle: before the long prompt.",
    "chunk: --prefill-chunk; one as long as the context reads every prompt in one go. tokens: of "
    "the long prompt, by the server's count.",
]

Messages = list[dict[str, str]]


def said(role: str, content: str) -> dict[str, str]:
    """Return a chat message in the format of OpenAI's API."""
    return {"role": role, "content": content}


def one_prompt() -> Messages:
    """Return a question that has 13,208 tokens with pocket-vl."""
    return [said("user", words(4500, 0)[:18_060])]


def told_answer() -> Messages:
    """Return a conversation that contains a long answer which the server did not generate."""
    return [said("user", "Go on."), said("assistant", words(14_000, 1)[:60_000]), said("user", "?")]


def told_turns() -> Messages:
    """Return a conversation with many earlier turns that are not in the server's cache."""
    turns = [(said("user", f"Q{at}?"), said("assistant", f"A{at}.")) for at in range(2000)]
    return [*(one for turn in turns for one in turn), said("user", "?")]


PROMPTS: dict[str, Callable[[], Messages]] = {
    "a prompt": one_prompt,
    "a told answer": told_answer,
    "told turns": told_turns,
}
_numbers = count()


def ask(port: int, messages: Messages) -> tuple[float, int]:
    """Send a request for a one-token answer that no cached prefix can speed up.

    Returns:
        The seconds until the answer, and the number of tokens of the prompt.
    """
    body = {"messages": messages, "max_tokens": 1, "temperature": 0}
    body |= {"cache_salt": f"benchmark {next(_numbers)}"}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    start = perf_counter()
    with urllib.request.urlopen(request, timeout=600) as reply:
        usage = json.load(reply)["usage"]
    return perf_counter() - start, usage["prompt_tokens"]


def short(port: int) -> float:
    """Ask a short question, and return the seconds until the answer."""
    return ask(port, [said("user", f"What is {next(_numbers)}?")])[0]


def beside(port: int, long: Future[Any]) -> list[float]:
    """Ask short questions one after another while a long prompt runs; return their seconds."""
    waits = []
    while not long.done():
        waits.append(short(port))
    return waits


def measure(port: int, messages: Messages) -> dict[str, Any]:
    """Measure a long prompt, alone and while short questions are asked, and return a row."""
    short(port)
    idle = [short(port) for _ in range(_ALONE)]
    alone, tokens = ask(port, messages)
    with ThreadPoolExecutor(1) as other:
        waits = beside(port, long := other.submit(ask, port, messages))
    return {
        "tokens": tokens,
        "long alone": round(alone, 3),
        "long beside": round(long.result()[0], 3),
        "short idle": round(median(idle), 3),
        "short median": round(median(waits), 3),
        "short longest": round(max(waits), 3),
        "short asked": len(waits),
    }


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark: measure each prompt with each chunk size; return the exit code."""
    line = parser("benchmarks.long_prompts", __doc__)
    line.add_argument("--model", default="pocket-vl")
    line.add_argument("--device", default="cpu", help="device of the model: cpu or cuda")
    line.add_argument(
        "--chunks", default="1024,65536", help="values of --prefill-chunk, comma-separated"
    )
    line.add_argument(
        "--prompts", default=",".join(PROMPTS), help="kinds of prompts, comma-separated"
    )
    line.add_argument("--add", action="store_true", help="keep the file's rows of other runs")
    options = line.parse_args(arguments)
    kinds = options.prompts.split(",")
    if unknown := set(kinds) - PROMPTS.keys():
        line.error(f"--prompts: unknown kinds: {', '.join(sorted(unknown))}")
    rows: list[dict[str, Any]] = []
    for chunk in options.chunks.split(","):
        further = ("--model", options.model, "--device", options.device, "--prefill-chunk", chunk)
        with serving(*further) as clients:
            for kind in kinds:
                rows.append({"chunk": int(chunk), "prompt": kind})
                rows[-1] |= measure(clients.port, PROMPTS[kind]())
                print(rows[-1], flush=True)
    columns = list(rows[0])
    show("Long prompts, seconds", columns, ([str(row[name]) for name in columns] for row in rows))
    extra = {"model": options.model, "threads": thread_count()}
    where, device = command("benchmarks.long_prompts", arguments), device_name(options.device)
    record = Record("long_prompts", where, device, rows, NOTES, extra)
    if options.add and (earlier := record.earlier(options.out)):
        record.rows = merge_rows(earlier.rows, rows, ["chunk", "prompt"], lambda *_: True)
        record.command = f"{earlier.command}; {record.command}"
    finish(record, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
