"""Clients of an OpenAI server that stream answers: what one process of `benchmarks.load` runs.

``traffic`` runs these processes, which need the openai package and no torch. Standard input has a
``Load`` as a line of JSON and, after the process has written "ready", the time at which to begin
(``time.monotonic``). Standard output then has a ``Traffic`` as a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import openai

TIMEOUT_S = 600.0
_LEAD_S = 0.2
"""Seconds from the last process that is ready to the beginning of a load."""
_RETRY_S = 0.5
"""Seconds after which a refused client sends its next request."""


@dataclass
class Prompt:
    """The message of a request.

    Attributes:
        kind: what it has, such as "pictures".
        content: its parts as the protocol has them; the last is the text.
    """

    kind: str
    content: list[dict[str, Any]]


@dataclass
class Load:
    """Requests of one process.

    Attributes:
        url: address of the server, with /v1.
        key: the server's key.
        model: the model's name at the server.
        options: further fields of each request.
        prompts: messages; each client sends them in turn, with a number in their text, so that no
            two requests are the same.
        new_tokens: tokens that each request asks for.
        seconds: time in which clients send requests.
        clients: clients in a closed loop, each of which sends its next request when the last one
            has ended; 0 for Poisson arrivals.
        rate: arrivals per second.
        leave: share of requests whose client leaves at a random token.
        first: number of the first client.
        seed: of arrivals, of the tokens at which clients leave, and of the numbers in texts.
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
    """A request and its answer as the client sees them.

    Attributes:
        client: number of the client; -1 with Poisson arrivals.
        kind: of the prompt.
        asked: tokens that it asks for.
        sent: when the request was sent, in seconds since the beginning.
        pieces: when each piece of text arrived.
        ended: when the stream ended.
        tokens: tokens of the answer by the server's count; of an incomplete one its pieces.
        status: of HTTP, "left" if the client has left, "broken" if the stream ended too early.
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
    """What a process did.

    Attributes:
        exchanges: its requests.
        cpu: CPU seconds that it took per second; near 1 it slows what it measures.
    """

    exchanges: list[Exchange]
    cpu: float


class StreamingClients:
    """Clients that share one event loop.

    Args:
        load: their requests.
        start: when they begin, of ``time.monotonic``.
    """

    def __init__(self, load: Load, start: float) -> None:
        self.load, self.start = load, start
        self.random = random.Random(load.seed)
        self.exchanges: list[Exchange] = []
        self._api = openai.AsyncOpenAI(
            base_url=load.url, api_key=load.key, max_retries=0, timeout=TIMEOUT_S
        )

    async def run(self) -> list[Exchange]:
        """Send requests for as long as the load says, and wait for the answers."""
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
        # The first answers differ in length, so that clients do not stay in step.
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
            pass  # the connection or the stream broke
        exchange.tokens, exchange.ended = counted or len(pieces), self._now()
        return exchange


def traffic(loads: Sequence[Load]) -> Traffic:
    """Run loads at once, each in a process of its own.

    Returns:
        all their exchanges, and the largest share of a CPU.

    Raises:
        RuntimeError: a process failed.
    """
    line = [sys.executable, "-c", "from benchmarks.streaming_clients import main; main()"]
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
        raise RuntimeError(f"the clients ended with {process.wait()}")
    return line


def main() -> None:
    """Run the load of standard input."""
    plan = json.loads(sys.stdin.readline())
    load = Load(**plan | {"prompts": [Prompt(**prompt) for prompt in plan["prompts"]]})
    print("ready", flush=True)
    clients = StreamingClients(load, float(sys.stdin.readline()))
    cpu, start = time.process_time(), time.monotonic()
    exchanges = asyncio.run(clients.run())
    busy = (time.process_time() - cpu) / (time.monotonic() - start)
    print(json.dumps(asdict(Traffic(exchanges, busy))))
