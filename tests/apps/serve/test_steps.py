"""When the pieces of answers are sent: after steps, and soon even if no further step comes."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("fastapi", reason="needs fastapi")
pytest.importorskip("prometheus_client", reason="needs prometheus-client")

from oscar_mm.apps.serve.metrics import Metrics
from oscar_mm.apps.serve.service import ServerLimits, Service


class Steps:
    """An engine whose steps the test makes."""

    @contextmanager
    def keep_stepping(self, after_step: Callable[[], object]) -> Iterator[None]:
        self.after_step = after_step
        yield

    async def step(self) -> None:
        await asyncio.to_thread(self.after_step)


def a_service() -> tuple[Service, Steps]:
    engine = Steps()
    conversations = SimpleNamespace(pipe=SimpleNamespace(engine=engine))
    metrics = Metrics(cast(Any, None))
    return Service(cast(Any, conversations), metrics, ServerLimits(), ["tiny"]), engine


def test_the_only_step_of_an_answer_is_sent_although_another_one_has_just_left() -> None:
    """Sending to the one that left took long, and nothing was to be sent since."""
    service, engine = a_service()
    watchers, sent = service.queue.watchers, asyncio.Event()

    def last() -> bool:
        time.sleep(0.1)
        watchers.clear()
        return False

    def only() -> bool:
        sent.set()
        return False

    async def scenario() -> None:
        with service.steps():
            watchers.add(last)
            await engine.step()
            while watchers:
                await asyncio.sleep(0.001)
            watchers.add(only)
            await engine.step()
            await asyncio.wait_for(sent.wait(), 2)

    asyncio.run(scenario())


def test_a_stall_of_the_event_loop_does_not_delay_what_follows_it() -> None:
    service, engine = a_service()
    looks = list[float]()

    def look() -> bool:
        if not looks:
            time.sleep(0.8)
        looks.append(time.perf_counter())
        return False

    async def scenario() -> None:
        with service.steps():
            service.queue.watchers.add(look)
            await engine.step()
            while len(looks) < 2:
                await asyncio.sleep(0.005)
                await engine.step()

    asyncio.run(scenario())
    assert looks[1] - looks[0] < 0.8


@pytest.mark.parametrize("steps", [1, 40])
def test_streams_take_turns(steps: int) -> None:
    """Each gets its pieces once in a round. The last round begins after the last step, goes on
    although no further step comes, and is followed by no other."""
    service, engine = a_service()
    turns, last_step = list[int](), 0.0
    begins = dict[int, float]()

    def send(stream: int) -> bool:
        turns.append(stream)
        begins[stream] = time.perf_counter()
        until = time.thread_time() + 0.003
        while time.thread_time() < until:
            pass
        return False

    async def scenario() -> None:
        nonlocal last_step
        with service.steps():
            service.queue.watchers |= {partial(send, stream) for stream in range(20)}
            begin = time.perf_counter()
            for step in range(steps):
                last_step = time.perf_counter()
                await engine.step()
                if not step:
                    await asyncio.sleep(0)
                    assert 0 < len(turns) < 15
            count = -1
            while count < len(turns):
                count = len(turns)
                await asyncio.sleep(0.5)
            assert max(begins.values()) - begin > 0.2, "60 ms of sending take at least 0.2 s"
            assert min(begins.values()) >= last_step

    asyncio.run(asyncio.wait_for(scenario(), 20))
    rounds = [turns[at : at + 20] for at in range(0, len(turns), 20)]
    assert len(rounds) == 1 if steps == 1 else len(rounds) > 1
    assert all(sorted(one) == [*range(20)] for one in rounds)


def test_streams_that_wait_for_first_pieces_hold_up_no_other() -> None:
    """They are looked at after each step, which takes more than the share of sending."""
    service, engine = a_service()
    looks = list[float]()

    def wait() -> bool:
        until = time.thread_time() + 0.002
        while time.thread_time() < until:
            pass
        return False

    def send() -> bool:
        looks.append(time.perf_counter())
        return False

    async def scenario() -> None:
        queue = service.queue
        with service.steps():
            queue.watchers |= {wait, send}
            queue.first_piece_watchers.add(wait)
            until = time.perf_counter() + 1
            while time.perf_counter() < until:
                await engine.step()

    asyncio.run(scenario())
    assert len(looks) > 20
    assert max(after - before for before, after in pairwise(looks)) < 0.5
