"""The largest pictures of every format at once: memory, other clients, answers."""

import io
import json
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from tests.apps.serve.conftest import image, text, user
from tests.apps.serve.test_command import running
from tests.processes import command

SIZE = 5600, 2800
"""A third of the pixels that are allowed, so that this takes seconds; 10000 x 5000 pass too."""
KINDS = [
    *(("JPEG", mode, {"progressive": True}) for mode in ("RGB", "CMYK")),
    *(("PNG", mode, {}) for mode in ("1", "P", "LA", "RGBA", "I;16")),
    *(("WEBP", "RGBA", {"lossless": lossless}) for lossless in (True, False)),
    *(("TIFF", mode, {"compression": "tiff_deflate"}) for mode in ("RGBA", "F")),
    *(("GIF", "P", {}), ("AVIF", "RGBA", {}), ("JPEG2000", "L", {}), ("ICO", "RGBA", {})),
]
MEDIA = Path(__file__).parents[3] / "examples" / "media"
CONTENTS = json.loads((MEDIA / "contents.json").read_text())["cards"]
CARDS = [card for card, code in CONTENTS.items() if isinstance(code, str)]
CLIENTS = 32
DECODING = 1 << 30
"""Bytes that decoding takes, as docs/serving.md says."""
BESIDE = 400 << 20
"""Bytes that requests, the model and Python's allocator take beside what decoding takes."""
STALLS = 3
"""Answers of /health that a busy machine may delay; a loop that decodes delays one a picture."""
ASKING_FOR_HEALTH = """
import sys, time, urllib.request
while True:
    start = time.monotonic()
    with urllib.request.urlopen(sys.argv[1], timeout=60) as reply:
        assert reply.read() == b"ok"
    print(time.monotonic() - start, flush=True)
    time.sleep(0.02)
"""


def picture(card: str, kind: str, mode: str, options: dict[str, object]) -> bytes:
    """A card of the examples, enlarged: few bytes of many pixels."""
    with Image.open(MEDIA / "cards" / f"{card}.png") as file:
        large = file.convert("RGB").resize(SIZE, Image.Resampling.NEAREST)
    if mode == "I;16":
        large = Image.fromarray(np.asarray(large.convert("L"), np.uint16) * np.uint16(257))
    encoded = io.BytesIO()
    large.convert(mode).save(encoded, "PNG" if kind == "ICO" else kind, **options)
    data = encoded.getvalue()
    if kind == "ICO":
        return struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(data), 22) + data
    return data


def asking(data: bytes) -> bytes:
    message = user(image(data), text("What is the code?"))
    return json.dumps({"messages": [message], "max_tokens": 12, "temperature": 0}).encode()


def answer(address: str, body: bytes) -> str:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
    request = urllib.request.Request(f"{address}/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=250) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


@contextmanager
def repeated(act: Callable[[], None], pause_s: float) -> Iterator[None]:
    """Call a function again and again in another thread while the block runs."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(pause_s):
            act()

    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(work)
        try:
            yield
        finally:
            ended.set()
        done.result()


@contextmanager
def health_waits(address: str) -> Iterator[list[float]]:
    """Seconds in which /health answers while the block runs; complete after it.

    Another process asks, which 32 clients do not keep from looking at the clock.
    """
    waits = list[float]()
    line = [sys.executable, "-c", ASKING_FOR_HEALTH, f"{address}/health"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        waits.append(float(asking.stdout.readline()))
        try:
            yield waits
        finally:
            ended = asking.poll()
            asking.terminate()
        waits += map(float, asking.stdout)
    assert ended is None, "each answer is ok"


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and of the processes that it has started.

    A child that has not begun its own program yet has its parent's command line and its memory,
    which is not counted twice.
    """
    process = psutil.Process(pid)
    line, total = process.cmdline(), process.memory_info().rss
    for child in process.children(recursive=True):
        try:
            total += child.memory_info().rss if child.cmdline() != line else 0
        except psutil.NoSuchProcess:
            continue
    return total


@pytest.mark.slow
def test_many_clients_with_the_largest_pictures(tmp_path) -> None:
    cards = [CARDS[number % len(CARDS)] for number in range(len(KINDS))]
    bodies = [asking(picture(card, *kind)) for card, kind in zip(cards, KINDS, strict=True)]
    codes = [CONTENTS[card] for card in cards]
    peaks = list[int]()
    with running(command, "pocket-vl", tmp_path) as (server, client):
        address = str(client.base_url).removesuffix("/v1/")
        assert answer(address, bodies[0]) == codes[0]
        before = resident_bytes(server.pid)
        with (
            health_waits(address) as waits,
            repeated(lambda: peaks.append(resident_bytes(server.pid)), 0.02),
            ThreadPoolExecutor(CLIENTS) as clients,
        ):
            asked = [number % len(bodies) for number in range(CLIENTS)]
            answers = clients.map(lambda one: answer(address, bodies[one]), asked)
            assert [*answers] == [codes[one] for one in asked]
        assert max(peaks) < before + DECODING + BESIDE
        slowest = sorted(waits)[::-1]
        assert slowest[STALLS] < 0.5 and slowest[0] < 5
        deadline = time.monotonic() + 10
        while resident_bytes(server.pid) > before + BESIDE:
            assert time.monotonic() < deadline, "memory goes back after a burst"
            time.sleep(0.2)
