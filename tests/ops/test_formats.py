"""Page formats as numbers."""

from itertools import product

import pytest

from oscar_mm import KVPolicy
from oscar_mm.ops.library import FORMAT_NUMBERS, format_of, numbers_of
from oscar_mm.pages.layout import PageFormat
from oscar_mm.policy import Bits


@pytest.mark.parametrize(
    ("preset", "bits", "head_dim"),
    list(product(("channel", "oscar", "kivi", "quarot"), ((2, 2), (4, 2), (3, 2)), (64, 80, 128))),
)
def test_there_and_back(preset: str, bits: tuple[int, int], head_dim: int) -> None:
    page_format = PageFormat.of(KVPolicy.preset(preset), Bits(*bits), 5, head_dim)
    assert format_of(numbers_of(page_format)) == page_format


def test_what_the_numbers_are() -> None:
    first = PageFormat(Bits(2, 2), 8, 128, "channel", 128, 128, "per_head")
    assert numbers_of(first) == [2, 2, 8, 128, 0, 128, 128, 1, 0]
    second = PageFormat(Bits(3, 2), 8, 64, "token", 64, 32, None, center=True)
    assert numbers_of(second) == [3, 2, 8, 64, 1, 64, 32, 0, 1]
    assert numbers_of(first, second) == numbers_of(first) + numbers_of(second)
    assert len(numbers_of(first)) == FORMAT_NUMBERS


@pytest.mark.parametrize(
    "numbers",
    [
        [],
        [2, 2, 8, 128, 0, 128, 128, 1],
        [2, 2, 8, 128, 0, 128, 128, 1, 0, 0],
        [0, 0, 8, 128, 0, 128, 128, 1, 0],
        [5, 2, 8, 128, 0, 128, 128, 1, 0],
        [2, 2, 0, 128, 0, 128, 128, 1, 0],
        [2, 2, -8, 128, 0, 128, 128, 1, 0],
        [2, 2, 8, 127, 0, 128, 128, 1, 0],
        [2, 2, 8, 128, 2, 128, 128, 1, 0],
        [2, 2, 8, 128, 0, 0, 128, 1, 0],
        [2, 2, 8, 128, 0, 128, 128, 3, 0],
        [2, 2, 8, 128, 0, 128, 128, -1, 0],
        [2, 2, 8, 128, 0, 128, 128, 1, 2],
    ],
)
def test_other_numbers(numbers: list[int]) -> None:
    with pytest.raises(ValueError, match="must be 9 numbers as"):
        format_of(numbers)
