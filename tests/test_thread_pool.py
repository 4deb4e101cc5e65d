"""Threads that decode media: order, errors, and how much is under way."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from oscar_mm import thread_pool
from oscar_mm.errors import InputError
from oscar_mm.media.limits import MediaCount, MediaLimits
from oscar_mm.thread_pool import parallel_map, thread_count


def test_results_keep_the_order() -> None:
    def late(item: int) -> int:
        time.sleep(0.002 * (item % 3 == 0))
        return item * item

    assert list(parallel_map(late, range(50))) == [item * item for item in range(50)]
    assert list(parallel_map(late, [])) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own() -> None:
    list(parallel_map(str, range(9)))
    child = os.fork()
    if not child:
        done = list(parallel_map(str, range(9))) == [str(item) for item in range(9)]
        os._exit(0 if done else 1)
    deadline = time.monotonic() + 20
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    assert ended[1] == 0


def test_a_single_item_stays_in_its_thread() -> None:
    assert list(parallel_map(lambda _: threading.get_ident(), [0])) == [threading.get_ident()]
    assert threading.get_ident() not in parallel_map(lambda _: threading.get_ident(), [0, 1])


def test_few_results_wait_to_be_taken() -> None:
    submit_all: list[int] = []
    results = parallel_map(submit_all.append, range(1000))
    next(results)
    time.sleep(0.01)
    assert len(submit_all) <= 2 * thread_count() + 1
    results.close()
    time.sleep(0.01)
    assert len(submit_all) <= 2 * thread_count() + 1, "nothing begins once nobody asks"


def test_the_first_error_in_order_ends_the_rest() -> None:
    submit_all: list[int] = []

    def failing(item: int) -> None:
        submit_all.append(item)
        if item in (2, 3):
            time.sleep(0.01 * (item == 2))
            raise InputError(f"{item} is bad")

    with pytest.raises(InputError, match="2 is bad"):
        list(parallel_map(failing, range(1000)))
    assert len(submit_all) <= 3 + 2 * thread_count()


def test_large_media_take_turns() -> None:
    count = MediaCount(MediaLimits())
    inside: list[int] = []

    def turn(_: int) -> int:
        with count.turn(large=True), count.turn(large=True):
            inside.append(1)
            time.sleep(0.002)
            together = len(inside)
            inside.pop()
            return together

    assert set(parallel_map(turn, range(6))) == {1}


def test_a_small_picture_waits_for_no_other() -> None:
    count = MediaCount(MediaLimits())
    both = threading.Barrier(2, timeout=10)

    def turn(large: bool) -> None:
        with count.turn(large=large):
            both.wait()

    other = threading.Thread(target=turn, args=(True,))
    other.start()
    turn(False)
    other.join()


def test_torch_uses_one_core_in_these_threads_alone() -> None:
    usual = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        thread_pool._threads.cache_clear()
        assert set(parallel_map(lambda _: torch.get_num_threads(), range(50))) == {1}
        assert torch.get_num_threads() == 3
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(usual)
