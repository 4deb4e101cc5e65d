"""Layered prefill: prompts and running answers share the time."""

import itertools
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oscar_mm.cache.batch_view import BatchView
from oscar_mm.cache.cache import OscarCache
from oscar_mm.engine import decode_runner, device_timer, layered_prefill, running_batches
from oscar_mm.engine.decode_runner import DecodeRunner
from oscar_mm.fast_decode import graph_runner
from oscar_mm.fast_decode.graph_runner import GraphRunner, InflightStep
from tests.checkpoints import build
from tests.engine.engine import (
    BAD,
    SHORT,
    SimulatedTimer,
    alone,
    embedding,
    empty,
    loaded,
    made,
    run,
    together,
)
from tests.engine.engine_waits import engine_waits
from tests.fast_decode.test_graph_runner import Repeat

pytestmark = pytest.mark.usefixtures("quick_collection")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps run between the layers of short prompts too."""
    monkeypatch.setattr(layered_prefill, "_PATIENCE_S", 0.0)


@pytest.mark.usefixtures("impatient")
def test_answers_join_after_a_step_that_failed_while_their_prompt_was_read(
    qwen3_vl_folder, monkeypatch
) -> None:
    pipe = loaded(qwen3_vl_folder)
    expected = alone(pipe, [BAD])
    first, second = made(pipe, SHORT[0], max_new_tokens=200), made(pipe, BAD)
    pipe.engine.submit(first)
    steps = iter(range(4))
    pipe.engine.run_until(lambda: next(steps, None) is None)
    right, fails = graph_runner.GraphRunner.__call__, [False]

    def call(*args: Any) -> torch.Tensor:
        if fails[0]:
            fails[0] = False
            raise RuntimeError("out of memory")
        return right(*args)

    def meets(_: torch.Tensor) -> None:
        fails[0] = not first.ended
        pipe.engine.scheduler._batches.pace = device_timer.StepTimer()

    monkeypatch.setattr(graph_runner.GraphRunner, "__call__", call)
    pipe.engine.submit(second)
    with embedding(pipe, meets):
        run(pipe, [first, second])
    with pytest.raises(RuntimeError, match="out of memory"):
        first.complete()
    assert [second.complete().token_ids] == expected


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_prompt_that_is_read_while_others_decode(qwen3_vl_folder, monkeypatch) -> None:
    pipe = loaded(qwen3_vl_folder, "channel")
    expected = alone(pipe, SHORT[:2], max_new_tokens=60)
    long = "What is written on the sign at the corner of the street? " * 60
    [read] = alone(pipe, [long])
    first = [made(pipe, prompt, max_new_tokens=60) for prompt in SHORT[:2]]
    for answer in first:
        pipe.engine.submit(answer)
    steps = iter(range(4))
    pipe.engine.run_until(lambda: next(steps, None) is None)
    before, during = len(first[0].tokens), []
    layers = pipe.model.get_decoder().layers

    def layer_begins(*_: Any) -> None:
        pipe.engine.scheduler._batches.pace = device_timer.StepTimer()
        during.append(len(first[0].tokens))

    hooks = [layer.register_forward_pre_hook(layer_begins) for layer in layers]
    answer = made(pipe, long)
    pipe.engine.submit(answer)
    pipe.engine.run_until(lambda: bool(answer.tokens))
    for hook in hooks:
        hook.remove()
    assert before < max(during)
    run(pipe, [*first, answer])
    assert [one.complete().token_ids for one in first] == expected
    assert answer.complete().token_ids == read


@pytest.mark.daily("channel")
@pytest.mark.parametrize("policy", ["bf16", "channel"])
def test_prompts_in_chunks_are_read_as_alone(qwen3_vl_folder, policy: str) -> None:
    pipe = loaded(qwen3_vl_folder, policy, prefill_chunk=24)
    prompts = [SHORT[0] * 20, *SHORT, SHORT[3] * 30]
    passes = []
    layer = pipe.model.get_decoder().layers[0]
    hook = layer.register_forward_pre_hook(lambda _, args: passes.append(args[0].shape[1]))
    expected = alone(pipe, prompts)
    assert together(pipe, [made(pipe, prompt) for prompt in prompts]) == expected
    assert max(passes) <= 24, "activations of more than a chunk"
    hook.remove()


def test_new_requests_are_prepared_between_steps(qwen3_vl_folder) -> None:
    """Calls of other threads come between two steps."""
    pipe = loaded(qwen3_vl_folder)
    steps, over = [0], threading.Event()
    running = made(pipe, SHORT[0], max_new_tokens=3000)

    def lead() -> None:
        pipe.engine.submit(running)
        pipe.engine.run_until(lambda: running.ended or over.is_set())

    thread = threading.Thread(target=lead)
    thread.start()
    try:
        while len(running.tokens) < 20:
            assert thread.is_alive()
            time.sleep(0.001)  # A thread that does not sleep keeps the others from running.
        waits = []
        for _ in range(20):
            before = len(running.tokens)
            with engine_waits(pipe):
                waits.append(len(running.tokens) - before)
        assert steps and not running.ended
        assert sorted(waits)[-3] <= 8, waits
    finally:
        over.set()
        thread.join()
        running.cancel()


@pytest.mark.slow
def test_a_step_that_was_launched_early_is_not_lost_when_others_join(
    qwen3_vl_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = loaded(qwen3_vl_folder, "standard")
    expected = alone(pipe, SHORT, max_new_tokens=40)
    launched, taken = list[InflightStep](), list[InflightStep]()
    made_early, is_step = InflightStep.__new__, InflightStep.is_step

    def note_launched(*arguments: Any) -> InflightStep:
        launched.append(made_early(*arguments))
        return launched[-1]

    def note_taken(early: InflightStep, *arguments: Any) -> bool:
        fits = is_step(early, *arguments)
        taken.extend([early] * fits)
        return fits

    monkeypatch.setattr(InflightStep, "__new__", note_launched)
    monkeypatch.setattr(InflightStep, "is_step", note_taken)
    monkeypatch.setattr(decode_runner, "GraphRunner", partial(GraphRunner, capture=Repeat()))
    answers = [made(pipe, prompt, max_new_tokens=40) for prompt in SHORT]
    for answer in answers:
        pipe.engine.submit(answer)
        steps = iter(range(9))
        pipe.engine.run_until(lambda steps=steps: next(steps, None) is None)
    run(pipe, answers)
    assert [answer.complete().token_ids for answer in answers] == expected
    # An end by max_new_tokens is predicted too.
    assert len(launched) > 20 and len(launched) - len(taken) <= 1


def test_a_step_with_new_requests_is_launched_before_the_tokens_of_others_have_come(
    qwen3_vl_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the device does not wait while requests join."""
    pipe, log = loaded(qwen3_vl_folder, "standard"), list[str]()

    class Logged(Repeat):
        def __call__(self, function: Any, device: torch.device) -> Any:
            replay = super().__call__(function, device)
            return lambda: (log.append("launch"), replay())[1]

    monkeypatch.setattr(decode_runner, "GraphRunner", partial(GraphRunner, capture=Logged()))
    monkeypatch.setattr(DecodeRunner, "size_for", lambda *_, **__: 4)
    right, give = DecodeRunner._join, decode_runner._give
    monkeypatch.setattr(DecodeRunner, "_join", lambda *x: (log.append("join"), right(*x))[1])
    monkeypatch.setattr(decode_runner, "_give", lambda *x: (log.append("wait"), give(*x))[1])

    def grow() -> None:
        for slots in pipe.store.allocators.values():  # Leave free slots in the pools.
            slots.release(slots.allocate(900))

    expected = alone(pipe, max_new_tokens=40)
    answers = [made(pipe, prompt, max_new_tokens=40) for prompt in SHORT]
    log.clear()
    for answer in answers:
        pipe.engine.submit(answer)
        goal = len(answers[0].tokens) + 8
        pipe.engine.run_until(lambda goal=goal: len(answers[0].tokens) >= goal)
        if answer is answers[0]:
            pipe.engine.call(grow)
    run(pipe, answers)
    assert [answer.complete().token_ids for answer in answers] == expected
    # The first one after the pools have grown is captured anew.
    assert log.count("join") == 3 and " ".join(log).count("join launch wait") == 2
    assert empty(pipe)


def test_requests_that_join_a_step_that_fails_go_on(
    qwen3_vl_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = loaded(qwen3_vl_folder, "standard")
    expected = alone(pipe, max_new_tokens=40)
    monkeypatch.setattr(decode_runner, "GraphRunner", partial(GraphRunner, capture=Repeat()))
    monkeypatch.setattr(DecodeRunner, "size_for", lambda *_, **__: 4)
    right = DecodeRunner._join

    def breaks(*arguments: Any) -> torch.Tensor:
        right(*arguments)
        raise RuntimeError("broken")

    answers = [made(pipe, prompt, max_new_tokens=40) for prompt in SHORT]
    for answer in answers[:2]:
        pipe.engine.submit(answer)
    groups = pipe.engine.scheduler._batches
    pipe.engine.run_until(lambda: bool(groups._shared and groups._shared.batch.is_ahead))
    with monkeypatch.context() as broken:
        broken.setattr(DecodeRunner, "_join", breaks)
        pipe.engine.submit(answers[2])
        pipe.engine.run_until(lambda: answers[0].ended)
    pipe.engine.submit(answers[3])
    run(pipe, answers)
    for answer in answers[:2]:
        with pytest.raises(RuntimeError, match="broken"):
            answer.complete()
    assert [answer.complete().token_ids for answer in answers[2:]] == expected[2:]
    assert empty(pipe)


def test_prompts_that_are_read_again_one_by_one_keep_their_seeds(
    qwen3_vl_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a pass has stored is checked after its first tokens have been sampled."""
    pipe, found = loaded(qwen3_vl_folder), [True, False]
    sampled = {"temperature": 1.0, "seed": 5}
    expected = alone(pipe, **sampled)
    monkeypatch.setattr(BatchView, "pop_overflow", lambda _: found.pop(0) if found else False)
    answers = [made(pipe, prompt, **sampled) for prompt in SHORT]
    assert together(pipe, answers) == expected
    assert not found


def test_an_error_of_a_step_that_was_launched_early_is_not_that_of_a_new_request(
    qwen3_vl_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = loaded(qwen3_vl_folder, "standard")
    expected = alone(pipe, max_new_tokens=40)
    monkeypatch.setattr(decode_runner, "GraphRunner", partial(GraphRunner, capture=Repeat()))
    answers = [made(pipe, prompt, max_new_tokens=40) for prompt in SHORT]
    for answer in answers[:2]:
        pipe.engine.submit(answer)
    groups = pipe.engine.scheduler._batches
    pipe.engine.run_until(lambda: bool(groups._shared and groups._shared.batch.is_ahead))
    right, failed = GraphRunner.__call__, []

    def call(steps: GraphRunner, *args: Any) -> torch.Tensor:
        if steps.is_ahead and not failed:
            failed.append(len(answers[2].tokens))
            raise RuntimeError("broken")
        return right(steps, *args)

    monkeypatch.setattr(GraphRunner, "__call__", call)
    # No steps between layers.
    monkeypatch.setattr(device_timer.StepTimer, "seconds", lambda _: 1e9)
    for answer in answers[2:]:
        pipe.engine.submit(answer)
    run(pipe, answers)
    assert failed == [1], "they had their first token, and waited to join"
    for answer in answers[:2]:
        with pytest.raises(RuntimeError, match="broken"):
            answer.complete()
    assert [answer.complete().token_ids for answer in answers[2:]] == expected[2:]
    assert empty(pipe)


@pytest.mark.daily("0.0015-0.0015-0.0", "0.0015-0.009-0.0")
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("layer_seconds", "later_seconds", "lost_seconds"),
    [
        (0.0015, 0.0015, 0.0),
        (0.036, 0.036, 0.0),
        (0.0015, 0.009, 0.0),
        (0.0085, 0.0085, 0.002),
    ],
)
def test_answers_keep_half_of_the_device_while_a_prompt_is_read(
    layer_seconds: float,
    later_seconds: float,
    lost_seconds: float,
    qwen3_vl_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = loaded(qwen3_vl_folder, prefill_chunk=16)
    step_seconds, spent = 0.008, {"layers": 0.0, "steps": 0.0, "turns": 0.0}
    right = GraphRunner.__call__

    def work(kind: str, seconds: float) -> None:
        SimulatedTimer.clock += seconds
        spent[kind] += seconds

    def step(*arguments: Any) -> torch.Tensor:
        work("steps", step_seconds)
        return right(*arguments)

    def layer_ends(_: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if not pipe.engine.scheduler._batches.stepping:
            begins = spent["layers"] < 50 * layer_seconds
            work("layers", layer_seconds if begins else later_seconds)

    paused = OscarCache.paused

    def turns(cache: OscarCache) -> Any:
        work("turns", lost_seconds)
        return paused(cache)

    monkeypatch.setattr(OscarCache, "paused", turns)
    monkeypatch.setattr(running_batches, "DeviceTimer", SimulatedTimer)
    monkeypatch.setattr(GraphRunner, "__call__", step)
    running = [made(pipe, prompt, max_new_tokens=3000) for prompt in SHORT]
    for answer in running:
        pipe.engine.submit(answer)
    pipe.engine.run_until(lambda: len(running[-1].tokens) > 4 or running[-1].ended)
    layers = pipe.model.get_decoder().layers
    handles = [layer.register_forward_hook(layer_ends, with_kwargs=True) for layer in layers]
    long = made(pipe, "What is written on the sign at the corner of the street? " * 40)
    spent.update(layers=0.0, steps=0.0, turns=0.0)
    pipe.engine.submit(long)
    pipe.engine.run_until(lambda: bool(long.tokens) or long.ended)
    assert not long.ended, long.complete()
    for handle in handles:
        handle.remove()
    for answer in (*running, long):
        answer.cancel()
    assert spent["layers"] > 50 * layer_seconds
    # The step after the last layer is one too many, and what is made in advance at the end of a
    # chunk, here of three layers, is not taken off the next one.
    reading = spent["layers"] + spent["turns"]
    assert 0.97 <= (spent["steps"] - step_seconds) / reading <= 1.35


@pytest.mark.parametrize("layer_seconds", [0.06, 0.2])
def test_a_short_prompt_is_read_at_once(
    layer_seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps begin between its layers once running answers have waited for 0.2 s, and do not make up
    for that time."""
    pipe = loaded(build("qwen3_vl", tmp_path / "deep", num_hidden_layers=3))
    right, step_seconds = GraphRunner.__call__, 0.02
    layers, tokens = pipe.model.get_decoder().layers, list[int]()

    def step(*arguments: Any) -> torch.Tensor:
        SimulatedTimer.clock += step_seconds
        return right(*arguments)

    def layer_ends(*_: Any) -> None:
        if not pipe.engine.scheduler._batches.stepping:
            SimulatedTimer.clock += layer_seconds

    def count(*_: Any) -> None:
        if not pipe.engine.scheduler._batches.stepping:
            tokens.append(len(running.tokens))

    monkeypatch.setattr(running_batches, "DeviceTimer", SimulatedTimer)
    monkeypatch.setattr(GraphRunner, "__call__", step)
    running, read = made(pipe, SHORT[0], max_new_tokens=100), made(pipe, SHORT[1])
    pipe.engine.submit(running)
    pipe.engine.run_until(lambda: len(running.tokens) > 12)
    hooks = [layer.register_forward_hook(layer_ends) for layer in layers]
    hooks.append(layers[0].register_forward_pre_hook(count))
    hooks.append(pipe.model.get_output_embeddings().register_forward_pre_hook(count))
    pipe.engine.submit(read)
    pipe.engine.run_until(lambda: bool(read.tokens))
    for hook in hooks:
        hook.remove()
    before, after = tokens
    for answer in (running, read):
        answer.cancel()
    late = max(len(layers) * layer_seconds - 0.2, 0.0)
    assert 0.5 * late <= (after - before) * step_seconds <= late + step_seconds * (late > 0)


def test_an_answer_after_a_pause_has_not_waited_since_the_last_one(
    qwen3_vl_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, right = loaded(qwen3_vl_folder, prefill_chunk=16), GraphRunner.__call__

    def step(*arguments: Any) -> torch.Tensor:
        SimulatedTimer.clock += 0.01
        return right(*arguments)

    monkeypatch.setattr(running_batches, "DeviceTimer", SimulatedTimer)
    monkeypatch.setattr(GraphRunner, "__call__", step)
    together(pipe, [made(pipe, SHORT[0])])
    SimulatedTimer.clock += 100.0
    first, second = made(pipe, SHORT[0], max_new_tokens=200), made(pipe, SHORT[1] * 200)
    for answer in (first, second):
        pipe.engine.submit(answer)
    pipe.engine.run_until(lambda: bool(second.tokens))
    assert len(first.tokens) < 20
    for answer in (first, second):
        answer.cancel()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("at_once", [True, False])
def test_many_that_wait_are_read_before_a_few_go_on(
    at_once: bool, qwen3_vl_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that ticks with each layer; one by one, a running answer gets half of the time."""
    pipe = loaded(qwen3_vl_folder)
    pipe.engine.reader.max_varlen_tokens = 1  # Each prompt is read by itself.
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(now[0]))
    monkeypatch.setattr(device_timer, "time", clock)
    running = made(pipe, SHORT[0], max_new_tokens=500)
    now, read = [0], list[int]()

    def tick(_: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        now[0] = next(ticks)

    def begin(_: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if kwargs["inputs_embeds"].shape[1] > 1:
            read.append(len(running.tokens))

    decoder = pipe.model.get_decoder()
    handles = [x.register_forward_hook(tick, with_kwargs=True) for x in decoder.layers]
    handles.append(decoder.register_forward_pre_hook(begin, with_kwargs=True))
    pipe.engine.submit(running)
    pipe.engine.run_until(lambda: len(running.tokens) > 4)
    others = [made(pipe, SHORT[1], max_new_tokens=100) for _ in range(9)]
    read.clear()
    if at_once:
        for answer in others:
            pipe.engine.submit(answer)
        pipe.engine.run_until(lambda: len(read) == 9)
        # Nine wait while one runs, then eight while two run, ...; meanwhile a layer of each passes.
        assert read[0] == read[2] < read[-1]
    else:
        for answer in others:
            before = len(running.tokens)
            pipe.engine.submit(answer)
            pipe.engine.run_until(lambda answer=answer: bool(answer.tokens))
            assert len(running.tokens) > before
    for handle in handles:
        handle.remove()
    for answer in (running, *others):
        answer.cancel()


@pytest.mark.parametrize("works_alone", [True, False])
def test_between_two_prompts_answers_make_a_step(
    works_alone: bool, qwen3_vl_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU runs the step while the host takes the first token and prepares the second prompt. With
    many waiting requests and few running ones, prompts are read at once, see the previous test."""
    pipe, read = loaded(qwen3_vl_folder), list[list[int]]()
    pipe.engine.reader.max_varlen_tokens = 1  # Each prompt is read by itself.
    monkeypatch.setattr(
        device_timer.StepTimer, "seconds", lambda _: 1e9
    )  # No steps between layers.
    if works_alone:
        monkeypatch.setattr(running_batches, "DeviceTimer", SimulatedTimer)
    running = [made(pipe, SHORT[0], max_new_tokens=100) for _ in range(8)]
    for answer in running:
        pipe.engine.submit(answer)
    pipe.engine.run_until(lambda: min(len(answer.tokens) for answer in running) > 4)
    others = [made(pipe, SHORT[1], max_new_tokens=100) for _ in range(2)]

    def begin(_: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if kwargs["inputs_embeds"].shape[1] > 1:
            read.append([len(answer.tokens) for answer in (*running, *others)])

    handle = pipe.model.get_decoder().register_forward_pre_hook(begin, with_kwargs=True)
    for answer in others:
        pipe.engine.submit(answer)
    pipe.engine.run_until(lambda: bool(others[1].tokens))
    handle.remove()
    first, second = read
    assert second == [*(tokens + works_alone for tokens in first[:8]), 1, 0]
    for answer in (*running, *others):
        answer.cancel()


def test_a_call_waits_for_one_prompt_of_many(qwen3_vl_folder: Path) -> None:
    pipe = loaded(qwen3_vl_folder)
    expected = alone(pipe, [BAD, *SHORT])
    pipe.engine.reader.max_varlen_tokens = 1  # Each prompt is read by itself.
    answers = [made(pipe, prompt) for prompt in (BAD, *SHORT)]
    for answer in answers:
        pipe.engine.submit(answer)
    begun: list[int] = []

    def wait() -> None:
        with engine_waits(pipe, runs_model=True):
            begun.append(sum(bool(answer.tokens) for answer in answers))

    waiting = threading.Thread(target=wait)

    def read(_: torch.Tensor) -> None:
        waiting.start()
        while not pipe.engine.thread.has_calls:
            time.sleep(0.001)

    with embedding(pipe, read):
        run(pipe, answers)
    waiting.join(60)
    assert begun == [1]
    assert [answer.complete().token_ids for answer in answers] == expected


@pytest.mark.parametrize("brief", [True, False])
def test_a_call_comes_between_the_layers_of_a_prompt(qwen3_vl_folder: Path, brief: bool) -> None:
    """It may free slots, but pools must not shrink while the prompt reads them. A call that runs
    the model waits for the end of the pass."""
    pipe = loaded(qwen3_vl_folder)
    chat, other = pipe.chat(), pipe.chat()
    chat.ask(SHORT[0], max_new_tokens=2)
    expected = chat.fork().ask(SHORT[1], max_new_tokens=4).token_ids
    other.ask(SHORT[2] * 20, max_new_tokens=2)
    layers, passed, found = pipe.model.get_decoder().layers, [0], list[int]()

    def work() -> None:
        found.append(passed[0])
        other.close()
        pipe.store.trim()

    how = {"runs_model": not brief}
    waiting = threading.Thread(target=pipe.engine.call, args=[work], kwargs=how)

    def layer_begins(*_: object) -> None:
        if not passed[0]:
            waiting.start()
            while not pipe.engine.thread.has_calls:
                time.sleep(0.001)
        passed[0] += 1

    hooks = [layer.register_forward_pre_hook(layer_begins) for layer in layers]
    assert chat.ask(SHORT[1], max_new_tokens=4).token_ids == expected
    for hook in hooks:
        hook.remove()
    waiting.join(60)
    assert found == [1] if brief else found[0] >= len(layers)
