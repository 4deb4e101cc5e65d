"""Products of many rows with FP8 weights, both in FP8, against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from oscar_mm.fast_decode.linear import linear
from oscar_mm.fast_decode.linear_cluster import MAX_CLUSTER_ROWS
from oscar_mm.fast_decode.linear_torch import LinearArguments, Norm
from oscar_mm.fast_decode.scaled_products import (
    EACH,
    THREADS,
    Params,
    QuantizeRowsKernel,
    ScaledProducts,
)
from oscar_mm.kernels.compile import csrc_folder
from oscar_mm.kernels.launch import ELEMENTS
from oscar_mm.weights import fp8
from tests.compiled import architectures, compile_once, same_struct

HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)


def rows_of(rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows whose blocks differ in scale by many orders of magnitude; one block is zero."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=generator)
    x *= torch.logspace(-3, 3, width // fp8.BLOCK).repeat_interleave(fp8.BLOCK)
    x[rows // 2, : fp8.BLOCK] = 0
    return x.to(dtype)


def test_quantized_rows() -> None:
    """Each number is within half a step of its code, and the largest of a block is exact."""
    x = rows_of(5, 384).double()
    codes, scales = fp8.quantized_rows(x)
    found = codes.double().unflatten(-1, (3, 128)) * scales.double()[..., None]
    blocks = x.unflatten(-1, (3, 128))
    step = (blocks.abs() / 16).clamp(min=scales.double()[..., None] * 2**-10)
    assert bool(((found - blocks).abs() <= step * 1.001).all())
    assert codes.float().abs().amax() == 448
    torch.testing.assert_close(found.abs().amax(-1), blocks.abs().amax(-1), rtol=1e-6, atol=0)


def test_only_on_hopper_gpus() -> None:
    weights = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    codes, scales = fp8.quantized(weights)
    x = rows_of(200, 256)
    assert ScaledProducts.of(LinearArguments.of(x, [codes], scales=[scales])) is None


@pytest.mark.parametrize("arch", architectures(("sm_90a",)))
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_compiles(arch: str, dtype: torch.dtype) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    text = (csrc_folder() / "linear/quantize_rows.cu").read_text() + (
        f"{same_struct(Params)}static_assert(THREADS == {THREADS} && EACH == {EACH});\n"
    )
    macros = {"ELEMENT": ELEMENTS[dtype]}
    report = compile_once("linear/quantize_rows.cu", text, arch, macros)["quantize_rows"]
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize(("rows", "width"), [(1, 128), (37, 384), (2000, 12288)])
def test_kernel(dtype: torch.dtype, rows: int, width: int) -> None:
    """Codes are PyTorch's bit by bit; padding is zero; NaN and infinity stay in their row."""
    x = rows_of(rows, width, dtype).cuda()
    kernel = QuantizeRowsKernel.of(dtype, x.device)
    assert kernel is not None
    found, (codes, scales) = kernel(x), fp8.quantized_rows(x)
    assert torch.equal(found.codes[:rows].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found.scales[:rows], scales)
    assert len(found.codes) % 16 == 0 and not found.codes[rows:].float().any()
    x[rows // 2, 3], x[rows // 2, 64] = torch.nan, torch.inf
    products = kernel(x).codes[:rows].float().isnan().any(-1)
    assert products.nonzero().flatten().tolist() == [rows // 2]


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("rows", [MAX_CLUSTER_ROWS[8] + 1, 500, 2048])
@pytest.mark.parametrize("width", [256, 1408, 4096])
@pytest.mark.parametrize("adjacent", [False, True])
def test_products(rows: int, width: int, adjacent: bool) -> None:
    """Products equal float64 products of the quantized rows, up to the rounding of bfloat16."""
    generator = torch.Generator().manual_seed(width)
    outputs, biased = (1024, 256), [None, torch.randn(256, generator=generator).bfloat16().cuda()]
    weights = [torch.randn(n, width, generator=generator) / width**0.5 for n in outputs]
    codes, scales = zip(*(fp8.quantized(weight.cuda()) for weight in weights), strict=True)
    if adjacent:
        codes, scales = (torch.cat(x).split(list(map(len, x))) for x in (codes, scales))
    x = rows_of(rows, width).cuda()
    residual = torch.randn(rows, sum(outputs), generator=generator).bfloat16().cuda()
    given = LinearArguments.of(x, codes, biased, None, residual, False, scales)
    assert ScaledProducts.of(given) is not None
    found = linear(x, codes, biased, residual=residual, scales=scales).double()
    found -= residual.double()
    kernel = QuantizeRowsKernel.of(x.dtype, x.device)
    assert kernel is not None
    row_codes, row_scales, _ = kernel(x)
    exact = row_codes.double().unflatten(-1, (-1, 128)) * row_scales.double()[..., None]
    exact = exact[:rows]
    expected = torch.cat(
        [
            exact.flatten(-2) @ fp8.dequantized(*matrix, torch.float64).T
            for matrix in zip(codes, scales, strict=True)
        ],
        -1,
    )
    expected[:, outputs[0] :] += biased[1].double()
    error = (found - expected).norm(dim=-1) / (expected.norm(dim=-1) + residual.norm(dim=-1))
    assert float(error.max()) < 5e-3


@pytest.mark.gpu
@HOPPER
def test_gated_and_broken_rows() -> None:
    """silu(gate) * up; a NaN affects its own row only."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(384, 512, generator=generator).cuda() / 512**0.5 for _ in range(2)]
    codes, scales = zip(*map(fp8.quantized, weights), strict=True)
    x = torch.randn(300, 512, generator=generator).bfloat16().cuda()
    x[7, 5] = torch.nan
    found = linear(x, codes, gated=True, scales=scales).double()
    gate, up = (x.double() @ weight.double().T for weight in weights)
    expected = silu(gate) * up
    assert found.isnan().any(-1).nonzero().flatten().tolist() == [7]
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    # Both factors are rounded to FP8 twice: rows and weights, 2% each.
    assert float(error[torch.arange(300) != 7].max()) < 0.12


@pytest.mark.gpu
@HOPPER
@torch.inference_mode()
def test_in_a_cuda_graph() -> None:
    """As parts of short prompts run: a replay gives what the operations give."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, 512, generator=generator).cuda() for n in (256, 128, 128)]
    codes, scales = zip(*map(fp8.quantized, weights), strict=True)
    x, norm = rows_of(256, 512).cuda(), Norm(torch.ones(512).bfloat16().cuda(), 1e-5)
    linear(x, codes, norm=norm, scales=scales)  # Compiles and checks the kernel.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = linear(x, codes, norm=norm, scales=scales)
    x.copy_(x.roll(1, 0) * 2)
    graph.replay()
    assert torch.equal(found, linear(x, codes, norm=norm, scales=scales))
