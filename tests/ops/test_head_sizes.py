"""Which operations have kernels for which head sizes: the table in docs/policies.md."""

import pytest
import torch

from oscar_mm import KVPolicy
from oscar_mm.fast_decode import rope
from oscar_mm.kernels.compile import KernelError
from oscar_mm.kernels.launch import check_pages
from oscar_mm.ops import decode_numba, pages_numba, store_numba
from oscar_mm.ops.decode import Specialization
from oscar_mm.pages.layout import PageFormat
from oscar_mm.pages.quantize import Recipe
from oscar_mm.policy import Bits

STANDARD = KVPolicy.preset("standard")
ALL = "decode store unpack"
BY_CPU = {64: ALL, 128: ALL, 192: ALL, 256: ALL, 384: ALL, 512: ALL}
"""Head size -> operations with CPU kernels; other multiples of 16 lack decode."""
BY_CUDA = {64: ALL, 128: ALL, 256: ALL, 512: ALL}
"""Head size -> operations with CUDA kernels."""
SIZES = [
    *((head_dim, Bits(3, 2)) for head_dim in (*range(16, 257, 16), 384, 512)),
    *((head_dim, bits) for head_dim in (80, 128) for bits in (Bits(2, 2), Bits(4, 4))),
]
"""Every head size, and two with other bits, which do not change what has kernels."""


def pages_of(policy: KVPolicy, bits: Bits, head_dim: int) -> PageFormat:
    return PageFormat.of(policy, bits, 2, head_dim)


@pytest.mark.parametrize(("head_dim", "bits"), SIZES)
def test_cpu_kernels(head_dim: int, bits: Bits) -> None:
    page_format = pages_of(STANDARD, bits, head_dim)
    found = {
        "store": store_numba.rotates(Recipe.of(page_format, STANDARD)),
        "unpack": pages_numba.reads(page_format, STANDARD.rotate),
        "decode": decode_numba.reads(page_format),
    }
    expected = BY_CPU.get(head_dim, "store unpack").split()
    assert sorted(name for name, has in found.items() if has) == expected


@pytest.mark.parametrize(("head_dim", "bits"), SIZES)
def test_cuda_kernels(head_dim: int, bits: Bits) -> None:
    page_format, columns = pages_of(STANDARD, bits, head_dim), 4
    how = head_dim, STANDARD.rotate, torch.bfloat16, columns
    has_decode = not isinstance(Specialization.of([page_format], *how), str)
    try:
        check_pages(page_format, torch.bfloat16)
    except KernelError as error:
        assert "head_dim of (64, 128, 256, 512)" in str(error)
        has_pages = False
    else:
        has_pages = True
    assert (has_decode, has_pages) == (head_dim in BY_CUDA,) * 2
    # Tokens in 16-bit precision alone need no format of pages.
    has_plain = not isinstance(Specialization.of([], *how), str)
    assert has_plain == has_decode


def test_rope() -> None:
    assert rope.HEAD_DIMS == (64, 128, 192, 256)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_parts_of_a_head_have_no_decode(group: int) -> None:
    """Files from before key_group="head" have pages of two groups per head of 256."""
    policy = KVPolicy.preset("standard", key_group=group)
    page_format = pages_of(policy, Bits(3, 2), 256)
    assert page_format.key_group == group and not decode_numba.reads(page_format)
    assert pages_numba.reads(page_format, rotate=True)
