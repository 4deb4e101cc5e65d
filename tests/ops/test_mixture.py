"""A mixture of experts for a few rows, against transformers' module and by kernel."""

from __future__ import annotations

import ctypes

import pytest
import torch

from oscar_mm import OscarOmniPipeline
from oscar_mm.decoding.layers import _experts, _norm
from oscar_mm.ops import mixture as module
from oscar_mm.ops.mixture import (
    Params,
    Specialization,
    mixture_by_torch,
    mixture_kernels,
)
from oscar_mm.ops.nvrtc import compile_text, csrc_folder

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
    found = mixture_by_torch(x, norm, experts)
    assert (found - expected).abs().max() <= (1e-5 if dtype == torch.float32 else 0.05)
    assert mixture_kernels(x, experts) is None, "no kernel on a CPU"


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120"])
def test_compiles(arch: str, down: bool) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    text = (csrc_folder() / "experts.cu").read_text() + (
        f"static_assert(sizeof(Params) == {ctypes.sizeof(Params)});\n"
    )
    for specialization in (QWEN3_OMNI, OTHERS[1]):
        macros = specialization.macros(down, 4, arch != "sm_80")
        report = compile_text("experts.cu", text, arch, macros).reports["experts"]
        assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("specialization", [QWEN3_OMNI, *OTHERS])
def test_kernel(specialization: Specialization) -> None:
    verdict = module.TRUSTED.check(specialization, torch.device("cuda", 0))
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
    if mixture_kernels(x, experts) is None:
        pytest.skip("experts of a width that the kernels do not take")
    together = mixture_kernels(x, experts)(x, norm, experts)
    alone = [mixture_kernels(row, experts)(row, norm, experts) for row in x.split(1)]
    assert torch.equal(together, torch.cat(alone))
    close = mixture_by_torch(x, norm, experts)
    assert (together - close).abs().max() < 0.1
