"""Rotary position embedding of decode steps, against transformers' and by kernel."""

from __future__ import annotations

from math import isnan

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb as partial_rope
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLTextRMSNorm,
    apply_rotary_pos_emb,
)

from oscar_mm.fast_decode.centered_norm import CenteredNorm
from oscar_mm.fast_decode.linear_torch import Norm
from oscar_mm.fast_decode.rope import (
    HEAD_DIMS,
    Params,
    RopeArguments,
    RopeKernel,
    Specialization,
    rope_,
    rope_by_torch,
)
from oscar_mm.kernels.compile import csrc_folder
from tests.compiled import architectures, compile_once, same_struct


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_transformers(dtype: torch.dtype, normed: bool) -> None:
    rows, query_heads, kv_heads, head_dim = 3, 6, 2, 64
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(rows, query_heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
    angles = torch.randn(rows, head_dim // 2, generator=generator).repeat(1, 2)
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = [Qwen3VLTextRMSNorm(head_dim, eps=1e-6).to(dtype) for _ in range(2)]
    for norm in norms:
        norm.weight.data.copy_(torch.randn(head_dim, generator=generator))
    sides = states.split([query_heads, kv_heads, kv_heads], 1)
    with torch.no_grad():
        query, key = (
            (norm(side) if normed else side).unsqueeze(2)
            for norm, side in zip(norms, sides[:2], strict=True)
        )
        query, key = apply_rotary_pos_emb(query, key, cosine[:, None], sine[:, None])
        expected = torch.cat([query[:, :, 0], key[:, :, 0], sides[2]], 1)
        of_heads = tuple(Norm(norm.weight, norm.variance_epsilon) for norm in norms)
        rope_(states[:, :8], query_heads, cosine, sine, of_heads if normed else None)
    assert torch.equal(states, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_gated_heads(dtype: torch.dtype) -> None:
    """As Qwen3.5's attention: centered norms, a quarter of the channels, gates after queries."""
    rows, query_heads, kv_heads, head_dim, turned = 3, 4, 2, 64, 16
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(rows, 2 * (query_heads + kv_heads), head_dim, generator=generator)
    states, expected = states.to(dtype), states.to(dtype)
    angles = torch.randn(rows, turned // 2, generator=generator).repeat(1, 2)
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = [Qwen3_5RMSNorm(head_dim, eps=1e-6).to(dtype) for _ in range(2)]
    for norm in norms:
        norm.weight.data.copy_(torch.randn(head_dim, generator=generator))
    asked = expected[:, : 2 * query_heads].unflatten(1, (query_heads, 2))
    key = expected[:, 2 * query_heads :][:, :kv_heads]
    with torch.no_grad():
        sides = norms[0](asked[:, :, 0])[:, :, None], norms[1](key)[:, :, None]
        query, new = partial_rope(*sides, cosine[:, None], sine[:, None])
        asked[:, :, 0], key[:] = query[:, :, 0], new[:, :, 0]
        of_heads = tuple(CenteredNorm(norm.weight, norm.eps) for norm in norms)
        turning = states[:, : 2 * query_heads + kv_heads]
        rope_(turning, query_heads, cosine, sine, of_heads, gated=True)
    assert torch.equal(states, expected)


@pytest.mark.parametrize("arch", architectures())
def test_compiles(arch: str) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    text = (csrc_folder() / "rope/rope.cu").read_text() + same_struct(Params)
    for head_dim, turned, centered in (*((one, one, False) for one in HEAD_DIMS), (256, 64, True)):
        macros = Specialization(head_dim, torch.bfloat16, turned, centered).macros
        report = compile_once("rope/rope.cu", text, arch, macros)["rope"]
        assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)


@pytest.mark.parametrize("value", [None, 0.0, torch.nan])
def test_one_wrong_head_of_one_problem_shows(value: float | None) -> None:
    def kernel(arguments: RopeArguments) -> None:
        rope_by_torch(arguments)
        if value is not None and arguments.key_norm is not None:
            arguments.heads[1, 2] = value

    made = Specialization(64, torch.float32, 64)
    worst = RopeKernel.disagreement(made, kernel, torch.device("cpu"))
    assert isnan(worst) if value is torch.nan else worst == (0 if value is None else 1)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("turned", "centered"), [(None, False), (64, True)])
def test_kernel(dtype: torch.dtype, head_dim: int, turned: int | None, centered: bool) -> None:
    made = Specialization(head_dim, dtype, turned or head_dim, centered)
    verdict = RopeKernel.checked.check(made, torch.device("cuda", 0))
    assert verdict.disagreement < 2e-3


@pytest.mark.gpu
def test_heads_of_any_alignment_are_rotated() -> None:
    """The kernel reads four channels at once; others are rotated with PyTorch operations."""
    generator = torch.Generator().manual_seed(0)
    for offset in (0, 1, 2, 4):
        row, angles = torch.randn(9 * 64 + offset, generator=generator), torch.randn(1, 64)
        heads = row.to("cuda", torch.bfloat16)[offset:].view(1, 9, 64)
        cosine, sine = angles.cos().to(heads), angles.sin().to(heads)
        expected = heads.clone()
        rope_by_torch(RopeArguments(expected, 8, cosine, sine, None, None, 0.0))
        rope_(heads, 8, cosine, sine)
        assert torch.allclose(heads, expected, rtol=2**-7)
