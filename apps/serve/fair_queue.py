"""FairQueue: the order in which the waiting requests of several clients get slots.

The rule is the virtual token counter (Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024): each client has a counter of the tokens that it was served, and a free slot goes to the
client with the lowest counter. When a client begins to wait, its counter is raised to the lowest
counter of those that wait, so that idle time is not saved up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_OUTPUT_COST = 2.0
"""Cost of an output token; a prompt token costs 1. The paper has the same weights."""
_REMEMBERED = 256
"""Number of parts of a share from which the share forgets idle parts."""
_RECENT = 0.1
"""Weight of the latest answer in means over recent answers."""


def token_cost(read: int, written: int) -> float:
    """Return the cost of an answer.

    Args:
        read: number of prompt tokens that the model read, without cached ones.
        written: number of output tokens.
    """
    return read + _OUTPUT_COST * written


class Slot:
    """A slot that a running answer uses.

    Args:
        waiter: request that got the slot.
        since: time at which it got the slot, in seconds.

    Attributes:
        client: names that identify the client; see ``FairQueue``.
        share: the client's share.
        cost: cost of the answer so far; see ``token_cost``.
    """

    def __init__(self, waiter: Waiter, since: float) -> None:
        self.client, self.share, self.since = waiter.client, waiter.share, since
        self.cost = 0.0


class Waiter:
    """A waiting request.

    Args:
        client: names that identify the client; see ``FairQueue``.
        share: the client's share.
        count: number of slots that the request needs.
        turn: object that tells the request about its turn.
    """

    def __init__(self, client: tuple[str, ...], share: Share, count: int, turn: Any) -> None:
        self.client, self.share, self.count, self.turn = client, share, count, turn


class Share:
    """What a client gets, or all clients of an address together, or all of them.

    Args:
        parent: share of which this share is a part; None for the share of all clients.

    Attributes:
        parts: parts of this share, by name.
        settled: total cost of the answers that have ended.
        slots: slots in use.
        waiters: waiting requests, oldest first; a dict because its order is that of arrival.
        latest: part that got the latest slot; None before the first one.
    """

    def __init__(self, parent: Share | None = None) -> None:
        self.parent, self.parts, self.settled = parent, dict[str, Share](), 0.0
        self.slots, self.waiters = set[Slot](), dict[Waiter, None]()
        self.latest: Share | None = None

    @property
    def path(self) -> Iterator[Share]:
        """This share, the share of which it is a part, and so on."""
        share: Share | None = self
        while share is not None:
            yield share
            share = share.parent

    @property
    def waiting(self) -> list[Share]:
        """Parts with waiting requests."""
        return [part for part in self.parts.values() if part.waiters]

    @property
    def wanted(self) -> int:
        """Total number of slots that the waiting requests need."""
        return sum(waiter.count for waiter in self.waiters)

    @property
    def served(self) -> float:
        """Virtual token counter: cost of the ended answers, and of the running ones so far."""
        return self.settled + sum(slot.cost for slot in self.slots)

    def expected(self, mean: float) -> float:
        """Return the counter for the case that no running answer will cost less than ``mean``."""
        return self.settled + sum(max(mean, slot.cost) for slot in self.slots)

    def part(self, name: str) -> Share:
        """Return the part with this name; if there is none, add one with a counter of 0."""
        if name not in self.parts:
            if len(self.parts) >= _REMEMBERED:
                self._forget_one()
            self.parts[name] = Share(self)
        return self.parts[name]

    def _forget_one(self) -> None:
        """Forget the idle part with the lowest counter, which loses least by that."""
        idle = [x for x, part in self.parts.items() if not (part.slots or part.waiters)]
        if idle:
            del self.parts[min(idle, key=lambda name: self.parts[name].settled)]

    def lift(self) -> None:
        """Raise the counter to the lowest one of the waiting shares beside this one; if none is
        waiting, to the counter of the one that got the latest slot."""
        if self.parent is None:
            return
        latest = self.parent.latest
        others = self.parent.waiting or ([] if latest in (None, self) else [latest])
        if others:
            lowest = min(other.served for other in others)
            self.settled += max(0.0, lowest - self.served)


class FairQueue:
    """Waiting requests, slots in use, and the shares of the clients.

    A client is a path of names, such as an address and a user: the addresses share the slots
    fairly, and the users of an address share its part. So inventing users gains nothing.

    Within a client, requests get slots in order of arrival. A request that needs more slots than
    are free keeps later ones waiting, or it might wait forever.

    Args:
        slots: number of slots.
    """

    def __init__(self, slots: int) -> None:
        self._slots, self._all = slots, Share()
        self._cost: float | None = None
        """Mean cost of recent answers; None before the first one."""
        self._held: float | None = None
        """Mean time for which recent answers used a slot, in seconds; None before the first one."""

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._all.waiters)

    @property
    def free(self) -> int:
        """Number of free slots."""
        return self._slots - len(self._all.slots)

    @property
    def clients(self) -> int:
        """Number of clients with waiting requests."""
        return len({waiter.share for waiter in self._all.waiters})

    def add(self, client: tuple[str, ...], count: int, turn: Any) -> Waiter:
        """Add a waiting request.

        Args:
            client: names that identify the client, the most general one first.
            count, turn: see ``Waiter``.
        """
        share = self._all
        for name in client:
            share = share.part(name)
        waiter = Waiter(client, share, count, turn)
        for part in share.path:
            if not part.waiters:
                part.lift()
        for part in share.path:
            part.waiters[waiter] = None
        return waiter

    def remove(self, waiter: Waiter) -> None:
        """Remove a request unless it has been removed or has got its slots."""
        for share in waiter.share.path:
            share.waiters.pop(waiter, None)

    def admit(self, now: float) -> Iterator[tuple[Waiter, list[Slot]]]:
        """Remove the requests whose turn it is, and yield them with their slots.

        Args:
            now: current time in seconds.
        """
        while (waiter := self._next()) is not None and waiter.count <= self.free:
            self.remove(waiter)
            slots = [Slot(waiter, now) for _ in range(waiter.count)]
            for share in waiter.share.path:
                share.slots.update(slots)
                if share.parent is not None:
                    share.parent.latest = share
            yield waiter, slots

    def _next(self) -> Waiter | None:
        share, mean = self._all, self._usual_cost
        while share.parts and share.waiters:
            waiting = share.waiting
            share = waiting[0]
            if len(waiting) > 1:  # Each counter is a sum over all running answers of a client.
                share = min(waiting, key=lambda part: part.expected(mean))
        return next(iter(share.waiters), None)

    @property
    def _usual_cost(self) -> float:
        return 1.0 if self._cost is None else self._cost

    def end(self, slot: Slot, now: float) -> None:
        """Free the slot of an answer that has ended, and settle its cost.

        An answer of which nothing is known, because it failed, costs as much as others: otherwise
        a client whose requests all fail would always be next.

        Args:
            slot: the slot; its ``cost`` is complete.
            now: current time in seconds.
        """
        if slot.cost:
            self._cost = _recent(self._cost, slot.cost)
        else:
            slot.cost = self._usual_cost
        self._held = _recent(self._held, now - slot.since)
        self.give_back(slot)

    def give_back(self, slot: Slot) -> None:
        """Free a slot, and settle its cost; for a slot that was not used, the cost is 0."""
        for share in slot.share.path:
            share.slots.remove(slot)
            share.settled += slot.cost

    def surplus(self, waiter: Waiter) -> Waiter:
        """Return the request to refuse if the newest request is one too many.

        It is the newest request of the client with the most waiting requests, if that client has
        more than the client of the newest request; otherwise, it is the newest request itself.
        """
        group, *own = reversed([*waiter.share.path])
        for share in own:
            largest = _largest(group)
            if len(largest.waiters) > len(share.waiters):
                while largest.parts:
                    largest = _largest(largest)
                return next(reversed(largest.waiters))
            group = share
        return waiter

    def needed(self, waiter: Waiter) -> int:
        """Estimate how many slots must become free until a request has its slots.

        Until a client gets its next slots, each other client gets at most as many; if the other
        one's counter is higher, it gets one slot less.

        Args:
            waiter: newest waiting request of its client.
        """
        needed, mean = waiter.share.wanted, self._usual_cost
        for share in waiter.share.path:
            if share.parent is not None:
                own, most = share.expected(mean), needed
                for part in share.parent.waiting:
                    if part is not share:
                        needed += min(part.wanted, most - (part.expected(mean) > own))
        return max(0, needed - self.free)

    def seconds(self, slots: int) -> float | None:
        """Estimate how long it takes until some slots become free; None before the first answer
        has ended."""
        return None if self._held is None else slots * self._held / self._slots


def _largest(share: Share) -> Share:
    """Return the part with the most waiting requests, the latest one of several."""
    return max(reversed(share.waiting), key=lambda part: len(part.waiters))


def _recent(mean: float | None, value: float) -> float:
    """Return a mean over recent values after a further value."""
    return value if mean is None else mean + _RECENT * (value - mean)
