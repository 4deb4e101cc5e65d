"""FP8 weights against arithmetic in float64, block by block."""

import pytest
import torch

from oscar_mm.weights.fp8 import BLOCK, CODES, dequantized, expanded, quantized, scales_shape

SHAPES = (1, 1), (5, 128), (128, 7), (300, 200), (1030, 384)


def by_hand(codes: torch.Tensor, scales: torch.Tensor, rows: int) -> torch.Tensor:
    found = codes.double()
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * rows, (i + 1) * rows), slice(j * BLOCK, (j + 1) * BLOCK)
            found[block] *= scales[i, j].double()
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_each_block_has_its_own_scale(shape) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    weight *= torch.logspace(-3, 3, shape[1], dtype=torch.float64)
    codes, scales = quantized(weight)
    assert codes.dtype == CODES and tuple(scales.shape) == scales_shape(weight)
    truth = by_hand(codes, scales, BLOCK)
    # e4m3 has 3 bits after the point; below 2^-6 its steps are 2^-9.
    steps = by_hand(torch.full(shape, 2**-10), scales, BLOCK)
    assert ((truth - weight).abs() <= torch.maximum(weight.abs() * 2**-4, steps) * 1.001).all()
    assert codes.float().abs().max() == 448
    torch.testing.assert_close(
        dequantized(codes, scales, torch.float32).double(), truth, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["block", "output", "outputs", "matrix", "number"])
def test_scales_of_every_form(shape, form) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randn(shape, generator=generator).to(CODES)
    sizes = {
        "block": scales_shape(codes),
        "output": (shape[0], 1),
        "outputs": (shape[0],),
        "matrix": (1, 1),
        "number": (),
    }
    scales = torch.rand(sizes[form], generator=generator, dtype=torch.float64) + 0.5
    if form == "block":
        truth = by_hand(codes, scales.float(), BLOCK)
    else:
        column = scales.float().double().reshape(-1, 1)
        truth = codes.double() * column
    found = dequantized(codes, expanded(codes, scales), torch.float32)
    torch.testing.assert_close(found.double(), truth, rtol=1e-6, atol=0)


def test_zeros_stay_zeros() -> None:
    codes, scales = quantized(torch.zeros(130, 130))
    assert scales.isfinite().all() and not dequantized(codes, scales, torch.float32).any()


@pytest.mark.parametrize("shape", [(2, 3), (300, 2), (3,), (4, 2)])
def test_scales_of_an_unknown_form_are_refused(shape) -> None:
    codes = torch.zeros(384, 384).to(CODES)
    with pytest.raises(ValueError, match=r"FP8 weights of shape \[384, 384\] need \[3, 3\] or"):
        expanded(codes, torch.ones(shape))
