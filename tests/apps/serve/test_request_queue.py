"""Slots, waiting and refusals, on a clock that jumps to the next timer instead of waiting."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="needs fastapi")
pytest.importorskip("prometheus_client", reason="needs prometheus-client")

from oscar_mm.apps.serve.fair_queue import Slot
from oscar_mm.apps.serve.metrics import Metrics
from oscar_mm.apps.serve.refusals import ClientGone, Refusal
from oscar_mm.apps.serve.request_queue import RequestQueue

GREEDY, MODEST, THIRD = ("10.0.0.1", ""), ("10.0.0.2", ""), ("10.0.0.3", "")


class JumpingLoop(asyncio.SelectorEventLoop):
    """Event loop whose time stands still while there is work, and then jumps to the next timer."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        timers = [timer.when() for timer in self._scheduled if not timer.cancelled()]
        if timers and not self._ready:
            self.now = max(self.now, min(timers))
        super()._run_once()


def run(scenario: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(scenario(), 10_000)

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(bounded())


def a_queue(running: int, waiting: int = 64, timeout_s: float | None = 60.0) -> RequestQueue:
    return RequestQueue(running, waiting, Metrics(cast(Any, None)), timeout_s)


class Asked:
    """A request that waits in the queue, in a task of its own."""

    def __init__(self, queue: RequestQueue, client: tuple[str, ...], count: int = 1) -> None:
        self.queue, self.gone = queue, asyncio.get_running_loop().create_future()
        self.task = asyncio.ensure_future(queue.take(client, self.gone, count))

    def leave(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)

    def release(self, cost: float = 1.0) -> None:
        for slot in self.task.result():
            slot.cost = cost
            self.queue.release(slot)

    async def refused(self) -> Refusal:
        with pytest.raises(Refusal) as error:
            await self.task
        return error.value


async def asked(queue: RequestQueue, *clients: tuple[str, ...], count: int = 1) -> list[Asked]:
    """Requests that have been in the queue for as long as they can without an event."""
    made = [Asked(queue, client, count) for client in clients]
    await settled()
    return made


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def figures(queue: RequestQueue) -> dict[str, float]:
    registry = queue.metrics.registry
    names = ("waiting", "waiting_clients", "queue_seconds_count", "queue_seconds_sum")
    return {name: cast(float, registry.get_sample_value(f"oscar_mm_{name}")) for name in names}


async def all_free(queue: RequestQueue, running: int) -> bool:
    """Whether nobody waits and one request can have all slots at once."""
    await settled()
    waits = figures(queue)["waiting"]
    [everything] = await asked(queue, THIRD, count=running)
    return waits == 0 and everything.task.done() and len(everything.task.result()) == running


def test_waiting_has_an_end() -> None:
    async def scenario() -> None:
        queue, time = a_queue(1), asyncio.get_running_loop().time
        [running, waiting] = await asked(queue, GREEDY, MODEST)
        refusal = await waiting.refused()
        assert (refusal.status, refusal.reason, time()) == (429, "timeout", 60)
        assert refusal.headers == {"Retry-After": "5"}, "nothing is known yet"
        running.release()
        assert await all_free(queue, 1)

    run(scenario)


def test_waiting_without_an_end() -> None:
    async def scenario() -> None:
        queue, loop = a_queue(1, timeout_s=None), asyncio.get_running_loop()
        [running, waiting] = await asked(queue, GREEDY, MODEST)
        loop.call_later(5000, running.release)
        assert len(await waiting.task) == 1 and loop.time() == 5000
        assert figures(queue)["queue_seconds_sum"] == 5000

    run(scenario)


@pytest.mark.parametrize("later", [False, True])
def test_a_slot_that_becomes_free_when_the_time_is_over(later: bool) -> None:
    """In whichever order the two timers run, the request gets the slot."""

    async def scenario() -> None:
        queue, loop = a_queue(1), asyncio.get_running_loop()
        [running] = await asked(queue, GREEDY)
        if not later:
            loop.call_at(60, running.release)
        [waiting] = await asked(queue, MODEST)
        if later:
            loop.call_at(60, running.release)
        assert len(await waiting.task) == 1 and loop.time() == 60
        waiting.release()
        assert await all_free(queue, 1)

    run(scenario)


def test_the_estimate_refuses_at_once() -> None:
    """With one slot and answers of 25 s, there is time for two answers before one begins."""

    async def scenario() -> None:
        queue, loop = a_queue(1), asyncio.get_running_loop()
        [first] = await asked(queue, GREEDY)
        await asyncio.sleep(25)
        first.release()
        *kept, late = await asked(queue, *[GREEDY] * 5)
        refusal, start = await late.refused(), loop.time()
        assert [one.task.done() for one in kept] == [True, False, False, False]
        assert (refusal.status, refusal.reason, start) == (429, "slow", 25)
        assert refusal.headers == {"Retry-After": "60"}, "at most, though 100 s are estimated"
        [other] = await asked(queue, MODEST)
        assert not other.task.done(), "before the last ones of the other client"
        kept[0].release()
        await settled()
        assert len(other.task.result()) == 1

    run(scenario)


def test_when_to_come_again() -> None:
    """Two slots whose answers take 6 s: one is free every 3 s."""

    async def scenario() -> None:
        queue = a_queue(2, waiting=4)
        running = await asked(queue, GREEDY, GREEDY)
        await asyncio.sleep(6)
        for one in running:
            one.release()
        await asked(queue, *[GREEDY] * 6)
        [late] = await asked(queue, GREEDY)
        assert (await late.refused()).headers == {"Retry-After": "15"}
        _, second, third = await asked(queue, MODEST, MODEST, MODEST)
        assert not second.task.done() and figures(queue)["waiting"] == 4
        # Two slots for this client and one that is refused; as many for the other one before.
        assert (await third.refused()).headers == {"Retry-After": "15"}

    run(scenario)


def test_nobody_fills_the_queue_for_the_others() -> None:
    async def scenario() -> None:
        queue = a_queue(1, waiting=4)
        _, *many = await asked(queue, *[("10.0.0.1", f"user {x}") for x in range(5)])
        assert figures(queue) | {"waiting": 4, "waiting_clients": 4} == figures(queue)
        [own] = await asked(queue, ("10.0.0.1", "yet another"))
        assert (await own.refused()).reason == "full"
        first, second = await asked(queue, MODEST, MODEST)
        refusals = [await many[-1].refused(), await many[-2].refused()]
        assert [x.reason for x in refusals] == ["displaced"] * 2
        assert all(x.status == 429 and x.headers == {"Retry-After": "5"} for x in refusals)
        [third] = await asked(queue, MODEST)
        assert (await third.refused()).reason == "full", "now both have two"
        assert not any(x.task.done() for x in (*many[:2], first, second))

    run(scenario)


def test_without_places_only_free_slots_count() -> None:
    async def scenario() -> None:
        queue = a_queue(2, waiting=0)
        one, other = await asked(queue, GREEDY, MODEST)
        [late] = await asked(queue, THIRD)
        assert (await late.refused()).reason == "full"
        for taken in (one, other):
            taken.release()
        assert await all_free(queue, 2)

    run(scenario)


def test_the_end_of_the_server_ends_the_wait() -> None:
    async def scenario() -> None:
        queue = a_queue(1)
        running, *waiting = await asked(queue, GREEDY, GREEDY, MODEST)
        running.release()  # One of the two gets its slot in the same moment.
        queue.stopping.set_result(None)
        for one in waiting:
            refusal = await one.refused()
            assert (refusal.status, refusal.reason) == (503, "stopping")
        assert len(queue._queue) == 0 and queue._queue.free == 1

    run(scenario)


@pytest.mark.parametrize("by", ["disconnect", "cancel"])
@pytest.mark.parametrize("release_first", [False, True])
def test_one_that_leaves_as_it_gets_its_slot(by: str, release_first: bool) -> None:
    async def scenario() -> None:
        queue = a_queue(1)
        running, leaving, next_one = await asked(queue, GREEDY, GREEDY, GREEDY)
        if release_first:
            running.release()
        leaving.leave() if by == "disconnect" else leaving.task.cancel()
        if not release_first:
            running.release()
        with pytest.raises((ClientGone, asyncio.CancelledError)):
            await leaving.task
        assert len(await next_one.task) == 1
        next_one.release()
        assert await all_free(queue, 1)

    run(scenario)


def test_the_one_behind_a_large_request_that_leaves() -> None:
    async def scenario() -> None:
        queue = a_queue(4)
        [running] = await asked(queue, GREEDY)
        [large] = await asked(queue, MODEST, count=4)
        [small] = await asked(queue, MODEST)
        assert not small.task.done()
        large.leave()
        await settled()
        assert len(small.task.result()) == 1
        for one in (running, small):
            one.release()
        assert await all_free(queue, 4)

    run(scenario)


EVENTS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 2), st.integers(1, 3)),
    st.tuples(st.sampled_from(["release", "leave", "cancel"]), st.integers(0, 30), st.just(0)),
    st.tuples(st.sampled_from(["pass", "turn"]), st.integers(1, 40), st.just(0)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(EVENTS, max_size=40), st.integers(0, 3))
def test_no_slot_is_lost_or_used_twice(events: list[tuple[str, int, int]], waiting: int) -> None:
    """Whatever happens in whatever order, also several events before any task runs."""

    async def scenario() -> None:
        queue, requests = a_queue(3, waiting), list[Asked]()
        released = set[Asked]()

        def held() -> list[Asked]:
            done = [x for x in requests if x.task.done() and not x.task.cancelled()]
            return [x for x in done if x.task.exception() is None and x not in released]

        for event, number, count in events:
            chosen = requests[number % len(requests)] if requests else None
            if event == "ask":
                requests.append(Asked(queue, [GREEDY, MODEST, THIRD][number], count))
            elif event == "pass":
                await asyncio.sleep(number)
            elif event == "turn":
                await asyncio.sleep(0)
            elif event == "release" and (free := held()):
                released.add(free[number % len(free)])
                free[number % len(free)].release(float(number))
            elif event == "leave" and chosen is not None:
                chosen.leave()
            elif event == "cancel" and chosen is not None and not chosen.task.done():
                chosen.task.cancel()
            slots = [slot for x in held() for slot in cast(list[Slot], x.task.result())]
            assert len(slots) == len(set(slots)) <= 3
        for one in requests:
            one.leave()
        await settled()
        for one in held():
            one.release()
        assert queue._queue.free == 3 and await all_free(queue, 3)

    run(scenario)
