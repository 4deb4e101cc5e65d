"""Steps that are launched before their tokens have come leave no trace where they are not taken.

Whatever the caller does between two tokens: tokens, cache and the next turn are those of eager
steps. The same function again stands for a graph, as in ``test_graph_runner``.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn

from oscar_mm import KVPolicy, OscarCache
from oscar_mm.cache.memory import MemoryReport
from oscar_mm.engine import decode_runner
from oscar_mm.engine.decode_runner import decode
from oscar_mm.engine.sampling import SampledTokens, Sampling
from oscar_mm.fast_decode.graph_runner import GraphRunner
from oscar_mm.policy import PLAIN
from tests.fast_decode.test_graph_runner import BATCH, Repeat
from tests.prompts import REQUESTS, Reference, Request

POLICY = KVPolicy.preset("channel", bits={"text": 2, "image": 4}, window=8, sinks=2)
LENGTH = 36
Tokens = list[list[int | None]]


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache says how its steps are recorded, for its forks too."""

    def captured_if_set(model: nn.Module, cache: OscarCache, *rest: Any) -> GraphRunner:
        return GraphRunner(model, cache, *rest, capture=getattr(cache.store, "record", None))

    monkeypatch.setattr(decode_runner, "GraphRunner", captured_if_set)


def answer(
    oscar: Reference,
    cache: OscarCache,
    requests: Sequence[Request] = BATCH,
    sampling: Sampling | Sequence[Sampling] | int = LENGTH,
    *,
    ends: Sequence[int] = (),
    ended: torch.Tensor | None = None,
) -> Iterator[list[int | None]]:
    if isinstance(sampling, int):
        sampling = Sampling(max_new_tokens=sampling)
    prompt = oscar.prompt(requests)
    ends = frozenset(ends)
    return decode(oscar.model, prompt, cache, sampling, end_tokens=ends, ended=ended)


def compare(
    oscar: Reference, play: Callable[[OscarCache], list], record: Repeat | None = None
) -> None:
    """Play on eager steps and on steps ahead, then another turn."""
    caches = eager, ahead = [OscarCache(POLICY, model=oscar.model) for _ in range(2)]
    for cache in caches:
        slots = cache.store.allocators[PLAIN]
        slots.release(slots.allocate(900))
    ahead.store.record = record or Repeat()
    expected, found = map(play, caches)
    assert found == expected
    assert_same(ahead, eager)
    turn = [REQUESTS["text"]] * len(ahead.kv_manager.sequences)
    expected, found = (list(answer(oscar, cache, turn, 8)) for cache in caches)
    assert found == expected
    assert_same(ahead, eager)


def assert_same(cache: OscarCache, expected: OscarCache) -> None:
    assert cache.kv_manager.sequences == expected.kv_manager.sequences
    assert cache.memory() == expected.memory()
    assert cache.store.memory() == expected.store.memory()
    for layer in range(len(cache.layers)):
        for mine, theirs in zip(cache.unpacked(layer), expected.unpacked(layer), strict=True):
            assert torch.equal(mine, theirs)


@pytest.fixture(scope="module")
def free(oscar) -> list[list[int]]:
    """Tokens of each row where nothing ends it."""
    return [
        list(row) for row in zip(*answer(oscar, OscarCache(POLICY, model=oscar.model)), strict=True)
    ]


def test_rows_end_one_after_the_other(oscar, free, guesses) -> None:
    ends = [row[at] for row, at in zip(free, (5, 32, 14), strict=True)]
    given: list[Tokens] = []

    def play(cache: OscarCache) -> Tokens:
        given.append(list(answer(oscar, cache, ends=ends)))
        return given[-1]

    compare(oscar, play)
    assert len({sum(step[row] is None for step in given[0]) for row in range(3)}) == 3
    # Of the turn after it too. Those that are not ahead pack a page or let a pool grow.
    assert all(guesses) and len(guesses) > 30


@pytest.mark.parametrize("count", [1, 4, 20])
def test_an_answer_that_the_caller_closes(oscar, count: int) -> None:
    def play(cache: OscarCache) -> Tokens:
        steps = answer(oscar, cache)
        found = list(islice(steps, count))
        steps.close()
        return found

    compare(oscar, play)


def test_rows_that_the_caller_ends(oscar, guesses) -> None:
    """And at every token the cache holds those given before it."""
    prompt = oscar.prompt(BATCH).tokens

    def play(cache: OscarCache) -> list[tuple[list[int | None], MemoryReport]]:
        ended, found = torch.zeros(3, dtype=torch.bool), []
        for step in answer(oscar, cache, ended=ended):
            assert cache.get_seq_length() == prompt + len(found)
            found.append((step, cache.memory()))
            ended[1] |= len(found) == 7
            ended[0] |= len(found) == 19
        return found

    compare(oscar, play)
    assert all(guesses)


def test_forks_answer_in_turns(oscar, guesses) -> None:
    """A slot that was foretold to both is taken by one of them."""

    def play(cache: OscarCache) -> Tokens:
        first = answer(oscar, cache)
        found = list(islice(first, 6))
        twin = cache.fork()
        for both in zip(first, answer(oscar, twin, [REQUESTS["text"]] * 3, 24), strict=False):
            found += both
        twin.close()
        return found

    compare(oscar, play)
    assert guesses.count(False) >= 1 and guesses.count(True) > 40


@pytest.mark.parametrize("change", ["crop", "forget", "trim"])
def test_a_cache_that_is_changed_between_two_tokens(oscar, guesses, change: str) -> None:
    def play(cache: OscarCache) -> Tokens:
        first = answer(oscar, cache, sampling=16)
        found = list(islice(first, 8))
        if change == "crop":
            cache.crop(-3)
        elif change == "forget":
            cache.forget(3, 9, row=1)
        else:
            cache.store.trim()
        return found + list(first)

    compare(oscar, play)
    assert guesses.count(False) == 1


def test_others_take_the_block_that_was_free(oscar, guesses) -> None:
    def play(cache: OscarCache) -> Tokens:
        slots, taken, found = cache.store.allocators[PLAIN], [], []
        for step in answer(oscar, cache):
            found.append(step)
            taken += slots.allocate(1)
        slots.release(taken)
        return found

    compare(oscar, play)
    # Each row needs some once in a few tokens, and then has them to itself.
    assert 1 <= guesses.count(False) <= 6


def test_seeds_and_penalties(oscar) -> None:
    sampling = [
        Sampling(max_new_tokens=30, temperature=1.0, top_p=0.9, seed=3),
        Sampling(max_new_tokens=17, repetition_penalty=1.3),
        Sampling(max_new_tokens=24, temperature=0.7, top_k=20, repetition_penalty=1.1, seed=4),
    ]
    compare(oscar, lambda cache: list(answer(oscar, cache, sampling=sampling)))


class Broken(Repeat):
    """NaN comes of the twelfth replay."""

    def __call__(self, function: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
        replay = super().__call__(function, device)

        def breaking() -> tuple[torch.Tensor]:
            [logits] = replay()
            if self.replays == 12:
                logits[1, 3] = float("nan")
            return (logits,)

        return breaking


def test_nan(oscar) -> None:
    """It is met when a step that was fed with what was chosen from it has been launched."""

    def play(cache: OscarCache) -> Tokens:
        steps = answer(oscar, cache)
        # The first step is eager.
        found = list(islice(steps, 13))
        if hasattr(cache.store, "record"):
            with pytest.raises(FloatingPointError, match="NaN"):
                next(steps)
            assert cache.store.record.replays == 13
        else:
            next(steps)
            steps.close()
        return found

    compare(oscar, play, Broken())


def test_a_step_is_launched_before_the_host_waits_for_its_tokens(oscar, monkeypatch) -> None:
    log: list[str] = []

    class Logged(Repeat):
        def __call__(self, function: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
            replay = super().__call__(function, device)

            def logged() -> Any:
                log.append("launch")
                return replay()

            return logged

    listed = SampledTokens.listed
    monkeypatch.setattr(SampledTokens, "listed", lambda one: (log.append("wait"), listed(one))[1])
    cache = OscarCache("bf16", model=oscar.model)
    cache.store.record = Logged()
    steps = answer(oscar, cache, [REQUESTS["text"]], 24)
    for _ in steps:
        log.append("given")
    said = " ".join(log)
    # With the caller's time in between, too.
    assert "launch wait given launch wait given launch wait given" in said
    assert said.endswith("wait given") and log.count("launch") == 24 - 1 - 1
