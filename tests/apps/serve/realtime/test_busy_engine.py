"""While the engine is busy, as in a step that compiles kernels, clients and servers do not wait."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from oscar_mm.apps.serve import service
from oscar_mm.apps.serve.server import create_app
from oscar_mm.apps.serve.service import ServerLimits
from tests.apps.serve.conftest import started
from tests.apps.serve.realtime.client import KEY, PUSH, RATE, Talk, ask, connected, sound

SOON_S = 5.0
"""Seconds in which is done what needs no model."""


@contextmanager
def busy(pipe: Any) -> Iterator[None]:
    """Keep the engine thread busy within the block."""
    begun, over = threading.Event(), threading.Event()
    pipe.engine.thread.post(lambda: (begun.set(), over.wait(60)))
    assert begun.wait(10)
    try:
        yield
    finally:
        over.set()


@contextmanager
def within(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


async def ask_aloud(one: Talk) -> None:
    """Ask a question whose sound the model reads before it answers."""
    await one.connection.session.update(session=PUSH)
    await one.until("session.updated")
    await one.say(sound(9.5), size=RATE)
    await one.connection.input_audio_buffer.commit()
    await one.connection.response.create()
    await one.until("conversation.item.done")


async def be_answered(one: Talk) -> None:
    """Have a question answered aloud, at length."""
    await one.connection.session.update(session={**PUSH, "max_output_tokens": 200})
    await ask(one, "Hello?")
    await one.until("response.output_audio.delta")


async def come_and_go(address: str) -> None:
    async with connected(address) as one:
        await ask_aloud(one)


def test_sessions_begin_and_end(address, pipe, server):
    with busy(pipe), within(SOON_S):
        asyncio.run(come_and_go(address))
        asyncio.run(come_and_go(address))
        # Those that are gone count until their memory is free.
        assert server[0].service.metrics.realtime._value.get() == 2
        while server[0].server_state.connections:
            time.sleep(0.01)


@pytest.mark.parametrize("do", [None, ask_aloud, be_answered])
def test_a_server_stops(pipe, do, caplog, monkeypatch):
    monkeypatch.setattr(service, "_CLOSING_S", 0.1)
    asked, stopped = threading.Event(), threading.Event()

    async def talk(address: str) -> None:
        async with connected(address) as one:
            if do is be_answered:
                await do(one)
            with busy(pipe):
                if do is ask_aloud:
                    await do(one)
                asked.set()
                await asyncio.to_thread(stopped.wait, 60)

    app = create_app(pipe, "tiny", ServerLimits(api_key=KEY))
    with started(app) as (server, address):
        client = threading.Thread(target=lambda: asyncio.run(talk(address)))
        client.start()
        assert asked.wait(30)
        start = time.monotonic()
        server.should_exit = True
        while server.servers[0].get_loop().is_running() and time.monotonic() - start < 18:
            time.sleep(0.05)
        took = time.monotonic() - start
        stopped.set()
        client.join()
    assert took < SOON_S
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
