"""A cache without a model warns once, and names the remedy."""

import warnings

import pytest
import torch
from transformers import PreTrainedModel

from oscar_mm import KVPolicy, OscarCache
from oscar_mm.cache.cache import as_argument
from oscar_mm.policy import PLAIN
from tests.checkpoints import build_decoder


def warned(model: PreTrainedModel, cache: OscarCache, implementation: str) -> list[str]:
    """Return the warnings raised while a prompt, a chunk and a token are read."""
    model.set_attn_implementation(implementation)
    ids = torch.arange(3, 203)[None]
    with warnings.catch_warnings(record=True) as found, torch.no_grad():
        warnings.simplefilter("always")
        for part in ids.split([150, 49, 1], dim=1):
            model(part, **as_argument(cache))
    return [str(one.message) for one in found if issubclass(one.category, UserWarning)]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build_decoder(request.param)


@pytest.mark.parametrize("implementation", ["oscar", "sdpa", "eager"])
def test_without_the_model_it_is_said_once(model, implementation: str) -> None:
    cache = OscarCache()
    [message] = warned(model, cache, implementation)
    assert "OscarCache(policy, model=model)" in message and "balance=None" in message
    assert all(layer.sigma is None for layer in cache.layers)
    assert warned(model, cache.fork(), implementation) == []
    cache.reset()
    assert warned(model, cache, implementation) == []


@pytest.mark.parametrize("implementation", ["oscar", "sdpa"])
def test_with_the_model_any_attention_balances(model, implementation: str) -> None:
    cache = OscarCache(model=model)
    assert warned(model, cache, implementation) == []
    assert all(layer.sigma is not None for layer in cache.layers)


def test_the_warning_points_at_the_caller(model) -> None:
    model.set_attn_implementation("sdpa")
    with pytest.warns(UserWarning, match="without query-key balancing") as found, torch.no_grad():
        model(torch.arange(3, 203)[None], **as_argument(OscarCache()))
    assert found[0].filename.endswith(f"modeling_{model.config.model_type}.py")


def test_nothing_is_said_where_nothing_is_missed(model) -> None:
    for policy in (KVPolicy.preset("channel", balance=None), "bf16", "oscar", "kivi"):
        assert warned(model, OscarCache(policy), "sdpa") == []


def test_nothing_is_said_before_keys_are_packed(model) -> None:
    """Tokens in 16-bit precision lose nothing: those of a short prompt, or of modalities that the
    policy does not pack."""
    model.set_attn_implementation("sdpa")
    text = {"text": 16}
    for policy in (
        KVPolicy(window=100),
        KVPolicy(bits=text),
        KVPolicy.preset("channel", bits=text),
    ):
        cache = OscarCache(policy)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("error", UserWarning)
            model(torch.arange(3, 99)[None], **as_argument(cache))
            if policy.bits.text == PLAIN:
                model(torch.arange(3, 203)[None], **as_argument(cache))
    cache = OscarCache(KVPolicy(window=100))
    with torch.no_grad():
        model(torch.arange(3, 99)[None], **as_argument(cache))
        twin = cache.fork()
        for one in (cache, twin):
            with pytest.warns(UserWarning, match="without query-key balancing"):
                model(torch.arange(3, 203)[None], **as_argument(one))


def test_unbalanced_is_the_policy_without_balancing(model) -> None:
    """As the warning says, this is another method: that of balance=None."""
    model.set_attn_implementation("sdpa")
    caches = [OscarCache(KVPolicy.preset("channel", balance=x)) for x in ("weights", None)]
    for cache in caches:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            model(torch.arange(3, 300)[None], **as_argument(cache))
    for one, other in zip(*(cache.unpacked(1) for cache in caches), strict=True):
        assert torch.equal(one, other)
