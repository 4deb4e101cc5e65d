"""The ledger keeps every token once, in order, whatever comes in; carried out on token numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_mm import KVPolicy
from oscar_mm.cache.layout import BLOCK_TOKENS, PAGE_TOKENS
from oscar_mm.cache.ledger import Ledger, Step
from oscar_mm.modality import PADDING, Modality


class Numbers:
    """A layer of token numbers: does what the steps of a ledger say, as a real layer would."""

    def __init__(self, policy: KVPolicy) -> None:
        self.ledger = Ledger(policy)
        self.pages: dict[tuple[int, int], np.ndarray] = {}
        self.blocks: dict[int, np.ndarray] = {}
        self.rows: list[list[int]] = []
        self.ids: list[list[int]] = []
        self.count = 0

    def advance(self, ids: np.ndarray) -> None:
        batch, tokens = ids.shape
        if not self.rows:
            self.rows, self.ids = [[] for _ in ids], [[] for _ in ids]
        new = self.count + np.arange(batch * tokens).reshape(batch, tokens)
        self.count += new.size
        self.carry_out(self.ledger.advance(ids.astype(np.int8)), new)
        for row in range(batch):
            self.rows[row] += new[row].tolist()
            self.ids[row] += ids[row].tolist()

    def carry_out(self, step: Step, new: np.ndarray) -> None:
        for job in step.packs:
            tail = [self.blocks[block] for block in job.blocks]
            tail = np.concatenate(tail)[: job.tail] if tail else np.empty(0, dtype=int)
            tokens = np.concatenate([tail, new[job.row, job.source]])
            for page, content in zip(job.pages, tokens.reshape(-1, PAGE_TOKENS), strict=True):
                self.pages[job.bits, page] = content
        for source, target in step.copies:
            self.blocks[target] = self.blocks[source].copy()
        if step.writes is not None:
            for row, token, block, place in step.writes.T:
                self.blocks.setdefault(block, np.full(BLOCK_TOKENS, -1))[place] = new[row, token]

    def crop(self, count: int) -> None:
        self.ledger.crop(count)
        for numbers in (*self.rows, *self.ids):
            del numbers[len(numbers) - count :]

    def select(self, rows: list[int]) -> None:
        self.ledger.select(rows)
        self.rows = [self.rows[row].copy() for row in rows]
        self.ids = [self.ids[row].copy() for row in rows]

    def check(self) -> None:
        """Every row reads back as what went in."""
        assert len(self.ledger.sequences) == len(self.rows)
        for row, (numbers, ids) in enumerate(zip(self.rows, self.ids, strict=True)):
            sequence = self.ledger.sequences[row]
            assert sequence.stored == sum(one != PADDING for one in ids)
            found: dict[int, int] = {}
            for code, stream in sequence.streams.items():
                held = [
                    self.pages[stream.bits, page][:count]
                    for page, count in zip(stream.pages, stream.page_tokens, strict=True)
                ]
                assert len(stream.blocks) == -(-stream.tail // BLOCK_TOKENS)
                if stream.blocks:
                    held.append(np.concatenate([self.blocks[b] for b in stream.blocks]))
                    held[-1] = held[-1][: stream.tail]
                tokens = np.concatenate(held) if held else np.empty(0, dtype=int)
                places = sequence.positions(code)
                assert len(places) == len(tokens) == stream.tokens
                assert all(ids[place] == stream.modality for place in places)
                found |= dict(zip(places.tolist(), tokens.tolist(), strict=True))
            expected = {at: n for at, n in enumerate(numbers) if ids[at] != PADDING}
            assert found == expected
        self.check_slots()

    def check_slots(self) -> None:
        """Used slots are those of the streams: none leaks, none is free and in use."""
        streams = list(self.ledger.streams())
        for bits, slots in self.ledger.allocators.items():
            if bits < 16:
                held = {page for stream in streams if stream.bits == bits for page in stream.pages}
            else:
                held = {block for stream in streams for block in stream.blocks}
            assert slots.used == len(held)

    def check_window_and_sinks(self) -> None:
        """Not after a crop, which cannot bring back what was packed."""
        policy = self.ledger.policy
        for row, ids in enumerate(self.ids):
            sequence = self.ledger.sequences[row]
            real = [at for at, one in enumerate(ids) if one != PADDING]
            recent, first = (
                set(real[max(0, len(real) - policy.window) :]),
                set(real[: policy.sinks]),
            )
            for code, stream in sequence.streams.items():
                places = sequence.positions(code)
                packed = set(places[: sum(stream.page_tokens)].tolist())
                assert not packed & (recent | first)
                in_window = len(recent & set(places.tolist()))
                if stream.bits < 16:
                    assert stream.tail < PAGE_TOKENS + in_window


MODALITIES = st.sampled_from([PADDING, *Modality])
POLICIES = st.builds(
    KVPolicy,
    bits=st.sampled_from([2, 16, {"text": 4}, {"image": 16, "video": 4}]),
    window=st.sampled_from([0, 1, 32, 100, 300]),
    sinks=st.sampled_from([0, 1, 4, 150]),
)


@st.composite
def chunks(draw: st.DrawFn, batch: int) -> np.ndarray:
    """(batch, tokens): runs of modalities, cut to one length."""
    tokens = draw(st.sampled_from([1, 2, 31, 32, 128, 150, 300]))
    rows = []
    for _ in range(batch):
        runs = draw(st.lists(st.tuples(MODALITIES, st.integers(1, 200)), min_size=1, max_size=5))
        row = [modality for modality, count in runs for _ in range(count)]
        rows.append((row * tokens)[:tokens])
    return np.array(rows)


@settings(max_examples=120, deadline=None)
@given(st.data(), POLICIES, st.integers(1, 3))
def test_any_chunks(data: st.DataObject, policy: KVPolicy, batch: int) -> None:
    numbers = Numbers(policy)
    for _ in range(data.draw(st.integers(1, 6))):
        numbers.advance(data.draw(chunks(batch)))
        numbers.check()
        numbers.check_window_and_sinks()


@settings(max_examples=120, deadline=None)
@given(st.data(), POLICIES)
def test_any_operations(data: st.DataObject, policy: KVPolicy) -> None:
    numbers = Numbers(policy)
    numbers.advance(data.draw(chunks(2)))
    for _ in range(data.draw(st.integers(1, 8))):
        batch, length = len(numbers.rows), numbers.ledger.length
        operation = data.draw(st.sampled_from(["advance", "advance", "crop", "select"]))
        if operation == "advance":
            numbers.advance(data.draw(chunks(batch)))
        elif operation == "crop":
            numbers.crop(data.draw(st.integers(0, min(length, 400))))
        else:
            row = st.integers(0, batch - 1)
            numbers.select(data.draw(st.lists(row, min_size=1, max_size=4)))
        numbers.check()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=150, max_size=400), st.sampled_from([0, 32]))
def test_decoding_token_by_token(sizes: list[int], window: int) -> None:
    numbers = Numbers(KVPolicy(window=window))
    for size in sizes:
        numbers.advance(np.zeros((1, size), dtype=int))
    numbers.check()
    numbers.check_window_and_sinks()
    stream = numbers.ledger.sequences[0].streams[0]
    assert len(stream.pages) == (sum(sizes) - 4 - window) // PAGE_TOKENS
    # Blocks of packed pages are used again.
    most = PAGE_TOKENS + window + 3
    assert numbers.ledger.allocators[16].capacity <= 2 + -(-most // BLOCK_TOKENS) + 4


def test_copy_on_write_between_forks() -> None:
    numbers = Numbers(KVPolicy(window=0, sinks=0))
    numbers.advance(np.zeros((1, 140), dtype=int))
    numbers.select([0, 0, 0])
    assert numbers.ledger.allocators[16].used == 1
    numbers.advance(np.zeros((3, 1), dtype=int))
    numbers.check()
    assert numbers.ledger.allocators[16].used == 3
    assert numbers.ledger.allocators[2].used == 1


def test_past_of_a_step_is_the_state_before_it() -> None:
    ledger = Ledger(KVPolicy(window=0, sinks=0))
    ledger.advance(np.zeros((1, 100), dtype=np.int8))
    step = ledger.advance(np.zeros((1, 60), dtype=np.int8))
    [past], [now] = step.past, ledger.sequences
    assert (past.streams[0].tail, past.streams[0].pages) == (100, [])
    assert (now.streams[0].tail, len(now.streams[0].pages)) == (32, 1)
    assert past.stored == 100 and now.stored == 160


def test_clear_gives_back_all_slots() -> None:
    numbers = Numbers(KVPolicy())
    numbers.advance(np.random.default_rng(0).integers(-1, 4, (3, 900)))
    numbers.ledger.clear()
    assert numbers.ledger.length == 0
    assert all(slots.used == 0 for slots in numbers.ledger.allocators.values())


def test_impossible_requests() -> None:
    ledger = Ledger(KVPolicy())
    ledger.advance(np.zeros((2, 5), dtype=np.int8))
    for count in (6, -1):
        with pytest.raises(ValueError, match=f"{count} tokens from a cache of 5"):
            ledger.crop(count)
    for rows in ([2], [-1], [0, 5]):
        with pytest.raises(IndexError, match="2 sequences"):
            ledger.select(rows)
    assert len(ledger.sequences) == 2
    with pytest.raises(ValueError):
        ledger.advance(np.zeros((3, 5), dtype=np.int8))
