"""Products of few rows within decoders' own modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from oscar_mm.fast_decode import module_products
from oscar_mm.fast_decode.linear import MAX_COLUMNS, kernel_for
from oscar_mm.fast_decode.linear_torch import LinearArguments, linear_by_torch
from oscar_mm.fast_decode.module_products import FewRowProducts


@pytest.fixture
def taken(monkeypatch) -> list[LinearArguments]:
    """What a kernel gets that takes everything."""
    seen = []

    def kernel(arguments: LinearArguments) -> torch.Tensor:
        seen.append(arguments)
        return linear_by_torch(arguments)

    monkeypatch.setattr(module_products, "kernel_for", lambda _: kernel)
    return seen


@pytest.mark.parametrize("shape", [(3, 16), (2, 1, 16), (16,), (MAX_COLUMNS, 1, 16)])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_few_rows_go_to_the_kernel(taken, shape: tuple[int, ...], bias: bool) -> None:
    module, x = nn.Linear(16, 5, bias=bias), torch.randn(shape)
    with FewRowProducts():
        found = module(x)
    assert len(taken) == 1
    torch.testing.assert_close(found, module(x))
    assert found.shape == (*shape[:-1], 5)


def test_everything_else_runs_as_it_was_written(taken) -> None:
    module, x = nn.Linear(16, 5), torch.randn(2, 16)
    own = nn.Linear(16, 5)
    own.weight = nn.Parameter(type("Packed", (torch.Tensor,), {})(own.weight.detach()))
    with FewRowProducts():
        assert module(x).requires_grad
        with torch.no_grad():
            module(torch.randn(MAX_COLUMNS + 1, 16))
            own(x)
            torch.matmul(x, module.weight.T)
            with torch.autocast("cpu", torch.bfloat16):
                assert module(x).dtype is torch.bfloat16
            with pytest.raises(RuntimeError):
                module(x.double())
    assert not taken


@torch.no_grad()
def test_without_a_kernel_the_module_runs() -> None:
    module, x = nn.Linear(16, 5), torch.randn(2, 16)
    with FewRowProducts():
        assert torch.equal(module(x), nn.functional.linear(x, module.weight, module.bias))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, MAX_COLUMNS])
@torch.inference_mode()
def test_kernels_compute_what_modules_do(rows: int) -> None:
    torch.manual_seed(rows)
    module = nn.Linear(3584, 512).to("cuda:0", torch.bfloat16)
    x = torch.randn(rows, 1, 3584, device="cuda:0", dtype=torch.bfloat16)
    exact = x.double() @ module.weight.double().T + module.bias.double()
    assert kernel_for(LinearArguments.of(x[:, 0], [module.weight], [module.bias])) is not None
    with FewRowProducts():
        found = module(x)
    assert (found - exact).norm() / exact.norm() < 0.004
