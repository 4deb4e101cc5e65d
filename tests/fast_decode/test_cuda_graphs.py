"""Captures of CUDA graphs, whatever other threads do meanwhile and whatever came before."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from oscar_mm.fast_decode import graph_runner
from oscar_mm.fast_decode.graph_runner import SmallGraphs, capture_cuda_graph, graph_capture

CUDA = torch.device("cuda", 0)


def product(size: int) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """Rows that may be overwritten, and a function that multiplies them."""
    rows = torch.ones((size, 64), dtype=torch.bfloat16, device=CUDA)
    weights = torch.eye(64, dtype=torch.bfloat16, device=CUDA)
    return rows, lambda: rows @ weights + 1


def test_no_graphs_on_a_cpu() -> None:
    assert graph_capture({torch.device("cpu")}) is None


def test_small_graphs_share_a_pool_as_long_as_one_of_them_is_there(monkeypatch) -> None:
    pools, used = iter(range(9)), list[int]()

    def capture(function, device, pool):
        used.append(pool)
        return lambda: function()

    monkeypatch.setattr(graph_runner, "capture_cuda_graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    small, replays = SmallGraphs(), list[Callable[[], None]]()
    for _ in range(3):
        replays.append(small(lambda: None, CUDA))
    del replays[:2]
    replays.append(small(lambda: None, CUDA))
    replays.clear()
    replays.append(small(lambda: None, CUDA))
    assert used == [0, 0, 0, 0, 1]


@pytest.mark.gpu
def test_small_graphs_are_captured_again_once_all_are_gone() -> None:
    capture = graph_capture({CUDA}, small=True)
    assert capture is not None
    for _ in range(3):
        rows, function = product(48)
        function()
        replays = [capture(function, CUDA) for _ in range(2)]
        rows.fill_(2)
        assert [float(replay().float().mean()) for replay in replays] == [3.0, 3.0]
        del replays


@pytest.mark.gpu
def test_a_thread_whose_first_product_is_in_the_capture() -> None:
    """Threads run at once, because a thread that ends leaves its cuBLAS handle to the next."""
    count, found = 6, list[float]()
    together, errors = threading.Barrier(count), list[BaseException]()
    states = [product(32 + index) for index in range(count)]

    def capture(index: int) -> None:
        rows, function = states[index]
        together.wait()
        try:
            replay = capture_cuda_graph(function, CUDA)
            rows.fill_(index)
            found.append(float(replay().float().mean()))
        except BaseException as error:
            errors.append(error)
        together.wait()

    threads = [threading.Thread(target=capture, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorted(found) == [index + 1 for index in range(count)]


@pytest.mark.gpu
def test_a_broken_capture_does_not_hinder_the_next() -> None:
    rows, function = product(40)
    function()

    def waits() -> torch.Tensor:
        function()
        torch.cuda.synchronize()
        return function()

    for value in range(5):
        with pytest.raises(RuntimeError, match="captur"):
            capture_cuda_graph(waits, CUDA)
        replay = capture_cuda_graph(function, CUDA)
        rows.fill_(value)
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert set(replay().unique().tolist()) == {value + 1}


@pytest.mark.gpu
def test_random_numbers_and_memory_after_a_broken_capture() -> None:
    """Both took part in the capture, and torch does not tell them that it is over."""
    x = torch.ones(8, device=CUDA)

    def draws() -> list[float]:
        torch.cuda.manual_seed(5)
        found = torch.rand(3, device=CUDA)
        for _ in range(2):
            if breaks:
                with pytest.raises(RuntimeError, match="captur"):
                    capture_cuda_graph(lambda: x.exponential_().sum().item(), CUDA)
            found = torch.cat([found, torch.empty(3, device=CUDA).exponential_()])
        return found.tolist()

    def active() -> int:
        torch.cuda.synchronize()
        # The allocator looks at its events when it is asked for memory.
        torch.empty(1 << 20, device=CUDA)
        return torch.cuda.memory_stats(CUDA)["active_bytes.all.current"]

    breaks = False
    expected = draws()
    breaks = True
    assert draws() == expected
    before, aside = active(), torch.cuda.Stream()
    shared = torch.empty(1 << 24, device=CUDA)
    shared.record_stream(aside)
    del shared
    assert active() - before < 1 << 22


@pytest.mark.gpu
def test_copies_and_events_of_other_threads_break_no_capture() -> None:
    stop, errors = threading.Event(), list[BaseException]()

    def work(seed: int) -> None:
        try:
            while not stop.is_set():
                host = torch.full((1 << (10 + seed), 64), 2.0)
                there = host.pin_memory().to(CUDA, non_blocking=True)
                done = torch.cuda.Event()
                done.record()
                done.synchronize()
                assert bool((host.to(CUDA) == there).all())
        except BaseException as error:
            errors.append(error)

    rows, function = product(16)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    try:
        for value in range(20):
            replay = capture_cuda_graph(function, CUDA)
            rows.fill_(value)
            assert set(replay().unique().tolist()) == {value + 1}
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors
