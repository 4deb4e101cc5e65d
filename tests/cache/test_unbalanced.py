"""A cache that cannot balance says so, once, and names what to do."""

import warnings

import pytest
import torch
from transformers import PreTrainedModel

from oscar_mm import InputError, KVPolicy, OscarCache
from oscar_mm.cache.cache import as_argument
from tests.checkpoints import build_decoder


def warned(model: PreTrainedModel, cache: OscarCache, implementation: str) -> list[str]:
    """What is warned of while a prompt, a chunk and a token are read."""
    model.set_attn_implementation(implementation)
    ids = torch.arange(3, 203)[None]
    with warnings.catch_warnings(record=True) as found, torch.no_grad():
        warnings.simplefilter("always")
        for part in ids.split([150, 49, 1], dim=1):
            model(part, **as_argument(cache))
    return [str(one.message) for one in found if issubclass(one.category, UserWarning)]


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return build_decoder("llama")


@pytest.fixture(scope="module")
def qwen3() -> PreTrainedModel:
    return build_decoder("qwen3")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_without_qk_norm_it_is_said_once(llama, implementation: str) -> None:
    for cache in (OscarCache(), OscarCache(model=llama)):
        [message] = warned(llama, cache, implementation)
        assert "balance='auto'" in message and "set_attn_implementation('oscar')" in message
        assert all(layer.sigma is None for layer in cache.layers)
        assert warned(llama, cache.fork(), implementation) == []
        cache.reset()
        assert warned(llama, cache, implementation) == []


def test_the_warning_points_at_the_caller(llama) -> None:
    llama.set_attn_implementation("sdpa")
    with pytest.warns(UserWarning, match="without query-key balancing") as found, torch.no_grad():
        llama(torch.arange(3, 9)[None], **as_argument(OscarCache()))
    assert found[0].filename.endswith("modeling_llama.py")


def test_weights_of_a_model_that_was_not_given(qwen3) -> None:
    [message] = warned(qwen3, OscarCache(), "sdpa")
    assert "OscarCache(policy, model=model)" in message
    assert warned(qwen3, OscarCache(model=qwen3), "sdpa") == []
    assert warned(qwen3, OscarCache(), "oscar") == []


def test_nothing_is_said_where_nothing_is_missed(llama) -> None:
    for policy in (KVPolicy.preset("channel", balance=None), "bf16", "oscar", "kivi"):
        assert warned(llama, OscarCache(policy), "sdpa") == []
    cache = OscarCache()
    assert warned(llama, cache, "oscar") == []
    assert warned(llama, cache, "sdpa") == [], "the first prompt was balanced"
    assert all(layer.sigma is not None for layer in cache.layers)


def test_a_policy_that_insists_is_refused(llama) -> None:
    """balance "prompt" has no second choice, so that this is an error."""
    llama.set_attn_implementation("sdpa")
    with pytest.raises(InputError, match="balance='prompt' needs attention 'oscar'"):
        llama(
            torch.arange(3, 9)[None],
            **as_argument(OscarCache(KVPolicy.preset("channel", balance="prompt"))),
        )


def test_unbalanced_is_the_policy_without_balancing(llama) -> None:
    """What the warning says: another method, the one that balance=None names."""
    llama.set_attn_implementation("sdpa")
    caches = {
        "auto": OscarCache(KVPolicy.preset("channel")),
        None: OscarCache(KVPolicy.preset("channel", balance=None)),
    }
    for cache in caches.values():
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            llama(torch.arange(3, 300)[None], **as_argument(cache))
    for one, other in zip(caches["auto"].unpacked(1), caches[None].unpacked(1), strict=True):
        assert torch.equal(one, other)
