"""The check of weights names the layers whose answers break, and no other."""

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from oscar_mm import KVPolicy, OscarCache, models
from oscar_mm.cache.cache import as_argument
from oscar_mm.ops.score_errors import MOST, score_errors, warn_of_hard_layers
from oscar_mm.pipelines import pipeline_for
from tests.checkpoints import build_decoder

IDS = torch.randint(3, 300, (1, 420), generator=torch.Generator().manual_seed(3))
POLICIES = ("standard", "compact", "channel", "oscar", "standard:bits=4")


def biased(size: float, layer: int = 0) -> PreTrainedModel:
    """Key biases on the slow rotary pairs of one layer, as Qwen2.5-1.5B has them in its first."""
    model = build_decoder("llama", attention_bias=True, rope_parameters=_SLOW)
    bias = torch.zeros(2, 2, 32)
    bias[:, :, 20:] = size * torch.randn(2, 2, 12, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        for index, one in enumerate(model.model.layers):
            one.self_attn.k_proj.bias.copy_(bias.flatten() * (index == layer))
    return model


_SLOW = {"rope_type": "default", "rope_theta": 1e6}


def warnings(caplog: pytest.LogCaptureFixture, model: PreTrainedModel, policy: str) -> list[str]:
    caplog.clear()
    warn_of_hard_layers(model, KVPolicy.preset(policy))
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


@torch.no_grad()
def divergence(model: PreTrainedModel, policy: str) -> float:
    """What the last tokens of a text lose by the cache."""
    found: list[Tensor] = []
    for cache in (DynamicCache(), OscarCache(policy, model=model)):
        model(IDS[:, :-40], **as_argument(cache))
        found.append(model(IDS[:, -40:], **as_argument(cache)).logits.double().log_softmax(-1))
    exact, other = found
    return float((exact.exp() * (exact - other)).sum(-1).mean())


@pytest.mark.parametrize("layer", [0, 1])
def test_the_layer_that_breaks_is_named(caplog: pytest.LogCaptureFixture, layer: int) -> None:
    """What counts the whole bias in balancing, or spreads it over all channels, breaks."""
    model = biased(300, layer)
    for policy in ("standard:center=false", "quarot"):
        [message] = warnings(caplog, model, policy)
        assert f"model.layers.{layer}.self_attn (" in message and message.count("self_attn") == 1
        assert divergence(model, policy) > 5 * divergence(model, "standard")
    for policy in POLICIES:
        assert not warnings(caplog, model, policy)


def test_the_error_grows_with_what_is_lost() -> None:
    errors, losses = [], []
    for size in (1, 30, 300):
        model = biased(size)
        errors.append(score_errors(model, KVPolicy.preset("quarot"))["model.layers.0.self_attn"])
        losses.append(divergence(model, "quarot"))
    assert errors == sorted(errors) and losses == sorted(losses)
    assert errors[0] < MOST < errors[2]


@pytest.mark.daily("llama", "qwen3")
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_models_that_pages_hold_well(caplog: pytest.LogCaptureFixture, name: str) -> None:
    model = build_decoder(name)
    for policy in POLICIES:
        errors = score_errors(model, KVPolicy.preset(policy))
        assert list(errors) == [f"model.layers.{index}.self_attn" for index in range(2)]
        assert 0.02 < max(errors.values()) < 0.6 * MOST
        assert not warnings(caplog, model, policy)


def test_uneven_norms_are_balanced(caplog: pytest.LogCaptureFixture) -> None:
    """Where a channel of keys is 100 times as large and of queries as small, no score changes."""
    model = build_decoder("qwen3")
    with torch.no_grad():
        for norm, factor in (("q_norm", 0.01), ("k_norm", 100)):
            getattr(model.model.layers[1].self_attn, norm).weight[[3, 35]] *= factor
    assert not warnings(caplog, model, "standard")
    [message] = warnings(caplog, model, "standard:balance=none")
    assert "model.layers.1.self_attn" in message and message.count("self_attn") == 1


def test_keys_beyond_what_pages_hold(caplog: pytest.LogCaptureFixture) -> None:
    [message] = warnings(caplog, biased(1e6), "quarot")
    assert "model.layers.0.self_attn (inf)" in message


def test_a_cache_in_16_bits_is_not_checked(caplog: pytest.LogCaptureFixture) -> None:
    assert not warnings(caplog, biased(1e6), "bf16")


@pytest.fixture(scope="module", params=["pocket-vl", "pocket-llava", "pocket-omni"])
def bundled(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    source = str(models.bundled(request.param))
    yield pipeline_for(source)(source, device="cpu").model


@pytest.mark.daily("pocket-omni")
def test_bundled_models_are_silent(
    caplog: pytest.LogCaptureFixture, bundled: PreTrainedModel
) -> None:
    for policy in (*POLICIES, "quarot", "kivi"):
        assert not warnings(caplog, bundled, policy)
        assert max(score_errors(bundled, KVPolicy.preset(policy)).values()) < 0.6 * MOST


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["standard", "oscar"])
def test_a_gpu_finds_the_errors_that_a_cpu_finds(policy: str) -> None:
    model = biased(30)
    expected = score_errors(model, KVPolicy.preset(policy))
    found = score_errors(model.cuda(), KVPolicy.preset(policy))
    assert found == pytest.approx(expected, rel=0.05)
