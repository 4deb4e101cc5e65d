"""Decode steps on fixed tensors, as a graph replays them, against eager ones: bit for bit."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from oscar_mm import KVPolicy, OscarCache
from oscar_mm.cache import layer as layer_module
from oscar_mm.cache.step_plan import AttentionShape, GraphTables, PackJob, StepPlan
from oscar_mm.engine import decode_runner
from oscar_mm.engine.decode_runner import decode
from oscar_mm.engine.sampling import Sampling
from oscar_mm.fast_decode import graph_runner
from oscar_mm.kernels.launch import NotCapturable
from oscar_mm.ops.store_torch import NOTHING
from oscar_mm.policy import PLAIN, Bits
from tests.cache.invariants import STREAM
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
    monkeypatch.setattr(
        decode_runner, "GraphRunner", partial(graph_runner.GraphRunner, capture=record)
    )
    cache = OscarCache(policy, model=oscar.model) if cache is None else cache
    sampling = Sampling(max_new_tokens=tokens)
    answer = decode(oscar.model, oscar.prompt(requests), cache, sampling, end_tokens=ends)
    return [list(row) for row in zip(*answer, strict=True)], cache


POLICIES = {
    "bf16": KVPolicy.preset("bf16"),
    "two widths": KVPolicy.preset("channel", bits={"text": 4, "image": 2}, window=16, sinks=2),
    "no window": KVPolicy.preset("channel", window=0, sinks=0),
    "stream": KVPolicy(bits=(3, 2), window=16, **STREAM),
    "stream, two widths": KVPolicy(bits={"text": (4, 2), "image": 2}, window=8, sinks=2, **STREAM),
    "stream, no window": KVPolicy(bits=2, window=0, sinks=0, **STREAM),
}


@pytest.mark.daily("no window", "stream, two widths")
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
    packed = [sum(stream.packed for stream in one.kv_manager.streams()) for one in (start, cache)]
    assert packed == [0, 0] if name == "bf16" else packed[0] < packed[1]
    for layer in range(len(cache.layers)):
        for mine, theirs in zip(cache.unpacked(layer), expected.unpacked(layer), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("name", "at_once"), [("stream", True), ("stream, no window", False)])
def test_fixed_steps_pack_all_layers_at_once(oscar, monkeypatch, name: str, at_once: bool) -> None:
    """But in no window, where the token that is packed is not in 16-bit precision."""
    counts = {"store": 0, "store_layers": 0}

    def counted(operation: str, run: Callable[..., None], *arguments: Any) -> None:
        counts[operation] += 1
        run(*arguments)

    for operation in counts:
        run = getattr(layer_module, operation)
        monkeypatch.setattr(layer_module, operation, partial(counted, operation, run))
    how = {"policy": POLICIES[name], "requests": BATCH[:1]}
    runs = []
    for tokens in (30, 40):
        answer(oscar, monkeypatch, Repeat(), tokens=tokens, **how)
        runs.append(counts.copy())
        counts.update(store=0, store_layers=0)
    more = {operation: runs[1][operation] - runs[0][operation] for operation in counts}
    if at_once:
        assert more == {"store": 0, "store_layers": 10}
    else:
        assert more["store"] >= 10 * len(oscar.model.get_decoder().layers)
        assert more["store_layers"] == 0


def test_a_capture_holds_until_a_pool_or_a_table_grows(oscar, monkeypatch) -> None:
    repeat = Repeat()
    answer(oscar, monkeypatch, repeat, policy="bf16", tokens=100, requests=BATCH[:1])
    # Slots of 16 bit are asked for by the quarter of what is held, at most 32 at a time.
    assert 1 < repeat.captures <= 8
    assert repeat.replays == 100 - 1 - 1


def test_a_fork_goes_on_by_itself(oscar, monkeypatch) -> None:
    """It takes nothing that the other one has."""
    _, cache = answer(oscar, monkeypatch, None, policy="channel", tokens=5, requests=BATCH[:1])
    twin = cache.fork()
    how = {"policy": "channel", "tokens": 40, "requests": [REQUESTS["text"]]}
    eager, _ = answer(oscar, monkeypatch, None, cache=cache, **how)
    assert answer(oscar, monkeypatch, Repeat(), cache=twin, **how)[0] == eager


@pytest.mark.parametrize("after_running", [False, True])
def test_a_capture_that_fails_leaves_the_answer(oscar, monkeypatch, caplog, after_running) -> None:
    def fail(function, _):
        if after_running:
            kept = [layer.recent.storage.clone() for layer in cache.layers]
            function()
            for layer, storage in zip(cache.layers, kept, strict=True):
                layer.recent.storage.copy_(storage)  # a capture runs nothing on the device
        raise RuntimeError("operation not permitted when stream is capturing")

    how = {"policy": "channel", "tokens": 20}
    eager, _ = answer(oscar, monkeypatch, None, **how)
    cache = OscarCache("channel", model=oscar.model)
    found, _ = answer(oscar, monkeypatch, fail, cache=cache, **how)
    assert found == eager
    [message] = [one.message for one in caplog.records if one.levelname == "WARNING"]
    assert "not permitted when stream is capturing" in message


CHANNEL: dict[str, Any] = {"policy": "channel", "tokens": 80}


@pytest.fixture(scope="module")
def eager(oscar) -> list[list[int]]:
    """The answers by steps that are not captured."""
    with pytest.MonkeyPatch.context() as patch:
        return answer(oscar, patch, None, **CHANNEL)[0]


@pytest.mark.daily("3")
@pytest.mark.parametrize("failures", [1, 3])
def test_a_capture_that_failed_is_tried_again(
    oscar, eager, monkeypatch, caplog, failures: int
) -> None:
    """Another thread may have broken it."""
    repeat, tries = Repeat(), []

    def record(function, device):
        tries.append(function)
        if len(tries) <= failures:
            raise RuntimeError("operation failed due to a previous error during capture")
        return repeat(function, device)

    assert answer(oscar, monkeypatch, record, **CHANNEL)[0] == eager
    assert repeat.replays > 20
    assert [one.levelname for one in caplog.records].count("WARNING") == 1


def test_captures_that_always_fail_are_given_up(oscar, eager, monkeypatch, caplog) -> None:
    tries = []

    def record(function, _):
        tries.append(function)
        try:
            raise ValueError("the first error")
        finally:
            raise RuntimeError("the capture is broken")

    assert answer(oscar, monkeypatch, record, **CHANNEL)[0] == eager
    assert len(tries) == 4
    messages = [one.message for one in caplog.records if one.levelname == "WARNING"]
    assert ["attempt 1 of 4" in messages[0], "attempt 4 of 4" in messages[1]] == [True, True]
    assert all("the first error" in message for message in messages)


def test_what_no_graph_can_hold_is_captured_once_only(oscar, eager, monkeypatch, caplog) -> None:
    """Another try would find the same operation, whose reason is in the log already."""
    tries = []

    def record(function, _):
        tries.append(function)
        raise NotCapturable(
            "decode: PyTorch operations, which wait for the GPU, cannot be captured"
        )

    assert answer(oscar, monkeypatch, record, **CHANNEL)[0] == eager
    assert len(tries) == 1
    assert not [one for one in caplog.records if one.levelname == "WARNING"]


def test_tables_stay_where_they_are_until_they_are_too_small(oscar, monkeypatch) -> None:
    _, cache = answer(oscar, monkeypatch, None, policy="bf16", tokens=2, requests=BATCH[:1])
    fixed = GraphTables(1, KVPolicy.preset("bf16"))
    cpu = torch.device("cpu")
    arguments = AttentionShape((None, None), 2, 2, 4), cpu
    step = StepPlan(past=cache.kv_manager.sequences)
    fixed.write(step)
    tables, writes = fixed.tables(step, *arguments), fixed.writes(cpu)
    assert writes.tolist() == [[-1] * 3]
    place, version = tables.items.data_ptr(), fixed.version
    fixed.refill(step)
    fixed.refill_tokens(StepPlan(writes=np.array([[0], [0], [7]])))
    assert writes.tolist() == [[0, 0, 7]]
    assert (
        fixed.tables(StepPlan(), *arguments).items.data_ptr() == place and fixed.version == version
    )
    longer = cache.kv_manager.sequences[0].copy()
    for stream in longer.streams.values():
        stream.slots = stream.slots * 40
    fixed.refill(StepPlan(past=[longer]))
    assert fixed.version == version + 1
    found = fixed.tables(StepPlan(past=[longer]), *arguments)
    assert found.recents.shape[1] >= int(found.counts.sum()) > tables.recents.shape[1]


def test_fixed_tables_of_slots_have_two_lines_for_each_row() -> None:
    """As many as the tiles of the tokens with which a page begins. Lines of rows that pack nothing,
    and of formats that nobody fills, do nothing.

    The new token is named by the slot that it has at the end of the step.
    """
    policy = KVPolicy(
        bits={"text": (3, 2), "image": 2}, key_axis="token", token_scaling=None, center=True
    )
    text, image = Bits(3, 2), Bits(2, 2)
    fixed, cpu = GraphTables(3, policy), torch.device("cpu")
    fixed.refill_tokens(StepPlan())
    slots = fixed.slots(cpu)
    assert all((table == -1).all() for one in slots.values() for table in one)
    begins = {4: np.array([~7, 0])}
    step = StepPlan(
        pack_jobs=[
            PackJob(2, text, [4], 0, ~np.arange(7, 32), begins),
            PackJob(0, image, [9], 70, np.array([~3]), {}),
        ],
        writes=np.array([[0, 2], [0, 0], [11, 12]]),
    )
    assert fixed.takes(step)
    fixed.refill_tokens(step)
    assert slots[text].jobs[:, 0].tolist() == [-1, -1, -1, -1, 4, 4]
    assert slots[text].jobs[4:, 1:4].tolist() == [[0, 2, 0], [1, 2, 0]]
    assert slots[text].jobs[5, 4:].tolist() == [*range(~23, ~32, -1), *[NOTHING] * 7]
    assert slots[text].begins[:, 0].tolist() == [-1, -1, -1, -1, 4, -1]
    assert slots[text].begins[4, :6].tolist() == [4, 2, 2, 0, ~7, ~12]
    assert slots[image].jobs[0, :4].tolist() == [9, 4, 0, 0]
    assert slots[image].jobs[0, 4 + 70 % 16] == ~3
    assert (slots[image].begins == -1).all()
    assert not fixed.takes(StepPlan(pack_jobs=[*step.pack_jobs, step.pack_jobs[0]]))
    for pages, first, count in (([4], 15, 17), ([4], 15, 18), ([4, 5], 127, 2)):
        pack_job = PackJob(1, text, pages, first, ~np.arange(count), {})
        assert fixed.takes(StepPlan(pack_jobs=[pack_job])) == (count == 17)


@pytest.mark.parametrize("policy", ["bf16", "stream"])
def test_a_capture_is_dropped_exactly_when_the_version_changes(oscar, monkeypatch, policy) -> None:
    repeat, found = Repeat(), []
    monkeypatch.setattr(
        decode_runner, "GraphRunner", partial(graph_runner.GraphRunner, capture=repeat)
    )
    cache, sampling = OscarCache(POLICIES[policy], model=oscar.model), Sampling(max_new_tokens=90)
    prompt = oscar.prompt(BATCH[:1])
    for count, _ in enumerate(decode(oscar.model, prompt, cache, sampling, end_tokens=frozenset())):
        found.append((repeat.captures, cache.version))
        if count == 60:
            slots = cache.store.allocators[PLAIN]
            slots.release(slots.allocate(9))
            cache.store.trim()
    # The first step is eager, and the second is the first that can be captured.
    steps = list(itertools.pairwise(found[2:]))
    captured = [after[0] - before[0] for before, after in steps]
    assert captured == [int(after[1] != before[1]) for before, after in steps]
    assert captured[60 - 2] == 1 and sum(captured) < 20
