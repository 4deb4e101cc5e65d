"""Scale, zero point and codes of groups."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_mm.quant.fit import assign_codes, fit_group

HALF = 2.0**-11


def decoded(values: torch.Tensor, bits: int, fit: str, dim: int = -1) -> torch.Tensor:
    scale, zero = fit_group(values, bits, fit, dim)
    return assign_codes(values, scale, zero, bits) * scale + zero


def groups(seed: int, shape: tuple[int, ...] = (50, 64)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [2, 4])
def test_minmax_reproduces_the_extremes(bits: int) -> None:
    values = groups(0)
    result = decoded(values, bits, "minmax")
    for extreme in (torch.argmin, torch.argmax):
        at = extreme(values, dim=-1, keepdim=True)
        assert torch.allclose(result.gather(-1, at), values.gather(-1, at), atol=1e-2, rtol=0)
    step = (values.amax(-1) - values.amin(-1)) / ((1 << bits) - 1)
    assert ((result - values).abs().amax(-1) <= step * 0.5 + 8 * HALF).all()


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("kind", ["normal", "uniform", "laplace", "outlier", "skewed"])
def test_lsq_beats_minmax(bits: int, size: int, kind: str) -> None:
    values = groups(1, (200, size))
    if kind == "uniform":
        values = torch.special.ndtr(values)
    elif kind == "laplace":
        values = values * values.abs()
    elif kind == "outlier":
        values[:, 3] += 20
    elif kind == "skewed":
        values = values.exp()
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


def test_unknown_fit() -> None:
    with pytest.raises(ValueError, match="'minmax' or 'lsq'"):
        fit_group(torch.zeros(1, 4), 2, "mse", -1)
