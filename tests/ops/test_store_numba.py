"""store by compiled loops against PyTorch operations: the same bytes."""

import pytest
import torch

from oscar_mm import KVPolicy
from oscar_mm.ops.library import recipe_numbers
from oscar_mm.ops.samples import random_pages
from oscar_mm.ops.store import store
from oscar_mm.ops.store_numba import rotates
from oscar_mm.ops.store_torch import NOTHING, StoreArguments, store_by_torch
from oscar_mm.pages.layout import PageFormat
from oscar_mm.pages.quantize import Recipe
from oscar_mm.policy import Bits
from tests.ops.arguments import stream_policy
from tests.pairs import pairs

CPU = torch.device("cpu")
POLICIES = {
    "standard": KVPolicy.preset("standard"),
    "no center": stream_policy(center=False),
    "small groups": stream_policy(value_group=32),
    "range": stream_policy(fit="minmax", norm="plain", value_scale="plain"),
    "not rotated": stream_policy(rotate=False),
}


def random_arguments(
    policy: KVPolicy, bits: Bits, head_dim: int, dtype: torch.dtype, rows: tuple[int, ...] = ()
) -> StoreArguments:
    """Two rows, tokens new and old, pages that begin and that go on, jobs of one page."""
    generator = torch.Generator().manual_seed(0)
    page_format = PageFormat.of(policy, bits, 2, head_dim)
    new = torch.randn(2, 2, 2, 50, head_dim, generator=generator) * 2 + 1
    recent = torch.randn(30, 2, 2, head_dim, generator=generator)
    jobs = torch.full((6, 20), NOTHING, dtype=torch.int32)
    heads = [[3, 0, 0, 0], [3, 1, 1, 0], [2, 7, 1, 0], [-1, 0, 0, 0], [0, 4, 0, 0], [0, 5, 1, 0]]
    jobs[:, :4] = torch.tensor(heads)
    jobs[:, 4:12] = torch.randint(-30, 50, (6, 8), generator=generator)
    begins = torch.randint(-30, 50, (2, 36), generator=generator, dtype=torch.int32)
    begins[:, :4] = torch.tensor([[3, 0, 20, 0], [0, 1, 5, 0]])
    return StoreArguments(
        *new.to(dtype),
        recent.to(dtype),
        *(jobs, begins[: 2 * page_format.center], random_pages(5, page_format, CPU)),
        torch.zeros(1, dtype=torch.int32),
        torch.rand(*rows, 2, head_dim, generator=generator) + 0.5,
        recipe_numbers(Recipe.of(page_format, policy)),
    )


def stored(arguments: StoreArguments) -> list[tuple[torch.Tensor, int]]:
    """Pages and flag by the operation, and by PyTorch operations."""
    found = []
    for run in (lambda given: store(*given), store_by_torch):
        given = arguments._replace(
            pages=arguments.pages.clone(), not_finite=torch.zeros(1, dtype=torch.int32)
        )
        run(given)
        found.append((given.pages, int(given.not_finite)))
    return found


@pytest.mark.parametrize(
    ("name", "bits", "head_dim", "dtype", "rows"),
    pairs(
        POLICIES,
        ((2, 2), (3, 2), (4, 4), (2, 3)),
        (64, 128),
        (torch.float32, torch.bfloat16, torch.float16),
        ((), (2,)),
    ),
)
def test_the_same_bytes(name, bits, head_dim, rows, dtype) -> None:
    arguments = random_arguments(POLICIES[name], Bits(*bits), head_dim, dtype, rows)
    assert rotates(arguments.recipe)
    (found, flag), (expected, expected_flag) = stored(arguments)
    changed = (expected != arguments.pages).sum()
    # Sums in another order may round a number to the next one.
    assert (found != expected).sum() <= 0.01 * changed and changed > 1000
    assert flag == expected_flag == 0


@pytest.mark.parametrize("head_dim", [16, 48, 80, 96, 192, 256])
@pytest.mark.parametrize("bits", [(3, 2)])
def test_heads_of_other_sizes(bits: tuple[int, int], head_dim: int) -> None:
    """The rotation of 48, 80, 96 and 192 channels has two blocks; codes change in one of them."""
    arguments = random_arguments(POLICIES["standard"], Bits(*bits), head_dim, torch.float32)
    assert rotates(arguments.recipe)
    (found, flag), (expected, expected_flag) = stored(arguments)
    changed = (expected != arguments.pages).sum()
    assert (found != expected).sum() <= 0.01 * changed and changed > 200
    assert flag == expected_flag == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e6])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_what_cannot_be_stored_is_noted(side: str, value: float) -> None:
    arguments = random_arguments(POLICIES["standard"], Bits(3, 2), 64, torch.float32)
    arguments.jobs[0, 4] = 7
    getattr(arguments, side)[0, 1, 7, 5] = value
    assert [flag for _, flag in stored(arguments)] == [1, 1]


@pytest.mark.parametrize("size", [1e-38, 1e-40, 1e-44])
def test_states_so_small_that_a_step_has_no_inverse(size: float) -> None:
    arguments = random_arguments(POLICIES["standard"], Bits(3, 2), 64, torch.float32)
    small = {name: getattr(arguments, name) * size for name in ("keys", "values", "recent")}
    for _, not_finite in stored(arguments._replace(**small)):
        assert not not_finite
