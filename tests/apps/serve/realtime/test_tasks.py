"""The tasks of a realtime session: they end with it, whatever the last one does."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from anyio import CapacityLimiter

from oscar_mm.apps.serve.realtime_tasks import RealtimeTasks


def test_a_swallowed_cancellation_does_not_keep_a_session() -> None:
    """An action that ends at the moment of the cancellation may go on, and begin another task."""
    ended = list[str]()

    async def sent(_: dict[str, Any]) -> None:
        pass

    async def answer() -> None:
        await asyncio.sleep(0.05)
        ended.append("answer")

    async def begin(tasks: RealtimeTasks) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        tasks.run(answer())

    async def session() -> None:
        tasks: Any = RealtimeTasks(None, sent, CapacityLimiter(1))
        tasks.begin()
        tasks.enqueue(lambda: begin(tasks))
        await asyncio.sleep(0.01)
        async with asyncio.timeout(5):
            await tasks.close()

    asyncio.run(session())
    assert ended == ["answer"]


@pytest.mark.timeout(20)
def test_tasks_that_have_just_ended_do_not_hold_the_event_loop() -> None:
    """With Python 3.12 and newer, ``close`` then turned for ever, and served no other client."""

    async def nothing(*_: Any) -> None:
        pass

    async def session() -> None:
        tasks: Any = RealtimeTasks(None, nothing, CapacityLimiter(1))
        tasks.run(nothing())
        # It begins after the end of the task, but before the task's callbacks.
        await asyncio.ensure_future(tasks.close())

    asyncio.run(session())
