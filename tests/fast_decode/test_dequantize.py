"""Quantized weight matrices in 16 bits, by kernel and by PyTorch."""

from __future__ import annotations

import pytest
import torch

from oscar_mm.fast_decode.dequantize import (
    EACH,
    THREADS,
    DequantizeKernel,
    Params,
    Specialization,
    dequantized,
)
from oscar_mm.kernels.compile import csrc_folder
from oscar_mm.kernels.launch import ELEMENTS
from oscar_mm.kernels.macros import macros_of
from oscar_mm.weights import fp8, int4
from oscar_mm.weights.matrix import QuantizedMatrix
from tests.compiled import architectures, compile_once, same_struct

SPECIALIZATIONS = [
    Specialization(dtype, *form) for dtype in ELEMENTS for form in ((8,), (4,), (4, True))
]


@pytest.mark.parametrize("arch", architectures(("sm_80", "sm_90a", "sm_100a", "sm_120")))
@pytest.mark.parametrize("specialization", SPECIALIZATIONS)
def test_compiles(arch: str, specialization: Specialization) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    text = (csrc_folder() / "linear/dequantize.cu").read_text() + (
        f"{same_struct(Params)}static_assert(THREADS == {THREADS} && EACH == {EACH});\n"
    )
    macros = macros_of(specialization)
    report = compile_once("linear/dequantize.cu", text, arch, macros)["dequantize"]
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)


def matrices(dtype: torch.dtype) -> list[QuantizedMatrix]:
    """All codes; blocks, rows, groups of several sizes, and widths that end within a block."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 1024, generator=generator).to(dtype)
    found = [QuantizedMatrix(*fp8.quantized(weight[:, :width])) for width in (1024, 520)]
    every = torch.arange(256, dtype=torch.uint8).view(fp8.CODES).expand(4, 256).contiguous()
    found.append(QuantizedMatrix(every, torch.rand(4, 2, generator=generator) + 0.1))
    for group in (8, 32, 128, 1024):
        words, scales, zeros = int4.quantized(weight, group)
        found.append(QuantizedMatrix(words, scales, zeros))
        found.append(QuantizedMatrix(words, scales.float() * 1.1, zeros))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("number", range(11))
def test_on_a_gpu(dtype: torch.dtype, number: int) -> None:
    """The kernel gives bitwise what PyTorch gives in float32, NaN included."""
    matrix = QuantizedMatrix(*(x if x is None else x.cuda() for x in matrices(dtype)[number]))
    wide = matrix.bits == 4 and matrix.scales.dtype == torch.float32
    assert DequantizeKernel.of(Specialization(dtype, matrix.bits, wide), matrix.codes.device)
    found, expected = dequantized(matrix, dtype), matrix.dequantized(dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_what_the_kernel_does_not_take() -> None:
    """Float32, and matrices that are not contiguous."""
    weight = torch.randn(256, 512, device="cuda")
    matrix = QuantizedMatrix.of(weight, 8)
    assert torch.equal(dequantized(matrix, torch.float32), matrix.dequantized(torch.float32))
    part = QuantizedMatrix(matrix.codes[:, :256], matrix.scales[:, :2])
    expected = part.dequantized(torch.bfloat16)
    assert torch.equal(dequantized(part, torch.bfloat16), expected)
