"""INT4 weights against arithmetic in float64, code by code."""

import pytest
import torch

from oscar_mm.weights.int4 import dequantized, packed, quantized, unpacked


def test_the_order_of_codes_in_a_word() -> None:
    codes = torch.arange(8)
    word = packed(codes).item() & 0xFFFFFFFF
    for i in range(4):
        pair = word >> 4 * i & 0x000F000F
        assert (pair & 0xFFFF, pair >> 16) == (2 * i, 2 * i + 1)


def test_packing_is_undone_by_unpacking() -> None:
    codes = torch.randint(16, (3, 5, 64), generator=torch.Generator().manual_seed(0))
    words = packed(codes)
    assert words.shape == (3, 5, 8) and words.dtype == torch.int32
    assert torch.equal(unpacked(words), codes.to(torch.uint8))


@pytest.mark.parametrize("group", [32, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_group_has_its_own_scale_and_zero(group, dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2, 7, 512, generator=generator) * torch.logspace(-2, 1, 512)
    weight[0, 0, :32] = 3.0  # All of one sign: 0 is within the range nevertheless.
    weight[0, 1, :] = 0.0
    weight = weight.to(dtype)
    words, scales, zeros = quantized(weight, group)
    assert scales.shape == zeros.shape == (2, 7, 512 // group) and scales.dtype == dtype
    codes = unpacked(words)
    found = dequantized(words, scales, zeros, torch.float32)
    for k in range(512):
        scale, zero = scales[..., k // group].double(), zeros[..., k // group].double()
        by_hand = (codes[..., k].double() - zero) * scale
        torch.testing.assert_close(found[..., k].double(), by_hand, rtol=1e-6, atol=0)
        assert ((by_hand - weight[..., k].double()).abs() <= 1.02 * scale).all()
    assert not found[0, 1].any()
