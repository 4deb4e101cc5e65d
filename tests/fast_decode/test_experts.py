"""A mixture of experts for a few rows, against transformers' module and by kernel."""

from __future__ import annotations

from itertools import product
from math import isnan

import pytest
import torch

from oscar_mm import OscarOmniPipeline
from oscar_mm.fast_decode.experts import (
    BLOCK_OF_X,
    COMBINE_THREADS,
    MAX_GROUPED,
    PIECE,
    PROMPT_THREADS,
    ROUTE_THREADS,
    CombineParams,
    ExpertKernels,
    GroupedKernels,
    GroupedParams,
    GroupedSpecialization,
    Params,
    PromptKernels,
    PromptParams,
    Specialization,
    expert_kernels,
    grouped_tilings,
)
from oscar_mm.fast_decode.experts_torch import (
    Choice,
    Experts,
    MixtureArguments,
    experts_by_torch,
)
from oscar_mm.fast_decode.layers import _experts, norm_of
from oscar_mm.fast_decode.linear import MAX_ROWS, RowsParams, linear
from oscar_mm.fast_decode.linear_params import UNQUANTIZED, WeightFormat
from oscar_mm.fast_decode.linear_torch import Norm
from oscar_mm.kernels.compile import csrc_folder
from oscar_mm.kernels.macros import macros_of
from tests.compiled import architectures, compile_once, same_struct

OMNI_CHOICE = Choice(128, 8, True, torch.bfloat16)
LARGEST_CHOICE = Choice(512, 32, False, torch.float16)
FP8, INT4 = WeightFormat(8), WeightFormat(4)
WEIGHTS = [UNQUANTIZED, FP8, INT4, WeightFormat(4, float_scales=True, group_columns=32)]
QWEN3_OMNI = Specialization(OMNI_CHOICE, 1, 2048, 768)
OTHERS = (
    Specialization(OMNI_CHOICE, 4, 2048, 768),
    Specialization(Choice(60, 4, False, torch.float16), 3, 1024, 1536),
    Specialization(Choice(4, 2, True, torch.bfloat16), 2, 256, 256),
)
QWEN3_5 = Specialization(Choice(256, 8, True, torch.bfloat16), 1, 2048, 512, has_norm=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_as_transformers(dtype: torch.dtype) -> None:
    model = OscarOmniPipeline("pocket-omni", device="cpu", dtype=dtype).model
    layer = model.get_decoder().layers[1]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, model.config.text_config.hidden_size, generator=generator).to(dtype)
    norm, experts = norm_of(layer.post_attention_layernorm), _experts(layer.mlp, None)
    expected = x + layer.mlp(norm(x)[:, None])[:, 0]
    found = experts_by_torch(MixtureArguments(x, *norm, *experts))
    assert (found - expected).abs().max() <= (1e-5 if dtype == torch.float32 else 0.05)
    assert expert_kernels(x, experts) is None, "no kernel on a CPU"


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("arch", architectures(("sm_80", "sm_90a", "sm_100a", "sm_120")))
@pytest.mark.parametrize("weights", WEIGHTS)
def test_compiles(arch: str, down: bool, weights: WeightFormat) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    text = (csrc_folder() / "experts/experts.cu").read_text() + same_struct(Params)
    text += f"static_assert(PIECE == {PIECE} && BLOCK == {BLOCK_OF_X});\n"
    made = QWEN3_OMNI, OTHERS[1], QWEN3_5
    for specialization in (one._replace(weights=weights) for one in made):
        # What the kernel stores there, in bytes; a multiprocessor of 24 has the most tiles.
        sums = "(ALL + 23) / 24 * PIECES * RECORD * sizeof(float)"
        own = f"X_BLOCKS * (BLOCK * 2 + sizeof(BlockOfX)) + {sums}"
        shared = specialization.shared_bytes(down, 24)
        assert shared <= 99 << 10
        macros = specialization.macros(down)
        checked = f"{text}static_assert({own} == {shared});\n"
        report = compile_once("experts/experts.cu", checked, arch, macros)["experts"]
        assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)


def _spills(source: str, arch: str, text: str, macros: dict[str, str | int]) -> tuple[int, ...]:
    """Spills and stack of all kernels of a source."""
    text = (csrc_folder() / source).read_text() + text
    reports = compile_once(source, text, arch, macros).values()
    return tuple(
        sum(getattr(report, name) for report in reports)
        for name in ("spill_stores", "spill_loads", "stack")
    )


@pytest.mark.parametrize("arch", architectures(("sm_90a", "sm_100a", "sm_120")))
@pytest.mark.parametrize("columns", [8, 32])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_kernels_of_many_rows_compile(arch: str, columns: int, weights: WeightFormat) -> None:
    """And the host's picture of them is right."""
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    made, text = GroupedSpecialization(OMNI_CHOICE, columns, weights), same_struct(RowsParams)
    limit = (227 if arch != "sm_120" else 99) << 10
    for gated, tiling in zip((True, False), grouped_tilings(limit), strict=True):
        form = made.products(gated)
        macros = tiling.macros(form)
        assert _spills("linear/linear_rows.cu", arch, text, macros) == (0, 0, 0)
        launch = tiling.launch(form, tiling.outputs(gated), limit)
        assert launch.depth >= 2 and launch.shared_bytes <= limit
    for name, params, threads in (
        ("route", GroupedParams, ROUTE_THREADS),
        ("combine", CombineParams, COMBINE_THREADS),
    ):
        text = same_struct(params) + f"static_assert(THREADS == {threads});\n"
        for other in (made, GroupedSpecialization(LARGEST_CHOICE, columns)):
            assert _spills(f"experts/{name}.cu", arch, text, macros_of(other)) == (0, 0, 0)


@pytest.mark.parametrize("arch", architectures(("sm_90a", "sm_100a", "sm_120")))
@pytest.mark.parametrize("choice", [OMNI_CHOICE, LARGEST_CHOICE])
def test_kernels_of_prompts_compile(arch: str, choice: Choice) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    text = f"{same_struct(PromptParams)}static_assert(THREADS == {PROMPT_THREADS});\n"
    assert _spills("experts/prompt.cu", arch, text, macros_of(choice)) == (0, 0, 0)


@pytest.mark.parametrize(("rows", "columns"), [(5, 8), (9, 16), (96, 16), (97, 32), (512, 32)])
def test_rows_of_a_group(rows: int, columns: int) -> None:
    assert GroupedSpecialization.of(OMNI_CHOICE, rows).columns == columns


@pytest.mark.parametrize(
    ("kernels", "made", "row"),
    [
        (ExpertKernels, Specialization(Choice(6, 2, True, torch.float32), 3, 256, 256), 1),
        (
            ExpertKernels,
            Specialization(Choice(6, 2, True, torch.float32), 3, 256, 256, has_norm=False),
            1,
        ),
        (GroupedKernels, GroupedSpecialization(Choice(12, 2, True, torch.float32), 8), 2),
        (GroupedKernels, GroupedSpecialization(Choice(12, 2, True, torch.float32), 8, FP8), 2),
        (GroupedKernels, GroupedSpecialization(Choice(12, 2, True, torch.float32), 8, INT4), 2),
        (PromptKernels, Choice(12, 2, True, torch.float32), 2),
    ],
)
@pytest.mark.parametrize("value", [None, 0.0, torch.nan])
def test_one_wrong_row_shows(kernels, made, row: int, value: float | None) -> None:
    def kernel(arguments: MixtureArguments) -> torch.Tensor:
        output = experts_by_torch(arguments)
        if value is not None:
            output[row] = arguments.stream[row] + value
        return output

    worst = kernels.disagreement(made, kernel, torch.device("cpu"))
    assert isnan(worst) if value is torch.nan else worst == (0 if value is None else 1)


@pytest.mark.gpu
@pytest.mark.parametrize("specialization", [QWEN3_OMNI, *OTHERS, QWEN3_5])
@pytest.mark.parametrize("weights", WEIGHTS[:3])
def test_kernel(specialization: Specialization, weights: WeightFormat) -> None:
    specialization = specialization._replace(weights=weights)
    verdict = ExpertKernels.checked.check(specialization, torch.device("cuda", 0))
    assert verdict.disagreement < 0.01


@pytest.mark.gpu
@torch.inference_mode()
def test_rows_choose_for_themselves() -> None:
    """Rows of a batch come out as each by itself."""
    model = OscarOmniPipeline("pocket-omni", device="cuda", dtype="bfloat16").model
    layer = model.get_decoder().layers[1]
    generator = torch.Generator("cuda").manual_seed(0)
    width = model.config.text_config.hidden_size
    x = torch.randn(4, width, generator=generator, device="cuda").bfloat16()
    norm, experts = norm_of(layer.post_attention_layernorm), _experts(layer.mlp, None)
    if expert_kernels(x, experts) is None:
        pytest.skip("experts of a width that the kernels do not take")
    together = expert_kernels(x, experts)(MixtureArguments(x, *norm, *experts))
    alone = [
        expert_kernels(row, experts)(MixtureArguments(row, *norm, *experts)) for row in x.split(1)
    ]
    assert torch.equal(together, torch.cat(alone))
    close = experts_by_torch(MixtureArguments(x, *norm, *experts))
    assert (together - close).abs().max() < 0.1


@pytest.mark.gpu
@torch.inference_mode()
def test_equal_logits_and_nan() -> None:
    """With equal logits the first experts are chosen; NaN stays in its row."""
    generator = torch.Generator("cuda").manual_seed(0)
    rows, count, chosen, width, between = 2, 60, 4, 256, 256

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    x, norm = random(rows, width), Norm(random(width), 1e-5)
    gate_and_up = random(count, 2 * between, width) / 16
    down = random(count, width, between)
    router = torch.zeros(count, width, device="cuda").bfloat16()
    experts = Experts(router, gate_and_up, down, chosen, True)
    found = expert_kernels(x, experts)(MixtureArguments(x, *norm, *experts))
    # A mixture of these alone gives them the same shares.
    first = Experts(router[:chosen], gate_and_up[:chosen], down[:chosen], chosen, True)
    expected = experts_by_torch(MixtureArguments(x, *norm, *first))
    assert (found - expected).norm() < 0.02 * (expected - x).norm()
    broken = x.clone()
    broken[0, 3] = torch.nan
    result = expert_kernels(broken, experts)(MixtureArguments(broken, *norm, *experts))
    assert result[0].isnan().all() and torch.equal(result[1], found[1])


def random_on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def quantized(
    arguments: MixtureArguments, weights: WeightFormat
) -> tuple[MixtureArguments, MixtureArguments]:
    """Experts in a format, and the same in float32."""
    if weights == UNQUANTIZED:
        return arguments, arguments
    gate_and_up, down = map(weights.quantized, (arguments.gate_and_up, arguments.down))
    arguments = arguments._replace(
        gate_and_up=gate_and_up.codes,
        down=down.codes,
        scales=[gate_and_up.scales, down.scales],
        zeros=[gate_and_up.zeros, down.zeros] if weights.weight_bits == 4 else [],
    )
    exact = (one.dequantized(torch.float32) for one in (gate_and_up, down))
    return arguments, arguments._replace(**dict(zip(("gate_and_up", "down"), exact, strict=True)))


def in_float64(arguments: MixtureArguments) -> torch.Tensor:
    """What the experts add to the residual stream, by the router's logits as they are in 16-bit
    precision."""
    x, _, _, router, gate_and_up, down, count, normalized, *_ = arguments
    # As the kernels round, since a row may choose other experts by other logits.
    few, norm = len(x) <= MAX_ROWS, arguments.of_norm
    normed = norm(x) if few and norm is not None else arguments.at_once
    logits = linear(x, [router], norm=norm) if few else linear(normed, [router])
    logits = logits.double()
    shares, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    shares, order = shares[:, :count], order[:, :count]
    if normalized:
        shares = shares / shares.sum(-1, keepdim=True)
    found = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(len(router)):
        row, place = (order == expert).nonzero(as_tuple=True)
        gate, up = (normed[row].double() @ gate_and_up[expert].double().T).chunk(2, -1)
        part = torch.nn.functional.silu(gate) * up @ down[expert].double().T
        found.index_add_(0, row, part * shares[row, place, None])
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [
        *product((torch.bfloat16, torch.float16), WEIGHTS[:2]),
        (torch.bfloat16, WEIGHTS[2]),
        (torch.float16, WEIGHTS[3]),
    ],
)
@pytest.mark.parametrize("rows", [1, 4, 5, 8, 9, 64, 130, MAX_GROUPED, 513, 3000])
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("has_norm", [True, False])
@torch.inference_mode()
def test_rows(
    rows: int, dtype: torch.dtype, skewed: bool, weights: WeightFormat, has_norm: bool
) -> None:
    """Also where most rows choose the same experts, so that these have several groups each; and
    where the outputs are added to other rows, as with a shared expert."""
    experts, chosen, width, between = 60, 4, 1280, 512
    router = random_on_gpu(experts, width, dtype=dtype) / width**0.5
    x = random_on_gpu(rows, width, dtype=dtype)
    if skewed:
        x = (x / 8 + random_on_gpu(1, width, dtype=dtype)).contiguous()
    arguments = MixtureArguments(
        *(x, random_on_gpu(width, dtype=dtype), 1e-5, router),
        random_on_gpu(experts, 2 * between, width, dtype=dtype) / width**0.5,
        random_on_gpu(experts, width, between, dtype=dtype) / between**0.5,
        *(chosen, dtype == torch.bfloat16, [], []),
    )
    if not has_norm:
        more = {"residual": random_on_gpu(rows, width, dtype=dtype), "logits": linear(x, [router])}
        arguments = arguments._replace(norm=None, epsilon=0.0, **more)
    arguments, exact = quantized(arguments, weights)
    kernels = expert_kernels(x, arguments.experts, has_norm=has_norm)
    if rows > MAX_GROUPED and dtype == torch.float16:
        assert kernels is None
        return
    kinds = ExpertKernels, GroupedKernels, PromptKernels
    assert type(kernels) is kinds[(rows > MAX_ROWS) + (rows > MAX_GROUPED)]
    # What is not written is NaN.
    torch.full((256 << 20,), torch.nan, device="cuda", dtype=torch.bfloat16)
    before = arguments.stream.double()
    found = kernels(arguments).double() - before
    expected = in_float64(exact)
    errors = (found - expected).norm(dim=1) / (expected.norm(dim=1) + before.norm(dim=1))
    # For a prompt, dequantized weights are rounded.
    rounds = weights != UNQUANTIZED and rows > MAX_GROUPED
    assert errors.max() < (4 if rounds else 2) * torch.finfo(dtype).eps


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [8, 16, 32])
@pytest.mark.parametrize(
    ("experts", "chosen", "weights"),
    [(128, 8, UNQUANTIZED), (512, 32, UNQUANTIZED), (4, 2, UNQUANTIZED), (128, 8, INT4)],
)
def test_kernels_of_many_rows(columns, experts, chosen, weights) -> None:
    made = GroupedSpecialization(Choice(experts, chosen, True, torch.bfloat16), columns, weights)
    verdict = GroupedKernels.checked.check(made, torch.device("cuda", 0))
    assert verdict.disagreement < 0.75 * verdict.bound


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "chosen"), [(128, 8), (512, 32), (4, 2)])
def test_kernels_of_prompts(experts: int, chosen: int) -> None:
    made = Choice(experts, chosen, True, torch.bfloat16)
    assert PromptKernels.checked.check(made, torch.device("cuda", 0)).disagreement < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [40, MAX_GROUPED + 40])
@torch.inference_mode()
def test_nan_of_many_rows_stays_in_its_row(rows: int) -> None:
    x, width, between = random_on_gpu(rows, 512), 512, 256
    experts = Experts(
        *(random_on_gpu(16, width), random_on_gpu(16, 2 * between, width) / 16),
        *(random_on_gpu(16, width, between) / 16, 4, True),
    )
    norm = Norm(random_on_gpu(width), 1e-5)
    kernels = expert_kernels(x, experts)
    assert isinstance(kernels, PromptKernels if rows > MAX_GROUPED else GroupedKernels)
    found = kernels(MixtureArguments(x, *norm, *experts))
    broken = x.clone()
    broken[7, 3] = torch.nan
    result = kernels(MixtureArguments(broken, *norm, *experts))
    others = torch.arange(rows) != 7
    assert result[7].isnan().all() and torch.equal(result[others], found[others])
