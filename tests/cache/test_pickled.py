"""A pickled cache continues like the original."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from oscar_mm import InputError, OscarCache
from oscar_mm.cache.batch_view import BatchView
from oscar_mm.cache.page_store import PageStore
from tests.cache.test_generate import generate, logits, padded, prompt
from tests.cache.test_other_decoders import LINEAR
from tests.checkpoints import build_decoder


def through_torch(cache: OscarCache) -> Any:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[OscarCache], Any]] = {
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "torch": through_torch,
    "to a process": lambda cache: pickle.loads(ForkingPickler.dumps(cache)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "in a dict": lambda cache: pickle.loads(pickle.dumps({"cache": cache}))["cache"],
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = build_decoder("llama", num_hidden_layers=2)
    model.set_attn_implementation("oscar")
    return model


@pytest.mark.parametrize(
    ("way", "policy"),
    [*((way, "standard") for way in WAYS), ("pickle", "channel"), ("deepcopy", "bf16")],
)
def test_it_goes_on(model, policy: str, way: str) -> None:
    inputs = padded(300, 300, 121, 3)
    cache = OscarCache(policy, model=model)
    ids = generate(model, cache, inputs)
    cache.forget(10, 30)
    twin = WAYS[way](cache)
    assert twin.get_seq_length() == cache.get_seq_length() and twin.policy == cache.policy
    assert twin.memory().tokens == cache.memory().tokens
    mask = torch.ones(len(ids), ids.shape[1] + 5, dtype=torch.long)
    mask[:, :300] = inputs["attention_mask"]
    mask[0, 10:30] = 0
    new = torch.cat([ids[:, -1:], prompt(5, batch=3, seed=1)], dim=1)
    found, expected = (logits(model, one, new, attention_mask=mask) for one in (twin, cache))
    assert torch.equal(found, expected)
    for one, other in zip(twin.unpacked(1), cache.unpacked(1), strict=True):
        assert torch.equal(one, other)


def test_of_a_store_that_others_use_it_is_its_own_part(model) -> None:
    store = PageStore("standard")
    kept, other = (OscarCache("standard", store=store, model=model) for _ in range(2))
    logits(model, other, prompt(700, seed=1))
    logits(model, kept, prompt(200))
    fork = kept.fork()
    dumped = pickle.dumps(fork)
    assert len(dumped) < 1.5 * fork.memory().kv_bytes + 10_000
    kept.close()
    other.close()
    twin = pickle.loads(dumped)
    assert twin.store is not store
    assert torch.equal(logits(model, twin, prompt(3)), logits(model, fork, prompt(3)))


def test_empty_closed_and_announced(model) -> None:
    cache = pickle.loads(pickle.dumps(OscarCache("channel", model=model)))
    cache.expect(torch.tensor([[-1, 0, 1, 1, 0]]))
    twin = pickle.loads(pickle.dumps(cache))
    for one in (cache, twin):
        logits(model, one, prompt(5))
    assert twin.memory().tokens == cache.memory().tokens
    cache.close()
    with pytest.raises(RuntimeError, match="closed"):
        logits(model, pickle.loads(pickle.dumps(cache)), prompt(5))


def test_a_hybrid() -> None:
    model = build_decoder(
        "qwen3_next", **LINEAR | {"num_experts": 0, "mlp_only_layers": [*range(4)]}
    )
    model.set_attn_implementation("oscar")
    cache = OscarCache("standard", model=model)
    logits(model, cache, prompt(60))
    twin = pickle.loads(pickle.dumps(cache))
    assert torch.equal(logits(model, twin, prompt(1)), logits(model, cache, prompt(1)))


def test_what_is_not_pickled(model) -> None:
    store = PageStore("bf16")
    with pytest.raises(InputError, match="pickle the caches of its rows"):
        pickle.dumps(BatchView(store))
    cache = OscarCache("bf16", model=model)
    logits(model, cache, prompt(5))

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        logits(model, cache, prompt(5))
    hook.remove()
    with pytest.raises(RuntimeError, match=r"reset\(\)"):
        pickle.dumps(cache)
