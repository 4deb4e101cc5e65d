"""Threads get a FairLock in the order in which they ask; one works for all, whoever leaves."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from oscar_mm.threads import FairLock, LeaderFollowers


def test_a_thread_that_takes_it_again_comes_after_those_that_wait() -> None:
    lock, order = FairLock(), []
    threads = []

    def wait(number: int) -> None:
        with lock:
            order.append(number)

    with lock:
        for number in range(4):
            threads.append(threading.Thread(target=wait, args=(number,)))
            threads[-1].start()
            while len(lock._waiting) <= number:
                time.sleep(0.001)
        assert order == []
    with lock:
        assert order == [0, 1, 2, 3]
    for thread in threads:
        thread.join()


def test_a_thread_may_take_it_several_times() -> None:
    lock = FairLock()
    with lock, lock:
        assert lock.acquire(blocking=False) and lock.is_owned
        lock.release()
    assert not lock.is_owned
    with pytest.raises(RuntimeError, match="only a lock that it has"):
        lock.release()


def test_who_does_not_wait_gets_it_from_nobody() -> None:
    lock, found = FairLock(), []

    def attempt() -> None:
        found.extend([lock.acquire(blocking=False), lock.acquire(timeout=0.05), lock.is_owned])

    with lock:
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
    assert found == [False, False, False]
    assert lock.acquire(timeout=0)
    lock.release()


def test_one_thread_at_a_time() -> None:
    lock, inside, most = FairLock(), [0], [0]

    def work() -> None:
        for _ in range(300):
            if not lock.acquire(timeout=0.001):
                continue
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0)
            inside[0] -= 1
            lock.release()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] and lock.acquire(blocking=False)


def waits(lock: FairLock, order: list[str], name: str, *, brief: bool) -> threading.Thread:
    """A thread that waits for a lock, and notes when it has it."""

    def work() -> None:
        with lock.briefly() if brief else lock:
            order.append(name)

    count, thread = len(lock._waiting), threading.Thread(target=work)
    thread.start()
    while len(lock._waiting) == count:
        time.sleep(0.001)
    return thread


def test_who_needs_it_for_a_moment_gets_it_between() -> None:
    lock, order = FairLock(), list[str]()
    with lock:
        names = ("long", "brief", "long too", "brief too")
        threads = [waits(lock, order, one, brief=one.startswith("brief")) for one in names]
        assert lock.is_wanted_briefly
        with lock:
            lock.let_in()
        assert order == [], "taken twice, it is not given to others"
        lock.let_in()
        assert order == ["brief", "brief too"] and lock.is_owned
        assert not lock.is_wanted_briefly
        lock.let_in()
        assert order == ["brief", "brief too"]
    for thread in threads:
        thread.join()
    assert order == ["brief", "brief too", "long", "long too"]
    lock.let_in()
    assert not lock.is_owned


class Interrupted(Exception):
    """A step of the leader was interrupted."""


def test_work_goes_on_though_leaders_are_interrupted_and_leave() -> None:
    lock, work = FairLock(), [0]
    threads = LeaderFollowers(lock)

    def wait(goal: int, seed: int) -> None:
        """Return when so much work is done, or this thread was interrupted at its own."""
        draw = random.Random(seed)
        try:
            while work[0] < goal:
                if threads.lead(lambda: work[0] >= goal):
                    try:
                        with lock:
                            work[0] += 1
                        if draw.random() < 0.1:
                            raise Interrupted
                    finally:
                        threads.step_down()
        finally:
            threads.promote()

    with ThreadPoolExecutor(24) as pool:
        goals = [index * 3 % 200 for index in range(400)]
        for one in [pool.submit(wait, goal, goal) for goal in goals]:
            try:
                one.result(timeout=60)
            except Interrupted:
                continue
    assert work[0] > 0


def test_an_error_of_a_question_is_of_the_thread_that_asks() -> None:
    threads, asked = LeaderFollowers(FairLock()), threading.Event()
    assert threads.lead(lambda: False)

    def done() -> bool:
        if asked.is_set():
            raise ValueError("no answer")
        asked.set()
        return False

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(threads.lead, done)
        asked.wait(10)
        while not waiting.done():
            threads.wake()
        with pytest.raises(ValueError, match="no answer"):
            waiting.result(10)


def test_the_owner_of_the_lock_does_not_wait() -> None:
    lock = FairLock()
    threads = LeaderFollowers(lock)
    assert threads.lead(lambda: False)
    with lock:
        assert threads.lead(lambda: False)
    assert not threads.lead(lambda: True)


def test_a_sole_leader_leads_until_it_leaves() -> None:
    threads, work, leaders = LeaderFollowers(FairLock()), [0], set[int]()
    threads.watchers.append(lambda: work.append(len(work)))

    def step_until(goal: int) -> int:
        while len(work) < goal:
            if threads.lead(lambda: len(work) >= goal):
                leaders.add(threading.get_ident())
                threads.step_down()
        threads.promote()
        return threading.get_ident()

    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(step_until, goal) for goal in (20_000, 25_000)]
        while not leaders:
            time.sleep(0)
        with threads.sole_leader():
            step_until(len(work) + 10)
            leaders.clear()
            waiting.append(pool.submit(step_until, len(work) + 50))
            step_until(len(work) + 100)
            assert leaders == {threading.get_ident()} and waiting[2].result(10) not in leaders
        assert {one.result(60) for one in waiting[:2]} & leaders
    assert len(work) >= 25_000
