"""FairLock: threads get it in the order in which they ask for it."""

import threading
import time

import pytest

from oscar_mm.cache.fair_lock import FairLock


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
