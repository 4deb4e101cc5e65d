"""The times of passes with prompts that are launched while the one before runs."""

from __future__ import annotations

import random
from collections.abc import Hashable
from time import perf_counter, sleep

import pytest

from oscar_mm.engine import decode_runner, mixed_prefill
from oscar_mm.engine.device_timer import EarlyPass, PassTimer
from oscar_mm.engine.engine_thread import EngineThread
from oscar_mm.engine.media_rows import media_rows
from oscar_mm.engine.request import Request
from oscar_mm.engine.sampling import SampledTokens, Sampler
from oscar_mm.fast_decode.graph_runner import GraphRunner
from tests.engine.engine import SimulatedTimer, empty, loaded, made, run, together
from tests.engine.test_mixed_prefill import CARDS, text, unmixed


@pytest.fixture
def early(monkeypatch) -> list[tuple[Hashable, EarlyPass]]:
    """Kinds of the passes that were launched early with a piece, and the passes; a launch takes a
    second of the device, and choosing tokens a quarter."""
    found, launched, sample = (
        list[tuple[Hashable, EarlyPass]](),
        GraphRunner._launched,
        Sampler.__call__,
    )

    def launches(*given):
        SimulatedTimer.clock += 1.0
        return launched(*given)

    def samples(*given):
        SimulatedTimer.clock += 0.25
        return sample(*given)

    monkeypatch.setattr(GraphRunner, "_launched", launches)
    monkeypatch.setattr(Sampler, "__call__", samples)
    monkeypatch.setattr(decode_runner, "DeviceTimer", SimulatedTimer)
    monkeypatch.setattr(PassTimer, "note_begin", lambda _, *given: found.append(given))
    monkeypatch.setattr(PassTimer, "seconds_left", lambda _: 0.0)
    return found


def test_the_time_of_a_pass_is_its_own(qwen3_vl_folder, capture, small, early) -> None:
    """Neither that of sampling, nor that of requests that decode in batches of their own."""
    pipe = loaded(qwen3_vl_folder)
    running = [
        made(pipe, text(5, seed), max_new_tokens=40, deterministic=seed > 1) for seed in range(4)
    ]
    for one in running:
        pipe.engine.submit(one)
    pipe.engine.run_until(lambda: all(len(one.tokens) > 2 for one in running))
    together(pipe, [made(pipe, text(150, seed)) for seed in range(4)])
    run(pipe, running)
    assert len(early) >= 2
    assert {one.end.since(one.begin) for _, one in early} == {1.0}
    assert all(one.launched <= one.seen for _, one in early)


def test_a_pass_has_begun_before_the_tokens_of_the_last_are_taken(
    qwen3_vl_folder, capture, small, early, monkeypatch
) -> None:
    """So the time of the host, such as for stop texts, is not waited for once more."""
    write, taken = Request.write, list[float]()

    def writes(self: Request, token: int) -> None:
        taken.append(perf_counter())
        write(self, token)

    monkeypatch.setattr(Request, "write", writes)
    monkeypatch.setattr(
        PassTimer, "note_begin", lambda _, kind, one: early.append((kind, one, taken[-3]))
    )
    pipe = loaded(qwen3_vl_folder)
    running = [made(pipe, text(5, seed), max_new_tokens=40) for seed in range(3)]
    for one in running:
        pipe.engine.submit(one)
    pipe.engine.run_until(lambda: all(len(one.tokens) > 2 for one in running))
    together(pipe, [made(pipe, text(250, 1), max_new_tokens=1)])
    run(pipe, running)
    assert len(early) >= 2
    assert all(one.seen <= first for _, one, first in early)


def test_prompts_after_the_last_row_has_ended_are_in_no_early_pass(
    qwen3_vl_folder, capture, small, pieces, early
) -> None:
    """An early pass that was counted again would make the host wait longer and longer."""
    pipe = loaded(qwen3_vl_folder, "standard")
    one = made(pipe, text(5), max_new_tokens=40)
    prompts = [text(150, seed) for seed in range(3)]
    expected = unmixed(qwen3_vl_folder, prompts, max_new_tokens=1)
    pipe.engine.submit(one)
    pipe.engine.run_until(lambda: len(one.tokens) > 2)
    requests = [made(pipe, prompt, max_new_tokens=1) for prompt in prompts]
    for request in requests:
        pipe.engine.submit(request)
    pipe.engine.run_until(lambda: len(early) > 1)
    one.cancel()
    run(pipe, requests)
    assert [request.complete().token_ids for request in requests] == expected
    assert len(pieces) > len(early) + 3  # Most pieces have run alone.
    assert all(rows > 0 for (rows, _), _ in early)


def test_a_late_end_of_the_wait_counts_as_launch(
    qwen3_vl_folder, capture, small, early, monkeypatch
) -> None:
    launches = list[float]()
    pipe = loaded(qwen3_vl_folder)

    def late(_: EngineThread, seconds: float) -> bool:
        sleep(seconds + 0.3)
        return False

    def launched(_: PassTimer, seconds: float) -> None:
        launches.append(seconds)
        monkeypatch.setattr(PassTimer, "seconds_left", lambda _: 0.001)
        monkeypatch.setattr(EngineThread, "wait_for_call", late)

    monkeypatch.setattr(PassTimer, "note_launch", launched)
    one = made(pipe, text(5), max_new_tokens=60)
    pipe.engine.submit(one)
    pipe.engine.run_until(lambda: len(one.tokens) > 2)
    for _ in range(3):
        together(pipe, [made(pipe, text(70, 1), max_new_tokens=1)])
    monkeypatch.undo()
    run(pipe, [one])
    assert max(launches) >= 0.3


def test_launches_after_towers_do_not_shorten_later_waits(
    qwen3_vl_folder, capture, small, early, monkeypatch
) -> None:
    """The host does not wait before those, so what they take says nothing about the others."""
    launches, read, shown = list[float](), media_rows, list[int]()

    def slowly(*given):
        shown.append(len(early))
        sleep(0.5)
        return read(*given)

    monkeypatch.setattr(PassTimer, "note_launch", lambda _, seconds: launches.append(seconds))
    monkeypatch.setattr(
        mixed_prefill,
        "media_rows",
        lambda family, prompts, *more: (slowly if any(x.media for x in prompts) else read)(
            family, prompts, *more
        ),
    )
    pipe = loaded(qwen3_vl_folder)
    one = made(pipe, text(5), max_new_tokens=60)
    pipe.engine.submit(one)
    pipe.engine.run_until(lambda: len(one.tokens) > 2)
    for images in (None, None, CARDS[0], None):
        together(pipe, [made(pipe, text(70, 1), images, max_new_tokens=1)])
    assert shown and shown[-1] < len(early)
    assert launches and max(launches) < 0.5


@pytest.mark.daily("0")
@pytest.mark.parametrize("seed", range(2))
def test_random_waits(qwen3_vl_folder, capture, small, seed, monkeypatch) -> None:
    """Prompts that come, and requests that are cancelled, while the host waits."""
    generator, waits = random.Random(seed), list[float]()
    prompts = [text(count, count) for count in (2, 9, 30, 50, 70, 120)]
    expected = unmixed(qwen3_vl_folder, prompts, max_new_tokens=40)
    pipe, requests = loaded(qwen3_vl_folder, "standard"), list[tuple[int, Request]]()

    def seconds_left(_: PassTimer) -> float:
        waits.append(generator.choice((0.0, 0.0, 0.01, 0.03)))
        return waits[-1]

    monkeypatch.setattr(PassTimer, "seconds_left", seconds_left)
    running = made(pipe, text(5), max_new_tokens=1000)
    pipe.engine.submit(running)
    with pipe.engine.keep_stepping(lambda: None):
        for _ in range(24):
            which = generator.randrange(len(prompts))
            request = made(pipe, prompts[which], max_new_tokens=generator.choice((1, 8, 40)))
            pipe.engine.submit(request)
            requests.append((which, request))
            sleep(generator.choice((0.0, 0.01, 0.03)))
            if generator.random() < 0.15:
                generator.choice(requests)[1].cancel()
        pipe.engine.run_until(lambda: all(request.ended for _, request in requests))
        running.cancel()
    for which, request in requests:
        tokens = request.complete().token_ids
        assert tokens == expected[which][: len(tokens)]
    assert any(waits)
    assert empty(pipe)


def test_watchers_are_called_once_the_next_step_is_launched(
    qwen3_vl_folder, capture, small, monkeypatch
) -> None:
    """Threads that they wake then have the interpreter while the device computes."""
    events, ahead, listed = list[str](), GraphRunner.ahead, SampledTokens.listed

    def launches(self: GraphRunner, *given) -> None:
        ahead(self, *given)
        events.append("launch" if self.is_ahead else "none")

    def waits(self: SampledTokens) -> list[int]:
        events.append("wait")
        return listed(self)

    monkeypatch.setattr(GraphRunner, "ahead", launches)
    monkeypatch.setattr(SampledTokens, "listed", waits)
    pipe = loaded(qwen3_vl_folder)
    running = [made(pipe, text(5, seed), max_new_tokens=20 + seed) for seed in range(3)]
    seen = [0]

    def look() -> None:
        events.append("called")
        seen.append(sum(len(one.tokens) for one in running))

    with pipe.engine.keep_stepping(look):
        for one in running:
            pipe.engine.submit(one)
        run(pipe, running)
        pipe.engine.call(lambda: None)
    assert seen == sorted(seen) and seen[-1] == 20 + 21 + 22
    steps = " ".join(events)
    assert (
        steps.count("launch called wait") >= 5 and "launch called wait called launch" not in steps
    )


def test_watchers_do_not_wait_for_towers(qwen3_vl_folder, capture, small, monkeypatch) -> None:
    read, counts = mixed_prefill.media_rows, list[tuple[int, int]]()
    pipe = loaded(qwen3_vl_folder)
    one, seen = made(pipe, text(5), max_new_tokens=60), [0]

    def towers(family, prompts, *more):
        if any(prompt.media for prompt in prompts):
            counts.append((seen[-1], len(one.tokens)))
        return read(family, prompts, *more)

    monkeypatch.setattr(mixed_prefill, "media_rows", towers)
    with pipe.engine.keep_stepping(lambda: seen.append(len(one.tokens))):
        pipe.engine.submit(one)
        pipe.engine.run_until(lambda: len(one.tokens) > 2)
        for seed in range(3):
            together(pipe, [made(pipe, text(20, seed), CARDS, max_new_tokens=1)])
        run(pipe, [one])
    assert len(counts) == 3
    assert all(known == taken for known, taken in counts)
