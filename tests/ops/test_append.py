"""append: new tokens into slots of 16 bit."""

import pytest
import torch

from oscar_mm.kernels.compile import csrc_folder
from oscar_mm.ops import append as module
from oscar_mm.ops.append import UNITS, Specialization, append
from tests.compiled import architectures, compile_once, same_struct

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def problem(
    dtype: torch.dtype, head_dim: int, tokens: int, device: str = "cpu"
) -> tuple[torch.Tensor, ...]:
    """Keys, values, poisoned slots, shuffled writes of all tokens of two rows, and the flag."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randn(2, tokens, 3, head_dim, generator=generator).to(device, dtype).transpose(1, 2)
        for _ in range(2)
    )
    slots = 2 * tokens + 30
    recent = torch.full((slots, 2, 3, head_dim), torch.nan, dtype=dtype, device=device)
    taken = torch.randperm(slots, generator=generator)[: 2 * tokens]
    row, token = torch.arange(2 * tokens) // tokens, torch.arange(2 * tokens) % tokens
    writes = torch.stack([row, token, taken], dim=1).to(device, torch.int32)
    return keys, values, recent, writes, torch.zeros(1, dtype=torch.int32, device=device)


def expected_slots(keys, values, recent, writes) -> torch.Tensor:
    expected = recent.clone()
    for row, token, slot in writes.tolist():
        if slot >= 0:
            expected[slot, 0] = keys[row, :, token]
            expected[slot, 1] = values[row, :, token]
    return expected


def check(problem: tuple[torch.Tensor, ...]) -> None:
    keys, values, recent, writes, bad = problem
    writes[::5, 2] = -1
    writes[::5, :2] = 1 << 20  # of what is not written nothing is looked at
    expected = expected_slots(keys, values, recent, writes)
    append(keys, values, recent, writes, bad)
    assert torch.equal(recent.isnan(), expected.isnan())
    assert torch.equal(recent.nan_to_num(), expected.nan_to_num())
    assert not bad


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_writes(dtype: torch.dtype, tokens: int) -> None:
    check(problem(dtype, 24, tokens))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("tokens", [2, 4])
def test_flag_of_what_is_not_finite(tokens: int, side: int, wrong: float) -> None:
    tensors = problem(torch.bfloat16, 24, tokens)
    tensors[side][1, 2, -1, 23] = wrong
    *states, writes, bad = tensors
    left_out = writes.clone()
    left_out[-1, 2] = -1
    append(*states, left_out, bad)
    assert not bad, "the token is not stored"
    append(*states, writes, bad)
    assert bad.tolist() == [1]
    tensors[side][1, 2, -1, 23] = 0
    append(*states, writes, bad)
    assert bad.tolist() == [1], "set until somebody has looked"


def test_nothing_to_write() -> None:
    keys, values, recent, writes, bad = problem(torch.float32, 24, 4)
    append(keys, values, recent, writes[:0], bad)
    assert recent.isnan().all()


@pytest.mark.parametrize(
    ("dtype", "width", "part", "unit"),
    [
        (torch.bfloat16, 128, slice(0, 128), 16),
        (torch.bfloat16, 136, slice(8, 136), 16),
        (torch.bfloat16, 136, slice(4, 132), 8),
        (torch.bfloat16, 36, slice(0, 36), 8),
        (torch.float32, 5, slice(0, 5), 4),
        (torch.bfloat16, 130, slice(0, 128), 4),
        (torch.bfloat16, 129, slice(0, 128), None),
        (torch.bfloat16, 3, slice(0, 3), None),
    ],
)
def test_bytes_that_a_thread_takes(
    dtype: torch.dtype, width: int, part: slice, unit: int | None
) -> None:
    assert module.unit_of(torch.zeros(2, 3, 5, width, dtype=dtype)[..., part]) == unit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", architectures())
def test_compiles(arch: str, dtype: torch.dtype) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    text = (csrc_folder() / "append/append.cu").read_text() + same_struct(module.AppendParams)
    for unit in UNITS:
        macros = Specialization(dtype, unit).macros
        report = compile_once("append/append.cu", text, arch, macros)["append"]
        assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 700])
@pytest.mark.parametrize("head_dim", [2, 36, 80, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel(dtype: torch.dtype, head_dim: int, tokens: int) -> None:
    tensors = problem(dtype, head_dim, tokens, "cuda")
    check(tensors)
    for side in range(2):
        tensors[side][0, 2, -1, -1] = torch.inf
        tensors[3][tokens - 1] = torch.tensor([0, tokens - 1, 0])
        tensors[4].zero_()
        append(*tensors)
        assert bool(tensors[4])
        tensors[side][0, 2, -1, -1] = 0
