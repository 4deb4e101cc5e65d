"""OpenAI server under load: streaming clients, the server's /metrics and its memory.

``traffic`` runs clients in separate processes, which need the openai package but not torch;
``main`` is the program of one such process. It reads a ``Load`` as a line of JSON from standard
input and writes "ready". Then it reads the start time (``time.monotonic``), runs the load, and
writes a ``Traffic`` as a line of JSON to standard output.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 600.0
_LEAD_S = 0.2
"""Seconds from the time when all processes are ready to the start of a load."""
_RETRY_S = 0.5
"""Seconds that a client waits after a refused request before it sends the next one."""
_POLL_S = 0.5
"""Seconds between two snapshots of the server."""
_IDLE_S = 10.0
"""Maximum seconds for a server to end all requests after the last client has disconnected."""
_RUNNING = ("oscar_mm_running", "vllm:num_requests_running")
_WAITING = ("oscar_mm_waiting", "vllm:num_requests_waiting")
_TIMES = {
    "first token": ("oscar_mm_first_token_seconds", "vllm:time_to_first_token_seconds"),
    "between tokens": ("oscar_mm_inter_token_seconds", "vllm:inter_token_latency_seconds"),
}
"""Names of metrics in our server and in vLLM."""


@dataclass
class Prompt:
    """User message of a request.

    Attributes:
        kind: kind of the content, such as "pictures".
        content: parts in OpenAI's format; the last one is the text.
    """

    kind: str
    content: list[dict[str, Any]]


@dataclass
class Load:
    """Requests that one process sends.

    Attributes:
        url: URL of the server, with /v1.
        key: API key of the server.
        model: name of the model at the server.
        options: further fields of each request.
        prompts: messages that each client sends in turn. A random number is added to each text, so
            that no two requests are the same.
        new_tokens: requested tokens per answer.
        seconds: time during which clients send requests, in seconds.
        clients: number of clients in a closed loop, each of which sends its next request when the
            previous one has ended; 0 for Poisson arrivals.
        rate: Poisson arrivals per second.
        leave: share of requests whose client disconnects at a random token.
        first: number of the first client.
        seed: seed for the arrivals, the tokens at which clients disconnect, and the numbers in
            texts.
    """

    url: str
    key: str
    model: str
    options: dict[str, Any]
    prompts: list[Prompt]
    new_tokens: int
    seconds: float
    clients: int = 0
    rate: float = 0.0
    leave: float = 0.0
    first: int = 0
    seed: int = 0


@dataclass
class Exchange:
    """Request and its answer, as observed by the client; times are seconds since the start.

    Attributes:
        client: number of the client; -1 with Poisson arrivals.
        kind: kind of the prompt.
        asked: number of requested tokens.
        sent: time at which the request was sent.
        pieces: times at which pieces of text arrived.
        ended: time at which the stream ended.
        tokens: number of tokens of the answer as reported by the server, or number of pieces if the
            answer is incomplete.
        status: HTTP status, "left" if the client disconnected, "broken" if the stream ended early.
    """

    client: int
    kind: str
    asked: int
    sent: float
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0
    tokens: int = 0
    status: str = "broken"


@dataclass
class Traffic:
    """Result of a load.

    Attributes:
        exchanges: requests with their answers.
        cpu: CPU seconds per second that a process of clients used; near 1, the clients themselves
            slow down what they measure.
    """

    exchanges: list[Exchange]
    cpu: float


class StreamingClients:
    """Streaming clients that share one event loop.

    Args:
        load: requests of the clients.
        start: start time, on the clock of ``time.monotonic``.
    """

    def __init__(self, load: Load, start: float) -> None:
        self.load, self.start = load, start
        self.random = random.Random(load.seed)
        self.exchanges: list[Exchange] = []
        self._api = openai.AsyncOpenAI(
            base_url=load.url, api_key=load.key, max_retries=0, timeout=TIMEOUT_S
        )

    async def run(self) -> list[Exchange]:
        """Send requests for the duration of the load, and wait for the answers."""
        await asyncio.sleep(self.start - time.monotonic())
        async with self._api:
            if self.load.clients:
                numbers = range(self.load.first, self.load.first + self.load.clients)
                await asyncio.gather(*map(self._closed_loop, numbers))
            else:
                await self._arrivals()
        return self.exchanges

    def _now(self) -> float:
        return time.monotonic() - self.start

    async def _closed_loop(self, client: int) -> None:
        # The first answers have different lengths, so that clients do not stay synchronized.
        new_tokens = self.random.randint(1, self.load.new_tokens)
        number = client
        while self._now() < self.load.seconds:
            exchange = await self._exchange(client, number, new_tokens)
            if exchange.status not in ("200", "left"):
                await asyncio.sleep(_RETRY_S)
            number, new_tokens = number + 1, self.load.new_tokens

    async def _arrivals(self) -> None:
        at, exchanges = self.random.expovariate(self.load.rate), []
        while at < self.load.seconds:
            await asyncio.sleep(at - self._now())
            exchange = self._exchange(-1, len(exchanges), self.load.new_tokens)
            exchanges.append(asyncio.ensure_future(exchange))
            at += self.random.expovariate(self.load.rate)
        await asyncio.gather(*exchanges)

    async def _exchange(self, client: int, number: int, new_tokens: int) -> Exchange:
        load = self.load
        prompt = load.prompts[number % len(load.prompts)]
        *media, question = prompt.content
        text = f"{self.random.getrandbits(32):08x} {question['text']}"
        leaves = self.random.random() < load.leave
        most = self.random.randint(1, new_tokens) if leaves else sys.maxsize
        message: Any = {"role": "user", "content": [*media, question | {"text": text}]}
        exchange = Exchange(client, prompt.kind, new_tokens, self._now())
        self.exchanges.append(exchange)
        pieces, counted = exchange.pieces, None
        try:
            stream = await self._api.chat.completions.create(
                model=load.model,
                messages=[message],
                max_tokens=new_tokens,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=load.options,
            )
            async with stream:
                async for event in stream:
                    if event.usage is not None:
                        counted = event.usage.completion_tokens
                    delta = event.choices[0].delta if event.choices else None
                    if delta and (delta.content or getattr(delta, "reasoning_content", None)):
                        pieces.append(self._now())
                        if len(pieces) >= most:
                            break
            exchange.status = "200" if counted else "left" if len(pieces) >= most else "broken"
        except openai.APIStatusError as error:
            exchange.status = str(error.status_code)
        except openai.APIError:
            pass  # The connection or the stream has failed.
        exchange.tokens, exchange.ended = counted or len(pieces), self._now()
        return exchange


def traffic(loads: Sequence[Load]) -> Traffic:
    """Run loads concurrently, each in its own process, and return the combined result.

    Returns:
        The exchanges of all processes, and the largest CPU usage of a process.

    Raises:
        RuntimeError: if a process failed.
    """
    line = [sys.executable, "-c", "from benchmarks.openai_server import main; main()"]
    exchanges, cpu = [], 0.0
    with ExitStack() as opened:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes = [opened.enter_context(subprocess.Popen(line, **pipes)) for _ in loads]
        for process, load in zip(processes, loads, strict=True):
            _tell(process, json.dumps(asdict(load)))
        for process in processes:
            _hear(process)
        start = time.monotonic() + _LEAD_S
        for process in processes:
            _tell(process, str(start))
        for process in processes:
            part = json.loads(_hear(process))
            exchanges += [Exchange(**exchange) for exchange in part["exchanges"]]
            cpu = max(cpu, part["cpu"])
    return Traffic(exchanges, cpu)


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def _hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of clients failed with exit code {process.wait()}")
    return line


def main() -> None:
    """Run the load that is read from standard input."""
    plan = json.loads(sys.stdin.readline())
    load = Load(**plan | {"prompts": [Prompt(**prompt) for prompt in plan["prompts"]]})
    print("ready", flush=True)
    clients = StreamingClients(load, float(sys.stdin.readline()))
    cpu, start = time.process_time(), time.monotonic()
    exchanges = asyncio.run(clients.run())
    busy = (time.process_time() - cpu) / (time.monotonic() - start)
    print(json.dumps(asdict(Traffic(exchanges, busy))))


@dataclass
class Snapshot:
    """State of a server at one point in time; missing figures are None or empty.

    Attributes:
        running, waiting: numbers of running and waiting requests.
        kv: bytes of the KV cache by modality.
        times: sum and count of the server's own timings, by name.
        rss: resident memory of the server's processes, in bytes.
    """

    running: int | None = None
    waiting: int | None = None
    kv: dict[str, int] = field(default_factory=dict)
    times: dict[str, tuple[float, float]] = field(default_factory=dict)
    rss: int | None = None


class Server:
    """Server under load.

    Args:
        url: URL of the server, with or without /v1.
        process: process of the server, if this benchmark has started the server.

    Attributes:
        model: name of the model at the server.
        maker: owner of the model according to the server, such as "vllm".
        options: request fields that make answers greedy and of full length.
    """

    def __init__(self, url: str, process: psutil.Process | None = None) -> None:
        self.root = url.rstrip("/").removesuffix("/v1")
        self.process = process
        self.key = os.environ.get("OPENAI_API_KEY", "none")
        self.api = openai.OpenAI(base_url=f"{self.root}/v1", api_key=self.key, timeout=TIMEOUT_S)
        card = self.api.models.list().data[0]
        self.model, self.maker = card.id, card.owned_by
        self.options: dict[str, Any] = {"temperature": 0}
        if self.maker == "vllm":
            self.options["ignore_eos"] = True

    def prompt_tokens(self, prompt: Prompt, new_tokens: int = 1) -> int:
        """Return the number of tokens of a prompt, as reported by the server."""
        answer = self.api.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": prompt.content}],  # pyright: ignore
            max_tokens=new_tokens,
            extra_body=self.options,
        )
        return answer.usage.prompt_tokens if answer.usage else 0

    def snapshot(self) -> Snapshot:
        """Return the current state of the server, from its metrics and its processes."""
        values: defaultdict[str, float] = defaultdict(float)
        kv: dict[str, int] = {}
        request = urllib.request.Request(
            f"{self.root}/metrics", headers={"Authorization": f"Bearer {self.key}"}
        )
        with suppress(OSError, ValueError):
            page = urllib.request.urlopen(request, timeout=30).read().decode()
            for family in text_string_to_metric_families(page):
                for sample in family.samples:
                    values[sample.name] += sample.value
                    if sample.name == "oscar_mm_kv_bytes":
                        kv[sample.labels["modality"]] = int(sample.value)

        def total(names: Sequence[str]) -> float | None:
            return next((values[name] for name in names if name in values), None)

        running, waiting = total(_RUNNING), total(_WAITING)
        times = {}
        for name, metrics in _TIMES.items():
            counted = [total([f"{x}_{part}" for x in metrics]) for part in ("sum", "count")]
            if counted[1] is not None:
                times[name] = (counted[0] or 0.0, counted[1])
        return Snapshot(
            None if running is None else int(running),
            None if waiting is None else int(waiting),
            kv,
            times,
            self._rss(),
        )

    def _rss(self) -> int | None:
        if self.process is None:
            return None
        size = 0
        for process in (self.process, *self.process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                size += process.memory_info().rss
        return size


@contextmanager
def watch(server: Server) -> Iterator[list[Snapshot]]:
    """Within the block, take snapshots of a server; after the block, the list is complete."""
    snapshots, finished = [server.snapshot()], threading.Event()

    def look() -> None:
        while not finished.wait(_POLL_S):
            snapshots.append(server.snapshot())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield snapshots
    finally:
        finished.set()
        watcher.join()
    deadline = time.monotonic() + _IDLE_S
    while (last := server.snapshot()).running and time.monotonic() < deadline:
        time.sleep(0.05)
    snapshots.append(last)


def server_figures(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """Summarize snapshots of a server: peak values, and values after the last answer."""
    before, after = snapshots[0], snapshots[-1]
    fullest = max(snapshots, key=lambda snapshot: sum(snapshot.kv.values()))
    row: dict[str, Any] = {}
    for name in ("running", "waiting"):
        seen = [getattr(one, name) for one in snapshots if getattr(one, name) is not None]
        if seen:
            row |= {f"{name} peak": max(seen), f"{name} end": seen[-1]}
    if after.kv:
        row |= {"KV bytes peak": fullest.kv, "KV bytes end": after.kv}
    means = {}
    for name, (seconds, count) in after.times.items():
        old_seconds, old_count = before.times.get(name, (0.0, 0.0))
        if count > old_count:
            means[name] = round((seconds - old_seconds) / (count - old_count) * 1000, 2)
    if means:
        row["server's means ms"] = means
    sizes = [one.rss >> 20 for one in snapshots if one.rss is not None]
    if sizes:
        row |= {"RSS MB before": sizes[0], "RSS MB peak": max(sizes), "RSS MB end": sizes[-1]}
    return row
