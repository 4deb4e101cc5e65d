"""Memory of a GPU that grows in place."""

import gc
import threading
from collections.abc import Callable

import pytest
import torch

from oscar_mm.kernels import address_range
from oscar_mm.kernels.address_range import AddressRange, bytes_in_ranges
from oscar_mm.kernels.launch import SWITCH

CUDA = torch.device("cuda", 0)
MIB = 1 << 20
NOISE = 32 * MIB
"""Bytes by which the free memory of a GPU differs for other reasons, such as kernels that torch
loads at first use."""


def free() -> int:
    # The first launches of torch's kernels take up to 100 MB of a GPU.
    some = torch.empty(8, dtype=torch.int32, device=CUDA).fill_(7)
    assert bool((some == 7).all()) and int(some.sum()) == 56
    del some
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(CUDA)[0]


def reserved() -> AddressRange:
    found = AddressRange.reserve(CUDA)
    assert found is not None
    return found


def numbers(addresses: AddressRange, count: int) -> torch.Tensor:
    """Room for so many int32."""
    addresses.resize(4 * count)
    return addresses.tensor((count,), torch.int32)


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    work()  # loads kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def test_no_range_without_a_gpu_or_with_kernels_switched_off(monkeypatch) -> None:
    assert AddressRange.reserve(torch.device("cpu")) is None
    monkeypatch.setenv(SWITCH, "off")
    assert AddressRange.reserve(CUDA) is None
    assert bytes_in_ranges(torch.device("cpu")) == (0, 0)


def test_a_driver_that_cannot_is_reported_once(monkeypatch, caplog) -> None:
    def refuse(index: int) -> None:
        raise RuntimeError(f"GPU {index} has no such thing")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(address_range, "_gpu", refuse)
    for _ in range(3):
        assert AddressRange.reserve(torch.device("cuda", 7)) is None
    assert len(caplog.records) == 1 and "GPU 7 has no such thing" in caplog.text


@pytest.mark.gpu(alone=True)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_growth_keeps_address_and_content(dtype) -> None:
    addresses, place, before = reserved(), None, torch.empty((0, 3, 5), dtype=dtype)
    for rows in (1, 1000, 200_000, 1_000_000):
        addresses.resize(rows * 15 * dtype.itemsize)
        tensor = addresses.tensor((rows, 3, 5), dtype)
        assert tensor.device == CUDA and tensor.is_contiguous() and tensor.dtype == dtype
        assert place in (None, tensor.data_ptr())
        assert torch.equal(tensor[: len(before)].cpu(), before)
        assert addresses.size == tensor.nbytes <= addresses.nbytes < tensor.nbytes + 4 * MIB
        place = tensor.data_ptr()
        tensor.copy_(torch.arange(tensor.numel()).view(rows, 3, 5) % 100)
        before = tensor.cpu()


@pytest.mark.gpu(alone=True)
def test_memory_comes_from_the_gpu_and_goes_back_to_it() -> None:
    addresses, start = reserved(), free()
    assert addresses.tensor((0, 4), torch.uint8).shape == (0, 4)
    assert start - free() < NOISE, "addresses take no memory"
    held = numbers(addresses, 64 * MIB)
    held.fill_(7)
    assert abs(start - free() - 256 * MIB) < NOISE
    assert bytes_in_ranges(CUDA)[1] >= 256 * MIB
    held = numbers(addresses, 16 * MIB + 1)
    assert abs(start - free() - 66 * MIB) < NOISE
    assert bool((held == 7).all())
    held = numbers(addresses, 64 * MIB)
    assert abs(start - free() - 256 * MIB) < NOISE
    assert bool((held[: 16 * MIB] == 7).all())
    addresses.resize(0)
    assert addresses.nbytes == 0 and start - free() < NOISE


@pytest.mark.gpu(alone=True)
def test_a_tensor_keeps_the_range() -> None:
    start = free()
    view = numbers(reserved(), 32 * MIB)[5:].view(torch.uint8)[:8]
    view.fill_(3)
    assert start - free() > 120 * MIB
    assert view.tolist() == [3] * 8
    del view
    assert start - free() < NOISE


@pytest.mark.gpu(alone=True)
def test_work_on_its_way_is_done_before_memory_goes() -> None:
    """Otherwise the GPU faults, and so does all that comes after."""
    source = torch.ones(64 * MIB, dtype=torch.int32, device=CUDA)
    for _ in range(5):
        addresses = reserved()
        held = numbers(addresses, len(source))
        for _ in range(30):
            held.copy_(source).mul_(2)
        total = held[: 1 << 20].sum()
        held = numbers(addresses, 1 << 20)
        for _ in range(30):
            held.add_(1)
        del held, addresses
        assert int(total) == 2 << 20
    torch.cuda.synchronize()


@pytest.mark.gpu(alone=True)
def test_a_graph_that_was_captured_before_growth_reads_and_writes() -> None:
    addresses, out = reserved(), torch.zeros(1000, dtype=torch.int32, device=CUDA)
    held = numbers(addresses, 1000)
    held.zero_()

    def work() -> None:
        held.add_(1)
        out.copy_(held)

    graph = captured(work)
    held.fill_(10)
    for count in (10, 10**6, 10**8, 2000):
        grown = numbers(addresses, max(count, 1000))
        graph.replay()
        assert torch.equal(grown[:1000], out)
        assert grown.data_ptr() == held.data_ptr()
    assert set(out.tolist()) == {14}


@pytest.mark.gpu(alone=True)
def test_ranges_dropped_within_a_capture_are_freed_after_it() -> None:
    start = free()
    ranges = [reserved() for _ in range(3)]
    for one in ranges:
        numbers(one, 16 * MIB)
    x = torch.zeros(8, device=CUDA)

    def work() -> None:
        x.add_(1)
        if torch.cuda.is_current_stream_capturing():
            ranges.clear()

    graph = captured(work)
    graph.replay()
    assert x.tolist() == [2] * 8
    one = reserved()
    one.resize(1)
    del one, graph
    # Half of what the ranges held: other processes may also take memory meanwhile.
    assert start - free() < 96 * MIB


@pytest.mark.gpu(alone=True)
def test_a_thread_that_captures_is_not_disturbed_by_others() -> None:
    stop, errors = threading.Event(), []

    def churn() -> None:
        try:
            while not stop.is_set():
                held = numbers(addresses := reserved(), 8 * MIB)
                held.fill_(1)
                held = numbers(addresses, MIB)
                assert int(held.sum()) == MIB
        except Exception as error:
            errors.append(error)

    x, aside = torch.zeros(1000, device=CUDA), torch.cuda.Stream()
    x.add_(1)
    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(20):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
                for _ in range(200):
                    x.add_(1)
            graph.replay()
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert x.unique().tolist() == [1 + 20 * 200]


@pytest.mark.gpu(alone=True)
def test_too_much_is_an_error_that_changes_nothing() -> None:
    addresses = reserved()
    held = numbers(addresses, MIB)
    held.fill_(5)
    start, total = free(), torch.cuda.mem_get_info(CUDA)[1]
    for size in (start + (1 << 30), 2 * total):
        with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory.*cuda:0 from .* to"):
            addresses.resize(size)
        assert addresses.size == 4 * MIB and abs(start - free()) < NOISE
        assert bool((held == 5).all())
    addresses.resize(64 * MIB)
    assert bool((addresses.tensor((MIB,), torch.int32) == 5).all())


@pytest.mark.gpu(alone=True)
def test_torch_gives_back_what_it_keeps_unused() -> None:
    addresses, size = reserved(), free() // 2
    kept = torch.empty(size, dtype=torch.uint8, device=CUDA)
    del kept
    assert torch.cuda.memory_reserved(CUDA) >= size
    addresses.resize(size + size // 2)
    assert torch.cuda.memory_reserved(CUDA) < size


@pytest.mark.gpu(alone=True)
def test_hundreds_of_ranges() -> None:
    start = free()
    ranges = [reserved() for _ in range(300)]
    tensors = [numbers(one, 1000 + index) for index, one in enumerate(ranges)]
    for index, one in enumerate(tensors):
        one.fill_(index)
    assert [int(one[-1]) for one in tensors] == list(range(300))
    assert len({one.data_ptr() for one in tensors}) == 300
    assert bytes_in_ranges(CUDA)[0] >= sum(one.nbytes for one in tensors)
    del ranges, tensors, one
    assert start - free() < NOISE


@pytest.mark.gpu(alone=True)
def test_a_thread_that_has_not_used_cuda_may_grow_and_drop() -> None:
    found = []

    def use() -> None:
        held = numbers(reserved(), 3)
        held.fill_(4)
        found.extend(held.tolist())

    reserved()
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert found == [4, 4, 4]
