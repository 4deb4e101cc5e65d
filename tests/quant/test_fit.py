"""Scale, zero point and codes of groups; token scaling and the norm that is stored."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oscar_mm.quant.fit import (
    assign_codes,
    divide_by_norm,
    fit_group,
    fitted_norm,
    token_rms,
    unbiased_scale,
)
from tests.pairs import pairs

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


def decoded(values: torch.Tensor, bits: int, fit: str, dim: int = -1) -> torch.Tensor:
    scale, zero = fit_group(values, bits, fit, dim)
    return assign_codes(values, scale, zero, bits) * scale + zero


def groups(seed: int, shape: tuple[int, ...] = (50, 64)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shaped(values: torch.Tensor, kind: str) -> torch.Tensor:
    """Normal groups made into others."""
    if kind == "uniform":
        return torch.special.ndtr(values)
    if kind == "laplace":
        return values * values.abs()
    if kind == "outlier":
        values[:, 3] += 20
    return values.exp() if kind == "skewed" else values


@pytest.mark.parametrize("bits", [2, 4])
def test_minmax_reproduces_the_extremes(bits: int) -> None:
    values = groups(0)
    result = decoded(values, bits, "minmax")
    for extreme in (torch.argmin, torch.argmax):
        at = extreme(values, dim=-1, keepdim=True)
        assert torch.allclose(result.gather(-1, at), values.gather(-1, at), atol=1e-2, rtol=0)
    step = (values.amax(-1) - values.amin(-1)) / ((1 << bits) - 1)
    assert ((result - values).abs().amax(-1) <= step * 0.5 + 8 * HALF).all()


@pytest.mark.parametrize(
    ("bits", "size", "kind"),
    pairs((2, 4), (32, 128), ("normal", "uniform", "laplace", "outlier", "skewed")),
)
def test_lsq_beats_minmax(bits: int, size: int, kind: str) -> None:
    values = shaped(groups(1, (200, size)), kind)
    errors = {
        fit: (decoded(values, bits, fit) - values).square().sum() for fit in ("minmax", "lsq")
    }
    assert errors["lsq"] <= errors["minmax"] * 1.001


def test_lsq_gain_on_normal_groups() -> None:
    """The reason to have it: half the squared error where groups are long."""
    values = groups(2, (200, 128))
    errors = [(decoded(values, 2, fit) - values).square().sum() for fit in ("lsq", "minmax")]
    assert errors[0] < 0.5 * errors[1]


@pytest.mark.parametrize("fit", ["minmax", "lsq"])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.3, 1e-3, 60000.0, -1e-7])
def test_constant_group(fit: str, value: float) -> None:
    result = decoded(torch.full((3, 32), value), 2, fit)
    assert torch.equal(result, torch.full((3, 32), value).half().float())


@settings(max_examples=60, deadline=None)
@example([0.0, 2.802596928649634e-44], 2, "lsq")
# A least-squares grid may reach beyond the values, and its zero point must be a float16 number.
@given(
    st.lists(st.floats(-1.6e4, 1.6e4, width=32), min_size=1, max_size=40),
    st.sampled_from([2, 4]),
    st.sampled_from(["minmax", "lsq"]),
)
def test_codes_in_range_and_nearest(numbers: list[float], bits: int, fit: str) -> None:
    values = torch.tensor([numbers])
    scale, zero = fit_group(values, bits, fit, -1)
    codes = assign_codes(values, scale, zero, bits)
    levels = torch.arange(1 << bits)
    assert scale.isfinite().all() and zero.isfinite().all() and (scale >= 0).all()
    assert torch.isin(codes, levels.float()).all()
    assert torch.equal(scale, scale.half().float()) and torch.equal(zero, zero.half().float())
    best = (levels[:, None, None] * scale + zero - values).abs().amin(0)
    mine = (codes * scale + zero - values).abs()
    assert torch.allclose(mine, best, rtol=1e-4, atol=float(values.abs().max()) * 1e-6)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_any_dimension(dim: int) -> None:
    values = groups(3, (4, 6, 8))
    moved = values.movedim(dim, -1)
    expected = decoded(moved, 2, "lsq").movedim(-1, dim)
    assert torch.allclose(decoded(values, 2, "lsq", dim), expected, atol=1e-6)
    assert fit_group(values, 2, "lsq", dim)[0].shape[dim] == 1


def read_back(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As a least-squares fit and its codes make them, and with the scale that does not shrink."""
    scale, zero = fit_group(values, bits, "lsq", -1)
    codes = assign_codes(values, scale, zero, bits)
    changed = unbiased_scale(values, codes, scale, zero, -1)
    assert all(torch.equal(x, x.half().float()) for x in changed)
    return codes * scale + zero, codes * changed[0] + changed[1]


def bias(found: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """<v^ - mean, v - mean> / |v - mean|^2 - 1 of each group, in float64."""
    mean = values.double().mean(-1, keepdim=True)
    apart = values.double() - mean
    return ((found.double() - mean) * apart).sum(-1) / apart.square().sum(-1) - 1


@pytest.mark.parametrize(
    ("bits", "size", "kind"),
    pairs((2, 4), (32, 128), ("normal", "uniform", "laplace", "skewed")),
)
def test_unbiased_values_do_not_shrink(bits: int, size: int, kind: str) -> None:
    values = shaped(groups(4, (500, size)), kind)
    plain, unbiased = read_back(values, bits)
    assert bias(plain, values).mean() < (-0.05 if bits == 2 else -0.003)
    # Up to float16; heavy tails may need more than a factor 2.
    assert bias(unbiased, values).abs().median() < 5e-4
    assert bias(unbiased, values).mean().abs() < 2e-3
    rounding = 4 * HALF * values.abs().amax(-1)
    assert ((unbiased.mean(-1) - values.mean(-1)).abs() < rounding).all()
    # What that costs each value alone.
    squares = [(x - values).square().sum() for x in (plain, unbiased)]
    assert squares[1] < 1.4 * squares[0]


@pytest.mark.parametrize("mean", [300.0, -2000.0])
def test_unbiased_values_far_from_zero(mean: float) -> None:
    """Values far larger than their differences lose nothing by cancellation."""
    values = groups(5, (200, 128)) + mean
    scale, zero = fit_group(values, 2, "lsq", -1)
    codes = assign_codes(values, scale, zero, 2)
    found = unbiased_scale(values, codes, scale, zero, -1)[0]
    apart, spread = (x.double() - x.double().mean(-1, keepdim=True) for x in (values, codes))
    expected = apart.square().mean(-1, keepdim=True) / (apart * spread).mean(-1, keepdim=True)
    assert torch.allclose(found.double(), expected, rtol=HALF * 1.1)


def test_the_fit_stays_where_codes_say_nothing() -> None:
    constant, two = torch.full((1, 32), 3.3), torch.tensor([[0.5, -7.0] * 16])
    for values in (constant, two):
        plain, unbiased = read_back(values, 2)
        assert torch.allclose(plain, unbiased, rtol=HALF, atol=0)
    codes = torch.tensor([[0.0, 1, 2, 3]])
    zero = torch.full((1, 1), 0.0)
    # Codes that go the other way, all alike, NaN, or a scale beyond float16.
    for values, said, one in (
        (-codes, codes, 1.0),
        (codes, 0 * codes, 1.0),
        (codes * torch.nan, codes, 1.0),
        (codes, codes, 0.0),
        (1e5 * codes, codes, 4e4),
    ):
        scale = torch.full((1, 1), one)
        assert unbiased_scale(values, said, scale, zero, -1) == (scale, zero)
    assert unbiased_scale(10 * codes, codes, zero + 1, zero, -1) == (2, 12)


def test_unknown_fit() -> None:
    with pytest.raises(ValueError, match="'minmax' or 'lsq'"):
        fit_group(torch.zeros(1, 4), 2, "mse", -1)
