"""crop, reorder, repeat, select, reset and deepcopy equal the same operations on plain tensors."""

import copy
from collections.abc import Callable
from functools import cache as remembered
from itertools import product

import pytest
import torch
from transformers import DynamicCache

from oscar_mm import OscarCache
from oscar_mm.modality import PADDING
from tests.cache.invariants import (
    POLICIES,
    attend_oscar,
    check_chunk,
    chunk,
    filled,
    left_padded,
    random_ids,
)

IDS = left_padded(random_ids(8, 60, 190, 40, 200), 490, 300, 120)
REAL = IDS != PADDING
KINDS = ("bf16", "channel", "stream_mixed")
"""Policies without pages, with pages that are packed as a whole, and with both and tokens that are
packed one by one."""
OTHERS = [name for name in POLICIES if name not in KINDS]


def same(cache: OscarCache, keys: torch.Tensor, values: torch.Tensor) -> None:
    for found, expected in zip(cache.unpacked(0), (keys, values), strict=True):
        assert torch.equal(found, expected)


@remembered
def filled_once(policy: str) -> OscarCache:
    return filled(POLICIES[policy], IDS)[0]


def with_ids(policy: str) -> OscarCache:
    """A cache that has read ``IDS``: a copy of one that all tests share."""
    return copy.deepcopy(filled_once(policy))


@pytest.mark.parametrize(
    ("policy", "count"),
    [*product(KINDS, (0, 1, 20, 33, 150, 250, 489, 490)), *product(OTHERS, [150])],
)
def test_crop(policy: str, count: int) -> None:
    cache = with_ids(policy)
    kept = 490 - count
    before = [x[:, :, :kept] for x in cache.unpacked(0)]
    cache.crop(-count)
    assert cache.get_seq_length() == kept
    if kept:
        same(cache, *before)
    new = chunk(1, 180, batch=3)
    check_chunk(cache, new, ids=torch.zeros(3, 180), past_real=REAL[:, :kept])


@pytest.mark.parametrize("policy", [*KINDS, "no_window", "stream_no_window"])
def test_many_crops(policy: str) -> None:
    """Add a few tokens and crop some of them, again and again, as assisted decoding does."""
    cache, _ = filled(POLICIES[policy], random_ids(8, 60, 190))
    length = 250
    generator = torch.Generator().manual_seed(0)
    for step in range(24):
        new = chunk(step, 6)
        check_chunk(cache, new)
        back = int(torch.randint(0, 7, (1,), generator=generator))
        kept = length + 6 - back
        before = [x[:, :, :kept] for x in cache.unpacked(0)]
        cache.crop(-back)
        same(cache, *before)
        length = kept
    if POLICIES[policy].packs:
        assert cache.memory().by_kind["codes"] > 0


OPERATIONS: dict[str, Callable] = {
    "reorder": lambda c: c.reorder_cache(torch.tensor([2, 0, 0])),
    "reorder_same": lambda c: c.reorder_cache(torch.tensor([0, 1, 2])),
    "repeat": lambda c: c.batch_repeat_interleave(3),
    "select": lambda c: c.batch_select_indices(torch.tensor([2, 1])),
    "select_bool": lambda c: c.batch_select_indices(torch.tensor([True, False, True])),
    "select_one": lambda c: c.batch_select_indices(torch.tensor([1])),
}


@pytest.mark.parametrize(
    ("policy", "name"), [*product(KINDS, OPERATIONS), *product(OTHERS, ["reorder"])]
)
def test_rows(policy: str, name: str) -> None:
    """Rows equal those of transformers' own cache with the unpacked copy, and stay usable."""
    cache = with_ids(policy)
    plain, masks = DynamicCache(), DynamicCache()
    plain.update(*(x.clone() for x in cache.unpacked(0)), 0)
    masks.update(*[REAL[:, None, :, None].float()] * 2, 0)
    for one in (cache, plain, masks):
        OPERATIONS[name](one)
    same(cache, plain.layers[0].keys, plain.layers[0].values)
    rows, past = len(plain.layers[0].keys), masks.layers[0].keys[:, 0, :, 0].bool()
    for tokens in (1, 170):
        new = chunk(tokens, tokens, batch=rows)
        check_chunk(cache, new, ids=torch.zeros(rows, tokens), past_real=past)
        past = torch.cat([past, torch.ones(rows, tokens, dtype=torch.bool)], dim=1)


@pytest.mark.parametrize("policy", POLICIES)
def test_forks_do_not_disturb_each_other(policy: str) -> None:
    """Forks copy on write: each equals an independent cache."""
    ids = random_ids(8, 60, 190, 45)
    cache, _ = filled(POLICIES[policy], ids)
    single = [copy.deepcopy(cache) for _ in range(2)]
    cache.batch_repeat_interleave(2)
    for tokens in (1, 3, 150, 1):
        new = chunk(tokens, tokens, batch=2)
        attend_oscar(cache, new)
        for row, one in enumerate(single):
            attend_oscar(one, tuple(x[row, None] for x in new))
    for row, one in enumerate(single):
        for found, expected in zip(cache.unpacked(0), one.unpacked(0), strict=True):
            torch.testing.assert_close(found[row, None], expected, rtol=0, atol=0)


def test_forks_share_what_they_have_in_common() -> None:
    cache, _ = filled("channel", random_ids(8, 300, 2000))
    before = cache.memory()
    cache.batch_repeat_interleave(8)
    after = cache.memory()
    assert after.by_kind["codes"] == before.by_kind["codes"]
    assert after.kv_bytes < 1.1 * before.kv_bytes
    assert after.values == 8 * before.values
    cache.batch_select_indices(torch.tensor([3]))
    assert cache.memory() == before


def test_forks_that_are_cut_and_go_on() -> None:
    """After a cut within a shared block, a fork must write to a copy of its own."""
    cache, _ = filled("channel", torch.zeros(1, 50, dtype=torch.int64))
    cache.batch_repeat_interleave(2)
    before = [x[:, :, :40].clone() for x in cache.unpacked(0)]
    cache.crop(-10)
    new = chunk(3, 5, batch=2)
    attend_oscar(cache, new)
    keys, values = cache.unpacked(0)
    _, new_keys, new_values = (x.bfloat16().float() for x in new)
    assert torch.equal(keys, torch.cat([before[0], new_keys], dim=2))
    assert torch.equal(values, torch.cat([before[1], new_values], dim=2))


@pytest.mark.parametrize("policy", ["channel", "bf16"])
def test_deepcopy(policy: str) -> None:
    cache = with_ids(policy)
    before = [x.clone() for x in cache.unpacked(0)]
    twin = copy.deepcopy(cache)
    attend_oscar(twin, chunk(1, 200, batch=3))
    twin.crop(-300)
    of_twin = [x.clone() for x in twin.unpacked(0)]
    same(cache, *before)
    attend_oscar(cache, chunk(2, 200, batch=3))
    assert (twin.get_seq_length(), cache.get_seq_length()) == (390, 690)
    same(twin, *of_twin)


def test_reset() -> None:
    cache, _ = filled("channel", IDS)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.memory().kv_bytes == 0
    # Another batch, head_dim and dtype: nothing is left of before.
    new = tuple(x.bfloat16() for x in chunk(0, 200, batch=2, head_dim=32))
    fresh = OscarCache("channel")
    assert torch.equal(attend_oscar(cache, new), attend_oscar(fresh, new))
    same(cache, *fresh.unpacked(0))


def test_rows_that_are_not_there() -> None:
    cache, _ = filled("channel", IDS)
    for rows in ([3], [0, -1]):
        with pytest.raises(IndexError, match="3 sequences"):
            cache.reorder_cache(torch.tensor(rows))
