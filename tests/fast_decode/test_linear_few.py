"""Products of a few rows with quantized weights: how they are cut up, and what they give."""

from __future__ import annotations

import pytest
import torch

from oscar_mm.fast_decode.linear_few import (
    MAX_DEPTH,
    FewParams,
    FewSpecialization,
    LinearFewKernel,
    most_warps_for,
)
from oscar_mm.fast_decode.linear_params import WeightFormat
from oscar_mm.fast_decode.linear_torch import LinearArguments, Norm, linear_by_torch
from oscar_mm.kernels.compile import csrc_folder
from oscar_mm.kernels.launch import multiprocessors, uses_tma
from oscar_mm.weights.matrix import QuantizedMatrix
from tests.compiled import architectures, compile_once, same_struct

LIMITS = {"sm_90a": 227, "sm_100a": 227, "sm_120": 99}
"""Architecture -> KiB of shared memory that a thread block may have."""
FORMATS = [
    WeightFormat(8),
    WeightFormat(4),
    WeightFormat(4, False, 64),
    WeightFormat(4, True, 32),
]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("width", [512, 2048, 2560, 4096, 4608, 12288])
def test_every_problem_is_cut_to_fit(form: WeightFormat, gated: bool, width: int) -> None:
    made = FewSpecialization(1, gated, torch.bfloat16, form)
    warps, limit, spans = most_warps_for(227 << 10), 224 << 10, width // made.span
    for grains in (1, 131, 132, 133, 1536):
        cut = made.launch(grains, width, 132, warps, limit)
        blocks, columns, teams, depth, shared_bytes = cut
        assert blocks == min(132, grains) and columns <= spans
        assert teams >= 1 and columns * teams <= warps
        assert 2 <= depth <= MAX_DEPTH and shared_bytes <= limit
        # No warp has more spans than it would with more warps.
        assert -(-spans // columns) == -(-spans // warps)
    # The sums of so many outputs leave no room for weights.
    assert made.launch(132 * 4000, width, 132, warps, limit).depth < 2
    # A GPU with less shared memory has fewer warps, and so two boxes for each.
    assert made.launch(256, width, 170, most_warps_for(99 << 10), 96 << 10).depth >= 2


@pytest.mark.parametrize("arch", architectures(LIMITS))
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("form", FORMATS)
def test_compiles(arch: str, gated: bool, rows: int, form: WeightFormat) -> None:
    """Also, the host has the same struct and sizes as the kernel."""
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    made = FewSpecialization(rows, gated, torch.bfloat16 if gated else torch.float16, form)
    text = (csrc_folder() / "linear/linear_few.cu").read_text() + (
        f"{same_struct(FewParams)}"
        f"static_assert(MAX_DEPTH == {MAX_DEPTH} && SPAN * PIECE == {made.span});\n"
        f"static_assert(STAGE == {made.stage_bytes} && sizeof(Box) == 8);\n"
    )
    macros = made.macros(most_warps_for(LIMITS[arch] << 10))
    report = compile_once("linear/linear_few.cu", text, arch, macros)["linear_few"]
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)


def around_nan(values: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the GPU, between NaN."""
    whole = torch.full((values.numel() + 1024,), torch.nan, dtype=values.dtype, device="cuda")
    return whole[512:-512].view(values.shape).copy_(values)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture
def device() -> torch.device:
    found = torch.device("cuda", torch.cuda.current_device())
    if not uses_tma(found):
        pytest.skip("needs TMA")
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("width", [512, 1536, 4096, 12288])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernel(
    dtype: torch.dtype,
    gated: bool,
    rows: int,
    width: int,
    form: WeightFormat,
    device: torch.device,
) -> None:
    """Against float64; also fewer outputs than thread blocks, and NaN around all that is read."""
    kernel = LinearFewKernel.of(FewSpecialization(rows, gated, dtype, form), device)
    assert isinstance(kernel, LinearFewKernel)
    many = 24 * multiprocessors(device) + 77 if width == 512 else 1500
    for outputs in ((5, 5), (many, many)) if gated else ((7,), (many, 9, 300)):
        x, norm = around_nan(random(rows, width).to(dtype)), around_nan(random(width).to(dtype))
        matrices = [
            form.quantized((random(count, width) / width**0.5).to(dtype)) for count in outputs
        ]
        exact = [matrix.dequantized(torch.float64).to(device) for matrix in matrices]
        matrices = [
            QuantizedMatrix(m.codes.to(device), around_nan(m.scales), _zeros(m, device))
            for m in matrices
        ]
        biases = [None if gated else around_nan(random(one).to(dtype)) for one in outputs]
        residual = None if gated else around_nan(random(rows, sum(outputs)).to(dtype))
        lists = [[m.codes for m in matrices], biases, Norm(norm, 1e-5), residual, gated]
        scales = [m.scales for m in matrices]
        zeros = [m.zeros for m in matrices if m.zeros is not None]
        arguments = LinearArguments.of(x, *lists, scales=scales, zeros=zeros)
        assert kernel.takes(arguments)
        found = kernel(arguments).double()
        added = [None if one is None else one.double() for one in (*biases, residual)]
        expected = linear_by_torch(
            LinearArguments.of(
                Norm(norm, 1e-5)(x).double(), exact, added[:-1], None, added[-1], gated
            )
        )
        typical = 0.5 * expected.shape[1] ** 0.5
        error = (found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=typical)
        assert error.max() < 1.5 * torch.finfo(dtype).eps
        assert torch.equal(found, kernel(arguments).double())


def _zeros(matrix: QuantizedMatrix, device: torch.device) -> torch.Tensor | None:
    return None if matrix.zeros is None else matrix.zeros.to(device)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_unusual_rows(dtype: torch.dtype, form: WeightFormat, device: torch.device) -> None:
    """Rows of very different magnitudes are as exact as others, and none changes the other row."""
    kernel = LinearFewKernel.of(FewSpecialization(2, False, dtype, form), device)
    assert kernel is not None
    matrix = form.quantized((random(300, 2048) / 2048**0.5).to(device, dtype))
    zeros = [] if matrix.zeros is None else [matrix.zeros]
    weights = matrix.dequantized(torch.float64)
    usual = random(2, 2048).to(device, dtype)

    def found(first: torch.Tensor) -> torch.Tensor:
        x = torch.stack([first, usual[1]])
        return kernel(LinearArguments.of(x, [matrix.codes], scales=[matrix.scales], zeros=zeros))

    expected = found(usual[0])[1]
    outlier, falling = usual[0].clone(), usual[0] * 2.0 ** -(torch.arange(2048, device=device) % 16)
    outlier[5] = 3e4
    for first in (usual[0], outlier, falling.to(dtype), usual[0] / 4096, torch.zeros_like(outlier)):
        mine, other = found(first)
        exact = weights @ first.double()
        assert (mine.double() - exact).norm() <= torch.finfo(dtype).eps * exact.norm()
        assert torch.equal(other, expected)
    for value in (torch.inf, -torch.inf, torch.nan):
        outlier[5] = value
        mine, other = found(outlier)
        assert not mine.isfinite().any() and torch.equal(other, expected)


@pytest.mark.gpu
def test_other_groups_and_widths_are_left_to_other_kernels(device: torch.device) -> None:
    """Groups of whole rows, a width that is no multiple of a box, and sums that do not fit."""
    form, dtype = WeightFormat(4), torch.bfloat16
    kernel = LinearFewKernel.of(FewSpecialization(1, False, dtype, form), device)
    assert kernel is not None

    def taken(outputs: int, width: int, groups: int) -> bool:
        words = torch.empty(outputs, width // 8, dtype=torch.int32, device=device)
        scales = torch.empty(outputs, groups, dtype=dtype, device=device)
        x, zeros = torch.empty(1, width, dtype=dtype, device=device), scales.to(torch.uint8)
        return kernel.takes(LinearArguments.of(x, [words], scales=[scales], zeros=[zeros]))

    assert taken(32, 512, 4)
    assert not taken(32, 512, 1) and not taken(32, 768, 6) and not taken(8_000_000, 512, 4)


@pytest.mark.gpu
def test_a_chain_of_dependent_launches(device: torch.device) -> None:
    """Each launch begins before the preceding one, whose output it reads, has ended."""
    form, dtype = WeightFormat(4), torch.bfloat16
    kernel = LinearFewKernel.of(FewSpecialization(1, False, dtype, form), device)
    assert kernel is not None
    words, scales, zeros = form.quantized(random(2048, 2048).to(device, dtype) / 2048**0.5)
    assert zeros is not None
    norm, start = torch.ones(2048, dtype=dtype, device=device), random(1, 2048).to(device, dtype)

    def run(x: torch.Tensor) -> torch.Tensor:
        around = Norm(norm, 1e-6), x
        arguments = LinearArguments.of(x, [words], (), *around, scales=[scales], zeros=[zeros])
        return kernel(arguments)

    x = again = start
    for _ in range(200):
        x = run(x)
    torch.cuda.synchronize()
    for _ in range(200):
        again = run(again)
        torch.cuda.synchronize()
    assert torch.equal(x, again) and x.isfinite().all() and not torch.equal(x, start)
