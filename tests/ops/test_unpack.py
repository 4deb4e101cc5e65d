"""unpack: pages by slot, in the model's coordinates. (What pages hold is in test_pack.py.)"""

from dataclasses import replace
from itertools import product

import pytest
import torch

from oscar_mm import KVPolicy
from oscar_mm.kernels.compile import csrc_folder
from oscar_mm.ops.library import numbers_of
from oscar_mm.ops.pages_numba import reads
from oscar_mm.ops.samples import random_basis, random_pages
from oscar_mm.ops.unpack import Specialization, UnpackKernel, UnpackParams, unpack_slots
from oscar_mm.pages.layout import PageFormat
from oscar_mm.pages.quantize import unpack_by_torch
from oscar_mm.policy import Bits
from tests.compiled import architectures, compile_once, same_struct
from tests.ops.arguments import channel_policy, stream_policy
from tests.pairs import pairs

POLICIES = {
    "channel": channel_policy(),
    "oscar": KVPolicy.preset("oscar"),
    "kivi": KVPolicy.preset("kivi"),
    "groups of 64": channel_policy(key_group=64, value_group=64),
    "stream": stream_policy(),
    "stream without center": stream_policy(center=False, value_group=32),
}
HEAD_DIMS = (64, 128, 256, 512)
CHANNEL_BITS = ((2, 2), (4, 4))
STREAM_BITS = tuple(product((2, 3, 4), repeat=2))
EVERY = [
    (name, bits, head_dim, rotate)
    for name, policy in POLICIES.items()
    for bits in (STREAM_BITS if policy.key_axis == "token" else CHANNEL_BITS)
    for head_dim, rotate in product(HEAD_DIMS, (True, False))
    if head_dim <= 128 or policy.key_axis == "token"
]
ON_CPU = pairs(
    POLICIES,
    STREAM_BITS,
    HEAD_DIMS,
    (True, False),
    allowed=lambda *one: one in EVERY,
)
SOME = (("channel", (2, 2), 128, False), ("stream", (3, 2), 128, False))
"""What is compiled every day without the rotation, which takes more registers."""
COMPILED = [
    pytest.param(*one, marks=() if one[2:] == (128, True) or one in SOME else pytest.mark.soak)
    for one in EVERY
    if not one[0].startswith("stream") or one[1] in ((2, 4), (3, 2), (4, 3))
]
"""Keys and values have code of their own, so each width of each is enough; a GPU compiles all."""
CPU = torch.device("cpu")


@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("name", [*POLICIES, "quarot"])
def test_slots(name: str, rotate: bool) -> None:
    policy = POLICIES.get(name) or KVPolicy.preset(name)
    page_format = PageFormat.of(policy, Bits(2, 2), 2, 80)
    pages, basis = random_pages(4, page_format, CPU), random_basis(page_format, rotate, CPU)
    slots = torch.tensor([3, 1, 1], dtype=torch.int32)
    numbers = numbers_of(page_format)
    found = unpack_slots(pages, slots, basis.sigma, numbers, rotate, torch.float32)
    expected = unpack_by_torch(pages, page_format, basis, torch.float32)
    for one, every in zip(found, expected, strict=True):
        torch.testing.assert_close(one, every[[3, 1, 1]], rtol=1e-5, atol=1e-4)
        # Pages of a head follow each other in memory.
        assert one.transpose(0, 1).is_contiguous()


def test_none_and_sigma_of_all_heads() -> None:
    page_format = PageFormat.of(POLICIES["channel"], Bits(4, 4), 2, 64)
    pages, numbers = random_pages(2, page_format, CPU), numbers_of(page_format)
    slots = torch.arange(2, dtype=torch.int32)
    none = unpack_slots(pages, slots[:0], None, numbers, True, torch.bfloat16)
    assert [x.shape for x in none] == [(0, 2, 128, 64)] * 2
    row = torch.rand(1, 64) + 0.5
    one = unpack_slots(pages, slots, row, numbers, True, torch.bfloat16)
    both = unpack_slots(pages, slots, row.repeat(2, 1), numbers, True, torch.bfloat16)
    assert torch.equal(one[0], both[0]) and one[0].dtype == torch.bfloat16


@pytest.mark.parametrize(("name", "bits", "head_dim", "rotate"), ON_CPU)
def test_cpu_kernels_equal_torch(
    name: str, bits: tuple[int, int], head_dim: int, rotate: bool
) -> None:
    page_format = PageFormat.of(POLICIES[name], Bits(*bits), 3, head_dim)
    assert reads(page_format, rotate) == name.startswith("stream")
    pages, basis = random_pages(4, page_format, CPU), random_basis(page_format, rotate, CPU)
    slots = torch.tensor([2, 0, 3, 2], dtype=torch.int32)
    for sigma in (None, basis.sigma, basis.sigma[:1].contiguous()):
        found = unpack_slots(pages, slots, sigma, numbers_of(page_format), rotate, torch.float32)
        expected = unpack_by_torch(
            pages[slots], page_format, replace(basis, sigma=sigma), torch.float32
        )
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("threads", [2, 5])
def test_cpu_kernels_give_the_same_bits_with_any_number_of_threads(threads: int) -> None:
    page_format, before = PageFormat.of(POLICIES["stream"], Bits(3, 2), 3, 64), []
    pages, slots = random_pages(4, page_format, CPU), torch.arange(4, dtype=torch.int32)
    usual = torch.get_num_threads()
    for count in (1, threads):
        torch.set_num_threads(count)
        try:
            both = unpack_slots(pages, slots, None, numbers_of(page_format), True, torch.float32)
        finally:
            torch.set_num_threads(usual)
        before.append(torch.stack(both))
    assert torch.equal(*before)


def compiled(arch: str, policy: KVPolicy, bits: tuple[int, int], head_dim: int) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    text = (csrc_folder() / "unpack/unpack.cu").read_text() + (
        f"{same_struct(UnpackParams)}static_assert(THREADS == 256);\n"
    )
    page_format = PageFormat.of(policy, Bits(*bits), 8, head_dim)
    made = Specialization(page_format, policy.rotate, torch.bfloat16).macros
    report = compile_once("unpack/unpack.cu", text, arch, made)["unpack"]
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    # So that a multiprocessor holds all its threads, or with larger heads fewer.
    assert report.registers <= max(64, min(head_dim // 2, 255))


@pytest.mark.parametrize("arch", architectures(("sm_80", "sm_86", "sm_89", "sm_100a", "sm_120")))
@pytest.mark.parametrize(("name", "bits"), [("channel", (2, 2)), ("stream", (3, 2))])
def test_compiles_for_other_architectures(name: str, bits: tuple[int, int], arch: str) -> None:
    compiled(arch, POLICIES[name], bits, 128)


@pytest.mark.parametrize(("name", "bits", "head_dim", "rotate"), COMPILED)
def test_specializations(name: str, bits: tuple[int, int], head_dim: int, rotate: bool) -> None:
    compiled("sm_90a", replace(POLICIES[name], rotate=rotate), bits, head_dim)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "bits", "head_dim", "rotate", "dtype"),
    pairs(
        POLICIES,
        STREAM_BITS,
        HEAD_DIMS,
        (True, False),
        (torch.bfloat16, torch.float16),
        allowed=lambda *one: one[:-1] in EVERY,
    ),
)
def test_kernel_equals_torch(
    name: str, bits: tuple[int, int], head_dim: int, rotate: bool, dtype: torch.dtype
) -> None:
    page_format = PageFormat.of(POLICIES[name], Bits(*bits), 5, head_dim)
    place = torch.device("cuda", 0)
    assert UnpackKernel.of(Specialization(page_format, rotate, dtype), place) is not None
    pages, basis = random_pages(40, page_format, place), random_basis(page_format, rotate, place)
    slots = torch.randint(40, (100,), dtype=torch.int32, device=place)
    for sigma in (None, basis.sigma, basis.sigma[:1].contiguous()):
        found = unpack_slots(pages, slots, sigma, numbers_of(page_format), rotate, dtype)
        expected = unpack_by_torch(
            pages[slots], page_format, replace(basis, sigma=sigma), torch.float32
        )
        for one, other in zip(found, expected, strict=True):
            # One rounding to 16 bit: half a unit, and float32 sums in another order.
            unit = torch.finfo(dtype).eps / 2
            scale = other.abs().amax(dim=3, keepdim=True)
            assert ((one.float() - other).abs() <= unit * other.abs() + 1e-5 * scale).all()


@pytest.mark.gpu
def test_what_the_kernel_does_not_make(caplog: pytest.LogCaptureFixture) -> None:
    place = torch.device("cuda", 0)
    for policy, head_dim, dtype in (
        (KVPolicy.preset("quarot", key_group=64), 128, torch.bfloat16),
        (POLICIES["channel"], 96, torch.bfloat16),
        (POLICIES["channel"], 128, torch.float32),
    ):
        page_format = PageFormat.of(policy, Bits(2, 2), 2, head_dim)
        pages, slots = random_pages(3, page_format, place), torch.arange(3, device=place).int()
        assert UnpackKernel.of(Specialization(page_format, True, dtype), place) is None
        found = unpack_slots(pages, slots, None, numbers_of(page_format), True, dtype)
        expected = unpack_by_torch(
            pages, page_format, random_basis(page_format, True, place), dtype
        )
        assert torch.equal(found[1], expected[1])
