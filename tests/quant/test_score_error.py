"""Codes that lower the error of scores."""

import pytest
import torch

from oscar_mm import KVPolicy
from oscar_mm.pages.layout import PageFormat
from oscar_mm.pages.quantize import Recipe, quantize_tokens
from oscar_mm.policy import Bits
from oscar_mm.quant import fit
from oscar_mm.quant.basis import hadamard
from oscar_mm.quant.fit import (
    assign_codes,
    fit_group,
    lower_score_error,
    score_weights,
    unbiased_scale,
)


def slow_pairs(head_dim: int, tokens: int = 60, seed: int = 0) -> torch.Tensor:
    """(tokens, head_dim) of which a quarter of the rotary pairs have most of the energy."""
    generator = torch.Generator().manual_seed(seed)
    half = head_dim // 2
    sizes = torch.where(torch.arange(half) < half // 4, 4.0, 0.3).repeat(2)
    return torch.randn(tokens, head_dim, generator=generator) * sizes


def fitted(keys: torch.Tensor, bits: int) -> tuple[torch.Tensor, ...]:
    """Rotated keys, their nearest codes, scales and zeros."""
    turned = keys @ hadamard(keys.shape[-1])
    scale, zero = fit_group(turned, bits, "lsq", -1)
    codes = assign_codes(turned, scale, zero, bits)
    return turned, codes, *unbiased_scale(turned, codes, scale, zero, -1)


def weighted_error(
    turned: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """e^T H D H e of each key."""
    error = (codes * scale + zero - turned) @ hadamard(turned.shape[-1])
    return (error.square() * weights).sum(-1)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_few_codes_change_and_the_error_falls(head_dim: int, bits: int) -> None:
    keys = slow_pairs(head_dim)
    turned, codes, scale, zero = fitted(keys, bits)
    weights = score_weights(keys, None)
    changed = lower_score_error(turned, codes, scale, zero, weights, bits)
    before, after = (weighted_error(turned, x, scale, zero, weights) for x in (codes, changed))
    assert (after <= before * 1.0001).all() and after.sum() < 0.7 * before.sum()
    apart = (changed - codes).abs()
    assert (apart.sum(-1) <= fit.CHANGES).all()
    assert changed.min() == 0 and changed.max() == (1 << bits) - 1


@pytest.mark.parametrize("head_dim", [16, 24])
def test_a_change_is_the_best_one(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "CHANGES", 1)
    bits, keys = 2, slow_pairs(head_dim)
    turned, codes, scale, zero = fitted(keys, bits)
    weights = score_weights(keys, slow_pairs(head_dim, seed=1))
    numbers = turned, scale, zero, weights
    changed = lower_score_error(*numbers[:1], codes, *numbers[1:], bits)
    found = weighted_error(turned, changed, *numbers[1:])
    least = weighted_error(turned, codes, *numbers[1:])
    for channel in range(head_dim):
        for step in (-1, 1):
            other = codes.clone()
            other[:, channel] = (other[:, channel] + step).clamp(0, 3)
            least = torch.minimum(least, weighted_error(turned, other, *numbers[1:]))
    torch.testing.assert_close(found, least, rtol=1e-4, atol=1e-4)


def test_weights_do_not_depend_on_positions() -> None:
    keys, angles = slow_pairs(64), torch.rand(60, 32) * 6
    one, other = keys.chunk(2, -1)
    turned = torch.cat(
        [one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()], -1
    )
    torch.testing.assert_close(score_weights(turned, None), score_weights(keys, None))


def test_keys_without_extent_keep_their_codes() -> None:
    keys, codes = torch.zeros(3, 64), torch.zeros(3, 64)
    none = torch.zeros(3, 1)
    weights = score_weights(keys, keys)
    assert torch.equal(lower_score_error(keys, codes, none, none, weights, 3), codes)


@pytest.mark.parametrize("bits", [2, 3])
def test_scores_of_queries_like_the_keys(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = KVPolicy.preset("standard")
    keys, queries = slow_pairs(64)[:, None] + 1, slow_pairs(64, seed=1)
    page_format = PageFormat.of(policy, Bits(bits, 2), 1, 64)
    recipe, centers = Recipe.of(page_format, policy), torch.zeros_like(keys)
    assert recipe.lowers_score_error

    def error() -> float:
        stored, _ = quantize_tokens(keys, keys, centers, recipe, None)
        back = stored["key_codes"] * stored["key_scales"].abs() + stored["key_zeros"]
        return float((queries @ (back[:, 0] @ hadamard(64) - keys[:, 0]).T).square().mean())

    changed = error()
    monkeypatch.setattr(fit, "CHANGES", 0)
    assert changed < 0.75 * error()
