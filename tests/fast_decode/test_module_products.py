"""Products of few rows, and norms, within decoders' own modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from oscar_mm.fast_decode import module_products
from oscar_mm.fast_decode.centered_norm import CenteredNorm, CenteredNormKernel
from oscar_mm.fast_decode.linear import MAX_COLUMNS, kernel_for
from oscar_mm.fast_decode.linear_torch import LinearArguments, Norm, linear_by_torch
from oscar_mm.fast_decode.module_products import FewRowProducts, in_fewer_launches, rms_norms


@pytest.fixture
def taken(monkeypatch) -> list[LinearArguments]:
    """Arguments that a kernel receives which takes all of them."""
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


class Decoder(nn.Module):
    """A decoder with norms of several classes, one of them with a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.hooked = LlamaRMSNorm(16), LlamaRMSNorm(16)
        self.centered, self.gated = CohereLayerNorm(16), MambaRMSNormGated(16, 16)
        self.minus_1, self.layer_norm = Gemma3RMSNorm(16), nn.LayerNorm(16)
        self.without_weights = nn.RMSNorm(16, elementwise_affine=False)
        self.hooked.register_forward_hook(lambda *_: None)
        for one in (self.norm, self.minus_1):
            nn.init.normal_(one.weight)

    def get_decoder(self) -> nn.Module:
        return self


@torch.no_grad()
def test_norms_take_one_launch_within_the_block_only(monkeypatch) -> None:
    """Norms that compute something else, or have hooks, run as they were written."""
    seen = []
    for kind in (Norm, CenteredNorm):

        def counted(norm, x: torch.Tensor, at_once=kind.at_once) -> torch.Tensor:
            seen.append(norm.weight)
            return at_once(norm, x)

        monkeypatch.setattr(kind, "at_once", counted)
    model, x, gate = Decoder(), torch.randn(3, 1, 16), torch.randn(3, 1, 16)
    norms = rms_norms(model)
    assert set(norms) == {model.norm, model.gated, model.minus_1}

    def computed() -> list[torch.Tensor]:
        by_class = [model.hooked(x), model.centered(x), model.gated(x, gate), model.layer_norm(x)]
        heads = x.view(3, 1, 1, 16).expand(-1, -1, 2, -1).transpose(1, 2)
        return [model.norm(x), model.minus_1(x), model.minus_1(heads), *by_class]

    expected, seen[:] = computed(), []
    with pytest.raises(ZeroDivisionError), in_fewer_launches(norms):
        found = computed()
        kept = [model.norm.weight, model.minus_1.weight, model.minus_1.weight]
        assert all(one is other for one, other in zip(seen, kept, strict=True))
        raise ZeroDivisionError
    torch.testing.assert_close(found, expected)
    computed()
    assert len(seen) == 3


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


@pytest.mark.gpu
@torch.inference_mode()
def test_norms_of_gemma_are_one_launch(monkeypatch) -> None:
    """Norms of hidden states, and norms of query heads, whose input is transposed."""
    torch.manual_seed(0)
    seen, launch = [], CenteredNormKernel.__call__
    monkeypatch.setattr(CenteredNormKernel, "__call__", lambda *x: (seen.append(x), launch(*x))[1])
    for norm, shape in ((Gemma3RMSNorm(2560), (2, 1, 2560)), (Gemma3RMSNorm(256), (2, 1, 8, 256))):
        nn.init.normal_(norm.weight, std=0.2)
        norm = norm.to("cuda:0", torch.bfloat16)
        x = torch.randn(shape, device="cuda:0", dtype=torch.bfloat16).transpose(1, -2)
        expected = norm(x)
        with in_fewer_launches([norm]):
            norm(x)  # This compiles and checks the kernel.
            seen.clear()
            torch.testing.assert_close(norm(x), expected, rtol=0.01, atol=0.01)
        assert len(seen) == 1
