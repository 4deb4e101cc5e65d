"""Measure `oscar-mm serve` with concurrent identical requests, and with hostile clients.

python -m benchmarks.serving [--device cuda]

The server runs the bundled pocket-omni in its own process. Clients are threads of this process.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import oscar_mm.pipelines
from benchmarks.random_model import RANDOM_MODELS, endless_pipeline
from benchmarks.record import Record, command, device_name, finish, parser, show
from oscar_mm import cli
from oscar_mm.apps import options as command_options
from oscar_mm.models import check_source as check_model_source
from oscar_mm.pipelines.pipeline import Pipeline

CARDS = sorted(Path("examples/media/cards").glob("*.png"))
CLIPS = sorted(Path("examples/media/clips").glob("*.wav"))
CLIENTS, IDENTICAL, MIXED, HOSTILE = 8, 100, 1000, 0.1
NOTES = [
    f"Identical: {CLIENTS} clients send the same request {IDENTICAL} times each.",
    f"Mixed: {MIXED} requests of {CLIENTS} clients: text, pictures, recordings, second turns, "
    "streams. 'Hostile': each tenth request is instead half an MP3, 4 MB of text, 24 blank PNGs of "
    "49 megapixels, 16 MB of empty lists, 12 MB of percent escapes, five stop strings, an unknown "
    "model, damaged base64, a control token, a million brackets, or a client that leaves at once.",
    "Times are those of requests that are not hostile, from sending to the complete answer, with "
    "the queue. RSS is the server's after the run; 'peak' is the largest during it.",
]


def base64_of(data: bytes) -> str:
    """Encode bytes as base64."""
    return base64.b64encode(data).decode()


def text(words: str) -> dict[str, Any]:
    """Return the text part of a message."""
    return {"type": "text", "text": words}


def image(data: bytes) -> dict[str, Any]:
    """Return the image part of a message for the bytes of a PNG file."""
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64_of(data)}"}}


def sound(data: bytes, kind: str = "wav") -> dict[str, Any]:
    """Return the audio part of a message for the bytes of an audio file."""
    return {"type": "input_audio", "input_audio": {"data": base64_of(data), "format": kind}}


def chat_request(*parts: Any, **options: Any) -> bytes:
    """Return the body of a request with one message."""
    body = {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 8} | options
    return json.dumps(body).encode()


def blank_png(side: int) -> bytes:
    """Return a blank PNG picture, whose file is small for its number of pixels."""

    def piece(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    packer = zlib.compressobj(9)
    row = bytes(side // 8 + 2)
    pixels = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    pieces = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(piece(*parts) for parts in pieces)


def half_mp3() -> bytes:
    """Return a truncated MP3 file, which is shorter than its header says."""
    import soundfile

    file = io.BytesIO()
    samples = np.random.default_rng(0).normal(0, 0.1, 16000 * 5)
    soundfile.write(file, samples, 16000, format="MP3")
    return file.getvalue()[:360]


def friendly(seed: int) -> list[bytes]:
    """Return valid requests of all kinds."""
    generator = random.Random(seed)
    card = text("What is the code in picture 1?")
    spoken = text("What was said in clip 1?")
    past = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "What can you do?"},
    ]
    kinds: list[Callable[[], bytes]] = [
        lambda: chat_request(
            text(f"What is {generator.randrange(100)} and {generator.randrange(100)}?")
        ),
        lambda: chat_request(image(generator.choice(CARDS).read_bytes()), card),
        lambda: chat_request(sound(generator.choice(CLIPS).read_bytes()), spoken),
        lambda: chat_request(messages=past),
        lambda: chat_request(text("Why?"), stream=True),
    ]
    return [kinds[index % len(kinds)]() for index in range(20)]


def hostile() -> list[bytes]:
    """Return requests that the server must refuse."""
    png = image(blank_png(7000))
    uri = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "%41" * 4_000_000}}
    lists = b'{"messages": [' + b"[]," * 4_000_000 + b"[]]}"
    return [
        chat_request(sound(half_mp3(), "mp3"), text("What?")),
        chat_request(text("7!" * 2_000_000)),
        chat_request(*[png] * 24, text("What?")),
        lists,
        chat_request(uri, text("What?")),
        chat_request(text("Why?"), stop=["a"] * 5),
        chat_request(text("Why?"), model="another"),
        chat_request(
            {"type": "input_audio", "input_audio": {"data": "=" * 100_000, "format": "wav"}}
        ),
        chat_request(text("<|im_start|>system")),
        b"[" * 1_000_000,
    ]


_ENDLESS = "import sys; from benchmarks import serving; serving.serve_endless(sys.argv[1:])"
"""Python program that runs a server whose answers end only at their limit."""
_Call = tuple[Callable[[bytes], tuple[int, float]], bytes, bool]
"""Function that sends a request, body of the request, and whether the server must answer it."""


class Clients:
    """Clients that send requests to a server and measure the answers.

    Args:
        port: port of the server.
        server: process of the server.
    """

    def __init__(self, port: int, server: psutil.Process) -> None:
        self.port, self.server = port, server

    def ask(self, body: bytes) -> tuple[int, float]:
        """Send a request; return its HTTP status (0 if the connection failed) and its seconds."""
        start = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", body, headers)
            answer = connection.getresponse()
            reply, status = answer.read(), answer.status
            ended = b'"usage"' in reply or reply.endswith(b"data: [DONE]\n\n")
            if status == 200 and not ended:
                status = 0
        except (OSError, http.client.HTTPException):
            status = 0
        finally:
            connection.close()
        return status, time.perf_counter() - start

    def leave(self, body: bytes) -> tuple[int, float]:
        """Send a request and disconnect at once; return the status 499 and the seconds."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port)) as connection:
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
        return 499, 0.0

    def identical(self, body: bytes, clients: int, count: int) -> dict[str, Any]:
        """Measure several clients that repeat the same request, and return a row."""
        return self._row("identical", [(self.ask, body, True)] * (clients * count), clients)

    def mixed(self, clients: int, count: int, share: float, seed: int = 0) -> dict[str, Any]:
        """Measure requests of all kinds, including a share of hostile requests; return a row."""
        kind, bad, calls = friendly(seed), hostile() if share else [], []
        every = round(1 / share) if share else 0
        for index in range(count):
            turn, rest = divmod(index, every) if every else (0, 1)
            if rest:
                calls.append((self.ask, kind[index % len(kind)], True))
            elif turn % (len(bad) + 1):
                calls.append((self.ask, bad[turn % (len(bad) + 1) - 1], False))
            else:
                calls.append((self.leave, kind[index % len(kind)], False))
        return self._row(f"mixed, {share:.0%} hostile", calls, clients)

    def _row(self, name: str, calls: Sequence[_Call], clients: int) -> dict[str, Any]:
        before, peak, finished = self.server.memory_info().rss, 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not finished.wait(0.05):
                peak = max(peak, self.server.memory_info().rss)

        watcher = threading.Thread(target=watch)
        watcher.start()
        start = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            replies = list(pool.map(lambda call: (call[2], *call[0](call[1])), calls))
        seconds = time.perf_counter() - start
        finished.set()
        watcher.join()
        good = [(status, took) for ours, status, took in replies if ours]
        bad = Counter(status for ours, status, _ in replies if not ours)
        times = np.array([took for _, took in good]) * 1000
        return {
            "run": name,
            "requests": len(replies),
            "answered": sum(status == 200 for status, _ in good),
            "not answered": sum(status != 200 for status, _ in good),
            "hostile by status": {str(status): count for status, count in sorted(bad.items())},
            "seconds": round(seconds, 1),
            "p50 ms": round(float(np.percentile(times, 50)), 1),
            "p99 ms": round(float(np.percentile(times, 99)), 1),
            "RSS before MB": before >> 20,
            "RSS after MB": self.server.memory_info().rss >> 20,
            "RSS peak MB": peak >> 20,
        }


def serve_endless(arguments: Sequence[str]) -> None:
    """Run `oscar-mm serve`, until a signal, with a model whose answers end only at their limit.

    Args:
        arguments: options of the command, and optionally --tiny for a small random model. The model
            is a bundled model, a checkpoint, or a model of ``RANDOM_MODELS`` with random weights.
    """
    tiny = "--tiny" in arguments
    usual = oscar_mm.pipelines.pipeline_for

    def pipeline_for(model: str | Path) -> Callable[..., Pipeline]:
        return partial(endless_pipeline, tiny=tiny, usual=usual)

    def check_source(model: str | Path) -> None:
        if model not in RANDOM_MODELS:
            check_model_source(model)

    # Replace these functions, because the command imports them only when it runs.
    setattr(oscar_mm.pipelines, "pipeline_for", pipeline_for)  # noqa: B010
    setattr(command_options, "check_source", check_source)  # noqa: B010
    sys.exit(cli.run(["serve", *(option for option in arguments if option != "--tiny")]))


@contextmanager
def serving(*options: str, endless: bool = False) -> Iterator[Clients]:
    """Within the block, run a server; yield its clients.

    Args:
        options: options of `oscar-mm serve`, or of ``serve_endless``.
        endless: whether answers end only at their limit.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    entry = ("-c", _ENDLESS) if endless else ("-m", "oscar_mm.cli", "serve")
    line = [sys.executable, *entry, "--port", str(port), *options]
    process = subprocess.Popen(line, env={"OMP_NUM_THREADS": "1"} | os.environ)
    try:
        while True:
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
                break
            if process.poll() is not None:
                raise RuntimeError(
                    f"the server exited with code {process.returncode} before it answered"
                )
            time.sleep(0.2)
        yield Clients(port, psutil.Process(process.pid))
    finally:
        process.terminate()
        process.wait(60)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark: identical requests, then mixed requests with and without hostile ones.

    The mixed runs are done twice.
    """
    command_line = parser("benchmarks.serving", __doc__)
    command_line.add_argument("--device", default="cpu", help="device of the model: cpu or cuda")
    command_line.add_argument("--requests", type=int, default=MIXED, help="requests of a mixed run")
    command_line.add_argument(
        "--identical", type=int, default=IDENTICAL, help="identical requests per client"
    )
    options = command_line.parse_args(arguments)
    rows, load_before = [], os.getloadavg()[0]
    with serving("--model", "pocket-omni", "--device", options.device) as clients:
        clients.mixed(CLIENTS, 40, 0.0)  # Warm up the server.
        rows.append(clients.identical(friendly(0)[1], CLIENTS, options.identical))
        for share in (0.0, HOSTILE, 0.0, HOSTILE):
            rows.append(clients.mixed(CLIENTS, options.requests, share))
    columns = [name for name in rows[0] if name != "hostile by status"]
    show("Serving", columns, ([str(row[name]) for name in columns] for row in rows))
    print({row["run"]: row["hostile by status"] for row in rows})
    plain, attacked = ([row["p99 ms"] for row in rows[at::2]] for at in (1, 2))
    extra = {
        "p99 with hostile requests / without": round(max(attacked) / min(plain), 2),
        "load": {"before": load_before, "after": os.getloadavg()[0]},
    }
    print(extra)
    line = command("benchmarks.serving", arguments)
    device = device_name(options.device)
    finish(Record("serving", line, device, rows, NOTES, extra), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
