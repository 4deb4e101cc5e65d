"""Vectors in compiled loops, against NumPy."""

import numpy as np
import pytest
from numba import njit

from oscar_mm.kernels.vectors import (
    LANES,
    aligned,
    as_floats,
    as_words,
    from_words,
    larger,
    largest,
    load,
    prefetch,
    shuffle,
    splat,
    splat_one,
    store,
    total,
)

REVERSED_SECOND = shuffle(*(2 * LANES - 1 - lane for lane in range(LANES)))
FLOATS = np.linspace(-3, 4, 3 * LANES, dtype=np.float32)
WORDS = np.arange(3 * LANES, dtype=np.int32) * 0x07654321 - 5
FIRST, SECOND = slice(1, 1 + LANES), slice(20, 20 + LANES)


@njit
def sums_and_products(numbers, result):
    one, two = load(numbers, 1), load(numbers, 20)
    prefetch(numbers, 0)
    store(result, 0, one + two * splat(np.float32(0.5)))
    store(result, LANES, (one - two) * splat_one(numbers, 7))
    store(result, 2 * LANES, larger(one, two))
    store(result, 3 * LANES, REVERSED_SECOND(one, two))
    return total(one), largest(two)


def test_floats() -> None:
    result = np.zeros(4 * LANES, np.float32)
    sums = sums_and_products(FLOATS, result)
    one, two = FLOATS[FIRST], FLOATS[SECOND]
    expected = [one + two / 2, (one - two) * FLOATS[7], np.maximum(one, two), two[::-1]]
    np.testing.assert_allclose(result, np.concatenate(expected), rtol=1e-6)
    np.testing.assert_allclose(sums, [one.sum(), two.max()], rtol=1e-6)


@njit
def bits_and_shifts(words, result):
    one, two = load(words, 1), load(words, 20)
    for number in range(2):
        store(result, number * LANES, (one >> 4 * number) & splat(15) | (two << 8))
    store(result, 2 * LANES, one | two)
    store(result, 3 * LANES, as_words(as_floats(one >> 1)))
    store(result, 4 * LANES, as_words(from_words(one)))


def test_words() -> None:
    result = np.zeros(5 * LANES, np.uint32)
    bits_and_shifts(WORDS, result)
    one, two = (WORDS[part].view(np.uint32) for part in (FIRST, SECOND))
    expected = [(one >> 4 * number) & 15 | two << 8 for number in range(2)]
    expected += [one | two, (one >> 1).astype(np.float32).view(np.uint32), one]
    np.testing.assert_array_equal(result, np.concatenate(expected))


@njit
def larger_ones(numbers, result):
    store(result, 0, larger(load(numbers, 0), load(numbers, LANES)))


def test_larger_keeps_nan_of_the_first() -> None:
    numbers, result = np.zeros(2 * LANES, np.float32), np.zeros(LANES, np.float32)
    numbers[3] = np.nan
    larger_ones(numbers, result)
    assert np.isnan(result[3]) and np.isnan(result).sum() == 1


@njit
def aligned_address(count):
    array = aligned(count)
    return array.ctypes.data % 64, len(array)


@pytest.mark.parametrize("count", [1, 16, 1000, 100_000])
def test_aligned(count: int) -> None:
    assert aligned_address(count) == (0, count)
