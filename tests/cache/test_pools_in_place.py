"""Pools with a fixed address: on a GPU, and on a CPU with a stand-in for the address range."""

import gc
import math

import numpy as np
import pytest
import torch

from oscar_mm import OscarCache
from oscar_mm.cache import page_store as store_module
from oscar_mm.cache.page_store import PageStore, Pool
from oscar_mm.fast_decode.graph_runner import GraphInputs
from oscar_mm.kernels.address_range import AddressRange
from oscar_mm.policy import PLAIN
from tests.cache.invariants import POLICIES, attend_oscar, chunk

TEXT = np.zeros((1, 1), np.int8)
PIECE = 1 << 14


class OneTensor:
    """Address range on a CPU; parts without memory are filled with bytes that decode to NaN."""

    def __init__(self) -> None:
        self.size = self.nbytes = 0
        with torch.inference_mode(False):
            self.memory = torch.full((1 << 24,), 0xFF, dtype=torch.uint8)

    @classmethod
    def reserve(cls, device: torch.device) -> "OneTensor":
        return cls()

    def resize(self, size: int) -> None:
        self.size, self.nbytes = size, -(-size // PIECE) * PIECE
        self.memory[self.nbytes :] = 0xFF

    def surplus(self, size: int) -> int:
        return self.nbytes - -(-size // PIECE) * PIECE

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        assert nbytes <= self.nbytes
        return self.memory[:nbytes].view(dtype).view(shape)


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request, monkeypatch) -> torch.device:
    if request.param == "cpu":
        monkeypatch.setattr(store_module, "AddressRange", OneTensor)
    return torch.device(request.param)


def add(cache: OscarCache, device: torch.device, tokens: int) -> None:
    # The kernels of a GPU take no float32.
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for layer in range(2):
        new = chunk(layer + cache.get_seq_length(), tokens)
        queries, keys, values = (x.to(device, dtype) for x in new)
        attend_oscar(cache, (queries, keys, values), layer=layer)
        cache.end_step([layer])


def pools(store: PageStore) -> list[Pool]:
    return [pool for layer in store.layers.values() for pool in layer.by_bits.values()]


def places(store: PageStore) -> list[int]:
    return [pool.storage.data_ptr() for pool in pools(store) if len(pool.storage)]


def conversation(policy: str, device: torch.device) -> tuple[list[torch.Tensor], set[int], int]:
    """Return the content of caches with a shared beginning after pools grew and shrank, the
    addresses of pools, and how often pools moved."""
    store = PageStore(POLICIES[policy])
    cache, other = (OscarCache(POLICIES[policy], store=store) for _ in range(2))
    add(other, device, 500)
    add(cache, device, 300)
    where = set(places(store))
    twin = cache.fork()
    for count in (1, 200, 1, 700):
        add(cache, device, count)
        add(twin, device, count + 3)
        where |= set(places(store))
    other.close()
    store.trim()
    where |= set(places(store))
    add(twin, device, 40)
    cache.crop(-100)
    store.trim()
    add(cache, device, 400)
    where |= set(places(store))
    held = [side for x in (cache, twin) for layer in range(2) for side in x.unpacked(layer)]
    return held, where, store.version


@pytest.mark.daily("bf16", "mixed")
@pytest.mark.parametrize("policy", ["bf16", "channel", "stream", "mixed"])
def test_holds_what_pools_that_move_hold(device, policy, monkeypatch) -> None:
    held, where, moves = conversation(policy, device)
    assert all(bool(side.isfinite().all()) for side in held)
    monkeypatch.setattr(OneTensor, "reserve", lambda device: None)
    monkeypatch.setattr(AddressRange, "reserve", lambda device: None)
    expected, _, more = conversation(policy, device)
    for side, other in zip(held, expected, strict=True):
        assert torch.equal(side, other)
    assert moves == len(where) < more


@pytest.mark.parametrize("policy", ["bf16", "stream"])
def test_a_capture_holds_while_pools_grow_and_shrink(device, policy) -> None:
    cache = OscarCache(POLICIES[policy])
    add(cache, device, 300)
    replay = GraphInputs(cache, 1)

    def take() -> None:
        assert replay.fix(cache.begin(TEXT))
        for pool in pools(cache.store):
            assert len(pool.storage) == 0 or pool.storage.data_ptr() in before
        add(cache, device, 1)

    before = places(cache.store)
    take()
    version, slots, plain = cache.version, cache.store.allocators[PLAIN], []
    assert replay.is_ready
    for _ in range(4):
        plain.append(slots.allocate(slots.free + 50))
        take()
        assert {layer.recent.storage.shape[0] for layer in cache.layers} == {slots.capacity}
    for taken in plain:
        slots.release(taken)
    cache.store.trim()
    take()
    assert cache.version == version and places(cache.store)[: len(before)] == before


@pytest.mark.parametrize("policy", ["stream", "mixed"])
def test_a_capture_after_pools_were_empty(device, policy) -> None:
    """It contains the addresses of pools that have no slots at the time, but will have some."""
    store = PageStore(POLICIES[policy])
    before = OscarCache(POLICIES[policy], store=store)
    add(before, device, 300)
    where = [pool.storage.data_ptr() for pool in pools(store)]
    before.close()
    store.trim()
    assert store.memory().pool_bytes == 0
    cache = OscarCache(POLICIES[policy], store=store)
    add(cache, device, 2)
    assert any(not len(pool.storage) for pool in pools(store)), "no page has begun"
    replay = GraphInputs(cache, 1)
    assert replay.fix(cache.begin(TEXT))
    version = cache.version
    assert [pool.storage.data_ptr() for pool in pools(store)] == where
    add(cache, device, 1)
    add(cache, device, 300)
    assert [pool.storage.data_ptr() for pool in pools(store)] == where
    assert cache.version == version
    cache.close()
    store.trim()
    assert store.memory().pool_bytes == 0


def test_a_report_counts_the_last_piece(device) -> None:
    cache = OscarCache("channel")
    add(cache, device, 300)
    store, taken = cache.store, [pool.device_bytes for pool in pools(cache.store)]
    report = store.memory()
    assert report.pool_bytes == sum(taken)
    slots = sum(pool.storage.nbytes for pool in pools(store))
    assert report.used_bytes == slots < report.pool_bytes and report.free_bytes == 0
    cache.close()
    store.trim()
    assert store.memory().pool_bytes == 0


@pytest.mark.parametrize("tokens", [1, 60, 1500])
def test_free_slots_within_a_piece_do_not_count(device, tokens: int) -> None:
    cache = OscarCache("bf16")
    add(cache, device, 32)
    store, other = cache.store, cache.fork()
    add(other, device, tokens)
    other.close()
    taken, used = store.memory().pool_bytes, cache.memory().by_modality["text"]
    free = store.memory().free_bytes
    assert cache.memory().by_kind["unused"] == free
    assert free <= sum(pool.storage.nbytes for pool in pools(store)) - used
    store.trim()
    assert (free > 0) == (store.memory().pool_bytes < taken)
    assert store.memory().used_bytes == used and store.memory().free_bytes == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_slots_move_together_in_place(device, dtype, monkeypatch) -> None:
    monkeypatch.setattr(store_module, "_COPY_BYTES", 100)
    pool, generator = Pool((2, 3), dtype, device), np.random.default_rng(0)
    with torch.inference_mode():
        pool.reserve(5)
    for capacity in (700, 900, 650):
        pool.reserve(capacity)
        content = torch.arange(6 * capacity, device=device).view(-1, 2, 3) % 251
        pool.storage[:] = content
        slots = np.flatnonzero(generator.random(capacity) < 0.7).tolist()
        slots = [*range(40), *(slot for slot in slots if slot >= 40)]
        pool.keep(slots)
        assert pool.storage.dtype == dtype and pool.moves == 1
        assert torch.equal(pool.storage, content[slots].to(dtype))
    pool.keep([])
    assert pool.storage.shape == (0, 2, 3) and pool.device_bytes == 0


@pytest.mark.gpu(alone=True)
def test_stores_that_are_gone_leave_nothing_behind() -> None:
    device = torch.device("cuda", 0)

    def free() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]

    def use() -> None:
        caches = [OscarCache("channel") for _ in range(8)]
        for cache in caches:
            add(cache, device, 300)
            cache.store.allocators[PLAIN].allocate(60_000)
            cache.store.reserve()
        taken = sum(cache.store.memory().pool_bytes for cache in caches)
        assert before - free() > 0.9 * taken > 200 << 20

    before = free()
    use()
    before = free()  # kernels are loaded now
    use()
    assert before - free() < 32 << 20


@pytest.mark.gpu(alone=True)
def test_a_pool_that_finds_no_memory_stays_as_it_is() -> None:
    pool = Pool((1 << 20,), torch.uint8, torch.device("cuda", 0))
    pool.reserve(10)
    pool.storage.fill_(9)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(0)
    for nbytes in (free + (1 << 28), 2 * total):
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            pool.reserve(nbytes >> 20)
        assert pool.storage.shape == (10, 1 << 20) and bool((pool.storage == 9).all())
    pool.reserve(20)
    assert bool((pool.storage[:10] == 9).all()) and pool.moves == 1
