"""What a cache tells of its steps: begin, replayed, version; and steps that a graph replays."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from oscar_mm import KVPolicy, OscarCache
from oscar_mm.cache.saved_cache import load_cache, save_cache
from oscar_mm.fast_decode.graph_runner import GraphInputs
from oscar_mm.modality import PADDING, Modality
from oscar_mm.policy import PLAIN
from tests.cache.invariants import (
    POLICIES,
    STREAM,
    attend_oscar,
    chunk,
    left_padded,
    poison,
    random_ids,
)

TEXT = np.zeros((1, 1), np.int8)


def of_two_layers(policy: str = "stream", tokens: int = 330) -> OscarCache:
    cache = OscarCache(POLICIES[policy])
    for layer in range(2):
        attend_oscar(cache, chunk(layer, tokens), layer=layer)
    return cache


def add(cache: OscarCache, tokens: int = 1) -> None:
    for layer in range(2):
        attend_oscar(cache, chunk(layer, tokens), layer=layer)


def with_free_slots(cache: OscarCache, slots: int = 2000) -> None:
    allocator = cache.store.allocators[PLAIN]
    allocator.release(allocator.allocate(slots))
    add(cache)


def places(cache: OscarCache) -> list[int]:
    pools = [pool for layer in cache.layers for pool in (layer.recent, *layer.pages.values())]
    return [pool.storage.data_ptr() for pool in pools]


def test_a_step_that_no_layer_carries_out_is_noticed() -> None:
    cache = of_two_layers()
    with_free_slots(cache)
    step = cache.begin(TEXT)
    with pytest.raises(RuntimeError, match="did not reach layer 0"):
        cache.begin(TEXT)
    cache.replayed(step)
    assert cache.begin(TEXT) is cache.step and cache.step is not step
    attend_oscar(cache, chunk(0, 1), layer=0)
    for use in (cache.fork, cache.check_complete, lambda: cache.begin(TEXT)):
        with pytest.raises(RuntimeError, match="did not reach layer 1"):
            use()
    attend_oscar(cache, chunk(0, 1), layer=1)
    cache.check_complete()


def test_a_layer_that_comes_late_is_noticed() -> None:
    cache = of_two_layers()
    add(cache)
    with pytest.raises(RuntimeError, match="did not reach layer 2"):
        attend_oscar(cache, chunk(0, 1), layer=2)


def test_a_layer_that_stops_between_keys_and_attention_is_noticed() -> None:
    cache = of_two_layers()
    _, keys, values = chunk(0, 1)
    cache.attend_packed(None)
    cache.update(keys, values, 0)
    with pytest.raises(RuntimeError, match="did not reach layer 0"):
        cache.update(keys, values, 0)


def forked(cache: OscarCache, _) -> OscarCache:
    return cache.fork()


def loaded(cache: OscarCache, folder) -> OscarCache:
    save_cache(cache, folder / "cache", fingerprint="one")
    return load_cache(folder / "cache", fingerprint="one")[0]


@pytest.mark.parametrize("twin", [forked, loaded])
def test_copies_of_a_cache_go_on_with_the_next_step(tmp_path, twin: Callable) -> None:
    copy = twin(of_two_layers(), tmp_path)
    copy.check_complete()
    add(copy)
    attend_oscar(copy, chunk(0, 1), layer=0)
    with pytest.raises(RuntimeError, match="did not reach layer 1"):
        copy.check_complete()


def test_an_empty_copy_begins_with_any_layers(tmp_path) -> None:
    for twin in (forked, loaded):
        copy = twin(OscarCache("channel"), tmp_path)
        assert copy.step is None
        add(copy, 5)


@pytest.mark.parametrize("policy", ["bf16", "channel", "stream"])
def test_the_version_says_whether_pools_stay(policy: str) -> None:
    """It stays while tokens come and go in room that is there, and changes with their places."""
    cache = of_two_layers(policy)
    with_free_slots(cache)
    version, before = cache.version, places(cache)
    for _ in range(5):
        add(cache)
    cache.crop(-3)
    cache.forget(4, 9)
    twin = cache.fork()
    twin.batch_repeat_interleave(2)
    twin.close()
    assert cache.version == version and places(cache) == before
    cache.store.trim()
    assert cache.version != version and places(cache) != before
    version, before = cache.version, places(cache)
    cache.store.trim()  # nothing is free any more
    assert cache.version == version and places(cache) == before
    add(cache, 40)
    assert cache.version != version and places(cache) != before
    version = cache.version
    cache.reset()
    assert cache.version != version


@pytest.mark.parametrize("policy", ["bf16", "channel", "stream"])
def test_a_dry_run_leaves_the_cache_as_it_was(policy: str) -> None:
    cache = of_two_layers(policy)
    with_free_slots(cache)
    replay, before = GraphInputs(cache, 1), cache.step
    held = [cache.unpacked(layer) for layer in range(2)]
    step = replay.plan_ahead(TEXT)
    assert step is not None
    with replay.dry_run(step):
        add(cache)
        cache.end_step()
        assert cache.step is step
    assert cache.step is before and cache.get_seq_length() == 331
    cache.check_complete()
    for layer, sides in enumerate(held):
        for side, found in zip(sides, cache.unpacked(layer), strict=True):
            assert torch.equal(side, found)
    # It was this step: nothing is left to do.
    taken = cache.begin(TEXT)
    assert taken.planned is step
    cache.replayed(taken)
    assert cache.fork().get_seq_length() == 332
    expected = of_two_layers(policy)
    with_free_slots(expected)
    add(expected)
    for layer in range(2):
        assert torch.equal(cache.unpacked(layer)[0], expected.unpacked(layer)[0])


def test_an_interrupted_dry_run_leaves_the_step_to_do() -> None:
    cache = of_two_layers()
    with_free_slots(cache)
    replay = GraphInputs(cache, 1)
    step = cache.begin(TEXT)
    assert replay.fix(step)
    with pytest.raises(KeyboardInterrupt), replay.dry_run(step):
        attend_oscar(cache, chunk(0, 1), layer=0)
        raise KeyboardInterrupt
    with pytest.raises(RuntimeError, match="did not reach layer 0"):
        cache.check_complete()
    add(cache)
    cache.end_step()
    cache.check_complete()


def test_what_no_graph_does_is_not_planned() -> None:
    """A pool that grows, a step without tokens, a page as a whole."""
    cache = of_two_layers()
    replay = GraphInputs(cache, 1)
    assert replay.plan_ahead(np.full((1, 1), PADDING, np.int8)) is None
    with_free_slots(cache)
    assert replay.plan_ahead(TEXT) is not None
    cache = of_two_layers("channel")
    with_free_slots(cache, 400)
    replay, packed = GraphInputs(cache, 1), 0
    for _ in range(140):
        early, step = replay.plan_ahead(TEXT), cache.begin(TEXT)
        packed += bool(step.all_jobs)
        assert early is None or not step.all_jobs
        assert replay.fix(step) and not step.all_jobs
        add(cache)
    assert packed


@pytest.mark.parametrize("way", ["launched early", "planned, then replayed", "not planned"])
def test_a_shared_page_is_copied_before_a_replay(way: str) -> None:
    cache = of_two_layers()
    with_free_slots(cache)
    twin, replay = cache.fork(), GraphInputs(cache, 1)
    stream = cache.kv_manager.tables[0].streams[Modality.TEXT]
    page, slots = stream.pages[-1], cache.store.allocators[stream.bits]
    slots.ensure_free(1)
    cache.store.reserve()
    before = [layer.pages[stream.bits].storage[page].clone() for layer in cache.layers]
    if way == "launched early":
        early = replay.plan_ahead(TEXT)
        assert early is not None and not early.copies
        assert cache.begin(TEXT).planned is early
    else:
        planned = cache.kv_manager.planned(TEXT) if way.startswith("planned") else None
        step = cache.begin(TEXT)
        assert step.planned is planned and len(step.copies) == 1
        assert replay.fix(step) and not step.copies
    own = cache.kv_manager.tables[0].streams[Modality.TEXT].pages[-1]
    assert own != page and slots.owners(own) == slots.owners(page) == 1
    for layer, content in zip(cache.layers, before, strict=True):
        pages = layer.pages[stream.bits].storage
        assert torch.equal(pages[own], content) and torch.equal(pages[page], content)
    cache.close()
    twin.close()
    assert all(not slots.used for slots in cache.store.allocators.values())


def test_a_capture_holds_for_a_version() -> None:
    cache = of_two_layers()
    with_free_slots(cache)
    replay = GraphInputs(cache, 1)
    version = replay.version
    assert not replay.is_ready

    def take() -> None:
        assert replay.fix(cache.begin(TEXT))
        add(cache)
        cache.end_step()

    take()
    assert replay.is_ready and replay.version != version  # layers have asked for tables
    version = replay.version
    for _ in range(20):
        take()
    assert replay.version == version
    cache.store.trim()
    assert replay.version != version


ANSWERS = {
    "2/2": KVPolicy(bits=2, **STREAM),
    "4/4": KVPolicy(bits=4, **STREAM),
    "mixed": POLICIES["stream_mixed"],
    "short window": KVPolicy(bits=(3, 2), window=2, sinks=1, **STREAM),
    "no window": POLICIES["stream_no_window"],
    "no center": KVPolicy(bits=2, **STREAM | {"center": False}),
}


@pytest.mark.daily("mixed-True", "short window-True")
@pytest.mark.parametrize(("name", "ahead"), [*((name, True) for name in ANSWERS), ("mixed", False)])
def test_all_steps_of_an_answer_are_replayed(name: str, ahead: bool) -> None:
    """Pages begin in some of them, of one row or of several. The cache holds, bit for bit, what one
    does whose steps are eager; nothing is read from slots that nobody has."""
    steps, rows = 170, 3
    ids = left_padded(random_ids(0, 60, 90, 40, 60), 250, 131, 7)
    expected, cache = (OscarCache(ANSWERS[name]) for _ in range(2))
    for one in (expected, cache):
        attend_oscar(one, chunk(0, ids.shape[1], batch=rows), ids=ids)
    for bits, slots in cache.store.allocators.items():
        slots.release(slots.allocate(40 if bits.packed else 300))
    replay, text = GraphInputs(cache, rows), np.zeros((rows, 1), np.int8)
    pick, begun, early = np.random.default_rng(0), 0, 0

    def take(seed: int) -> torch.Tensor:
        output = attend_oscar(cache, chunk(seed, 1, batch=rows))
        cache.end_step()
        return output

    for index in range(1, steps + 1):
        poison(cache.store)
        told = replay.plan_ahead(text) if ahead and index > 1 else None
        stays = pick.random() < 0.8
        output = torch.empty(0)
        if told is not None:
            with replay.dry_run(told):
                output = take(index if stays else 10_000 + index)
            if not stays:
                cache.forget(0, 0)  # A change, of no token.
        step = cache.begin(text)
        begun += sum(pack_job.first == 0 for pack_job in step.all_jobs)
        if step.planned is not None and step.planned is told:
            early += 1
            cache.replayed(step)
        else:
            assert replay.fix(step)
            output = take(index)
        assert torch.equal(output, attend_oscar(expected, chunk(index, 1, batch=rows)))
        if index % 10 == 0:
            for found, other in zip(cache.unpacked(0), expected.unpacked(0), strict=True):
                assert torch.equal(found, other)
    assert begun >= 3
    assert early > 0.7 * steps if ahead else not early
