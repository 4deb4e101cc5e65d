"""The products around a decoder layer's attention, against transformers' modules and by kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from oscar_mm.fast_decode import linear as module
from oscar_mm.fast_decode.centered_norm import CenteredNorm
from oscar_mm.fast_decode.graph_runner import capture_cuda_graph
from oscar_mm.fast_decode.linear import LinearKernel, Params, Specialization, linear, linear_of
from oscar_mm.fast_decode.linear_torch import (
    LinearArguments,
    Norm,
    linear_by_torch,
    linear_on_gpu,
)
from oscar_mm.kernels.compile import csrc_folder
from tests.compiled import architectures, compile_once, same_struct

ARCHITECTURES = {"sm_80": 2, "sm_86": 2, "sm_89": 2, "sm_90a": 4, "sm_100a": 4, "sm_120": 2}
"""Architecture -> pieces on their way."""


def random(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_around_attention(dtype: torch.dtype) -> None:
    """Norm, three projections with biases; the last one with the residual stream."""
    x = random(5, 96, dtype=dtype)
    norm = Qwen2RMSNorm(96, eps=1e-5).to(dtype)
    norm.weight.data.copy_(random(96))
    parts = [torch.nn.Linear(96, outputs, dtype=dtype) for outputs in (64, 32, 16)]
    weights, biases = [one.weight for one in parts], [one.bias for one in parts]
    with torch.inference_mode():
        found = linear(x, weights, biases, norm=Norm(norm.weight, norm.variance_epsilon))
        assert torch.equal(found, torch.cat([part(norm(x)) for part in parts], -1))
        residual = random(5, 64, dtype=dtype)
        found = linear(x, weights[:1], residual=residual)
        plain = torch.nn.functional.linear(x, weights[0])
        assert torch.equal(found, residual + plain)


@pytest.mark.parametrize("multiply", [linear_by_torch, linear_on_gpu, linear_of])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_residual_becomes_the_sum_only_in_place(
    multiply: Callable[..., torch.Tensor], biased: bool, device: str
) -> None:
    how = {"device": device, "dtype": torch.bfloat16}
    x, weight, residual = (random(*shape, **how) for shape in ((300, 96), (64, 96), (300, 64)))
    before, biases = residual.clone(), [random(64, **how) if biased else None]
    arguments = LinearArguments.of(x, [weight], biases, residual=residual)
    expected = multiply(arguments)
    assert torch.equal(residual, before) and not torch.equal(expected, before)
    found = multiply(arguments, in_place=True)
    assert found is residual and torch.equal(residual, expected)


def test_gate() -> None:
    x, gate, up = random(3, 32), random(48, 32), random(48, 32)
    expected = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
    assert torch.allclose(linear(x, [gate, up], gated=True), expected, atol=1e-5)


@pytest.mark.gpu
def test_a_gate_with_biases_is_left_to_torch() -> None:
    how = {"device": "cuda", "dtype": torch.bfloat16}
    x, weights = random(1, 256, **how), [random(64, 256, **how), random(64, 256, **how)]
    biases = [random(64, **how), random(64, **how)]
    expected = linear_by_torch(LinearArguments.of(x, weights, biases, gated=True))
    found = linear(x, weights, biases, gated=True)
    assert torch.allclose(found.float(), expected.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [25, 64, 130])
@pytest.mark.parametrize("captured", [False, True])
def test_many_rows(rows: int, captured: bool) -> None:
    """Against float64; in a CUDA graph too, which is replayed on other inputs."""
    how = {"device": "cuda", "dtype": torch.bfloat16}
    x, norm = random(rows, 1024, **how), Norm(random(1024, **how), 1e-5)
    for outputs, gated in (((1000, 8, 300), False), ((520,), False), ((2000, 2000), True)):
        weights = [random(one, 1024, **how) / 32 for one in outputs]
        residual = None if gated else random(rows, sum(outputs), **how)
        for biases in ((), [random(one, **how) for one in outputs]):
            around = {"norm": norm, "residual": residual, "gated": gated}
            run = partial(linear, x, weights, biases, **around)
            if captured:
                run()
                run = capture_cuda_graph(run, x.device)
                x.copy_(x.flip(0))
            found, normed = run(), norm.at_once(x).double()
            exact = [weight.double() for weight in weights]
            *added, stream = [None if one is None else one.double() for one in (*biases, residual)]
            expected = linear_by_torch(
                LinearArguments.of(normed, exact, added, None, stream, gated)
            )
            error = (found.double() - expected).norm(dim=1) / expected.norm(dim=1)
            assert error.max() < 1.5 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("arch", architectures(ARCHITECTURES))
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bits", [16, 8])
def test_compiles(arch: str, gated: bool, bits: int) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    text = (csrc_folder() / "linear/linear.cu").read_text() + same_struct(Params)
    for rows, dtype in ((1, torch.bfloat16), (module.MAX_ROWS, torch.float16)):
        bulk = arch.startswith(("sm_9", "sm_1"))
        made = Specialization(rows, gated, dtype, bits, centered=rows == 1)
        macros = made.macros(ARCHITECTURES[arch], bulk)
        report = compile_once("linear/linear.cu", text, arch, macros)["linear"]
        assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)


def test_depth_by_shared_memory() -> None:
    assert module.depth_for(227 << 10) == 3
    assert module.depth_for(99 << 10) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("width", [256, 1024, 4096, 11008, 18944])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernel(dtype: torch.dtype, gated: bool, rows: int, width: int) -> None:
    """Also fewer outputs than warps; NaN beyond the outputs must stay where it is."""
    how, centered = {"device": "cuda", "dtype": dtype}, rows == 2
    for outputs in ((5, 5), (2500, 2500)) if gated else ((7,), (1000, 9, 300, 40)):
        kind = CenteredNorm if centered else Norm
        x, norm = random(rows, width, **how), kind(random(width, **how), 1e-5)
        weights = [random(one, width, **how) / width**0.5 for one in outputs]
        biases = [None] * len(outputs) if gated else [random(one, **how) for one in outputs]
        residual = None if gated else random(rows, sum(outputs), **how)
        made = Specialization(rows, gated, dtype, centered=centered)
        kernel = LinearKernel.of(made, x.device)
        assert isinstance(kernel, LinearKernel)
        around = norm, residual, gated
        arguments = LinearArguments.of(x, weights, biases, *around, centered=centered)
        if not kernel.takes(arguments):
            assert rows * width > 35_000
            continue
        found = kernel(arguments).double()
        # Not by products in 16-bit precision: PyTorch's may round partial sums, too.
        normed, exact = norm(x).double(), [weight.double() for weight in weights]
        around = [None if one is None else one.double() for one in (*biases, residual)]
        expected = linear_by_torch(
            LinearArguments.of(normed, exact, around[:-1], None, around[-1], gated)
        )
        # Of five outputs all may be small by chance, with errors as of others.
        typical = 0.5 * expected.shape[1] ** 0.5
        error = (found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=typical)
        assert error.max() < 1.5 * torch.finfo(dtype).eps
        again = kernel(arguments).double()
        assert torch.equal(found, again)


@pytest.mark.gpu
def test_a_chain_of_dependent_launches() -> None:
    """Each begins before the one in front of it has ended, on what that makes."""
    how = {"device": "cuda", "dtype": torch.bfloat16}
    square = random(2048, 2048, **how) / 2048**0.5
    norm = Norm(torch.ones(2048, **how), 1e-6)
    start = random(1, 2048, **how)
    x = again = start
    for _ in range(200):
        x = linear(x, [square], norm=norm, residual=x)
    torch.cuda.synchronize()
    for _ in range(200):
        again = linear(again, [square], norm=norm, residual=again)
        torch.cuda.synchronize()
    assert torch.equal(x, again) and x.isfinite().all() and not torch.equal(x, start)
