"""Decode steps on fixed tensors, as a graph replays them, against eager ones: bit for bit."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from oscar_mm import KVPolicy, OscarCache
from oscar_mm.cache.fixed import FixedTables
from oscar_mm.decoding import loop, steps
from oscar_mm.decoding.loop import decode
from oscar_mm.decoding.sampling import Sampling
from tests.prompts import REQUESTS

TWO = REQUESTS["two images"]
LONG = type(TWO)("Compare the two pictures. " * 6, TWO.images)
BATCH = [LONG, REQUESTS["text"], REQUESTS["image"]]


class Repeat:
    """Stands in for CUDA graphs: runs the function again on the tensors that it was given."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, function: Callable[[], Any], _: torch.device) -> Callable[[], Any]:
        self.captures += 1

        def replay() -> Any:
            self.replays += 1
            return function()

        return replay


def answer(
    oscar, monkeypatch, record, *, policy, tokens, ends=frozenset(), requests=BATCH, cache=None
):
    """Token lists of each row, and the cache."""
    monkeypatch.setattr(loop, "DecodeSteps", partial(steps.DecodeSteps, record=record))
    cache = OscarCache(policy) if cache is None else cache
    sampling = Sampling(max_new_tokens=tokens)
    answer = decode(oscar.model, oscar.prompt(requests), cache, sampling, end_tokens=ends)
    return [list(row) for row in zip(*answer, strict=True)], cache


POLICIES = {
    "bf16": KVPolicy.preset("bf16"),
    "two widths": KVPolicy.preset("compact", bits={"text": 4, "image": 2}, window=16, sinks=2),
    "no window": KVPolicy.preset("compact", window=0, sinks=0),
}


@pytest.mark.parametrize("name", POLICIES)
def test_fixed_steps_equal_eager_ones(oscar, monkeypatch, name: str) -> None:
    how = {"policy": POLICIES[name], "tokens": 100}
    free, start = answer(oscar, monkeypatch, None, **how | {"tokens": 30})
    # One row ends, the others go on.
    end = next(token for token in free[1][8:] if token not in free[0] + free[2])
    how["ends"] = frozenset({end})
    eager, expected = answer(oscar, monkeypatch, None, **how)
    assert eager[1][29] is None and eager[0][29] is not None
    repeat = Repeat()
    fixed, cache = answer(oscar, monkeypatch, repeat, **how)
    assert fixed == eager
    assert repeat.replays > 20
    assert cache.memory() == expected.memory()
    packed = [one.memory().by_kind.get("codes", 0) for one in (start, cache)]
    assert packed == [0, 0] if name == "bf16" else packed[0] < packed[1]
    for layer in range(len(cache.layers)):
        for mine, theirs in zip(cache.unpacked(layer), expected.unpacked(layer), strict=True):
            assert torch.equal(mine, theirs)


def test_a_capture_holds_until_a_pool_or_a_table_grows(oscar, monkeypatch) -> None:
    repeat = Repeat()
    answer(oscar, monkeypatch, repeat, policy="bf16", tokens=100, requests=BATCH[:1])
    # A block of 16 bits takes 32 tokens.
    assert 1 < repeat.captures <= 5
    assert repeat.replays == 100 - 1 - 1


def test_a_fork_goes_on_by_itself(oscar, monkeypatch) -> None:
    """Its first step copies a shared block, which no graph does."""
    _, cache = answer(oscar, monkeypatch, None, policy="compact", tokens=5, requests=BATCH[:1])
    twin = cache.fork()
    how = {"policy": "compact", "tokens": 40, "requests": [REQUESTS["text"]]}
    eager, _ = answer(oscar, monkeypatch, None, cache=cache, **how)
    assert answer(oscar, monkeypatch, Repeat(), cache=twin, **how)[0] == eager


@pytest.mark.parametrize("after_running", [False, True])
def test_a_capture_that_fails_leaves_the_answer(oscar, monkeypatch, caplog, after_running) -> None:
    def fail(function, _):
        if after_running:
            kept = [layer.blocks.storage.clone() for layer in cache.layers]
            function()
            for layer, storage in zip(cache.layers, kept, strict=True):
                layer.blocks.storage.copy_(storage)  # a capture runs nothing on the device
        raise RuntimeError("operation not permitted when stream is capturing")

    how = {"policy": "compact", "tokens": 20}
    eager, _ = answer(oscar, monkeypatch, None, **how)
    cache = OscarCache("compact")
    found, _ = answer(oscar, monkeypatch, fail, cache=cache, **how)
    assert found == eager
    [message] = [one.message for one in caplog.records if one.levelname == "WARNING"]
    assert "not permitted when stream is capturing" in message


def test_tables_stay_where_they_are_until_they_are_too_small(oscar, monkeypatch) -> None:
    _, cache = answer(oscar, monkeypatch, None, policy="bf16", tokens=2, requests=BATCH[:1])
    fixed = FixedTables(1)
    cpu = torch.device("cpu")
    arguments = ((2, None), 2, 2, 4, cpu)
    fixed.refill(cache.ledger.sequences)
    fixed.refill_writes(None)
    tables, writes = fixed.tables(cache.ledger.sequences, *arguments), fixed.writes(cpu)
    assert writes.tolist() == [[-1] * 4]
    place, version = tables.items.data_ptr(), fixed.version
    fixed.refill(cache.ledger.sequences)
    fixed.refill_writes(torch.tensor([[0], [0], [7], [3]]).numpy())
    assert writes.tolist() == [[0, 0, 7, 3]]
    assert fixed.tables([], *arguments).items.data_ptr() == place and fixed.version == version
    longer = cache.ledger.sequences[0].copy()
    for stream in longer.streams.values():
        stream.blocks = stream.blocks * 40
        stream.tail += 39 * 32
    fixed.refill([longer])
    assert fixed.version == version + 1
    found = fixed.tables([longer], *arguments)
    assert found.items.shape[1] >= int(found.counts.sum()) > tables.items.shape[1]
