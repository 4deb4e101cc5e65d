"""The pack kernel against PyTorch operations. The compilation needs no GPU, the rest does."""

import logging
from itertools import product
from pathlib import Path

import pytest
import torch

from oscar_mm import KVPolicy
from oscar_mm.kernels.compile import csrc_folder
from oscar_mm.kernels.launch import SWITCH
from oscar_mm.kernels.self_check import CheckedKernels
from oscar_mm.ops.library import recipe_numbers
from oscar_mm.ops.pack import (
    NormsParams,
    PackArguments,
    PackKernel,
    PackParams,
    Specialization,
    pack,
    pack_jobs,
    shared_bytes,
)
from oscar_mm.ops.samples import JOB_SLOTS, random_basis, random_jobs
from oscar_mm.ops.unpack import unpack
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.pages.quantize import Recipe
from oscar_mm.policy import Bits
from oscar_mm.quant.basis import Basis
from tests.compiled import architectures, compile_once, same_struct
from tests.ops.arguments import channel_policy

POLICIES = {
    "channel": channel_policy(),
    "oscar": KVPolicy.preset("oscar"),
    "kivi": KVPolicy.preset("kivi"),
    "4 bit": channel_policy(bits=4),
    "groups of 64": channel_policy(key_group=64, value_group=64, norm="refit"),
    "groups of 32": channel_policy(key_group=32, value_group=32),
    "values plain": channel_policy(value_scale="plain"),
    "not rotated": channel_policy(rotate=False),
}


@pytest.mark.parametrize(
    ("policy", "head_dim"),
    [
        (channel_policy(), 64),
        (channel_policy(value_scale="plain"), 128),
        (channel_policy(key_group=64), 64),
        (channel_policy(key_group=64), 128),
    ],
)
def test_defaults_and_what_is_near_do_not_spill(policy: KVPolicy, head_dim: int) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    recipe = Recipe.of(PageFormat.of(policy, Bits(2, 2), 8, head_dim), policy)
    made = Specialization(recipe, torch.float16).macros
    text = (csrc_folder() / "pack/pack.cu").read_text()
    report = compile_once("pack/pack.cu", text, "sm_90a", made)["pack"]
    assert (report.spill_stores, report.spill_loads) == (0, 0)


@pytest.mark.parametrize("arch", architectures())
def test_compiles(arch: str) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    text = (csrc_folder() / "pack/pack.cu").read_text() + (
        f"static_assert(sizeof(Shared) == {shared_bytes(128)});\n{same_struct(PackParams)}"
    )
    policy = POLICIES["channel"]
    page_format = PageFormat.of(policy, Bits(2, 2), 8, 128)
    made = Specialization(Recipe.of(page_format, policy), torch.bfloat16).macros
    report = compile_once("pack/pack.cu", text, arch, made)["pack"]
    assert (report.spill_stores, report.spill_loads) == (0, 0)
    assert shared_bytes(128) <= 99 * 1024, "of the smallest GPUs"


@pytest.mark.parametrize("arch", architectures())
@pytest.mark.parametrize("head_dim", [64, 128])
def test_norms_compile(head_dim: int, arch: str) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    text = (csrc_folder() / "pack/norms.cu").read_text() + same_struct(NormsParams)
    policy = POLICIES["oscar"]
    recipe = Recipe.of(PageFormat.of(policy, Bits(2, 2), 8, head_dim), policy)
    made = Specialization(recipe, torch.float16).norms_macros
    report = compile_once("pack/norms.cu", text, arch, made)["norms"]
    assert (report.spill_stores, report.spill_loads) == (0, 0)


def states(pages: int, heads: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, heads, pages, PAGE_TOKENS, head_dim)
    keys, values = torch.randn(shape, generator=generator)
    keys *= torch.randn(heads, pages, PAGE_TOKENS, 1, generator=generator).mul(0.7).exp()
    keys[..., 3] *= 30
    keys[0, 0, 5] = 0
    values[0, 0, 7] = 0
    # Strided, as pages are when tokens of a layer are regrouped.
    return tuple(x.to("cuda", dtype).transpose(0, 1) for x in (keys, values))


def both(
    policy: KVPolicy,
    head_dim: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    mean: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, PageFormat, list[tuple[float, float]]]:
    """Pages by the kernel and by PyTorch operations; of keys and of values the squared errors of
    both. ``mean``: of the values of each group."""
    keys, values = states(40, 3, head_dim, dtype)
    offset = torch.full((head_dim,), mean, device="cuda")
    values = values + Basis(head_dim, policy.rotate).values_out(offset).to(dtype)
    bits = policy.bits.text
    page_format = PageFormat.of(policy, bits, 3, head_dim)
    # Balancing has reciprocals of few bits (quant/basis.py).
    generator = torch.Generator("cuda").manual_seed(0)
    random = torch.rand(3, head_dim, generator=generator, device="cuda")
    balanced = 1 / (random + 0.5).bfloat16().float()
    sigma = balanced if policy.balance else None
    basis = Basis(head_dim, policy.rotate, sigma)
    assert PackKernel.of(Specialization(Recipe.of(page_format, policy), dtype), keys.device)
    found = pack(keys, values, page_format, policy, basis)
    monkeypatch.setenv(SWITCH, "off")
    expected = pack(keys, values, page_format, policy, basis)
    restored = [unpack(pages, page_format, basis, torch.float32) for pages in (found, expected)]
    errors = [
        tuple(float((back - side.float()).square().mean()) for back in backs)
        for side, backs in zip((keys, values), zip(*restored, strict=True), strict=True)
    ]
    return found, expected, page_format, errors


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "head_dim"), list(product(POLICIES, (64, 128))))
def test_equals_torch(
    name: str, head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = POLICIES[name]
    found, expected, page_format, errors = both(policy, head_dim, dtype, monkeypatch)
    for ours, theirs in errors:
        assert ours == pytest.approx(theirs, rel=1e-3)
    for field in page_format.fields:
        ours, theirs = (page_format.read(x, field).float() for x in (found, expected))
        # Values between two codes may go either way; where that happens in a round of the least
        # squares fit, the group's scale and zero follow. What is not rotated are few-digit numbers:
        # those that are equal change their code together.
        if field.endswith("codes"):
            most = 1e-4 if policy.rotate else 1e-3
            assert (ours != theirs).float().mean() < most, field
            assert (ours - theirs).abs().max() <= 1, field
        else:
            far = (ours - theirs).abs() > 2e-3 * theirs.abs() + 1e-6
            # An unbiased scale follows every single code of its group.
            most = 2e-3
            if policy.value_scale == "unbiased":
                most = 2e-2 if policy.rotate else 0.1
            assert far.float().mean() < (most if policy.fit == "lsq" else 1e-5), field


@pytest.mark.gpu
@pytest.mark.parametrize("mean", [0.0, 100.0])
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(("rotate", "head_dim"), list(product((True, False), (64, 128))))
def test_values_do_not_shrink(
    rotate: bool, head_dim: int, bits: int, mean: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes stay as they are; stored scales and zeros are those of PyTorch operations."""
    found = {}
    for name in ("plain", "unbiased"):
        monkeypatch.setenv(SWITCH, "auto")
        policy = channel_policy(bits=bits, rotate=rotate, value_scale=name)
        found[name], expected, made, _ = both(policy, head_dim, torch.float16, monkeypatch, mean)
        pages = (found[name], expected)
        ours, theirs = (made.read(x, "value_codes") for x in pages)
        same = (ours == theirs).unflatten(3, (-1, made.value_group)).all(4)
        # Far from zero, sums of float32 decide less surely about codes, and about a plain scale.
        assert same.float().mean() > (0.7 if mean else 0.99)
        most = 0.2 if mean and name == "plain" else 1e-3
        ours, step = (made.read(x, "value_scales")[same] for x in pages)
        assert ((ours - step).abs() > 2e-3 * step).float().mean() < most
        ours, theirs = (made.read(x, "value_zeros")[same] for x in pages)
        assert ((ours - theirs).abs() > 2e-3 * (step + theirs.abs())).float().mean() < most
    for field in made.fields:
        plain, unbiased = (made.read(x, field) for x in found.values())
        differ = (plain != unbiased).float().mean()
        assert differ > 0.2 if field in ("value_scales", "value_zeros") else differ < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("token_scaling", ["per_head", None])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 4])
def test_keys_do_not_shrink(
    bits: int, group: int, token_scaling: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes stay as they are; stored scales, zeros and norms are those of PyTorch operations."""
    found = {}
    for norm in ("plain", "unbiased"):
        monkeypatch.setenv(SWITCH, "auto")
        policy = channel_policy(bits=bits, key_group=group, norm=norm, token_scaling=token_scaling)
        found[norm], expected, made, _ = both(policy, 128, torch.float16, monkeypatch)
        ours, theirs = (made.read(x, "key_codes") for x in (found[norm], expected))
        same = (ours == theirs).unflatten(2, (-1, group)).all(3)
        assert same.float().mean() > 0.95
        # A plain scale follows the codes of the round before too, which may differ.
        most = 1e-3 if norm == "unbiased" else 0.02
        for field in ("key_scales", "key_zeros"):
            ours, theirs = (made.read(x, field)[same] for x in (found[norm], expected))
            assert ((ours - theirs).abs() > 2e-3 * theirs.abs() + 1e-3).float().mean() < most
    plain, unbiased = (made.read(x, "key_scales") for x in found.values())
    assert (plain != unbiased).float().mean() > 0.2
    codes = [made.read(x, "key_codes") for x in found.values()]
    assert torch.equal(*codes)


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("side", [0, 1])
def test_what_no_page_can_hold(side: int, wrong: float) -> None:
    sides = [x.clone() for x in states(2, 2, 128, torch.bfloat16)]
    sides[side][1, 1, 77, 99] = wrong
    policy = POLICIES["channel"]
    with pytest.raises(FloatingPointError, match="NaN, infinity or numbers beyond"):
        pack(*sides, PageFormat.of(policy, Bits(2, 2), 2, 128), policy, Basis(128, True))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [(), (2,)], ids=["one balancing", "balancing by row"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", POLICIES)
def test_jobs_equal_torch(
    name: str, dtype: torch.dtype, rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens in 16-bit precision and new ones, of strided input, a job that does nothing,
    balancing."""
    policy, place = POLICIES[name], torch.device("cuda", 0)
    page_format = PageFormat.of(policy, policy.bits.text, 5, 128)
    jobs = random_jobs(page_format, dtype, place)
    basis = random_basis(page_format, True, place, rows)
    numbers = recipe_numbers(Recipe.of(page_format, policy))
    both = []
    for switch in ("auto", "off"):
        monkeypatch.setenv(SWITCH, switch)
        pages = torch.full((JOB_SLOTS, page_format.page_bytes), 255, dtype=torch.uint8).to(place)
        bad = torch.zeros(1, dtype=torch.int32, device=place)
        pack_jobs(*jobs, pages, bad, basis.sigma, numbers)
        assert not bool(bad)
        both.append(pages)
    untouched = sorted(set(range(JOB_SLOTS)) - set(jobs[5].tolist()))
    assert (both[0][untouched] == 255).all()
    assert (both[0] != both[1]).float().mean() < 2e-3


@pytest.mark.gpu
def test_a_kernel_that_disagrees_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = PackKernel.__call__

    def wrong(kernel: PackKernel, arguments: PackArguments) -> None:
        right(kernel, arguments)
        arguments.pages.copy_(arguments.pages.roll(1, dims=1))

    monkeypatch.setenv("OSCAR_MM_CACHE", str(tmp_path))
    monkeypatch.setattr(PackKernel, "__call__", wrong)
    fresh = CheckedKernels("pack", PackKernel, PackKernel.disagreement, 0.01)
    monkeypatch.setattr(PackKernel, "checked", fresh)
    keys, values = states(3, 2, 128, torch.bfloat16)
    policy = POLICIES["channel"]
    page_format = PageFormat.of(policy, Bits(2, 2), 2, 128)
    with caplog.at_level(logging.ERROR):
        found = pack(keys, values, page_format, policy, Basis(128, True))
    assert "pack kernel disagrees" in caplog.text
    monkeypatch.setenv(SWITCH, "off")
    assert torch.equal(found, pack(keys, values, page_format, policy, Basis(128, True)))
