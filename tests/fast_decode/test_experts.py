"""A mixture of experts for a few rows, against transformers' module and by kernel."""

from __future__ import annotations

import ctypes
from math import isnan

import pytest
import torch

from oscar_mm import OscarOmniPipeline
from oscar_mm.fast_decode.decoder import _experts, _norm
from oscar_mm.fast_decode.experts import (
    ExpertKernels,
    Experts,
    MixtureArguments,
    Params,
    Specialization,
    expert_kernels,
    experts_by_torch,
)
from oscar_mm.fast_decode.linear_torch import Norm
from oscar_mm.kernels.compile import compile_text, csrc_folder

QWEN3_OMNI = Specialization(1, 128, 8, True, 2048, 768, torch.bfloat16)
OTHERS = (
    Specialization(4, 128, 8, True, 2048, 768, torch.bfloat16),
    Specialization(3, 60, 4, False, 1024, 1536, torch.float16),
    Specialization(2, 4, 2, True, 256, 256, torch.bfloat16),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_as_transformers(dtype: torch.dtype) -> None:
    model = OscarOmniPipeline("pocket-omni", device="cpu", dtype=dtype).model
    layer = model.get_decoder().layers[1]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, model.config.text_config.hidden_size, generator=generator).to(dtype)
    norm, experts = _norm(layer.post_attention_layernorm), _experts(layer.mlp)
    expected = x + layer.mlp(norm(x)[:, None])[:, 0]
    found = experts_by_torch(MixtureArguments(x, *norm, *experts))
    assert (found - expected).abs().max() <= (1e-5 if dtype == torch.float32 else 0.05)
    assert expert_kernels(x, experts) is None, "no kernel on a CPU"


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120"])
def test_compiles(arch: str, down: bool) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    text = (csrc_folder() / "experts/experts.cu").read_text() + (
        f"static_assert(sizeof(Params) == {ctypes.sizeof(Params)});\n"
    )
    for specialization in (QWEN3_OMNI, OTHERS[1]):
        limit = (227 if arch != "sm_120" else 99) << 10
        macros = specialization.macros(down, limit, arch != "sm_80")
        assert 0 < macros["EARLY"] <= macros["DEPTH"] <= 32
        if specialization is QWEN3_OMNI:
            assert specialization.shared_bytes(macros) <= limit
        report = compile_text("experts/experts.cu", text, arch, macros).reports["experts"]
        assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)


@pytest.mark.parametrize("value", [None, 0.0, torch.nan])
def test_one_wrong_row_shows(value: float | None) -> None:
    def kernels(arguments: MixtureArguments) -> torch.Tensor:
        output = experts_by_torch(arguments)
        if value is not None:
            output[1] = arguments.x[1] + value
        return output

    made = Specialization(3, 6, 2, True, 256, 256, torch.float32)
    worst = ExpertKernels.disagreement(made, kernels, torch.device("cpu"))
    assert isnan(worst) if value is torch.nan else worst == (0 if value is None else 1)


@pytest.mark.gpu
@pytest.mark.parametrize("specialization", [QWEN3_OMNI, *OTHERS])
def test_kernel(specialization: Specialization) -> None:
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
    norm, experts = _norm(layer.post_attention_layernorm), _experts(layer.mlp)
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
    """Of equal logits the first experts are chosen; NaN stays in its row."""
    generator = torch.Generator("cuda").manual_seed(0)
    made = Specialization(2, 60, 4, True, 256, 256, torch.bfloat16)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    x, norm = random(made.rows, made.width), Norm(random(made.width), 1e-5)
    gate_and_up = random(made.experts, 2 * made.between, made.width) / 16
    down = random(made.experts, made.width, made.between)
    router = torch.zeros(made.experts, made.width, device="cuda").bfloat16()
    experts = Experts(router, gate_and_up, down, made.chosen, made.normalized)
    found = expert_kernels(x, experts)(MixtureArguments(x, *norm, *experts))
    # A mixture of these alone gives them the same shares.
    first = Experts(
        *(router[: made.chosen], gate_and_up[: made.chosen], down[: made.chosen]),
        *(made.chosen, made.normalized),
    )
    expected = experts_by_torch(MixtureArguments(x, *norm, *first))
    assert (found - expected).norm() < 0.02 * (expected - x).norm()
    broken = x.clone()
    broken[0, 3] = torch.nan
    result = expert_kernels(broken, experts)(MixtureArguments(broken, *norm, *experts))
    assert result[0].isnan().all() and torch.equal(result[1], found[1])
