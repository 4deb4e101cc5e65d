"""Products with adapters in one or two launches: that their kernel compiles, and what they give."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from oscar_mm.fast_decode.linear_torch import Norm
from oscar_mm.fast_decode.low_rank import LowRank
from oscar_mm.fast_decode.low_rank_kernel import (
    MAX_ROWS,
    STEP,
    TILE,
    WARPS,
    LowRankKernel,
    LowRankParams,
    LowRankSpecialization,
)
from oscar_mm.fast_decode.row_adapters import choosing
from oscar_mm.kernels.compile import csrc_folder
from oscar_mm.kernels.macros import macros_of
from oscar_mm.weights.matrix import QuantizedMatrix
from tests.compiled import architectures, compile_once, same_struct


@pytest.mark.parametrize("arch", architectures())
@pytest.mark.parametrize("gated", [False, True])
def test_kernel_compiles(arch: str, gated: bool) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    made = LowRankSpecialization(gated, torch.float16 if gated else torch.bfloat16)
    text = (csrc_folder() / "linear/low_rank.cu").read_text() + same_struct(LowRankParams)
    sizes = {"ROWS": MAX_ROWS, "TILE": TILE, "STEP": STEP, "WARPS": WARPS}
    text += "".join(f"static_assert({name} == {size});\n" for name, size in sizes.items())
    report = compile_once("linear/low_rank.cu", text, arch, macros_of(made))["low_rank"]
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 16, 17])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("by_row", [False, True])
@torch.inference_mode()
def test_products_with_adapters(rows: int, gated: bool, quantized: bool, by_row: bool) -> None:
    """Against float64, with two adapters of 16 ranks: chosen by each row, or acting on all."""
    device, dtype, width = torch.device("cuda", 0), torch.bfloat16, 512
    sizes = (152, 152) if gated else (152, 40, 8)
    generator = torch.Generator(device).manual_seed(rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    x, norm, down = random(rows, width), Norm(random(width), 1e-5), random(len(sizes) * 32, width)
    down, weights = down / 22, [random(size, width) / 22 for size in sizes]
    up = random(sum(sizes), 32)
    exact, formats = torch.cat(weights).double(), {"scales": [], "zeros": []}
    if quantized:
        matrices = [QuantizedMatrix.of(weight, 4) for weight in weights]
        exact = torch.cat([matrix.dequantized(torch.float64) for matrix in matrices])
        weights = [matrix.codes for matrix in matrices]
        formats = {kind: [getattr(m, kind) for m in matrices] for kind in formats}
    residual = None if gated else random(rows, sum(sizes))
    idle = torch.zeros(rows, 32, dtype=torch.bool, device=device)
    if by_row:
        idle[::2, :16] = idle[1::2, 16:] = True
    low_rank = LowRank(down, up, sizes, by_row)
    assert (LowRankKernel.for_rows(x, up, sizes, gated) is not None) == (rows <= 16)
    around = {"norm": norm, "residual": residual, "gated": gated, **formats}
    with choosing(idle if by_row else None):
        found = low_rank.product(x, weights, [None] * len(sizes), **around).double()
    normed = norm(x).double()
    between = (normed @ down.double().T) * ~idle.repeat(1, len(sizes))
    expected = normed @ exact.T + between @ torch.block_diag(*up.double().split(sizes)).T
    if gated:
        gates, ups = expected.chunk(2, 1)
        expected = silu(gates) * ups
    else:
        expected += residual
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 0.01
