"""After any operations on several caches of one store, each has its content, bit for bit."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from oscar_mm import OscarCache
from oscar_mm.cache.page_store import PageStore
from oscar_mm.modality import PADDING
from tests.cache.invariants import POLICIES, check_chunk, chunk, poison, random_ids
from tests.cache.numbers import check_slots

SHAPE = {"kv_heads": 1, "group": 2, "head_dim": 64}


@dataclass
class Twin:
    """A cache and its expected content: keys and values of every row, and which tokens exist."""

    cache: OscarCache
    keys: torch.Tensor
    values: torch.Tensor
    real: torch.Tensor

    @classmethod
    def empty(cls, store: PageStore) -> Twin:
        nothing = torch.zeros(1, SHAPE["kv_heads"], 0, SHAPE["head_dim"])
        real = torch.zeros(1, 0, dtype=torch.bool)
        return cls(OscarCache(store.policy, store=store), nothing, nothing, real)

    def check(self) -> None:
        """Compare the cache with its expected content, bit for bit."""
        if self.cache.get_seq_length():
            keys, values = self.cache.unpacked(0)
            assert torch.equal(keys, self.keys) and torch.equal(values, self.values)
            assert torch.equal(self.cache.real_tokens(keys.shape[2]), self.real)

    def append(self, seed: int, ids: torch.Tensor) -> None:
        """Add tokens and check attention and content; packed tokens are compared approximately."""
        batch, tokens = ids.shape
        new = chunk(seed, tokens, batch=batch, **SHAPE)
        check_chunk(self.cache, new, ids=ids, past_real=self.real)
        self.real = torch.cat([self.real, ids != PADDING], dim=1)
        found = self.cache.unpacked(0)
        for side, (before, added) in enumerate(zip((self.keys, self.values), new[1:], strict=True)):
            exact = torch.cat([before, added], dim=2) * self.real[:, None, :, None]
            error = (found[side] - exact).norm(dim=-1)[:, 0]
            assert found[side].isfinite().all()
            bound = 1.2 if self.cache.policy.packs else 0
            assert (error <= bound * exact.norm(dim=-1)[:, 0]).all()
        self.keys, self.values = found

    def forget(self, row: int, start: int, stop: int) -> None:
        self.cache.forget(start, stop, row)
        self.keys, self.values, self.real = (x.clone() for x in (self.keys, self.values, self.real))
        self.keys[row, :, start:stop] = self.values[row, :, start:stop] = 0
        self.real[row, start:stop] = False

    def crop(self, count: int) -> None:
        self.cache.crop(-count)
        kept = self.real.shape[1] - count
        self.keys, self.values = self.keys[:, :, :kept], self.values[:, :, :kept]
        self.real = self.real[:, :kept]

    def select(self, rows: list[int]) -> None:
        self.cache.batch_select_indices(torch.tensor(rows))
        self.keys, self.values, self.real = self.keys[rows], self.values[rows], self.real[rows]

    def fork(self) -> Twin:
        return Twin(self.cache.fork(), self.keys, self.values, self.real)


@pytest.mark.parametrize(
    ("policy", "seed"),
    [
        *(("channel", 0), ("mixed", 1), ("no_window", 0), ("bf16", 1)),
        *(("stream", 0), ("stream_mixed", 1), ("stream_no_window", 0)),
    ],
)
def test_any_operations(policy: str, seed: int) -> None:
    """Random operations on several caches of one store; after each, all have their content."""
    pick = random.Random(seed)
    store = PageStore(POLICIES[policy])
    caches = [Twin.empty(store)]
    done = set()
    for step in range(30):
        one = pick.choice(caches)
        rows, length = one.real.shape
        name = pick.choice(
            ["append"] * 5 + ["forget"] * 4 + ["crop", "select", "fork", "fork", "close", "trim"]
        )
        if name == "append" or not length:
            spans = [pick.choice([1, 30, 100, 250]) for _ in range(pick.randint(1, 4))]
            ids = random_ids(step, *spans).repeat(rows, 1)
            if pick.random() < 0.3:
                ids[-1, : ids.shape[1] // 2] = PADDING
            one.append(step, ids)
        elif name == "forget":
            start = pick.randint(0, length)
            one.forget(pick.randrange(rows), start, pick.randint(start, length))
        elif name == "crop":
            one.crop(pick.randint(0, min(length, 300)))
        elif name == "select":
            one.select([pick.randrange(rows) for _ in range(pick.randint(1, 3))])
        elif name == "fork":
            caches.append(one.fork())
        elif name == "close" and len(caches) > 1:
            one.cache.close()
            caches = [other for other in caches if other is not one]
        elif name == "trim":
            store.trim()
            assert store.memory().free_bytes == 0
        done.add(name)
        poison(store)
        for other in caches:
            other.check()
        check_slots(store, [other.cache.kv_manager for other in caches])
    assert len(done) >= 6
    for one in caches:
        one.cache.close()
    store.collect()
    assert not any(slots.used for slots in store.allocators.values())
