"""A hundred realtime sessions, most of which interrupt their answers, leave nothing behind."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import pytest
import torch
from websockets.exceptions import ConnectionClosed

from benchmarks.profiling import allocated
from oscar_mm import OscarOmniPipeline
from oscar_mm.apps.serve.server import create_app
from oscar_mm.apps.serve.service import ServerLimits
from oscar_mm.engine.warm_up import warm_up
from tests.apps.serve.conftest import started
from tests.apps.serve.realtime.client import KEY, PUSH, RATE, Talk, connected, speech
from tests.apps.serve.stalls import watched
from tests.pipelines.conftest import NEVER

SESSIONS, FIRST, TOGETHER = 100, 20, 5
IDLE_S = 4.0
OF_SESSIONS = {"RealtimeSession", "Chat", "Listening", "OscarCache", "OmniVoice"}
OF_SESSIONS |= {"Request", "SpokenRequest", "Task", "Socket", "Slot"}
"""Names of classes whose objects must be gone with the sessions."""
MAX_GROWN = {
    "cpu": {"resident": 48 << 20, "objects": 1000},
    "cuda": {"resident": 512 << 20, "objects": 4000, "device": 1 << 20},
}
"""How much more may be in use after the sessions than after the first ones: what allocators keep.
Each session hears 0.3 MB of sound."""
POOLS = ("AnyIO worker thread", "oscar-media", "answers", "readers", "converters")
"""Names of threads of pools, which have as many as ever worked at the same time: on a GPU, dozens
of sessions that were left may be closed together."""


def prepare(pipe: OscarOmniPipeline) -> None:
    """Compile what sessions need, as clients do not wait for that, and run all batch sizes, as a
    server does before its first request: their workspaces stay."""
    pipe(prompt="Hello?", audio=(speech(1), RATE), speak=True, max_new_tokens=30)
    warm_up(pipe.engine, TOGETHER)


async def talk(address: str, number: int) -> None:
    """Ask aloud; then interrupt, cancel, leave in the middle of a frame, wait too long, or listen
    to the end."""
    async with connected(address) as one:
        by_voice = number % 5 == 0
        session = {"type": "realtime", "max_output_tokens": 30 if number % 5 < 4 else 6}
        await one.connection.session.update(session=session | ({} if by_voice else PUSH))
        await one.say(speech(1 + number % 3), size=RATE // 2)
        if not by_voice:
            await one.connection.input_audio_buffer.commit()
            await one.connection.response.create()
        await one.until("response.output_audio.delta")
        for _ in range(number // 5 % 8):
            await one.connection.recv()
        match number % 5:
            case 0:
                await one.say(speech(2), size=RATE // 2)
                await one.until("response.done")
            case 1:
                await one.connection.response.cancel()
                await one.until("response.done")
            case 2:
                leave_within_a_frame(one)
            case 3:
                await wait_for_the_end(one)
            case 4:
                await one.until("response.done")
                await one.say(speech(3), size=RATE // 2)


def leave_within_a_frame(one: Talk) -> None:
    transport = one.connection._connection.transport
    transport.write(b"\x81\xfe\x40\x00" + bytes(4) + b'{"type": "input_audio_buffer.append", "aud')
    transport.abort()


async def wait_for_the_end(one: Talk) -> None:
    async with asyncio.timeout(60):
        with pytest.raises(ConnectionClosed):
            while True:
                await one.connection.recv()


async def talk_all(address: str, numbers: Iterable[int]) -> None:
    """Hold conversations, some of which run at the same time."""
    free = asyncio.Semaphore(TOGETHER)

    async def one(number: int) -> None:
        async with free:
            with suppress(ConnectionClosed):  # At the end of a connection that was left.
                await talk(address, number)

    await asyncio.gather(*map(one, numbers))


def left(server: Any, pipe: OscarOmniPipeline) -> dict[str, int]:
    """What is in use once all clients are gone, without the graphs of the batch sizes so far."""
    pipe.release_graphs()
    deadline = time.monotonic() + 20
    while (found := in_use(server, pipe)).pop("busy"):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found


def in_use(server: Any, pipe: OscarOmniPipeline) -> dict[str, int]:
    gc.collect()
    metrics = server.service.metrics
    busy = metrics.realtime._value.get() + metrics.running._value.get()
    kinds = Counter(type(one).__name__ for one in gc.get_objects())
    pages = pipe.engine.call(lambda: pipe.store.memory().used_bytes)
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "busy": busy + len(server.server_state.connections),
        "pages": pages,
        "speech": pipe.engine.speech_bytes,
        "slots": sum(one.used for one in pipe.store.allocators.values()),
        "device": allocated(pipe.family.device).get("requested", 0),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": sum(not one.name.startswith(POOLS) for one in threading.enumerate()),
        "resident": resident,
        "objects": kinds.total(),
        **{name: kinds[name] for name in OF_SESSIONS},
    }


CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, CUDA])])
def test_a_hundred_interrupted_sessions_leave_nothing(device: str) -> None:
    pipe = OscarOmniPipeline("pocket-omni", device=device)
    pipe.model.generation_config.eos_token_id = NEVER
    prepare(pipe)
    limits = ServerLimits(api_key=KEY, realtime=4 * TOGETHER, realtime_idle_s=IDLE_S)
    with started(create_app(pipe, "tiny", limits)) as (server, address), watched(server) as stall:
        asyncio.run(talk_all(address, range(FIRST)))
        before = left(server, pipe)
        asyncio.run(talk_all(address, range(FIRST, FIRST + SESSIONS)))
        after = left(server, pipe)
    print(f"longest stall of the event loop: {stall[0]:.2f} s")
    print({name: (value, after[name] - value) for name, value in before.items()})
    assert before["pages"] == before["speech"] == before["slots"] == 0
    for name, value in before.items():
        assert after[name] <= value + MAX_GROWN[device].get(name, 0), (name, before, after)
