"""What a conversation takes by the formula, against what a cache of that shape holds."""

import pytest
import torch

from benchmarks.synthetic_cache import synthetic_cache
from oscar_mm.admission.capacity import RESERVED, ModelShape
from oscar_mm.policy import PLAIN, KVPolicy
from tests.cache.invariants import STREAM
from tests.checkpoints import build_decoder

GB = 10**9
LLAMA_LIKE = ModelShape(layers=32, kv_heads=8, head_dim=128, parameters=8 * GB)
POCKET = ModelShape(layers=4, kv_heads=2, head_dim=64, parameters=0)
POLICIES = [
    *KVPolicy.preset_names(),
    KVPolicy(bits={"image": 4, "text": 16}),
    KVPolicy(window=200, sinks=40),
    KVPolicy(bits=(3, 2), **STREAM),
    KVPolicy(bits={"text": (4, 2), "image": 2}, window=0, sinks=0, **STREAM),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("tokens", [40, 700, 2100])
def test_bytes_are_those_that_a_cache_holds(policy, tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    # So many of them come one by one that the window holds text only, as after an answer.
    cache = synthetic_cache(policy, (1, 2, tokens, 64), 4, generator, answer=min(tokens // 2, 220))
    report = cache.memory()
    shape = ModelShape(layers=1, kv_heads=2, head_dim=64, parameters=0)
    held = report.kv_bytes - report.by_kind["tables"] - report.by_kind["unused"]
    assert shape.kv_bytes(KVPolicy.of(policy), report.tokens) == held


@pytest.mark.parametrize("shape", [LLAMA_LIKE, POCKET], ids=["llama", "pocket"])
def test_a_short_conversation_takes_no_more_than_in_16_bit(shape: ModelShape) -> None:
    policy = KVPolicy.preset("standard")
    plain = shape.layers * shape.slot_bytes(policy)[PLAIN]

    def ratio(text: int, image: int = 0) -> float:
        return (text + image) * plain / shape.kv_bytes(policy, {"text": text, "image": image})

    for tokens in range(1, 301):
        for image in (0, tokens // 2, max(0, tokens - 20)):
            assert ratio(tokens - image, image) >= 1
    # What is promised of heads of 128 channels; a page of two streams each may be nearly empty.
    if shape.head_dim == 128:
        assert min(ratio(tokens) for tokens in range(300, 430)) > 2.8
        assert min(ratio(tokens) for tokens in range(1000, 1130)) > 4.4
        assert min(ratio(text, 8192 - text) for text in range(40, 8192, 61)) > 5.4
        assert min(ratio(text, 1000 - text) for text in range(40, 1000, 7)) > 4.1


def test_how_many_fit() -> None:
    tokens, compact = {"text": 1000, "image": 31_000}, KVPolicy.preset("compact")
    one = LLAMA_LIKE.kv_bytes(compact, tokens)
    room = 80 * GB * (1 - RESERVED) - 16 * GB
    count = LLAMA_LIKE.conversations(80 * GB, compact, tokens)
    assert count * one <= room < (count + 1) * one
    plain = LLAMA_LIKE.conversations(80 * GB, KVPolicy.preset("bf16"), tokens)
    assert 6 < count / plain < 7
    assert LLAMA_LIKE.conversations(16 * GB, compact, tokens) == 0
    assert LLAMA_LIKE.conversations(80 * GB, compact, {}) > 10**9


def test_shape_of_a_configuration() -> None:
    model = build_decoder("llama")
    shape = ModelShape.of(model.config, model.num_parameters())
    assert (shape.layers, shape.kv_heads, shape.head_dim) == (3, 2, 64)
    assert shape.weight_bytes == 2 * model.num_parameters()
