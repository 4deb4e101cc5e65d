"""The order in which clients get slots, against simulated answers."""

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_mm.apps.serve import fair_queue
from oscar_mm.apps.serve.fair_queue import FairQueue, Slot, Waiter, token_cost

Client = tuple[str, ...]
GREEDY, MODEST = ("10.0.0.1", ""), ("10.0.0.2", "")


class Simulation:
    """A server whose answers take a second for each unit of their cost.

    Clients send another request whenever one of theirs has ended.
    """

    def __init__(self, slots: int, costs: Iterator[float]) -> None:
        self.queue, self.costs, self.now = FairQueue(slots), costs, 0.0
        self.running: list[tuple[float, int, Slot, float]] = []
        self.admitted: list[tuple[Client, float]] = []
        """The clients that got slots, and the costs of their answers, in this order."""
        self.ended: dict[Client, float] = defaultdict(float)
        self.numbers = itertools.count()
        self.again: Callable[[Client], Client | None] = lambda client: client

    def send(self, client: Client, count: int = 1) -> Waiter:
        waiter = self.queue.add(client, count, None)
        self.admit()
        return waiter

    def admit(self) -> None:
        for waiter, slots in self.queue.admit(self.now):
            assert len(slots) == waiter.count
            for slot in slots:
                cost = next(self.costs)
                self.admitted.append((waiter.client, cost))
                heapq.heappush(self.running, (self.now + cost, next(self.numbers), slot, cost))
        assert len(self.running) + self.queue.free == self.queue._slots

    def step(self) -> Client:
        """Let the next answer end; return its client."""
        until, _, slot, cost = heapq.heappop(self.running)
        for _, _, other, total in self.running:  # Tokens come at the same rate.
            other.cost = min(total, other.cost + until - self.now)
        self.now, slot.cost = until, cost
        self.queue.end(slot, until)
        self.ended[slot.client] += cost
        self.admit()
        if (client := self.again(slot.client)) is not None:
            self.send(client)
        return slot.client

    def admitted_in(self, steps: int) -> Counter[Client]:
        """Let answers end; return how many slots each client got meanwhile."""
        before = len(self.admitted)
        for _ in range(steps):
            self.step()
        return Counter(client for client, _ in self.admitted[before:])


COSTS = st.lists(st.integers(1, 50), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(COSTS, st.integers(1, 5))
def test_two_clients_that_always_wait_are_served_the_same(costs: list[int], slots: int) -> None:
    """Whatever their answers cost, and though one has many more requests."""
    simulation = Simulation(slots, itertools.cycle(map(float, costs)))
    for client, count in ((GREEDY, 60), (MODEST, slots + 2)):
        for _ in range(count):
            simulation.send(client)
    for _ in range(150):
        simulation.step()
    difference = abs(simulation.ended[GREEDY] - simulation.ended[MODEST])
    # All slots may have gone to one of them before it was known what its answers cost.
    assert difference <= 2 * slots * max(costs)


@settings(max_examples=60, deadline=None)
@given(COSTS, st.integers(1, 5))
def test_a_client_with_one_request_at_a_time_waits_for_its_share_only(
    costs: list[int], slots: int
) -> None:
    simulation = Simulation(slots, itertools.cycle(map(float, costs)))
    for _ in range(60):
        simulation.send(GREEDY)
    simulation.send(MODEST)
    for _ in range(200):
        simulation.step()
    own, others = 0.0, 0.0
    for client, cost in simulation.admitted[60 + slots :]:
        others += cost
        if client == MODEST:
            own, others = cost, 0.0
        # Since its last answer began: as much in its own slot, in each other one, and once more.
        assert others <= (slots + 1) * (own + 2 * max(costs))


def test_answers_of_equal_cost_alternate() -> None:
    simulation = Simulation(1, itertools.repeat(10.0))
    for client in (*[GREEDY] * 60, *[MODEST] * 2):
        simulation.send(client)
    for _ in range(40):
        simulation.step()
    latest = Counter(client for client, _ in simulation.admitted[-20:])
    assert latest == {GREEDY: 10, MODEST: 10}


def test_slots_that_become_free_together_are_shared() -> None:
    """An answer that has just begun counts as much as others, though it has no tokens yet."""
    queue = FairQueue(4)
    for _, [slot] in _taken(queue, 4):
        slot.cost = 10.0
        queue.end(slot, 1.0)
    for client in (*[GREEDY] * 4, *[MODEST] * 4):
        queue.add(client, 1, None)
    found = Counter(waiter.client for waiter, _ in queue.admit(1.0))
    assert found == {GREEDY: 2, MODEST: 2}


def test_invented_users_gain_nothing() -> None:
    simulation, names = Simulation(2, itertools.repeat(10.0)), map(str, itertools.count())
    simulation.again = lambda client: MODEST if client == MODEST else ("10.0.0.1", next(names))
    for _ in range(60):
        simulation.send(("10.0.0.1", next(names)))
    for _ in range(3):
        simulation.send(MODEST)
    for _ in range(400):
        simulation.step()
    shares = Counter(address for (address, _), _ in simulation.admitted[-200:])
    assert shares["10.0.0.1"] == pytest.approx(100, abs=2)
    parts = simulation.queue._all.parts["10.0.0.1"].parts
    assert len(parts) <= fair_queue._REMEMBERED


def test_users_of_an_address_share_its_part() -> None:
    simulation = Simulation(2, itertools.repeat(10.0))
    users = [("10.0.0.1", "a"), ("10.0.0.1", "b"), MODEST]
    for user, count in zip(users, (40, 4, 4), strict=True):
        for _ in range(count):
            simulation.send(user)
    for _ in range(200):
        simulation.step()
    shares = Counter(client for client, _ in simulation.admitted[-80:])
    assert [shares[user] for user in users] == pytest.approx([20, 20, 40], abs=2)


def test_idle_time_is_not_saved_up() -> None:
    simulation = Simulation(1, itertools.repeat(10.0))
    simulation.again = lambda client: None if client == MODEST else client
    for client in (MODEST, *[GREEDY] * 60):
        simulation.send(client)
    for _ in range(100):
        simulation.step()
    simulation.again = lambda client: client
    for _ in range(60):
        simulation.send(MODEST)
    latest = simulation.admitted_in(20)
    assert latest[MODEST] == pytest.approx(10, abs=1)


def test_use_of_idle_slots_is_not_held_against_a_client() -> None:
    simulation = Simulation(4, itertools.repeat(10.0))
    simulation.send(GREEDY)
    for _ in range(100):  # Nobody waits.
        simulation.step()
    for client in (*[MODEST] * 60, *[GREEDY] * 59):
        simulation.send(client)
    latest = simulation.admitted_in(40)
    assert latest[GREEDY] == pytest.approx(20, abs=3)


def test_failed_answers_do_not_come_first_for_ever() -> None:
    """An answer of which no cost is known counts as much as others."""
    queue, admitted = FairQueue(1), Counter[Client]()
    for client in (*[GREEDY] * 30, *[MODEST] * 30):
        queue.add(client, 1, None)
    for _ in range(20):
        for waiter, [slot] in queue.admit(0.0):
            admitted[waiter.client] += 1
            slot.cost = 10.0 * (waiter.client == MODEST)
            queue.end(slot, 1.0)
            break
    assert admitted[GREEDY] == pytest.approx(10, abs=1)


def test_a_request_for_many_slots_is_not_overtaken_for_ever() -> None:
    simulation = Simulation(4, itertools.cycle([10.0, 7.0, 3.0]))
    for _ in range(20):
        simulation.send(GREEDY)
    simulation.send(MODEST, 4)
    steps = 0
    while all(client != MODEST for client, _ in simulation.admitted):
        simulation.step()
        steps += 1
    assert steps <= 8 and [client for client, _ in simulation.admitted[-4:]] == [MODEST] * 4


def test_which_request_is_one_too_many() -> None:
    queue = FairQueue(1)
    many = [queue.add(("a", str(user)), 1, None) for user in range(3)]
    first = queue.add(("b", ""), 1, None)
    assert queue.surplus(first) is many[-1]
    queue.remove(many.pop())
    assert queue.surplus(first) is many[-1]
    second = queue.add(("b", ""), 1, None)
    assert queue.surplus(second) is second, "both have as many"
    busy = [queue.add(("a", "0"), 1, None) for _ in range(2)]
    other = queue.add(("a", "1"), 1, None)
    assert queue.surplus(other) is busy[-1], "of the other user at the same address"
    assert queue.surplus(busy[-1]) is busy[-1]
    for _ in range(3):
        queue.add(("b", ""), 1, None)
    assert queue.surplus(other) is busy[-1], "not of another address that has no more"


def test_how_many_slots_come_first() -> None:
    queue = FairQueue(2)
    (_, [first]), _ = _taken(queue, 2)
    assert queue.seconds(3) is None
    waiting = [queue.add(GREEDY, 1, None) for _ in range(5)]
    assert queue.needed(waiting[-1]) == 5
    one = queue.add(MODEST, 1, None)
    assert queue.needed(one) == 1, "the other client has been served more"
    three = queue.add(("10.0.0.3", ""), 3, None)
    assert queue.needed(three) == 3 + 2 + 1
    queue.end(first, 8.0)
    assert queue.needed(one) == 1 + 1 - 1, "one is free"
    assert queue.seconds(3) == 3 * 8.0 / 2


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 6))
def test_the_estimate_is_what_happens(slots: int, others: list[int], own: int) -> None:
    """Where all answers cost the same and nobody comes, to within a turn of each client."""
    simulation = Simulation(slots, itertools.repeat(10.0))
    for place, count in enumerate(others):
        for _ in range(slots + count):
            simulation.send((f"10.1.0.{place}", ""))
    for _ in range(3 * slots):
        simulation.step()
    waiters = [simulation.send(MODEST) for _ in range(own)]
    needed, freed = simulation.queue.needed(waiters[-1]), 0
    simulation.again = lambda client: None
    while waiters[-1] in simulation.queue._all.waiters:
        simulation.step()
        freed += 1
    assert abs(freed - needed) <= len(others) + slots


def _taken(queue: FairQueue, count: int) -> list[tuple[Waiter, list[Slot]]]:
    for _ in range(count):
        queue.add(GREEDY, 1, None)
    return [*queue.admit(0.0)]


def test_idle_clients_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "_REMEMBERED", 3)
    queue = FairQueue(9)
    for name, cost in (("a", 30.0), ("b", 10.0), ("c", 20.0), ("d", 5.0)):
        queue.add((name, ""), 1, None)
        [(_, [slot])] = queue.admit(0.0)
        slot.cost = cost
        if name != "a":
            queue.end(slot, 1.0)
    assert queue._all.parts.keys() == {"a", "c", "d"}, "not one that is running"


def test_output_costs_more() -> None:
    assert token_cost(100, 0) == 100 and token_cost(100, 10) == 120
