"""Blocks against attention as an engine schedules it: the same keys and values."""

import pytest
import torch

from oscar_mm import KVPolicy
from oscar_mm.compare.blocks import Blocks
from oscar_mm.compare.forced import LayerStates
from oscar_mm.compare.methods import block_methods
from tests.compare.states import states
from tests.vllm_plugin.requests import Layer


@pytest.mark.parametrize("policy", ["standard", "standard:center=false"])
@pytest.mark.parametrize(("first", "step"), [(None, 1), (200, 200), (40, 1), (110, 20)])
def test_restored_is_what_an_engine_stores(first: int | None, step: int, policy: str) -> None:
    """Token for token, though ``Blocks`` takes many steps at once."""
    layer, tokens = Layer(policy), 390
    request = layer.request(tokens)
    layer.step([(request, first or tokens)])
    while request.read < tokens:
        layer.step([(request, min(step, tokens - request.read))])
    queries, keys, values = (x.transpose(0, 1)[None] for x in request.states)
    recorded = LayerStates(
        index=0,
        module=torch.nn.Module(),
        scaling=1.0,
        keys=keys,
        values=values,
        first_queries=queries,
        sigma_of_weights=layer.attention.sigma,
        sigma_of_prompt={},
    )
    method = Blocks("x", KVPolicy.preset(policy), first=first, step=step)
    back = method.restored(recorded, torch.zeros(tokens, dtype=torch.int8))
    stored = layer.stored(request, tokens)
    for found, expected in zip((back.keys, back.values), stored, strict=True):
        torch.testing.assert_close(found[0].transpose(0, 1), expected)


@pytest.mark.parametrize("method", block_methods(), ids=lambda method: method.name)
def test_rows_do_not_know_of_each_other(method: Blocks) -> None:
    ids = torch.zeros(300, dtype=torch.int8)
    [both] = states(2, ids)
    back = method.restored(both, ids)
    assert not (back.keys == both.keys).all(-1).any() and method.memory([both], ids) is None
    alone = LayerStates(**vars(both) | {"keys": both.keys[1:], "values": both.values[1:]})
    found = method.restored(alone, ids)
    assert torch.equal(found.keys, back.keys[1:]) and torch.equal(found.values, back.values[1:])
