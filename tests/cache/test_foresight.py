"""What is foreseen is what the ledger then takes, slot by slot and token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_mm.cache.foresight import Growth, bytes_over_time, foreseen
from oscar_mm.cache.ledger import Ledger
from oscar_mm.cache.store import PageStore
from oscar_mm.policy import KVPolicy

POLICIES = [
    *map(KVPolicy.preset, ("compact", "oscar", "bf16")),
    KVPolicy(bits={"image": 4, "text": 16}),
    KVPolicy(window=200, sinks=40),
    KVPolicy(window=0, sinks=300),
]
RUNS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 300)), min_size=1, max_size=5)


def modalities(runs: list[tuple[int, int]]) -> np.ndarray:
    return np.concatenate([np.full(count, kind, np.int8) for kind, count in runs])


def slots(ledger: Ledger) -> dict[int, int]:
    return {bits: slots.used for bits, slots in ledger.allocators.items()}


def taken(ledger: Ledger, new: np.ndarray, answer: int) -> list[dict[int, int]]:
    """Slots of the whole store after the prompt and each token of the answer."""
    ledger.advance(new[None])
    found = [slots(ledger)]
    for _ in range(answer):
        ledger.advance(np.zeros((1, 1), np.int8))
        found.append(slots(ledger))
    return found


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@settings(max_examples=6, deadline=None)
@given(first=RUNS, second=RUNS, answer=st.integers(0, 330), padding=st.integers(0, 3))
def test_the_ledger_takes_what_was_foreseen(policy, first, second, answer, padding) -> None:
    store = PageStore(policy)
    ledger = Ledger(store)
    prompt = np.concatenate([np.full(padding, -1, np.int8), modalities(first)])
    growth = foreseen(policy, prompt, answer)
    steps = taken(ledger, prompt, answer)
    for bits in store.allocators:
        assert growth.held[bits].tolist() == [step[bits] for step in steps]
        assert growth.added[bits].tolist() == growth.held[bits].tolist()
    # A turn goes on from a fork; what was there before stays until it is complete.
    before = slots(ledger)
    later = foreseen(policy, modalities(second), answer, ledger.sequences[0])
    twin = ledger.fork()
    steps = taken(twin, modalities(second), answer)
    for bits in store.allocators:
        found = np.array([step[bits] - before[bits] for step in steps])
        # Where all new tokens become pages at once, no block is copied after all.
        spare = later.added[bits] - found
        assert spare.min() >= 0 and spare.max() <= (len(twin.sequences[0].streams) * (bits == 16))
        assert later.added[bits][-1] >= found[-1]
    ledger.clear()
    assert {bits: int(later.held[bits][-1]) for bits in later.held} == slots(twin)


def test_rows_of_a_batch() -> None:
    policy = KVPolicy.preset("compact")
    rows = [modalities([(0, 100), (1, 700)]), modalities([(0, 300)])]
    each = zip(rows, (5, 90), strict=True)
    together = Growth.together(foreseen(policy, row, answer) for row, answer in each)
    ledger = Ledger(PageStore(policy))
    padded = np.full((2, 800), -1, np.int8)
    padded[0], padded[1, 500:] = rows
    ledger.advance(padded)
    for step in range(90):
        ledger.advance(np.array([[0 if step < 5 else -1], [0]], np.int8))
        for bits, used in slots(ledger).items():
            assert together.held[bits][step + 1] == used
    assert len(together.held[2]) == 91


def test_bytes() -> None:
    growth = foreseen(KVPolicy.preset("compact"), modalities([(0, 10), (1, 260)]), 40)
    sizes = {2: 1000, 16: 3000}
    found = bytes_over_time(growth.held, sizes)
    # Sinks, text and, as all of the window is the image's, 132 tokens of it.
    assert found[0] == 1000 + 3000 * (1 + 1 + 5)
    assert found[-1] == 2 * 1000 + 3000 * (1 + 2 + 1)
    # Most of all just before the image's last full page is packed.
    assert len(found) == 41 and found.max() == 1000 + 3000 * (1 + 2 + 5)
