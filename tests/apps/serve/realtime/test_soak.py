"""A hundred realtime sessions."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tests.apps.serve.realtime.client import PUSH, RATE, connected, held, speech


@pytest.mark.soak
def test_a_hundred_interrupted_sessions_leave_nothing(address: str, server, pipe) -> None:
    """Answers are cancelled, cut by speech or left after each number of events."""

    async def talk(number: int) -> None:
        async with connected(address) as one:
            session = {"type": "realtime", "max_output_tokens": 60}
            await one.connection.session.update(session=session | (PUSH if number % 2 else {}))
            await one.say(speech(1), size=RATE // 2)
            if number % 2:
                await one.connection.input_audio_buffer.commit()
                await one.connection.response.create()
            await one.until("response.created")
            for _ in range(number // 4 % 24):
                await one.connection.recv()
            if number % 4 == 0:
                await one.say(speech(2), size=RATE // 2)
                await one.until("response.done")
            elif number % 4 == 1:
                await one.connection.response.cancel()
                await one.until("response.done")

    asyncio.run(talk(1))
    before = threading.active_count()
    for number in range(100):
        asyncio.run(talk(number))
    deadline = time.monotonic() + 10
    while held(server, pipe) != (0, 0.0, 0.0, 0) or pipe.engine.speech_bytes:
        assert time.monotonic() < deadline, (held(server, pipe), pipe.engine.speech_bytes)
        time.sleep(0.02)
    assert threading.active_count() <= before + 2
