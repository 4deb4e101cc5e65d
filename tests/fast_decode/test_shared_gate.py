"""What follows the first products of a mixture with a shared expert, by kernel and by PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from oscar_mm.fast_decode.shared_gate import THREADS, Params, SharedGateKernel, shared_gate
from oscar_mm.kernels.compile import csrc_folder
from oscar_mm.kernels.launch import ELEMENTS
from tests.compiled import architectures, compile_once, same_struct


def parts(
    rows: int, width: int, experts: int, joined: bool, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The products, in one tensor or in two."""
    generator = torch.Generator(device).manual_seed(rows)
    both = torch.randn(rows, 2 * width + experts + 1, generator=generator, device=device)
    inner, outer = both.split([2 * width, experts + 1], 1)
    return (inner, outer) if joined else (inner.contiguous(), outer.contiguous())


@pytest.mark.parametrize("joined", [False, True])
def test_shared_gate(joined: bool) -> None:
    inner, outer = parts(5, 16, 6, joined)
    between, logits = shared_gate(inner, outer)
    expected = silu(inner[:, :16]) * inner[:, 16:] * outer[:, 6:].sigmoid()
    torch.testing.assert_close(between, expected)
    assert torch.equal(logits, outer[:, :6]) and logits.is_contiguous()


@pytest.mark.parametrize("arch", architectures(("sm_80", "sm_90a", "sm_100a", "sm_120")))
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_compiles(arch: str, dtype: torch.dtype) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    source, macros = "experts/shared_gate.cu", {"ELEMENT": ELEMENTS[dtype]}
    text = (csrc_folder() / source).read_text() + (
        f"{same_struct(Params)}static_assert(THREADS == {THREADS});\n"
    )
    report = compile_once(source, text, arch, macros)["shared_gate"]
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize(
    ("rows", "width", "experts"), [(1, 512, 256), (37, 300, 7), (9, 4104, 512)]
)
@pytest.mark.parametrize("joined", [False, True])
def test_on_a_gpu(dtype: torch.dtype, rows: int, width: int, experts: int, joined: bool) -> None:
    """As in float64."""
    assert SharedGateKernel.of(dtype, torch.device("cuda", 0)) is not None
    both = torch.cat(parts(rows, width, experts, joined, "cuda"), 1).to(dtype)
    inner, outer = both.split([2 * width, experts + 1], 1)
    if not joined:
        inner, outer = inner.contiguous(), outer.contiguous()
    between, logits = shared_gate(inner, outer)
    gate, up = inner.double().chunk(2, 1)
    expected = silu(gate) * up * outer[:, experts:].double().sigmoid()
    # silu, its product, the share and the result are rounded.
    error = (between.double() - expected).abs()
    assert bool((error <= 3 * torch.finfo(dtype).eps * expected.abs() + 1e-7).all())
    assert torch.equal(logits, outer[:, :experts])


@pytest.mark.gpu
def test_what_the_kernel_does_not_take() -> None:
    """float32, and columns that are not next to each other."""
    inner, outer = parts(3, 16, 4, True, "cuda")
    for one in (inner, inner.bfloat16().T.contiguous().T):
        found, _ = shared_gate(one, outer.to(one.dtype))
        gate, up = one.chunk(2, 1)
        expected = silu(gate) * up * outer[:, 4:].to(one.dtype).sigmoid()
        torch.testing.assert_close(found, expected)
