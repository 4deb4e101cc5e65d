"""Norms and channels of keys whose troubles are known."""

import pytest
import torch

from oscar_mm.inspect.norms import Spread, channel_outliers, measure_norms
from oscar_mm.quant.basis import sigma_from_rms
from tests.inspect.synthetic import states


def test_spread_of_known_norms() -> None:
    norms = torch.cat([torch.arange(1.0, 100.0), torch.tensor([151.0])])
    spread = Spread.of(norms[torch.randperm(100)])
    assert (spread.p5, spread.median, spread.p95) == (6.0, 51.0, 95.0)
    assert spread.mean == pytest.approx(51.01) and spread.long == 0
    assert Spread.of(torch.tensor([1.0] * 98 + [3.1, 4.0])).long == pytest.approx(0.02)


def test_imbalance_between_modalities() -> None:
    shown, ids = states(imbalance=3.0)
    norms = measure_norms(shown.keys, None, ids)
    assert list(norms.tokens) == ["text", "image", "audio"]
    assert norms.ratio == pytest.approx(3, rel=0.05)
    assert norms.scaled_ratio == pytest.approx(1, abs=0.05)
    assert norms.heads["text"].median == pytest.approx(3 * norms.heads["image"].median, rel=0.05)
    even, ids = states()
    assert measure_norms(even.keys, None, ids).ratio == pytest.approx(1, abs=0.05)


def test_long_keys_are_counted_within_their_modality() -> None:
    shown, ids = states(imbalance=4.0, long=6.0)
    norms = measure_norms(shown.keys, None, ids)
    lengths = shown.keys.norm(dim=-1).square().mean(0).sqrt()
    image = lengths[ids == 1]
    expected = float((image > 3 * image.median()).float().mean())
    assert norms.tokens["image"].long == pytest.approx(expected, abs=2e-3) and expected > 0.005
    # What is long for all heads is as any other after token scaling.
    assert norms.scaled["image"].long == 0
    assert norms.long == max(spread.long for spread in norms.tokens.values())


def test_outlier_channels() -> None:
    keys = torch.randn(2, 512, 64, generator=torch.Generator().manual_seed(0))
    even = channel_outliers(keys, None)
    assert max(even.values()) < 1.3 and even["raw"] == even["balanced"]
    keys[1, :, 7] *= 10
    found = channel_outliers(keys, None)
    assert found["raw"] == pytest.approx(10, rel=0.15)
    assert found["rotated"] < 1.3
    rms = keys.square().mean(1).sqrt()
    balanced = channel_outliers(keys, sigma_from_rms(rms, torch.ones_like(rms)))
    assert balanced["balanced"] == pytest.approx(10**0.5, rel=0.15)
    assert balanced["raw"] == found["raw"]


def test_long_prompts_are_read_in_parts(monkeypatch) -> None:
    shown, ids = states(imbalance=2.0)
    sigma = torch.rand(2, 64, generator=torch.Generator().manual_seed(0)) + 0.5
    whole = measure_norms(shown.keys, sigma, ids), channel_outliers(shown.keys, sigma)
    monkeypatch.setattr("oscar_mm.inspect.norms._CHUNK_TOKENS", 100)
    part = measure_norms(shown.keys, sigma, ids), channel_outliers(shown.keys, sigma)
    assert part[0] == whole[0] and part[1] == pytest.approx(whole[1], rel=1e-5)
