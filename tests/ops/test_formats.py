"""Page formats and recipes as numbers."""

import pytest

from oscar_mm import KVPolicy
from oscar_mm.ops.library import (
    FORMAT_NUMBERS,
    format_of,
    numbers_of,
    recipe_numbers,
    recipe_of,
)
from oscar_mm.pages.layout import PageFormat
from oscar_mm.pages.quantize import Recipe
from oscar_mm.policy import Bits
from tests.pairs import pairs


@pytest.mark.parametrize(
    ("preset", "bits", "head_dim"),
    pairs(("channel", "oscar", "kivi", "quarot"), ((2, 2), (4, 2), (3, 2)), (64, 80, 128)),
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
        [8, 8, 8, 128, 1, 128, 128, 0, 0],
        [2, 1, 8, 128, 1, 128, 128, 0, 0],
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


@pytest.mark.parametrize("preset", ["standard", "channel", "oscar", "kivi", "quarot"])
def test_recipes_there_and_back(preset: str) -> None:
    policy = KVPolicy.preset(preset)
    recipe = Recipe.of(PageFormat.of(policy, policy.bits.text, 5, 64), policy)
    assert recipe_of(recipe_numbers(recipe)) == recipe


def test_what_the_numbers_of_a_recipe_are() -> None:
    page_format = PageFormat.of(KVPolicy.preset("channel"), Bits(2, 2), 8, 128)
    recipe = Recipe(True, "lsq", "refit", "plain", page_format)
    assert recipe_numbers(recipe) == [*numbers_of(page_format), 1, 1, 1, 0]


@pytest.mark.parametrize(
    "numbers",
    [[], [1, 1, 1], [1, 1, 1, 0, 0], [2, 1, 1, 0], [1, 2, 1, 0], [1, 1, -1, 0], [1, 1, 1, 2]],
)
def test_other_numbers_of_a_recipe(numbers: list[int]) -> None:
    with pytest.raises(ValueError, match="must be 13 numbers as"):
        recipe_of([2, 2, 8, 128, 0, 128, 128, 1, 0, *numbers])
