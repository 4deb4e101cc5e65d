"""Caches of token numbers: carry out the plans of a KV cache manager without tensors, and check
them."""

from __future__ import annotations

import copy
import itertools
from collections import Counter

import numpy as np

from oscar_mm import KVPolicy
from oscar_mm.cache.block_table import SequenceTable, min_page_tokens
from oscar_mm.cache.kv_manager import KVCacheManager
from oscar_mm.cache.page_store import PageStore
from oscar_mm.cache.step_plan import StepPlan
from oscar_mm.modality import PADDING
from oscar_mm.ops.store_torch import STORED_CENTER
from oscar_mm.pages.codecs.registry import codec_of
from oscar_mm.pages.layout import PAGE_TOKENS
from oscar_mm.policy import PLAIN, Bits


class Contents:
    """Pools of token numbers in place of a layer's; a slot with several owners is never written."""

    def __init__(self, policy: KVPolicy) -> None:
        self.store = PageStore(policy)
        self.pages: dict[tuple[Bits, int], np.ndarray] = {}
        self.centers: dict[tuple[Bits, int], list[int]] = {}
        self.recent: dict[int, int] = {}

    def write(self, slot: int, number: int) -> None:
        assert self.store.allocators[PLAIN].owners(slot) == 1
        self.recent[slot] = number

    def read_ahead(self, step: StepPlan) -> None:
        """Check that an in-flight step only writes to places where nothing is stored."""
        for bits, source, target in step.copies:
            assert self.store.allocators[bits].owners(target) == 0
            self.pages[bits, target] = self.pages[bits, source].copy()
        read = step.sources()[PLAIN]
        for row, _, slot in () if step.writes is None else step.writes.T.tolist():
            owners = self.store.allocators[PLAIN].owners(slot)
            assert owners == 0 or (owners == 1 and slot in step.past[row].spare)
            assert slot not in read
            self.recent[slot] = -2
        for pack_job in step.all_jobs:
            for page in pack_job.begins:
                assert self.store.allocators[pack_job.bits].owners(page) == 0
                self.centers[pack_job.bits, page] = [-2]
            for index in range(len(pack_job.source)):
                number, place = divmod(pack_job.first + index, PAGE_TOKENS)
                key = pack_job.bits, pack_job.pages[number]
                self.pages.setdefault(key, np.full(PAGE_TOKENS, -1))[place] = -2

    def carry_out(self, step: StepPlan, new: np.ndarray, sequences: list[SequenceTable]) -> None:
        slots = self.store.allocators
        for bits, source, target in step.copies:
            assert slots[bits].owners(target) == 1
            self.pages[bits, target] = self.pages[bits, source].copy()
            self.centers[bits, target] = self.centers.get((bits, source), [])
        for pack_job in step.all_jobs:

            def tokens(source: np.ndarray, row: int = pack_job.row) -> list[int]:
                return [new[row, at] if at >= 0 else self.recent[~at] for at in source.tolist()]

            for page, source in pack_job.begins.items():
                stored = self.pages.get((pack_job.bits, pack_job.before), np.zeros(0))[
                    STORED_CENTER
                ]
                center = tokens(source) or stored.tolist()
                assert len(center) and min(center) >= 0
                self.centers[pack_job.bits, page] = center
            for index, number in enumerate(tokens(pack_job.source)):
                at, place = divmod(pack_job.first + index, PAGE_TOKENS)
                key = bits, page = pack_job.bits, pack_job.pages[at]
                # Nobody else's: of its own stream a page may have several entries.
                streams = sequences[pack_job.row].streams.values()
                own = sum(stream.pages.count(page) for stream in streams if stream.bits == bits)
                assert slots[bits].owners(page) == own
                self.pages.setdefault(key, np.full(PAGE_TOKENS, -1))[place] = number
        if step.writes is not None:
            for row, token, slot in step.writes.T.tolist():
                self.write(slot, new[row, token])


class Numbers:
    """A cache of token numbers that carries out plans of a KV cache manager as a layer would."""

    def __init__(self, policy: KVPolicy) -> None:
        self.contents = Contents(policy)
        self.kv_manager, self.last = KVCacheManager(self.contents.store), StepPlan()
        self.rows: list[list[int]] = []
        self.ids: list[list[int]] = []
        self.count = itertools.count()

    def advance(self, ids: np.ndarray) -> None:
        if not self.rows:
            self.rows, self.ids = [[] for _ in ids], [[] for _ in ids]
        new = np.array([next(self.count) for _ in range(ids.size)]).reshape(ids.shape)
        step = self.last = self.kv_manager.advance(ids.astype(np.int8))
        self.contents.carry_out(step, new, self.kv_manager.tables)
        for row in range(len(ids)):
            self.rows[row] += new[row].tolist()
            self.ids[row] += ids[row].tolist()

    def plan_ahead(self, ids: np.ndarray) -> StepPlan | None:
        """Plan an in-flight step, which writes to the places that the next tokens will take."""
        step = self.kv_manager.planned(ids.astype(np.int8))
        if step is not None:
            self.contents.read_ahead(step)
        return step

    def crop(self, count: int) -> None:
        self.kv_manager.crop(count)
        for numbers in (*self.rows, *self.ids):
            del numbers[len(numbers) - count :]

    def select(self, rows: list[int]) -> None:
        self.kv_manager.select(rows)
        self.rows = [self.rows[row].copy() for row in rows]
        self.ids = [self.ids[row].copy() for row in rows]

    def forget(self, row: int, start: int, stop: int) -> None:
        self.kv_manager.forget(row, start, stop)
        self.ids[row][start:stop] = [PADDING] * (stop - start)

    def fork(self) -> Numbers:
        twin = copy.copy(self)
        twin.kv_manager = self.kv_manager.fork()
        twin.rows, twin.ids = copy.deepcopy(self.rows), copy.deepcopy(self.ids)
        return twin

    def check(self) -> None:
        """Check that every row reads back as it was written."""
        tables = self.kv_manager.tables
        assert len(tables) == len(self.rows)
        for row, (numbers, ids) in enumerate(zip(self.rows, self.ids, strict=True)):
            sequence = tables[row]
            assert sequence.stored == sum(one != PADDING for one in ids)
            found: dict[int, int] = {}
            for code, stream in sequence.streams.items():
                entries = zip(stream.pages, stream.starts, stream.stops, strict=True)
                held = [self.contents.pages[stream.bits, page][a:b] for page, a, b in entries]
                held.append(np.array([self.contents.recent[slot] for slot in stream.slots]))
                tokens = np.concatenate(held) if held else np.empty(0, dtype=int)
                places = sequence.positions(code)
                assert len(places) == len(tokens) == stream.tokens
                assert all(ids[place] == stream.modality for place in places)
                found |= dict(zip(places.tolist(), tokens.tolist(), strict=True))
            expected = {at: n for at, n in enumerate(numbers) if ids[at] != PADDING}
            assert found == expected

    def check_window_and_sinks(self) -> None:
        """Check window and sinks; not valid after a crop, which cannot unpack tokens."""
        policy = self.kv_manager.policy
        for row, ids in enumerate(self.ids):
            sequence = self.kv_manager.sequences[row]
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
                if stream.bits.packed:
                    least = min_page_tokens(policy, stream.bits)
                    waiting = PAGE_TOKENS
                    if codec_of(policy).appends_tokens:
                        assert all(stop >= least for stop in stream.stops)
                        waiting = 1 if stream.room else least
                    assert len(stream.slots) < waiting + in_window


def check_slots(store: PageStore, kv_managers: list[KVCacheManager]) -> None:
    """Check that every slot has as many owners as tables refer to it, so that none leaks."""
    owners = {bits: Counter() for bits in store.allocators}
    for sequence in itertools.chain.from_iterable(
        kv_manager.sequences for kv_manager in kv_managers
    ):
        owners[PLAIN].update(sequence.spare)
        for stream in sequence.streams.values():
            assert stream.bits.packed or not stream.pages
            owners[stream.bits].update(stream.pages)
            owners[PLAIN].update(stream.slots)
    store.collect()  # Reading the tables ended steady steps.
    for bits, slots in store.allocators.items():
        assert slots.used == len(owners[bits])
        assert all(slots.owners(slot) == count for slot, count in owners[bits].items())
