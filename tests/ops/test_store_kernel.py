"""The store kernel against PyTorch operations. The compilation needs no GPU, the rest does."""

from itertools import product

import pytest
import torch

from oscar_mm import KVPolicy
from oscar_mm.kernels.compile import Report, csrc_folder
from oscar_mm.ops.library import recipe_numbers
from oscar_mm.ops.samples import random_basis, random_pages, random_stores
from oscar_mm.ops.store import LayersParams, Specialization, StoreKernel, StoreParams
from oscar_mm.ops.store_torch import (
    CENTER_TOKENS,
    HEAD,
    NOTHING,
    STORED_CENTER,
    TILE,
    StoreArguments,
    StoreLayersArguments,
    store_by_torch,
)
from oscar_mm.pages.layout import PageFormat
from oscar_mm.pages.quantize import Recipe, unpack_stored
from tests.compiled import ALL, architectures, compile_once, same_struct
from tests.ops.arguments import stream_policy
from tests.pairs import pairs

POLICIES = {
    **{f"{k}/{v}": stream_policy((k, v)) for k, v in product((2, 3, 4), repeat=2)},
    "quarot": KVPolicy.preset("quarot"),
    "without center": stream_policy(center=False),
    "plain": stream_policy(norm="plain", value_scale="plain"),
    "min-max": stream_policy(fit="minmax", norm="plain", value_scale="plain"),
    "not rotated": stream_policy((3, 3), rotate=False, value_group=32),
    "groups of 64": stream_policy((4, 4), value_group=64),
}

HEAD_DIMS = (64, 128, 256, 512)
MOST_SPILLED = 256
"""Maximum bytes of a thread's registers that the kernel for 512 channels spills."""
USUAL = ("2/2", "4/2", "quarot", "groups of 64")
EVERY_DAY = {*product(USUAL, (128,))}
EVERY = [
    pytest.param(*one, marks=() if one in EVERY_DAY else pytest.mark.soak)
    for one in product(POLICIES, HEAD_DIMS)
]
"""The usual ones every day, besides 3/2 of ``test_compiles``; the tests on a GPU compile the others
too."""


def recipe_of(name: str, head_dim: int, kv_heads: int = 3) -> Recipe:
    policy = POLICIES[name]
    return Recipe.of(PageFormat.of(policy, policy.bits.text, kv_heads, head_dim), policy)


def compiled(arch: str, recipe: Recipe, dtype: torch.dtype) -> dict[str, Report]:
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    text = (csrc_folder() / "store/store.cu").read_text() + (
        f"{same_struct(StoreParams)}"
        f"{same_struct(LayersParams, 'LayersParams')}"
        "static_assert(WARPS == 4);\n"
        f"static_assert(JOB_HEAD == {HEAD} && CENTER_TOKENS == {CENTER_TOKENS});\n"
        f"static_assert(STORED_CENTER == {STORED_CENTER.start});\n"
    )
    macros = Specialization(recipe, dtype).macros
    reports = compile_once("store/store.cu", text, arch, macros)
    assert set(reports) == {"store", "store_layers"} | (
        {"centers"} if recipe.page_format.center else set()
    )
    for report in reports.values():
        # With 512 channels, a lane's 128 elements and their codes take nearly all registers.
        assert report.stack <= (0 if recipe.page_format.head_dim <= 256 else MOST_SPILLED)
        # So that a multiprocessor holds four thread blocks, or three; fewer with larger heads.
        small = recipe.page_format.head_dim <= 128
        assert report.registers <= (255 if not small else 168 if arch == "sm_120" else 128)
    return reports


@pytest.mark.parametrize("arch", architectures())
def test_compiles(arch: str) -> None:
    compiled(arch, recipe_of("3/2", 128), torch.bfloat16)


@pytest.mark.parametrize(
    "arch", [pytest.param(one, marks=() if one == "sm_90a" else pytest.mark.soak) for one in ALL]
)
@pytest.mark.parametrize("head_dim", [256, 512])
def test_larger_heads_compile(head_dim: int, arch: str) -> None:
    """NVRTC takes seconds for each architecture."""
    compiled(arch, recipe_of("3/2", head_dim), torch.bfloat16)


@pytest.mark.parametrize(("name", "head_dim"), EVERY)
def test_specializations(name: str, head_dim: int) -> None:
    compiled("sm_90a", recipe_of(name, head_dim), torch.float16)


def both(
    recipe: Recipe, states: tuple[torch.Tensor, ...], before: torch.Tensor, sigma: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages by the kernel and by PyTorch operations."""
    kernel = StoreKernel.of(Specialization(recipe, states[0].dtype), before.device)
    assert kernel is not None
    found, expected = before.clone(), before.clone()
    bad = torch.zeros(1, dtype=torch.int32, device=before.device)
    for run, pages in ((kernel, found), (store_by_torch, expected)):
        run(StoreArguments(*states, pages, bad, sigma, recipe_numbers(recipe)))
    assert not bool(bad)
    return found, expected


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "head_dim", "dtype", "rows"),
    pairs(POLICIES, HEAD_DIMS, (torch.bfloat16, torch.float16), ((), (2,))),
)
def test_jobs_equal_torch(
    name: str, head_dim: int, dtype: torch.dtype, rows: tuple[int, ...]
) -> None:
    """Single tokens, new ones and stored ones, strided input, jobs that do nothing, balancing."""
    recipe, place = recipe_of(name, head_dim), torch.device("cuda", 0)
    states = random_stores(recipe.page_format, dtype, place)
    before = random_pages(5, recipe.page_format, place)
    sigma = random_basis(recipe.page_format, True, place, rows).sigma
    assert sigma is not None
    found, expected = both(recipe, states, before, sigma)
    owners = recipe.page_format.token_bytes(place)
    for slot in range(5):
        differ = (found[slot] != expected[slot]).float()
        # What no job names is as it was.
        kept = (expected[slot] == before[slot]) & (owners >= 0)
        assert differ[kept].mean() < 1e-3
    written = (expected != before).sum()
    assert (found != expected).sum() < (2e-3 if recipe.rotate else 1e-2) * written


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "head_dim"), list(product(POLICIES, HEAD_DIMS)))
def test_a_long_prompt(name: str, head_dim: int) -> None:
    """Whole tiles of 64 pages have the same errors as PyTorch operations."""
    recipe, place = recipe_of(name, head_dim, 5), torch.device("cuda", 0)
    page_format, pages = recipe.page_format, 64
    tokens = 128 * pages
    generator = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randn(1, tokens, 5, head_dim, generator=generator).to(place).transpose(1, 2)
        for _ in range(2)
    )
    keys = keys + 3 * torch.randn(5, 1, head_dim, generator=generator).to(place)
    jobs = torch.zeros(pages, 8, HEAD + TILE, dtype=torch.int32, device=place)
    order = torch.arange(tokens, dtype=torch.int32, device=place).view(pages, 8, TILE)
    jobs[..., 0] = torch.arange(pages, device=place)[:, None]
    jobs[..., 1], jobs[..., HEAD:] = torch.arange(8, device=place), order
    begins = torch.zeros(pages, HEAD + CENTER_TOKENS, dtype=torch.int32, device=place)
    begins[:, 0], begins[:, 2] = torch.arange(pages, device=place), CENTER_TOKENS
    begins[1:, HEAD:] = order.view(pages, 128)[:-1, -CENTER_TOKENS:]
    begins[0, HEAD:] = order.view(pages, 128)[0, :CENTER_TOKENS]
    recent = keys.new_empty(0, 2, 5, head_dim).bfloat16()
    states = (keys.bfloat16(), values.bfloat16(), recent, jobs.flatten(0, 1))
    states = (*states, begins[: pages * page_format.center])
    before = torch.full((pages, page_format.page_bytes), 255, dtype=torch.uint8, device=place)
    basis = random_basis(page_format, recipe.rotate, place)
    assert basis.sigma is not None
    made = both(recipe, states, before, basis.sigma)
    assert (made[0] != made[1]).float().mean() < (2e-3 if recipe.rotate else 1e-2)
    losses = []
    for stored in (unpack_stored(one, page_format) for one in made):
        back = (basis.keys_out(stored[0]), basis.values_out(stored[1]))
        for found, given in zip(back, states, strict=False):
            whole = given[0].float().view(5, pages, 128, head_dim).transpose(0, 1)
            losses.append(float((found - whole).square().mean()))
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-3)


def steps_of(page_format: PageFormat, place: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Jobs and begins of a decode step: tokens of five rows, of whose pages two begin, one of them
    with two jobs."""
    jobs = torch.full((6, HEAD + TILE), NOTHING, dtype=torch.int32)
    numbers = [[-1, 2, 4, 0, 1, 4], [-1, 7, 0, 0, 3, 1], [0, 1, 2, 3, 4, 2], [0] * 6]
    jobs[:, :HEAD] = torch.tensor(numbers).T
    jobs[torch.arange(5), HEAD + torch.tensor([9, 15, 0, 0, 8])] = ~torch.tensor(
        [90, 3, 0, 38, 17], dtype=torch.int32
    )
    jobs[2, HEAD:], jobs[5, HEAD : HEAD + 7] = ~torch.arange(TILE), ~torch.arange(TILE, TILE + 7)
    begins = torch.full((6, HEAD + CENTER_TOKENS), -1, dtype=torch.int32)
    for line, count in ((2, 32), (3, 1)):
        begins[line, :HEAD] = torch.tensor([jobs[line, 0], line, count, 0])
        begins[line, HEAD : HEAD + count] = ~torch.arange(count, dtype=torch.int32)
    return jobs.to(place), begins[: 6 * page_format.center].to(place)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "head_dim"), list(product(POLICIES, HEAD_DIMS)))
def test_layers_at_once_equal_one_by_one(name: str, head_dim: int) -> None:
    """Bit for bit, with the centers in the same launch or before; more layers than a launch has."""
    recipe, place = recipe_of(name, head_dim), torch.device("cuda", 0)
    page_format, count = recipe.page_format, 100
    kernel = StoreKernel.of(Specialization(recipe, torch.bfloat16), place)
    assert kernel is not None
    _, _, first, _, _ = random_stores(page_format, torch.bfloat16, place)
    recent = [first.roll(index, 0) + index for index in range(count)]
    basis = random_basis(page_format, True, place).sigma
    assert basis is not None
    of_rows = random_basis(page_format, True, place, (5,)).sigma
    assert of_rows is not None
    sigmas = (None, basis, basis[:1].contiguous(), of_rows, of_rows[:, :1].contiguous())
    sigma = [sigmas[index % len(sigmas)] for index in range(count)]
    jobs, begins = steps_of(page_format, place)
    before = random_pages(5, page_format, place)
    found, expected = ([before.clone() for _ in recent] for _ in range(2))
    bad = [torch.zeros(1, dtype=torch.int32, device=place) for _ in recent]
    layers = (recent, jobs, begins, found, bad, sigma)
    of_layers = StoreLayersArguments(*layers, recipe_numbers(recipe))
    kernel.of_layers(of_layers)
    none = first.new_empty(1, 3, 0, head_dim)
    for index, (stored, pages) in enumerate(zip(recent, expected, strict=True)):
        # A line more of beginnings has them launched first.
        more = begins[: index % 2 * page_format.center]
        more = torch.cat([begins, torch.full_like(more, -1)])
        states = (none, none, stored, jobs, more, pages, bad[0], sigma[index])
        kernel(StoreArguments(*states, recipe_numbers(recipe)))
    assert torch.equal(torch.stack(found), torch.stack(expected))
    assert (found[-1] != before).any() and not any(map(bool, bad))
    recent[98][38] = torch.nan
    kernel.of_layers(of_layers)
    assert [index for index, flag in enumerate(bad) if flag] == [98]


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("where", ["keys", "values", "center"])
def test_flag(where: str, wrong: float) -> None:
    recipe, place = recipe_of("3/2", 128), torch.device("cuda", 0)
    keys, values, recent, jobs, begins = random_stores(recipe.page_format, torch.bfloat16, place)
    kernel = StoreKernel.of(Specialization(recipe, torch.bfloat16), place)
    assert kernel is not None
    if where == "center":
        jobs[:, 0] = -1
        keys[1, 2, 81, 3] = wrong
    else:
        begins[:, 0] = -1
        (keys if where == "keys" else values)[1, 2, 119, 127] = wrong
    for used, flag in ((True, 1), (False, 0)):
        if not used:
            jobs[:, 0] = begins[:, 0] = -1
        pages = random_pages(5, recipe.page_format, place)
        bad = torch.zeros(1, dtype=torch.int32, device=place)
        states = (keys, values, recent, jobs, begins, pages, bad, None)
        kernel(StoreArguments(*states, recipe_numbers(recipe)))
        assert int(bad) == flag
    assert torch.equal(pages, random_pages(5, recipe.page_format, place))


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "dtype"), [(96, torch.bfloat16), (128, torch.float32)])
def test_what_the_kernel_does_not_take(head_dim: int, dtype: torch.dtype) -> None:
    specialization = Specialization(recipe_of("3/2", head_dim), dtype)
    assert StoreKernel.of(specialization, torch.device("cuda", 0)) is None
