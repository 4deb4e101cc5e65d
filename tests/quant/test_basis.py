"""Query-key balancing changes no score and makes outlier channels harmless; Hadamard rotation."""

import pytest
import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from oscar_mm import KVPolicy, roundtrip
from oscar_mm.quant.basis import (
    Basis,
    hadamard,
    rotation_blocks,
    sigma_from_norms,
    sigma_from_prompt,
    sigma_from_rms,
    sigmas_of_model,
)
from tests.checkpoints import build_decoder
from tests.quant.synthetic import attention, multimodal, relative_error


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


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("rotate", [True, False])
def test_scores_are_unchanged(head_dim: int, rotate: bool) -> None:
    queries, keys, values, _ = multimodal(0, kv_heads=2, group=3, tokens=96, head_dim=head_dim)
    sigma = sigma_from_prompt(queries, keys)
    basis = Basis(head_dim, rotate, sigma)
    stored = basis.keys_in(keys[0])
    grouped = queries[0].view(2, -1, head_dim)
    scores = basis.queries_in(grouped) @ stored.transpose(1, 2)
    assert relative_error(scores, grouped.double() @ keys[0].double().transpose(1, 2)) < 1e-6
    assert relative_error(basis.keys_out(stored), keys[0]) < 1e-6
    assert relative_error(basis.values_out(basis.values_in(values[0])), values[0]) < 1e-6


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


@pytest.mark.parametrize("centered", [True, False])
def test_from_prompt(centered: bool) -> None:
    queries, keys, *_ = multimodal(1, kv_heads=2, group=4, tokens=64, head_dim=64)
    sigma = sigma_from_prompt(queries, keys, centered=centered)
    assert sigma.shape == (2, 64) and sigma.dtype == torch.float32
    per_head = queries[0].view(2, 4 * 64, 64)
    size = keys[0].std(1, correction=0) if centered else keys[0].square().mean(1).sqrt()
    ratio = size / per_head.square().mean(1).sqrt()
    # Up to a constant factor, which balances nothing.
    relative = sigma / ratio.sqrt()
    assert torch.allclose(relative, relative[:, :1].expand_as(relative), rtol=2**-7)


def test_from_prompt_leaves_out_constants() -> None:
    """A key bias costs a channel-wise fit nothing; long prompts are read in pieces."""
    queries, keys, *_ = multimodal(4, kv_heads=2, group=2, tokens=5000, head_dim=64)
    bias = 300 * torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(0))
    sigma = sigma_from_prompt(queries, keys)
    assert torch.allclose(sigma_from_prompt(queries, keys + bias), sigma, rtol=1e-3)
    constant = torch.full_like(keys, 3.0)
    assert (sigma_from_prompt(queries, constant) == 1).all()


def test_from_prompt_leaves_out_what_hardly_turns_within_a_page() -> None:
    """A key bias on slow rotary pairs: over a long prompt it turns, within a page next to not."""
    queries, keys = torch.randn(2, 1, 1, 20_000, 64, generator=torch.Generator().manual_seed(0))
    angles = torch.arange(20_000)[:, None] * torch.logspace(-5, -4.5, 32)
    bias = 100 * torch.cat([angles.cos(), angles.sin()], dim=-1)
    sigma = sigma_from_prompt(queries, keys)
    assert sigma_from_prompt(queries, keys + bias).allclose(sigma, rtol=0.02)
    # Its mean over the prompt would leave many times the deviation of keys, and rms leaves all.
    assert (keys + bias).std(2).amax() > 10
    assert (sigma_from_prompt(queries, keys + bias, centered=False) > 3 * sigma).all()


@pytest.mark.parametrize("lengths", [(1, 1), (40, 150), (700, 300)])
def test_from_prompt_of_rows_of_unequal_length(lengths: tuple[int, int]) -> None:
    """Deviations within runs of 128, row by row; padding is no part of them."""
    queries, keys, *_ = multimodal(5, kv_heads=2, group=1, tokens=720, head_dim=64)
    queries, keys = (torch.cat([x, x.flip(2)]) for x in (queries, keys))
    real = torch.arange(720) < torch.tensor(lengths)[:, None]
    sigma = sigma_from_prompt(queries, keys, real)
    runs = [
        run
        for row, n in zip(keys.double(), lengths, strict=True)
        for run in row[:, :n].split(128, dim=1)
    ]
    spread = sum(run.var(1, correction=0) * run.shape[1] for run in runs)
    seen = [row[:, :n].square().sum(1) for row, n in zip(queries.double(), lengths, strict=True)]
    expected = sigma_from_rms(spread.sqrt(), sum(seen).sqrt())
    assert torch.allclose(sigma, expected, rtol=2**-7)


@pytest.mark.parametrize("garbage", [1e6, torch.nan, torch.inf])
def test_from_prompt_ignores_padding(garbage: float) -> None:
    queries, keys, *_ = multimodal(2, kv_heads=2, tokens=64, head_dim=64)
    real = torch.ones(2, 80, dtype=torch.bool)
    real[1, :16] = real[0, 64:] = False

    def padded(x: torch.Tensor) -> torch.Tensor:
        both = torch.full((2, x.shape[1], 80, 64), garbage)
        both[0, :, :64] = x[0]
        both[1, :, 16:] = x[0]
        return both

    sigma = sigma_from_prompt(padded(queries), padded(keys), real)
    assert torch.allclose(sigma, sigma_from_prompt(queries, keys), rtol=1e-5)


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


def test_norms_that_do_not_act_on_one_head() -> None:
    wide = norm_of(torch.ones(128))
    assert sigma_from_norms(wide, wide, 64) is None
    assert sigma_from_norms(nn.Identity(), norm_of(torch.ones(64)), 64) is None


def test_of_model() -> None:
    model = build_decoder("qwen3")
    sigmas = sigmas_of_model(model)
    assert sorted(sigmas) == [0, 1, 2]
    attention_layer = model.model.layers[1].self_attn
    expected = sigma_from_norms(attention_layer.q_norm, attention_layer.k_norm, 64)
    assert torch.equal(sigmas[1], expected)
    assert sigmas_of_model(build_decoder("llama")) == {}


@pytest.mark.parametrize("name", ["channel", "oscar"])
@pytest.mark.parametrize("seed", range(3))
def test_scale_moved_between_queries_and_keys(name: str, seed: int) -> None:
    """A model can move scale from queries to keys for free; a balanced cache does not notice."""
    queries, keys, values, ids = multimodal(seed, tokens=512, kv_heads=2, outliers=1.0)
    factor = torch.ones(128)
    factor[[5, 5 + 64, 40, 40 + 64]] = 8
    moved = (queries / factor, keys * factor)
    exact = attention(queries, keys, values)
    assert relative_error(attention(*moved, values), exact) < 1e-6

    def packed(balance: str | None, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = roundtrip(k, values, KVPolicy.preset(name, balance=balance), ids, q=q)
        scores = q.unflatten(1, (2, -1)) @ result.k.transpose(2, 3)[:, :, None]
        return scores, attention(q, result.k, result.v)

    scores = queries.unflatten(1, (2, -1)) @ keys.transpose(2, 3)[:, :, None]
    balanced_scores, balanced = packed("auto", queries, keys)
    assert relative_error(packed("auto", *moved)[1], balanced) < 1e-5
    plain_scores, plain = packed(None, queries, keys)
    worse_scores, worse = packed(None, *moved)
    assert relative_error(worse_scores, scores) > 1.4 * relative_error(plain_scores, scores)
    assert relative_error(balanced_scores, scores) < 1.1 * relative_error(plain_scores, scores)
    assert relative_error(worse, exact) > 1.1 * relative_error(plain, exact)
    assert relative_error(worse, exact) > 1.05 * relative_error(balanced, exact)


SIZES = [1, 2, 3, 7, 33, 64, 80, 96, 112, 127, 128, 256]


@pytest.mark.parametrize("size", SIZES)
def test_orthonormal_symmetric_and_its_own_inverse(size: int) -> None:
    matrix = hadamard(size)
    assert matrix.shape == (size, size) and matrix.dtype == torch.float32
    assert torch.equal(matrix, matrix.T)
    assert torch.allclose(matrix @ matrix, torch.eye(size), atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_blocks(size: int) -> None:
    blocks = rotation_blocks(size)
    assert sum(blocks) == size and list(blocks) == sorted(set(blocks), reverse=True)
    assert all(block & (block - 1) == 0 for block in blocks)
    # An outlier is spread evenly over its block and nowhere else.
    row, start = hadamard(size)[0], blocks[0]
    assert torch.allclose(row[:start].abs(), torch.full((start,), start**-0.5))
    assert not row[start:].any()


def test_sylvester_order() -> None:
    expected = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    assert torch.equal(hadamard(4), expected)


@pytest.mark.parametrize("size", [0, -64])
def test_no_channels(size: int) -> None:
    with pytest.raises(ValueError, match="head_dim"):
        rotation_blocks(size)


def test_made_in_inference_mode_and_used_with_gradients() -> None:
    hadamard.cache_clear()
    with torch.inference_mode():
        hadamard(16)
    x = torch.ones(3, 16, requires_grad=True)
    (x @ hadamard(16)).square().sum().backward()
    assert torch.allclose(x.grad, 2 * x.detach(), atol=1e-6)
