"""Products of 3 to 128 rows by kernel: how they are cut up, that they compile, what they give."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from oscar_mm.fast_decode import linear as module
from oscar_mm.fast_decode import linear_params
from oscar_mm.fast_decode.linear import (
    LinearKernel,
    LinearRowsKernel,
    RowsParams,
    RowsSpecialization,
    kernel_for,
)
from oscar_mm.fast_decode.linear_cluster import (
    MAX_CLUSTER_ROWS,
    MAX_GROUPS,
    TILE,
    ClusterParams,
    ClusterSpecialization,
    ClusterTiling,
    LinearClusterKernel,
)
from oscar_mm.fast_decode.linear_params import Matrices, NormParams, WeightFormat
from oscar_mm.fast_decode.linear_torch import LinearArguments, Norm, linear_by_torch
from oscar_mm.kernels.compile import csrc_folder
from oscar_mm.kernels.launch import multiprocessors, uses_tma, uses_wgmma
from tests.compiled import architectures, compile_once, same_struct

LIMITS = {"sm_90a": 227, "sm_100a": 227, "sm_120": 99}
"""Architecture -> KiB of shared memory that a thread block may have."""
CLUSTERS = [
    (bits, columns)
    for bits, most in MAX_CLUSTER_ROWS.items()
    for columns in (16, 32, 64, 96, 128)
    if columns <= most
]
"""Bits of a weight and columns of a product by linear_cluster."""
SHAPES = [(False, 1), (True, 2), (False, 8), (True, 8), (True, 16), (False, 24)]
"""Whether a product by linear_rows is gated, and its rows."""
COMPILED_ROWS = {
    **dict.fromkeys([(16, False, 128), (4, False, 128)], SHAPES),
    **dict.fromkeys([(8, False, 128), (4, False, 64), (4, True, 32)], SHAPES[-2:]),
}
"""Bits of weights, whether scales are float32, columns that share one -> shapes: where the format
changes little, those that take the most registers."""
COMPILED_CLUSTERS = [
    pytest.param(
        *one, marks=() if one[1] in (16, 32, MAX_CLUSTER_ROWS[one[0]]) else pytest.mark.soak
    )
    for one in CLUSTERS
]
"""Every day the fewest columns, those of float16, and the most, which take the most registers."""


def random(*shape: int, dtype: torch.dtype, beyond: int = 0) -> torch.Tensor:
    """On the GPU, with so many NaN in front of it and behind."""
    generator = torch.Generator().manual_seed(sum(shape))
    values = torch.randn(shape, generator=generator)
    whole = torch.full((values.numel() + 2 * beyond,), torch.nan, dtype=dtype, device="cuda")
    part = whole[beyond : beyond + values.numel()].view(shape)
    return part.copy_(values)


def test_matrices_are_those_of_the_tensors() -> None:
    weights = [torch.zeros(outputs, 256) for outputs in (4, 6, 2, 1)]
    biases = [torch.zeros(4), None, torch.zeros(2), None]
    residual, output = torch.zeros(3, 13), torch.zeros(3, 13)
    x = torch.zeros(3, 256)
    made = Matrices.of(LinearArguments.of(x, weights, biases, residual=residual), output)
    assert list(made.weights) == [weight.data_ptr() for weight in weights]
    assert list(made.biases) == [biases[0].data_ptr(), None, biases[2].data_ptr(), None]
    assert (made.residual, made.output) == (residual.data_ptr(), output.data_ptr())
    assert (list(made.outputs), made.total, made.width) == ([4, 6, 2, 1], 13, 256)


def test_what_is_not_there_is_null() -> None:
    x, weights = torch.zeros(1, 256), [torch.zeros(4, 256)]
    made = Matrices.of(LinearArguments.of(x, weights), torch.zeros(1, 4))
    assert made.residual is None
    assert list(made.weights)[1:] == [None] * 3 and list(made.biases) == [None] * 4
    assert list(made.outputs) == [4, 0, 0, 0]


@pytest.mark.parametrize("rows", [3, 8, 9, 16, 17, 24])
def test_rows_are_rounded_up(rows: int) -> None:
    columns = RowsSpecialization.of(rows, False, torch.bfloat16).columns
    assert columns % 8 == 0 and rows <= columns < rows + 8


@pytest.mark.parametrize("limit", sorted(set(LIMITS.values())))
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 24])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_every_problem_is_cut_to_fit(limit: int, rows: int, gated: bool, bits: int) -> None:
    made = RowsSpecialization.of(rows, gated, torch.bfloat16, WeightFormat(bits))
    tiling = module.tiling_for(limit << 10, made)
    most = tiling.sweep // (2 if gated else 1)
    for outputs in (1, 7, 8, 9, 31, 32, 33, 47, 94, 1152):
        step, depth, shared_bytes = tiling.launch(made, outputs, limit << 10)
        assert 1 <= step <= most
        assert -(-outputs // step) == -(-outputs // most), "no more sweeps than are needed"
        assert 2 <= depth <= 16
        assert shared_bytes <= limit << 10


@pytest.mark.parametrize("arch", architectures(LIMITS))
@pytest.mark.parametrize(
    ("gated", "rows", "bits", "wide", "group"),
    [(*shape, *form) for form, shapes in COMPILED_ROWS.items() for shape in shapes],
)
def test_compiles(arch: str, gated: bool, rows: int, bits: int, wide: bool, group: int) -> None:
    """And the host's picture of the kernel is right."""
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    dtype = torch.bfloat16 if gated else torch.float16
    made = RowsSpecialization.of(rows, gated, dtype, WeightFormat(bits, wide, group))
    tiling = module.tiling_for(LIMITS[arch] << 10, made)
    step, depth, shared_bytes = tiling.launch(made, 1000, LIMITS[arch] << 10)
    text = (csrc_folder() / "linear/linear_rows.cu").read_text() + (
        f"{same_struct(RowsParams)}"
        f"static_assert(MAX_DEPTH == {module.MAX_DEPTH} && UNIT == {made.unit});\n"
        f"constexpr int ROWS = GATED ? ({step} + 7) / 8 * 16 : {step};\n"
        "constexpr int STAGE = (ROWS + 15) / 16 * 16 * STRIDE + COLUMNS * X_STRIDE;\n"
        f"static_assert(PARTIALS * sizeof(float) + {depth} * STAGE == {shared_bytes});\n"
    )
    macros = tiling.macros(made)
    report = compile_once("linear/linear_rows.cu", text, arch, macros)["linear_rows"]
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("centered", [False, True])
def test_norm_compiles(arch: str, centered: bool) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    text = (csrc_folder() / "linear/rms_norm.cu").read_text() + (
        f"{same_struct(NormParams)}"
        f"static_assert(THREADS == {linear_params.NORM_THREADS});\n"
        f"static_assert(THREADS * EACH * 8 == {linear_params.WIDEST_NORM});\n"
    )
    macros = linear_params.norm_macros(torch.bfloat16, centered=centered)
    report = compile_once("linear/rms_norm.cu", text, arch, macros)["rms_norm"]
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)


def cluster_tilings(made: ClusterSpecialization, limit: int) -> list[ClusterTiling]:
    """Return the tilings that the kernel can choose from."""
    sizes = [MAX_GROUPS] if made.gated else range(1, MAX_GROUPS + 1)
    return [ClusterTiling.of(made, groups, limit) for groups in sizes]


@pytest.mark.parametrize(("bits", "columns"), CLUSTERS)
@pytest.mark.parametrize("gated", [False, True])
def test_clusters_share_every_problem(bits: int, columns: int, gated: bool) -> None:
    limit = LIMITS["sm_90a"] << 10
    made = ClusterSpecialization.of(columns - 7, gated, torch.bfloat16, WeightFormat(bits))
    assert made.columns == columns
    for tiling in cluster_tilings(made, limit):
        depth = tiling.depth(made, limit)
        assert depth >= (3 if bits == 16 else 2) and tiling.grants(made) < depth
        assert tiling.shared_bytes(made, depth) <= limit < tiling.shared_bytes(made, depth + 1)
        for grains in (1, 2, 65, 66, 67, 192, 5000):
            clusters, share, extra, step = tiling.launch(made, grains, 66)
            assert clusters <= min(66, grains) and share * clusters + extra == grains
            assert 0 <= extra < clusters and step >= 1
            assert step * tiling.grain * made.sides <= tiling.groups * TILE


@pytest.mark.parametrize(("bits", "columns"), COMPILED_CLUSTERS)
@pytest.mark.parametrize("gated", [False, True])
def test_cluster_compiles(bits: int, columns: int, gated: bool) -> None:
    """And the host's picture of the kernel is right."""
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    limit = LIMITS["sm_90a"] << 10
    dtype = torch.float16 if columns == 32 else torch.bfloat16
    # Groups of 64 and scales in float32 take the most registers.
    weights = WeightFormat(bits, bits == 4 and gated, 64 if bits == 4 and gated else 128)
    made = ClusterSpecialization(columns, gated, dtype, weights)
    for tiling in cluster_tilings(made, limit):
        text = (csrc_folder() / "linear/linear_cluster.cu").read_text() + (
            f"{same_struct(ClusterParams)}"
            f"static_assert(THREADS == {tiling.threads});\n"
            f"static_assert(STAGE == {tiling.stage_bytes(made)});\n"
            f"static_assert(GRANTS == {tiling.grants(made)});\n"
        )
        macros = tiling.macros(made)
        report = compile_once("linear/linear_cluster.cu", text, "sm_90a", macros)["linear_cluster"]
        assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)


@pytest.fixture
def added_in_float32() -> Iterator[None]:
    """cuBLAS may add in 16-bit precision otherwise."""
    matmul = torch.backends.cuda.matmul
    flags = [f"allow_{name}_reduced_precision_reduction" for name in ("fp16", "bf16")]
    before = [getattr(matmul, flag) for flag in flags]
    for flag in flags:
        setattr(matmul, flag, False)
    yield
    for flag, value in zip(flags, before, strict=True):
        setattr(matmul, flag, value)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [32, 256, 4096, 12288])
@pytest.mark.parametrize("rows", [3, 5, 8, 9, 16, 17, 24])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("added_in_float32")
def test_kernel(dtype: torch.dtype, gated: bool, rows: int, width: int) -> None:
    """Also fewer outputs than thread blocks, several sweeps, and NaN around all that is read."""
    device = torch.device("cuda", torch.cuda.current_device())
    kernel = LinearRowsKernel.of(RowsSpecialization.of(rows, gated, dtype), device)
    assert isinstance(kernel, LinearRowsKernel)
    many = kernel.tiling.sweep * multiprocessors(device) + 77 if width == 256 else 2500
    for outputs in ((5, 5), (many, many)) if gated else ((7,), (many, 9, 300)):
        x = random(rows, width, dtype=dtype, beyond=4096)
        norm = Norm(random(width, dtype=dtype, beyond=64), 1e-5)
        weights = [random(one, width, dtype=dtype, beyond=4096) for one in outputs]
        for weight in weights:
            weight /= width**0.5
        biases = [None if gated else random(one, dtype=dtype, beyond=64) for one in outputs]
        total = outputs[0] if gated else sum(outputs)
        residual = random(rows, total, dtype=dtype, beyond=64)
        arguments = LinearArguments.of(x, weights, biases, norm, residual, gated)
        assert kernel.takes(arguments)
        found, expected = kernel(arguments).double(), linear_by_torch(arguments).double()
        # Sums in another order round to another neighbour here and there: of a few outputs any
        # may be the only large one.
        error = (found - expected).norm(dim=1) / expected.norm(dim=1)
        most = 1e-3 if dtype == torch.float16 else 8e-3
        assert error.max() < (most if total > 100 else 4 * most), (outputs, error.max())
        assert torch.equal(found, kernel(arguments).double())


@pytest.mark.gpu
@pytest.mark.parametrize("width", [256, 320, 4096, 5120, 12288])
@pytest.mark.parametrize("rows", [3, 16, 17, 33, 56, 64, 65, 128])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("added_in_float32")
def test_cluster_kernel(dtype: torch.dtype, gated: bool, rows: int, width: int) -> None:
    """Also fewer outputs than clusters, every tiling, several sweeps, and NaN around all that is
    read."""
    device = torch.device("cuda", torch.cuda.current_device())
    if not uses_wgmma(device):
        pytest.skip("needs a Hopper GPU")
    kernel = LinearClusterKernel.of(ClusterSpecialization.of(rows, gated, dtype), device)
    assert isinstance(kernel, LinearClusterKernel)
    many = 200 * multiprocessors(device) + 77 if width == 256 else 2500
    for outputs in ((5, 5), (many, many)) if gated else ((7,), (many, 9, 300), (4096, 4000)):
        x = random(rows, width, dtype=dtype, beyond=4096)
        norm = Norm(random(width, dtype=dtype, beyond=64), 1e-5)
        weights = [random(one, width, dtype=dtype, beyond=4096) for one in outputs]
        for weight in weights:
            weight /= width**0.5
        biases = [None if gated else random(one, dtype=dtype, beyond=64) for one in outputs]
        total = outputs[0] if gated else sum(outputs)
        residual = random(rows, total, dtype=dtype, beyond=64)
        arguments = LinearArguments.of(x, weights, biases, norm, residual, gated)
        assert kernel.takes(arguments)
        found, expected = kernel(arguments).double(), linear_by_torch(arguments).double()
        error = (found - expected).norm(dim=1) / expected.norm(dim=1)
        most = 1e-3 if dtype == torch.float16 else 8e-3
        assert error.max() < (most if total > 100 else 4 * most), (outputs, error.max())
        assert torch.equal(found, kernel(arguments).double())


@pytest.mark.gpu
def test_which_kernel_takes_how_many_rows() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    if not uses_tma(device):
        pytest.skip("without bulk copies cuBLAS is faster")
    dtype = torch.bfloat16
    weights = [random(64, 256, dtype=dtype)]
    on_hopper = LinearClusterKernel if uses_wgmma(device) else None
    for rows, kind in (
        (2, LinearKernel),
        (3, on_hopper or LinearRowsKernel),
        (24, on_hopper or LinearRowsKernel),
        (25, on_hopper),
        (MAX_CLUSTER_ROWS[16], on_hopper),
        (MAX_CLUSTER_ROWS[16] + 1, None),
    ):
        x = random(rows, 256, dtype=dtype)
        found = kernel_for(LinearArguments.of(x, weights))
        assert found is None if kind is None else isinstance(found, kind)
        # Rows that do not begin at multiples of 16 bytes are nobody's.
        others = [random(65, 256, dtype=dtype, beyond=1)[1:]]
        assert kernel_for(LinearArguments.of(x, others)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 64])
def test_a_chain_of_dependent_launches(rows: int) -> None:
    """Each begins before the one in front of it has ended, on what that makes."""
    dtype, device = torch.bfloat16, torch.device("cuda", torch.cuda.current_device())
    if rows == 16:
        kernel = LinearRowsKernel.of(RowsSpecialization.of(rows, False, dtype), device)
    elif uses_wgmma(device):
        kernel = LinearClusterKernel.of(ClusterSpecialization.of(rows, False, dtype), device)
    else:
        pytest.skip("needs a Hopper GPU")
    assert kernel is not None
    square = random(2048, 2048, dtype=dtype) / 2048**0.5
    norm = Norm(torch.ones(2048, dtype=dtype, device="cuda"), 1e-6)
    x = again = start = random(rows, 2048, dtype=dtype)
    for _ in range(200):
        x = kernel(LinearArguments.of(x, [square], (), norm, x))
    torch.cuda.synchronize()
    for _ in range(200):
        again = kernel(LinearArguments.of(again, [square], (), norm, again))
        torch.cuda.synchronize()
    assert torch.equal(x, again) and x.isfinite().all() and not torch.equal(x, start)
