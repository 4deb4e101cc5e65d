"""The slot forecast equals what the KV cache manager takes, slot by slot and token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_mm.cache.kv_manager import KVCacheManager
from oscar_mm.cache.page_store import PageStore
from oscar_mm.cache.placement import bytes_over_time, slot_forecast
from oscar_mm.policy import PLAIN, Bits, KVPolicy
from tests.cache.invariants import STREAM

POLICIES = [
    *map(KVPolicy.preset, ("channel", "oscar", "bf16")),
    KVPolicy.preset("channel", bits={"image": 4, "text": 16}),
    KVPolicy.preset("channel", window=200, sinks=40),
    KVPolicy.preset("channel", window=0, sinks=300),
    KVPolicy(bits=(3, 2), **STREAM),
    KVPolicy(bits={"text": 4, "image": 2, "audio": 16}, **STREAM),
    KVPolicy(window=0, sinks=0, **STREAM),
    KVPolicy(window=150, **STREAM),
]
RUNS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 300)), min_size=1, max_size=5)


def modalities(runs: list[tuple[int, int]]) -> np.ndarray:
    return np.concatenate([np.full(count, kind, np.int8) for kind, count in runs])


def slots(kv_manager: KVCacheManager) -> dict[Bits, int]:
    return {bits: slots.used for bits, slots in kv_manager.allocators.items()}


def taken(kv_manager: KVCacheManager, new: np.ndarray, answer: int) -> list[dict[Bits, int]]:
    """Return the slots in use in the store after the prompt and each token of the answer."""
    kv_manager.advance(new[None])
    found = [slots(kv_manager)]
    for _ in range(answer):
        kv_manager.advance(np.zeros((1, 1), np.int8))
        found.append(slots(kv_manager))
    return found


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@settings(max_examples=6, deadline=None)
@given(
    first=RUNS,
    second=RUNS,
    answer=st.integers(0, 330),
    padding=st.integers(0, 3),
    change=st.tuples(st.sampled_from(["", "crop", "forget"]), st.floats(0, 1), st.floats(0, 1)),
)
def test_the_kv_manager_takes_what_was_forecast(
    policy, first, second, answer, padding, change
) -> None:
    store = PageStore(policy)
    kv_manager = KVCacheManager(store)
    prompt = np.concatenate([np.full(padding, -1, np.int8), modalities(first)])
    growth = slot_forecast(policy, prompt, answer)
    steps = taken(kv_manager, prompt, answer)
    for bits in store.allocators:
        assert growth.held[bits].tolist() == [step[bits] for step in steps]
        assert growth.added[bits].tolist() == growth.held[bits].tolist()
    # Of a conversation that was changed a turn continues a fork; what was there before stays
    # until it is complete.
    how, *ends = change
    start, stop = (int(end * kv_manager.length) for end in sorted(ends))
    if how == "crop":
        kv_manager.crop(stop - start)
    elif how == "forget":
        kv_manager.forget(0, start, stop)
    before = slots(kv_manager)
    later = slot_forecast(policy, modalities(second), answer, kv_manager.sequences[0])
    twin = kv_manager.fork()
    steps = taken(twin, modalities(second), answer)
    for bits in store.allocators:
        found = np.array([step[bits] - before[bits] for step in steps])
        assert later.added[bits].tolist() == found.tolist()
    kv_manager.clear()
    if how == "forget":  # Out of the middle of a page, which is held twice once one is copied.
        return
    assert {bits: int(later.held[bits][-1]) for bits in later.held} == slots(twin)


def test_tokens_that_wait_next_to_free_places() -> None:
    """Waiting tokens take the places of forgotten ones when the next token of their stream leaves
    the window, and not before."""
    kv_manager = KVCacheManager(PageStore(KVPolicy(bits=2, window=32, sinks=4, **STREAM)))
    kv_manager.advance(modalities([(0, 4 + 128 + 20), (1, 32)])[None])
    kv_manager.forget(0, 4 + 100, 4 + 128 + 3)
    new, before = modalities([(1, 3)]), slots(kv_manager)
    growth = slot_forecast(kv_manager.policy, new, 80, kv_manager.sequences[0])
    steps = taken(kv_manager.fork(), new, 80)
    for bits in kv_manager.allocators:
        found = [step[bits] - before[bits] for step in steps]
        assert growth.added[bits].tolist() == found
    # A page of the images, and that of the text, which is copied as the first of the answer leaves.
    pages = growth.added[Bits(2, 2)]
    assert (pages[32], pages[33]) == (1, 2)


def test_planned_steps_of_a_fork_take_what_was_forecast() -> None:
    """The fork fills a page while other sequences still share its window; a plan of many rows at
    once then keeps no more spare slots than a plan of one."""
    kv_manager = KVCacheManager(PageStore(KVPolicy(bits=2, window=32, sinks=0, **STREAM)))
    kv_manager.advance(modalities([(0, 32 + 116)])[None])
    new, before = modalities([(0, 10)]), kv_manager.allocators[PLAIN].used
    growth = slot_forecast(kv_manager.policy, new, 30, kv_manager.sequences[0])
    fork, found, steady = kv_manager.fork(), [], 0
    for step in range(31):
        token = np.zeros((1, 1), np.int8)
        told = fork.planned(token) if step else None
        steady += told is not None and told.steady is not None
        fork.advance(token if step else new[None])
        kv_manager.store.collect()
        found.append(kv_manager.allocators[PLAIN].used - before)
    assert steady > 15
    # Slots that are shared are released a few steps later.
    assert max(found) == max(growth.added[PLAIN]) and found[-1] == growth.added[PLAIN][-1]


def test_an_answer_whose_first_tokens_are_sinks() -> None:
    """Earlier sinks were forgotten, but not a whole page of text: new sinks still stay in 16-bit
    precision, and need spare slots."""
    kv_manager = KVCacheManager(PageStore(KVPolicy(bits=2, window=3, sinks=40, **STREAM)))
    kv_manager.advance(modalities([(0, 40 + 80)])[None])
    kv_manager.forget(0, 0, 40 + 60)
    new, before = modalities([(1, 1)]), slots(kv_manager)
    growth = slot_forecast(kv_manager.policy, new, 60, kv_manager.sequences[0])
    steps = taken(kv_manager.fork(), new, 60)
    for bits in kv_manager.allocators:
        assert growth.added[bits].tolist() == [step[bits] - before[bits] for step in steps]


def test_a_shorter_answer_grows_as_the_beginning_of_a_longer_one() -> None:
    policy, prompt = KVPolicy.preset("standard"), modalities([(0, 10), (1, 260)])
    whole = slot_forecast(policy, prompt, 500)
    for answer in (-1, 0, 1, 130, 500):
        part, expected = whole.until(answer), slot_forecast(policy, prompt, max(0, answer))
        for bits, counts in expected.added.items():
            assert part.added[bits].tolist() == counts.tolist()
            assert part.held[bits].tolist() == expected.held[bits].tolist()


def test_bytes() -> None:
    growth = slot_forecast(KVPolicy.preset("channel"), modalities([(0, 10), (1, 260)]), 40)
    sizes = {Bits(2, 2): 1000, PLAIN: 100}
    found = bytes_over_time(growth.held, sizes)
    # Sinks, text and, as all of the window is the image's, 132 tokens of it.
    assert found[0] == 1000 + 100 * (4 + 6 + 132)
    # And, where the answer needs more, a run of spare slots.
    assert 0 <= found[-1] - (2 * 1000 + 100 * (4 + 46 + 4)) <= 100 * 32
    # Most of all just before the image's last full page is packed.
    most = 1000 + 100 * (4 + 6 + 27 + 132)
    assert len(found) == 41 and most <= found.max() <= most + 100 * 32
