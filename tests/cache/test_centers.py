"""Centers of pages with a small window: keys stored one by one are as exact as others."""

from pathlib import Path

import numpy as np
import pytest
import torch

from oscar_mm import KVPolicy, OscarCache
from oscar_mm.cache import placement as slot_growth_module
from oscar_mm.cache.block_table import min_page_tokens
from oscar_mm.cache.saved_cache import load_cache, save_cache
from tests.cache.invariants import STREAM
from tests.cache.numbers import Numbers
from tests.pairs import pairs

TOKENS = 500
ONE_BY_ONE = (40, *[1] * (TOKENS - 40))


def small_window(window: int = 0) -> KVPolicy:
    return KVPolicy(bits=(3, 2), window=window, sinks=0, balance=None, **STREAM)


@pytest.fixture(scope="module")
def states() -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys around a drifting offset, like those of models, and values."""
    generator = torch.Generator().manual_seed(0)
    noise, values = torch.randn(2, 1, 2, TOKENS, 64, generator=generator)
    offset = 3 * torch.randn(1, 2, 1, 64, generator=generator)
    drift = torch.randn(1, 2, 1, 64, generator=generator) * torch.linspace(0, 1, TOKENS)[:, None]
    return noise + offset + drift, values


def stored(policy: KVPolicy, states: tuple[torch.Tensor, ...], pieces: tuple) -> torch.Tensor:
    """Return keys as a cache restores them."""
    cache, start = OscarCache(policy), 0
    for count in pieces:
        cache.update(*(x[:, :, start : start + count] for x in states), 0)
        start += count
    return cache.unpacked(0)[0]


def divergence(keys: torch.Tensor, found: torch.Tensor) -> float:
    """Return the mean KL divergence of attention over stored keys from that over exact keys."""
    queries = torch.randn(64, keys.shape[-1], generator=torch.Generator().manual_seed(1))
    log, other = ((queries @ x.mT / 8).log_softmax(-1) for x in (keys, found))
    return float((log.exp() * (log - other)).sum(-1).mean())


@pytest.mark.daily("0")
@pytest.mark.parametrize("window", [0, 2])
def test_keys_that_come_one_by_one_are_stored_as_exactly(states, monkeypatch, window) -> None:
    policy, (keys, _) = small_window(window), states
    once, single = (stored(policy, states, pieces) for pieces in ((TOKENS,), ONE_BY_ONE))
    errors = [float((found - keys).norm()) for found in (once, single)]
    assert errors[1] < 1.05 * errors[0]
    assert divergence(keys, single) < 1.1 * divergence(keys, once)
    # By the mean of the keys in the window, as in larger windows, they would not be.
    monkeypatch.setattr(slot_growth_module, "_SMALL_WINDOW", 0)
    few = stored(policy, states, ONE_BY_ONE)
    assert divergence(keys, few) > (1.2 if window else 1.7) * divergence(keys, single)
    assert float((few - keys).norm()) > (1.1 if window else 1.3) * errors[1]


def test_centers_are_of_32_keys() -> None:
    """The page's own first keys if they arrive together; else keys before the page, of the same
    step or of the previous page."""
    numbers = Numbers(small_window())
    for count in (100, 60, *[1] * 300, 30, 47, 128):
        numbers.advance(np.zeros((1, count), dtype=int))
    numbers.check()
    stream, centers = numbers.kv_manager.sequences[0].streams[0], numbers.contents.centers
    begins = [centers[stream.bits, page] for page in stream.pages]
    assert begins[:2] == [[*range(32)], [*range(128, 160)]]
    assert begins[2:4] == [[*range(start, start + 32)] for start in (192, 320)]
    assert begins[4:] == [[*range(505, 537)], [*range(633, 665)]]


def test_a_page_without_these_keys_is_no_help() -> None:
    """The keys of a center were forgotten, so it is the mean of those that are left."""
    numbers = Numbers(small_window())
    numbers.advance(np.zeros((1, 120), dtype=int))
    numbers.forget(0, 80, 90)
    for _ in range(40):
        numbers.advance(np.zeros((1, 1), dtype=int))
    numbers.check()
    stream = numbers.kv_manager.sequences[0].streams[0]
    waited = range(128, 128 + min_page_tokens(small_window(), stream.bits))
    assert numbers.contents.centers[stream.bits, stream.pages[-1]] == [*waited]


def test_the_first_page_has_the_tokens_that_waited() -> None:
    numbers = Numbers(small_window())
    while not (centers := numbers.contents.centers):
        numbers.advance(np.zeros((1, 1), dtype=int))
    [stop] = numbers.kv_manager.sequences[0].streams[0].stops
    assert list(centers.values()) == [[*range(min(stop, 32))]]


@pytest.mark.daily("loaded-20-32", "forked-40-32", "cropped-20-0")
@pytest.mark.parametrize(
    ("copied", "before", "window"), pairs(("forked", "loaded", "cropped"), (20, 40), (0, 32))
)
def test_copies_continue_the_same(
    states, tmp_path: Path, copied: str, before: int, window: int
) -> None:
    """Copies are made before a page is full, or while tokens wait for the next page."""
    cache, first = OscarCache(small_window(window)), 100 + window
    pieces = [[x[:, :, a : a + 1] for x in states] for a in range(first, first + 80)]
    cache.update(*(x[:, :, :first] for x in states), 0)
    for new in pieces[:before]:
        cache.update(*new, 0)
    if copied == "forked":
        twin = cache.fork()
    elif copied == "loaded":
        save_cache(cache, tmp_path / "a", fingerprint="f")
        twin = load_cache(tmp_path / "a", fingerprint="f")[0]
    else:
        twin = cache.fork()
        twin.update(*pieces[-1], 0)
        twin.crop(-1)
    for new in pieces[before:]:
        for one in (cache, twin):
            one.update(*new, 0)
    assert len(cache.kv_manager.sequences[0].streams[0].pages) == 2
    assert torch.equal(cache.unpacked(0)[0], twin.unpacked(0)[0])
