"""What a conversation takes by the formula, against what a cache of that shape holds."""

import pytest
import torch

from benchmarks.synthetic_cache import synthetic_cache
from oscar_mm.admission.capacity import RESERVED, ModelShape
from oscar_mm.policy import KVPolicy
from tests.cache.invariants import STREAM
from tests.checkpoints import build_decoder

GB = 10**9
LLAMA_LIKE = ModelShape(layers=32, kv_heads=8, head_dim=128, parameters=8 * GB)
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
