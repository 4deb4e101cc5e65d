"""What is foreseen is what the ledger then takes, slot by slot and token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_mm.cache.ledger import Ledger
from oscar_mm.cache.slot_growth import bytes_over_time, slot_growth
from oscar_mm.cache.store import PageStore
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


def slots(ledger: Ledger) -> dict[Bits, int]:
    return {bits: slots.used for bits, slots in ledger.allocators.items()}


def taken(ledger: Ledger, new: np.ndarray, answer: int) -> list[dict[Bits, int]]:
    """Slots of the whole store after the prompt and each token of the answer."""
    ledger.advance(new[None])
    found = [slots(ledger)]
    for _ in range(answer):
        ledger.advance(np.zeros((1, 1), np.int8))
        found.append(slots(ledger))
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
def test_the_ledger_takes_what_was_foreseen(policy, first, second, answer, padding, change) -> None:
    store = PageStore(policy)
    ledger = Ledger(store)
    prompt = np.concatenate([np.full(padding, -1, np.int8), modalities(first)])
    growth = slot_growth(policy, prompt, answer)
    steps = taken(ledger, prompt, answer)
    for bits in store.allocators:
        assert growth.held[bits].tolist() == [step[bits] for step in steps]
        assert growth.added[bits].tolist() == growth.held[bits].tolist()
    # Of a conversation that was changed a turn goes on from a fork; what was there before stays
    # until it is complete.
    how, *ends = change
    start, stop = (int(end * ledger.length) for end in sorted(ends))
    if how == "crop":
        ledger.crop(stop - start)
    elif how == "forget":
        ledger.forget(0, start, stop)
    before = slots(ledger)
    later = slot_growth(policy, modalities(second), answer, ledger.sequences[0])
    twin = ledger.fork()
    steps = taken(twin, modalities(second), answer)
    for bits in store.allocators:
        found = np.array([step[bits] - before[bits] for step in steps])
        assert later.added[bits].tolist() == found.tolist()
    ledger.clear()
    if how == "forget":  # Out of the middle of a page, which is held twice once one is copied.
        return
    assert {bits: int(later.held[bits][-1]) for bits in later.held} == slots(twin)


def test_tokens_that_wait_beside_room() -> None:
    """Some were forgotten before them: they take its places when the next of their stream leaves
    the window, and not before."""
    ledger = Ledger(PageStore(KVPolicy(bits=2, window=32, sinks=4, **STREAM)))
    ledger.advance(modalities([(0, 4 + 128 + 20), (1, 32)])[None])
    ledger.forget(0, 4 + 100, 4 + 128 + 3)
    new, before = modalities([(1, 3)]), slots(ledger)
    growth = slot_growth(ledger.policy, new, 80, ledger.sequences[0])
    steps = taken(ledger.fork(), new, 80)
    for bits in ledger.allocators:
        found = [step[bits] - before[bits] for step in steps]
        assert growth.added[bits].tolist() == found
    # A page of the images, and that of the text, which is copied as the first of the answer leaves.
    pages = growth.added[Bits(2, 2)]
    assert (pages[32], pages[33]) == (1, 2)


def test_an_answer_whose_first_tokens_are_sinks() -> None:
    """Earlier sinks were forgotten, but not all of a page of text: sinks stay in 16 bit all the
    same, and need spare slots."""
    ledger = Ledger(PageStore(KVPolicy(bits=2, window=3, sinks=40, **STREAM)))
    ledger.advance(modalities([(0, 40 + 80)])[None])
    ledger.forget(0, 0, 40 + 60)
    new, before = modalities([(1, 1)]), slots(ledger)
    growth = slot_growth(ledger.policy, new, 60, ledger.sequences[0])
    steps = taken(ledger.fork(), new, 60)
    for bits in ledger.allocators:
        assert growth.added[bits].tolist() == [step[bits] - before[bits] for step in steps]


def test_a_shorter_answer_grows_as_the_beginning_of_a_longer_one() -> None:
    policy, prompt = KVPolicy.preset("standard"), modalities([(0, 10), (1, 260)])
    whole = slot_growth(policy, prompt, 500)
    for answer in (-1, 0, 1, 130, 500):
        part, expected = whole.until(answer), slot_growth(policy, prompt, max(0, answer))
        for bits, counts in expected.added.items():
            assert part.added[bits].tolist() == counts.tolist()
            assert part.held[bits].tolist() == expected.held[bits].tolist()


def test_bytes() -> None:
    growth = slot_growth(KVPolicy.preset("channel"), modalities([(0, 10), (1, 260)]), 40)
    sizes = {Bits(2, 2): 1000, PLAIN: 100}
    found = bytes_over_time(growth.held, sizes)
    # Sinks, text and, as all of the window is the image's, 132 tokens of it.
    assert found[0] == 1000 + 100 * (4 + 6 + 132)
    # And, where the answer needs more, a run of spare slots.
    assert 0 <= found[-1] - (2 * 1000 + 100 * (4 + 46 + 4)) <= 100 * 32
    # Most of all just before the image's last full page is packed.
    most = 1000 + 100 * (4 + 6 + 27 + 132)
    assert len(found) == 41 and most <= found.max() <= most + 100 * 32
