"""Token scaling and the norm that is stored."""

import pytest
import torch

from oscar_mm.quant.scaling import divide_by_norm, fitted_norm, token_rms

HALF = 2.0**-11
SCALINGS = ["shared", "per_head"]


def keys_and_codes(seed: int = 0, error: float = 0.3) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(3, 2, 128, 64, generator=generator)
    keys *= torch.rand(3, 1, 128, 1, generator=generator) * 10
    return keys, error * torch.randn(keys.shape, generator=generator)


def dims(scaling: str) -> tuple[int, ...]:
    return (1, 3) if scaling == "shared" else (3,)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_token_rms(scaling: str) -> None:
    keys, _ = keys_and_codes()
    norms = token_rms(keys, scaling)
    assert norms.shape == (3, 1 if scaling == "shared" else 2, 128, 1)
    expected = keys.double().square().mean(dims(scaling), keepdim=True).sqrt()
    assert torch.allclose(norms.double(), expected, rtol=HALF)
    assert torch.equal(norms, norms.half().float())
    unit = divide_by_norm(keys, norms)
    assert torch.allclose(token_rms(unit, scaling), torch.ones_like(norms), rtol=2 * HALF)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_tokens_of_norm_zero(scaling: str) -> None:
    keys, noise = keys_and_codes()
    keys[1, :, 5] = 0
    norms = token_rms(keys, scaling)
    unit = divide_by_norm(keys, norms)
    assert unit.isfinite().all() and not unit[1, :, 5].any()
    for norm in ("plain", "refit", "unbiased"):
        fitted = fitted_norm(keys, unit + noise, norms, norm, scaling)
        assert fitted.isfinite().all() and not fitted[1, :, 5].any()


def test_float16_holds_the_norm_of_any_float16_key() -> None:
    keys = torch.full((1, 2, 128, 256), torch.finfo(torch.float16).max)
    assert token_rms(keys, "shared").isfinite().all()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_unbiased(scaling: str) -> None:
    keys, noise = keys_and_codes()
    norms = token_rms(keys, scaling)
    coded = 0.8 * divide_by_norm(keys, norms) + noise
    fitted = fitted_norm(keys, coded, norms, "unbiased", scaling)
    overlap = (fitted * coded * keys).sum(dims(scaling))
    assert torch.allclose(overlap, keys.square().sum(dims(scaling)), rtol=2 * HALF)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_refit_minimizes_the_error(scaling: str) -> None:
    keys, noise = keys_and_codes()
    norms = token_rms(keys, scaling)
    coded = 0.8 * divide_by_norm(keys, norms) + noise

    def error(stored: torch.Tensor) -> torch.Tensor:
        return (stored * coded - keys).square().sum(dims(scaling), keepdim=True)

    fitted = fitted_norm(keys, coded, norms, "refit", scaling)
    for factor in (0.99, 1.01):
        assert (error(fitted) < error(fitted * factor)).all()
    assert error(fitted).sum() < error(norms).sum()


@pytest.mark.parametrize("norm", ["refit", "unbiased"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_norm_stays_within_a_factor_of_two(norm: str, scaling: str) -> None:
    keys, noise = keys_and_codes()
    norms = token_rms(keys, scaling)
    for coded in (noise, -keys, 0 * keys, 100 * keys, 1e-20 * keys):
        fitted = fitted_norm(keys, coded, norms, norm, scaling)
        assert fitted.shape == norms.shape
        assert ((fitted >= norms * 0.499) & (fitted <= norms * 2.001)).all()


def test_plain_keeps_the_norm() -> None:
    keys, noise = keys_and_codes()
    norms = token_rms(keys, "shared")
    assert fitted_norm(keys, noise, norms, "plain", "shared") is norms
    with pytest.raises(ValueError, match="'plain', 'refit' or 'unbiased'"):
        fitted_norm(keys, noise, norms, "best", "shared")
