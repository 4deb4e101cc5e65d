"""Query-key balancing from a model's weights: norms, projections, biases, rotary positions."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from oscar_mm.quant.balance import (
    rotary_angles,
    sigma_from_norms,
    sigma_from_rms,
    sigma_of_layer,
    sigma_of_norms,
    sigmas_of_model,
)
from tests.checkpoints import build_decoder


class OnePlusNorm(nn.Module):
    """An RMS norm that scales by 1 + weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * (1 + self.weight)


def norm_of(weight: torch.Tensor) -> Qwen3RMSNorm:
    norm = Qwen3RMSNorm(len(weight))
    norm.weight = nn.Parameter(weight)
    return norm


def test_minimizes_the_bound() -> None:
    """(sum rms_q^2 sigma^2)(sum rms_k^2 / sigma^2) is smallest, whatever the common factor."""
    generator = torch.Generator().manual_seed(0)
    rms_keys, rms_queries = torch.rand(2, 64, generator=generator) + 0.05

    def bound(sigma: torch.Tensor) -> torch.Tensor:
        return (rms_queries * sigma).square().sum() * (rms_keys / sigma).square().sum()

    sigma = sigma_from_rms(rms_keys, rms_queries)
    best = bound(sigma)
    for _ in range(20):
        other = sigma * (0.2 * torch.randn(64, generator=generator)).exp()
        assert bound(other) > best
    scaled = sigma_from_rms(7 * rms_keys, rms_queries)
    assert torch.allclose(scaled, sigma * 7**0.5, rtol=2**-7), "to bfloat16"


def test_reciprocals_are_bfloat16() -> None:
    """So that csrc/pack/pack.cu balances exactly."""
    rms_keys, rms_queries = torch.rand(2, 256, generator=torch.Generator().manual_seed(1)) + 0.01
    reciprocal = 1 / sigma_from_rms(rms_keys, rms_queries)
    assert torch.allclose(reciprocal.bfloat16().float(), reciprocal, rtol=1e-6)


def test_dead_channels() -> None:
    rms_keys = torch.tensor([0.0, 1.0, 0.0, 4.0, 1e30, 1e-30, torch.nan, torch.inf])
    rms_queries = torch.tensor([1.0, 0.0, 0.0, 1.0, 1e-3, 1.0, 1.0, 1.0])
    sigma = sigma_from_rms(rms_keys, rms_queries)
    assert sigma.tolist() == [1, 1, 1, 2, 256, 1 / 256, 1, 1]


@pytest.mark.parametrize("make", [norm_of, OnePlusNorm])
def test_from_norm_weights(make: type) -> None:
    generator = torch.Generator().manual_seed(3)
    key_weight, query_weight = torch.rand(2, 64, generator=generator) + 0.1
    shift = 1.0 if make is OnePlusNorm else 0.0
    sigma = sigma_from_norms(make(query_weight - shift), make(key_weight - shift), 64)
    assert sigma.shape == (1, 64) and not sigma.requires_grad

    def pairs(weight: torch.Tensor) -> torch.Tensor:
        return weight.view(2, 32).square().mean(0).sqrt().repeat(2)

    expected = (pairs(key_weight) / pairs(query_weight)).sqrt()
    assert torch.allclose(sigma[0], expected, rtol=2**-8)
    # Equal over a rotary pair, so that RoPE and balancing commute.
    assert torch.equal(sigma[:, :32], sigma[:, 32:])


def test_norms_of_heads_that_are_rotated_in_part() -> None:
    """As in Qwen3.5, the first 16 channels are balanced in pairs (c, c + 8), others one by one."""
    generator = torch.Generator().manual_seed(4)
    key_weight, query_weight = torch.rand(2, 64, generator=generator) + 0.1
    norms = OnePlusNorm(query_weight - 1), OnePlusNorm(key_weight - 1)
    [sigma] = sigma_from_norms(*norms, 64, torch.ones(8))
    alone = (key_weight / query_weight).sqrt()
    assert torch.allclose(sigma[16:], alone[16:], rtol=2**-8)
    assert torch.equal(sigma[:8], sigma[8:16])
    pairs = [x[:16].view(2, 8).square().mean(0) for x in (key_weight, query_weight)]
    assert torch.allclose(sigma[:8], (pairs[0] / pairs[1]) ** 0.25, rtol=2**-8)


def test_norms_that_do_not_act_on_one_head() -> None:
    wide = norm_of(torch.ones(128))
    assert sigma_from_norms(wide, wide, 64) is None
    assert sigma_from_norms(nn.Identity(), norm_of(torch.ones(64)), 64) is None


def test_of_model() -> None:
    model = build_decoder("qwen3")
    sigmas = sigmas_of_model(model)
    assert sorted(sigmas) == [0, 1]
    attention_layer = model.model.layers[1].self_attn
    expected = sigma_from_norms(attention_layer.q_norm, attention_layer.k_norm, 64)
    assert torch.equal(sigmas[1], expected)


def measured(model: PreTrainedModel, index: int = 1, *, deviations: bool = False) -> torch.Tensor:
    """Sigma of a layer by queries and keys that it computes of random inputs, in float64.

    Args:
        deviations: take keys of a page less those of its first token, which has the same input.
    """
    layer = model.model.layers[index]
    attention, generator = layer.self_attn, torch.Generator().manual_seed(5)
    hidden = torch.randn(6000, model.config.hidden_size, generator=generator)
    places = torch.randint(4096, (6000,), generator=generator)
    if deviations:
        places = torch.arange(6000) % 128

    def turned(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        cos, sin = (t[0].double()[:, None] for t in model.model.rotary_emb(hidden, at[None]))
        one, other = x.chunk(2, -1)
        return x * cos + torch.cat([-other, one], -1) * sin

    with torch.no_grad():
        normed = layer.input_layernorm(hidden)
        queries, keys = (
            turned(project(normed).double().unflatten(-1, (-1, 64)), places)
            for project in (attention.q_proj, attention.k_proj)
        )
        bias = attention.k_proj.bias
        if deviations and bias is not None:
            keys = keys - turned(bias.double().view(1, -1, 64).expand(6000, -1, -1), 0 * places)
    grouped = queries.unflatten(1, (keys.shape[1], -1)).square().mean((0, 2)).sqrt()
    return sigma_from_rms(keys.square().mean(0).sqrt(), grouped)


def shape_of(sigma: torch.Tensor) -> torch.Tensor:
    """Up to a factor for each head, which balances nothing."""
    log = sigma.log()
    return log - log.mean(-1, keepdim=True)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Root mean square of the logarithm."""
    return float((shape_of(one) - shape_of(other)).square().mean().sqrt())


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_projections_are_as_measured(name: str) -> None:
    model = build_decoder(name)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.copy_(torch.rand(64, generator=generator) * 3 + 0.1)
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                rows = torch.rand(len(projection.weight), 1, generator=generator)
                projection.weight.mul_(rows.mul(2).exp())
    sigmas = sigmas_of_model(model)
    assert sorted(sigmas) == [0, 1] and sigmas[1].shape == (2, 64)
    assert sigmas[1].dtype == torch.float32 and not sigmas[1].requires_grad
    assert difference(sigmas[1], measured(model)) < 0.04 < 0.2 < difference(sigmas[1], sigmas[0])
    for index, again in sigmas_of_model(model).items():
        assert torch.equal(again, sigmas[index])


def test_of_key_biases_what_a_center_leaves() -> None:
    """On slow pairs a page's tokens have them in common; on fast ones RoPE turns them away."""
    rope = {"rope_type": "default", "rope_theta": 1e6}
    model = build_decoder("qwen2", rope_parameters=rope)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for layer in model.model.layers:
            bias = torch.zeros(2, 2, 32)
            bias[:, :, 24:] = 100 * torch.randn(2, 2, 8, generator=generator)
            layer.self_attn.k_proj.bias.copy_(bias.flatten())
    centered, whole = (sigmas_of_model(model, centered=centered)[1] for centered in (True, False))
    assert difference(centered, measured(model, deviations=True)) < 0.05
    assert difference(whole, measured(model)) < 0.05
    assert (whole.view(2, 2, 32)[..., 24:] > 2 * centered.view(2, 2, 32)[..., 24:]).all()
    fast = torch.zeros(2, 2, 32)
    fast[:, :, :4] = 100
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.bias.copy_(fast.flatten())
    assert difference(*(sigmas_of_model(model, centered=c)[1] for c in (True, False))) < 0.01


class Int8Linear(nn.Module):
    """A projection whose weights are stored in 8 bits and restored as it runs."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.codes = nn.Parameter((linear.weight.detach() / scale).round().char(), False)
        self.scale, self.bias = nn.Parameter(scale), linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.codes.to(x.dtype) * self.scale, self.bias)


@pytest.mark.parametrize("way", ["int8", "bfloat16", "lora", "no norm"])
def test_projections_of_other_kinds(way: str) -> None:
    model = build_decoder("qwen2")
    expected = sigmas_of_model(model)
    for layer in model.model.layers:
        attention = layer.self_attn
        if way == "int8":
            attention.q_proj = Int8Linear(attention.q_proj)
            attention.k_proj = Int8Linear(attention.k_proj)
        elif way == "no norm":
            del layer.input_layernorm  # Its weights are ones.
    if way == "bfloat16":
        model = model.bfloat16()
    elif way == "lora":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "k_proj"]))
    found = sigmas_of_model(model)
    assert sorted(found) == sorted(expected)
    assert all(difference(found[index], sigma) < 0.02 for index, sigma in expected.items())


def test_a_large_bias_rounds_nothing_away() -> None:
    """bfloat16 has 8 bits, and the bias is 10,000 times as large as the rest."""
    model = build_decoder("qwen2")
    bias = model.model.layers[0].self_attn.k_proj.bias
    with torch.no_grad():
        bias.copy_(300 * bias.sign())
        model.model.layers[0].self_attn.k_proj.weight.mul_(0.1)
    expected = sigmas_of_model(model)[0]
    assert difference(sigmas_of_model(model.bfloat16())[0], expected) < 0.03


def test_partial_rotary_positions() -> None:
    model = build_decoder("llama")
    layer, angles = model.model.layers[0], torch.tensor([1.0, 0.1])
    some = sigma_of_layer(layer, layer.self_attn, 64, angles)
    none = sigma_of_layer(layer, layer.self_attn, 64, None)
    assert torch.equal(shape_of(some)[:, 4:].argsort(), shape_of(none)[:, 4:].argsort())
    # A pair that turns fast shares its energy.
    torch.testing.assert_close(some[:, 0], some[:, 2], rtol=0.02, atol=0)
    assert (none[:, 0] / none[:, 2]).log().abs().max() > 0.05


def test_models_without_separate_projections() -> None:
    attention = nn.Module()
    attention.c_attn = nn.Linear(64, 192)
    assert sigma_of_layer(None, attention, 64, None) is None
    model = build_decoder("llama")
    for layer in model.model.layers:
        del layer.self_attn.k_proj
    assert sigmas_of_model(model) == {}


def vllm_layer(model: PreTrainedModel, index: int) -> tuple[nn.Module, nn.Module]:
    """A layer as vLLM has it: one projection, and a table of angles."""
    layer = model.model.layers[index]
    attention, parts = nn.Module(), [layer.self_attn.q_proj, layer.self_attn.k_proj]
    attention.q_size, attention.kv_size = (part.out_features for part in parts)

    def project(x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.cat([*(part(x) for part in parts), x.new_zeros(len(x), 128)], -1), None

    attention.qkv_proj = project
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(9)[None])
    table = torch.cat([x[0, :, :32] for x in (cos, sin)], -1)
    attention.rotary_emb = SimpleNamespace(cos_sin_cache=table)
    return layer, attention


def test_layers_of_vllm() -> None:
    model = build_decoder("qwen2")
    layer, attention = vllm_layer(model, 1)
    found = sigma_of_layer(layer, attention, 64, rotary_angles(attention))
    torch.testing.assert_close(found, sigmas_of_model(model)[1], rtol=2**-7, atol=0)


def test_norms_over_all_heads() -> None:
    """OLMo 2 norms queries and keys before they are parted into heads."""
    model = build_decoder("olmo2")
    layer = model.model.layers[0].self_attn
    with torch.no_grad():
        layer.k_norm.weight[5::64] = 9
    sigma = sigmas_of_model(model)[0]
    assert sigma_of_norms(layer, 64) is None
    assert sigma.shape == (2, 64) and (shape_of(sigma)[:, [5, 37]] > 0.5).all()
