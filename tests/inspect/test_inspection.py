"""One forward pass of each family, looked at: nothing changes, and figures are the cache's own.

Norms and channels of keys whose troubles are known.
"""

import weakref
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from oscar_mm import InputError, KVPolicy, OscarCache
from oscar_mm.cache.cache import as_argument
from oscar_mm.engine.prompt import Prompt
from oscar_mm.inspect.inspection import (
    Probe,
    Spread,
    channel_outliers,
    inspect_prompt,
    measure_norms,
)
from oscar_mm.inspect.quantization_errors import PAIRS, LayerStates
from oscar_mm.pipelines.pipeline import Pipeline
from oscar_mm.quant.balance import sigma_from_rms
from tests.inspect.synthetic import states
from tests.prompts import clip, noise, prepare, tone

LONG = "What is on the sign, and how much is the bread? " * 20
PICTURES = [noise(256, 256, seed) for seed in range(3)]


def prompt_of(pipe: Pipeline, text: str = LONG, **media: Any) -> Prompt:
    return prepare(pipe, text, pipe.read_media(**media))


def forward(pipe: Pipeline, prompt: Prompt, cache: Any) -> torch.Tensor:
    arguments = {**prompt.inputs, "position_ids": prompt.positions, "logits_to_keep": 1}
    with torch.inference_mode():
        return pipe.model(**arguments, **as_argument(cache), use_cache=True).logits


@pytest.mark.parametrize("family", ["llava", "qwen", "omni"])
def test_the_probe_changes_nothing_and_keeps_nothing(family, request) -> None:
    pipe = request.getfixturevalue(family)
    media = {"images": noise(100, 200)} | ({"audio": tone(1.0)} if family == "omni" else {})
    prompt = prompt_of(pipe, "What is it?", **media)
    plain = DynamicCache()
    expected = forward(pipe, prompt, plain)
    seen: list[int] = []
    last: weakref.ref | None = None

    def look(states: LayerStates) -> None:
        nonlocal last
        assert last is None or last() is None, "the layer before is still held"
        held = plain.layers[states.index]
        assert torch.equal(states.keys, held.keys[0]) and torch.equal(states.values, held.values[0])
        assert states.queries.shape[1:] == states.keys.shape[1:] == (prompt.tokens, 64)
        seen.append(states.index)
        last = weakref.ref(states)

    assert torch.allclose(forward(pipe, prompt, Probe(look)), expected, atol=1e-5)
    assert seen == list(range(len(plain.layers)))


@pytest.mark.daily("llava")
@pytest.mark.parametrize("family", ["llava", "qwen"])
def test_errors_are_those_of_the_cache(family, request) -> None:
    pipe = request.getfixturevalue(family)
    prompt = prompt_of(pipe, images=PICTURES)
    inspection = inspect_prompt(pipe.model, prompt)
    assert inspection.tokens == {
        "text": int((prompt.modalities == 0).sum()),
        "image": int((prompt.modalities == 1).sum()),
    }
    assert inspection.qk_norm is (family == "qwen")
    assert not inspection.is_sample and inspection.parts == ["text", "image", "all"]
    exact = DynamicCache()
    forward(pipe, prompt, exact)
    for preset, (variant, _) in PAIRS.items():
        if variant.token_scaling != KVPolicy.preset(preset).token_scaling:
            continue  # kivi has none of its own
        cache = OscarCache(KVPolicy.preset(preset, window=0, sinks=0), model=pipe.model)
        cache.expect(prompt.modalities)
        forward(pipe, prompt, cache)
        for layer in inspection.layers:
            keys, values = cache.unpacked(layer.index)
            states = exact.layers[layer.index]
            for part, code in (("text", 0), ("image", 1)):
                where = (prompt.modalities[0] == code).nonzero()[:, 0]
                where = where[: len(where) // 128 * 128]
                sides = ((keys, states.keys, "keys"), (values, states.values, "values"))
                for found, right, side in sides:
                    found, right = found[:, :, where], right[:, :, where]
                    expected = float((found - right).norm() / right.norm())
                    measured = getattr(layer.errors[variant.label][part], side)
                    assert measured == pytest.approx(expected, rel=2e-3)


def test_all_modalities(omni) -> None:
    media = {"images": PICTURES, "videos": clip(16), "audio": tone(11.0)}
    inspection = inspect_prompt(omni.model, prompt_of(omni, **media))
    assert inspection.parts == ["text", "image", "video", "audio", "all"]
    for layer in inspection.layers:
        assert set(layer.norms.tokens) == {"text", "image", "video", "audio"}
        for errors in layer.errors.values():
            assert all(0 < errors[part].output < 1 for part in inspection.parts)
    figures = inspection.to_dict()
    assert figures["layers"][1]["norms"]["tokens"]["audio"]["median"] > 0
    assert figures["layers"][0]["norm_ratio"] == inspection.layers[0].norms.ratio


def test_broken_weights_are_reported(qwen) -> None:
    projection = qwen.model.get_decoder().layers[1].self_attn.v_proj.weight
    before = projection.detach().clone()
    try:
        with torch.no_grad():
            projection[3] = float("nan")
        with pytest.raises(InputError, match=r"layer 1: .*NaN"):
            inspect_prompt(qwen.model, prompt_of(qwen))
    finally:
        with torch.no_grad():
            projection.copy_(before)


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
    monkeypatch.setattr("oscar_mm.inspect.inspection._CHUNK_TOKENS", 100)
    part = measure_norms(shown.keys, sigma, ids), channel_outliers(shown.keys, sigma)
    assert part[0] == whole[0] and part[1] == pytest.approx(whole[1], rel=1e-5)
