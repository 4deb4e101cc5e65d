"""A client of realtime sessions: the official one, and what it says."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import soxr
from openai import AsyncOpenAI

from tests.prompts import tone

KEY = "secret"
CLIPS = Path(__file__).parents[4] / "examples" / "media" / "clips"
PUSH: dict[str, Any] = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
RATE = 24_000


class Talk:
    """A connection, and the events that it has received."""

    def __init__(self, connection: Any) -> None:
        self.connection, self.seen = connection, list[Any]()
        self.receive: Callable[[], Awaitable[Any]] = connection.recv

    async def until(self, kind: str, **fields: Any) -> Any:
        """Receive up to an event of a kind, and return the event."""
        async with asyncio.timeout(20):
            while True:
                event = await self.receive()
                self.seen.append(event)
                if event.type == "error" and kind != "error":
                    raise AssertionError(event.error)
                if event.type == kind:
                    return event

    def kinds(self) -> list[str]:
        """Kinds of the events so far, each once in a row."""
        kinds = [event.type for event in self.seen]
        return [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]

    async def say(self, samples: np.ndarray, size: int = RATE // 10) -> None:
        for start in range(0, len(samples), size):
            await self.connection.input_audio_buffer.append(
                audio=encoded(samples[start : start + size])
            )


def encoded(samples: np.ndarray) -> str:
    return base64.b64encode((samples * 32767).astype("<i2").tobytes()).decode()


def sound(seconds: float, *, seed: int = 0) -> np.ndarray:
    return soxr.resample(tone(seconds, seed=seed)[0], 16_000, RATE)


def speech(number: int) -> np.ndarray:
    """A spoken clip with a second of silence around it."""
    import soundfile

    samples, rate = soundfile.read(CLIPS / f"{number:02}.wav", dtype="float32")
    silence = np.zeros(RATE, np.float32)
    return np.concatenate([silence, soxr.resample(samples, rate, RATE), silence])


def talked(address: str, talk: Callable[[Talk], Awaitable[None]], **session: Any) -> Talk:
    """Run a conversation; ``session`` are settings that are sent first."""
    return asyncio.run(_talked(address, talk, session))


async def _talked(address: str, talk: Any, session: dict[str, Any]) -> Talk:
    async with connected(address) as one:
        if session:
            await one.connection.session.update(session={**PUSH, **session})
            await one.until("session.updated")
            one.seen.clear()
        await talk(one)
        return one


@asynccontextmanager
async def connected(address: str, **query: str) -> AsyncIterator[Talk]:
    """A connection; ``query`` are further fields of its URL."""
    client = AsyncOpenAI(base_url=f"{address}/v1", api_key=KEY)
    async with client.realtime.connect(model="tiny", extra_query=query) as connection:
        talk = Talk(connection)
        await talk.until("session.created")
        yield talk


async def ask(one: Talk, text: str) -> None:
    part = {"type": "input_text", "text": text}
    item = {"type": "message", "role": "user", "content": [part]}
    await one.connection.conversation.item.create(item=item)
    await one.connection.response.create()


async def show(one: Talk, picture: bytes, text: str) -> None:
    url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    parts = [{"type": "input_text", "text": text}, {"type": "input_image", "image_url": url}]
    item = {"type": "message", "role": "user", "content": parts}
    await one.connection.conversation.item.create(item=item)


def held(server: Any, pipe: Any) -> tuple[int, float, float, int]:
    """Bytes of caches, sessions, answers, and connections."""
    service = server[0].service
    sessions = service.metrics.realtime._value.get()
    running = service.metrics.running._value.get()
    used = pipe.engine.call(lambda: pipe.store.memory().used_bytes)
    return used, sessions, running, len(server[0].server_state.connections)
