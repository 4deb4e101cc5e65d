"""Caches of token numbers: what a ledger says, carried out without tensors, and compared."""

from __future__ import annotations

import copy
import itertools
from collections import Counter

import numpy as np

from oscar_mm import KVPolicy
from oscar_mm.cache.layout import BLOCK_TOKENS, PAGE_TOKENS
from oscar_mm.cache.ledger import Ledger
from oscar_mm.cache.step import Step
from oscar_mm.cache.store import PageStore
from oscar_mm.modality import PADDING


class Contents:
    """The pools of a layer of token numbers; nothing is written that has several owners."""

    def __init__(self, policy: KVPolicy) -> None:
        self.store = PageStore(policy)
        self.pages: dict[tuple[int, int], np.ndarray] = {}
        self.blocks: dict[int, np.ndarray] = {}

    def write(self, block: int, place: int, number: int) -> None:
        assert self.store.allocators[16].owners(block) == 1
        self.blocks.setdefault(block, np.full(BLOCK_TOKENS, -1))[place] = number

    def write_ahead(self, block: int, place: int) -> None:
        assert self.store.allocators[16].owners(block) <= 1
        self.blocks.setdefault(block, np.full(BLOCK_TOKENS, -1))[place] = -2

    def carry_out(self, step: Step, new: np.ndarray) -> None:
        for job in step.packs:
            tail = [self.blocks[block] for block in job.blocks]
            tail = np.concatenate(tail)[: job.tail] if tail else np.empty(0, dtype=int)
            tokens = np.concatenate([tail, new[job.row, job.source]])
            for page, content in zip(job.pages, tokens.reshape(-1, PAGE_TOKENS), strict=True):
                assert self.store.allocators[job.bits].owners(page) == 1
                self.pages[job.bits, page] = content
        for source, target in step.copies:
            self.blocks[target] = self.blocks[source].copy()
        if step.writes is not None:
            for row, token, block, place in step.writes.T.tolist():
                self.write(block, place, new[row, token])

    def move(self, moves: np.ndarray) -> None:
        """A few at a time, as a layer does when there are many."""
        for start in range(0, moves.shape[1], 37):
            part = moves[:, start : start + 37].T.tolist()
            numbers = [self.blocks[block][place] for block, place, _, _ in part]
            for number, (_, _, block, place) in zip(numbers, part, strict=True):
                self.write(block, place, number)


class Numbers:
    """A cache of token numbers: does what the steps of a ledger say, as a real layer would."""

    def __init__(self, policy: KVPolicy) -> None:
        self.contents = Contents(policy)
        self.ledger = Ledger(self.contents.store)
        self.rows: list[list[int]] = []
        self.ids: list[list[int]] = []
        self.count = itertools.count()

    def advance(self, ids: np.ndarray) -> None:
        if not self.rows:
            self.rows, self.ids = [[] for _ in ids], [[] for _ in ids]
        new = np.array([next(self.count) for _ in range(ids.size)]).reshape(ids.shape)
        self.contents.carry_out(self.ledger.advance(ids.astype(np.int8)), new)
        for row in range(len(ids)):
            self.rows[row] += new[row].tolist()
            self.ids[row] += ids[row].tolist()

    def foretell(self, ids: np.ndarray) -> np.ndarray | None:
        """As a step does that is launched ahead: it writes where it is told that tokens will go."""
        writes = self.ledger.foretold(ids.astype(np.int8))
        for block, place in () if writes is None else writes[2:].T.tolist():
            self.contents.write_ahead(block, place)
        return writes

    def crop(self, count: int) -> None:
        self.ledger.crop(count)
        for numbers in (*self.rows, *self.ids):
            del numbers[len(numbers) - count :]

    def select(self, rows: list[int]) -> None:
        self.ledger.select(rows)
        self.rows = [self.rows[row].copy() for row in rows]
        self.ids = [self.ids[row].copy() for row in rows]

    def forget(self, row: int, start: int, stop: int) -> None:
        self.contents.move(self.ledger.forget(row, start, stop))
        self.ids[row][start:stop] = [PADDING] * (stop - start)

    def fork(self) -> Numbers:
        twin = copy.copy(self)
        twin.ledger = self.ledger.fork()
        twin.rows, twin.ids = copy.deepcopy(self.rows), copy.deepcopy(self.ids)
        return twin

    def check(self) -> None:
        """Every row reads back as what went in."""
        assert len(self.ledger.sequences) == len(self.rows)
        for row, (numbers, ids) in enumerate(zip(self.rows, self.ids, strict=True)):
            sequence = self.ledger.sequences[row]
            assert sequence.stored == sum(one != PADDING for one in ids)
            found: dict[int, int] = {}
            for code, stream in sequence.streams.items():
                entries = zip(stream.pages, stream.starts, stream.stops, strict=True)
                held = [self.contents.pages[stream.bits, page][a:b] for page, a, b in entries]
                assert len(stream.blocks) == -(-stream.tail // BLOCK_TOKENS)
                if stream.blocks:
                    held.append(np.concatenate([self.contents.blocks[b] for b in stream.blocks]))
                    held[-1] = held[-1][: stream.tail]
                tokens = np.concatenate(held) if held else np.empty(0, dtype=int)
                places = sequence.positions(code)
                assert len(places) == len(tokens) == stream.tokens
                assert all(ids[place] == stream.modality for place in places)
                found |= dict(zip(places.tolist(), tokens.tolist(), strict=True))
            expected = {at: n for at, n in enumerate(numbers) if ids[at] != PADDING}
            assert found == expected

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
                packed = set(places[: stream.packed].tolist())
                assert not packed & (recent | first)
                in_window = len(recent & set(places.tolist()))
                if stream.bits < 16:
                    assert stream.tail < PAGE_TOKENS + in_window


def check_slots(store: PageStore, ledgers: list[Ledger]) -> None:
    """Every slot has as many owners as there are tables that name it: none leaks."""
    store.collect()
    owners = {bits: Counter() for bits in store.allocators}
    for stream in itertools.chain.from_iterable(ledger.streams() for ledger in ledgers):
        assert stream.bits < 16 or not stream.pages
        owners[stream.bits].update(stream.pages)
        owners[16].update(stream.blocks)
    for bits, slots in store.allocators.items():
        assert slots.used == len(owners[bits])
        assert all(slots.owners(slot) == count for slot, count in owners[bits].items())
