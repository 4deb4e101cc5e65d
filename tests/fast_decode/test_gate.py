"""silu(gate) * up by kernel and by PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from oscar_mm.fast_decode.gate import THREADS, GateKernel, Params, gate_
from oscar_mm.kernels.compile import csrc_folder
from oscar_mm.kernels.launch import ELEMENTS
from tests.compiled import architectures, compile_once, same_struct


@pytest.mark.parametrize("halves", [False, True])
def test_gate(halves: bool) -> None:
    """In place, of two tensors and of halves of one."""
    both = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    gates, ups = both.chunk(2, -1) if halves else (x.clone() for x in both.chunk(2, -1))
    expected, before = silu(gates) * ups, ups.clone()
    found = gate_(gates, ups)
    assert found.data_ptr() == gates.data_ptr()
    assert torch.equal(found, expected) and torch.equal(ups, before)


@pytest.mark.parametrize("arch", architectures(("sm_80", "sm_90a", "sm_100a", "sm_120")))
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_compiles(arch: str, dtype: torch.dtype) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    text = (csrc_folder() / "linear/gate.cu").read_text() + (
        f"{same_struct(Params)}static_assert(THREADS == {THREADS});\n"
    )
    report = compile_once("linear/gate.cu", text, arch, {"ELEMENT": ELEMENTS[dtype]})["gate"]
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (37, 264), (3000, 768), (700, 12288)])
@pytest.mark.parametrize("halves", [False, True])
def test_on_a_gpu(dtype: torch.dtype, rows: int, width: int, halves: bool) -> None:
    """As float64 rounded where transformers' modules round; nothing else is written."""
    assert GateKernel.of(dtype, torch.device("cuda", 0)) is not None
    both = torch.randn(rows, 2 * width, device="cuda", dtype=dtype)
    gates, ups = both.chunk(2, -1) if halves else (x.clone() for x in both.chunk(2, -1))
    expected = silu(gates.double()).to(dtype).double() * ups.double()
    before = ups.clone()
    error = (gate_(gates, ups).double() - expected).abs()
    assert bool((error <= 2 * torch.finfo(dtype).eps * expected.abs() + 1e-7).all())
    assert torch.equal(ups, before)


@pytest.mark.gpu
def test_what_the_kernel_does_not_take() -> None:
    """Widths and addresses that are no multiples of 16 bytes, no rows, float32."""
    for shape, dtype in (
        ((3, 7), torch.bfloat16),
        ((0, 8), torch.float16),
        ((3, 8), torch.float32),
    ):
        gates, ups = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))
        expected = silu(gates) * ups
        assert torch.equal(gate_(gates, ups), expected)
    both = torch.randn(3, 20, device="cuda").bfloat16()
    gates, ups = both[:, 1:9], both[:, 9:17]
    expected = silu(gates) * ups
    assert torch.equal(gate_(gates, ups), expected)
