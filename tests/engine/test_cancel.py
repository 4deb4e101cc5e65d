"""Requests cancelled during prefill: the prefill ends, and everything is released."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from oscar_mm import OscarOmniPipeline
from oscar_mm.engine import device_timer, layered_prefill, running_batches
from oscar_mm.engine.message import first_turn
from oscar_mm.engine.prefix_cache import PrefixCache
from oscar_mm.engine.request import Request
from oscar_mm.errors import Cancelled
from oscar_mm.media.part import media_parts
from oscar_mm.pipelines.pipeline import Pipeline
from oscar_mm.tensor_parallel import TPGroup
from tests.cache.test_random_walk import poison
from tests.engine.engine import (
    BAD,
    SHORT,
    TOKENS,
    SimulatedTimer,
    alone,
    counted,
    embedding,
    empty,
    loaded,
    made,
    run,
    together,
)
from tests.engine.engine_waits import engine_waits
from tests.pipelines.conftest import NEVER
from tests.prompts import noise, tone

LONG = "What is written on the sign at the corner of the street? " * 40
pytestmark = pytest.mark.usefixtures("quick_collection")


@contextmanager
def at_layer(module: Any, call: Callable[[], Any], passed: int = 0) -> Iterator[None]:
    """Call a function once, in another thread, within a layer's pass after some other passes."""
    left = [passed]

    def hook(*_: Any) -> None:
        left[0] -= 1
        if left[0] == -1:
            thread = threading.Thread(target=call)
            thread.start()
            thread.join(60)

    # As one of ours, which change nothing: another might, and so would share no prefix.
    hook.__module__ = PrefixCache.__module__
    handle = module.register_forward_pre_hook(hook)
    try:
        yield
        assert left[0] < 0
    finally:
        handle.remove()


@contextmanager
def nan_in_unused_memory(pipe: Pipeline) -> Iterator[None]:
    """Fill free slots and uninitialized memory with NaN."""
    with engine_waits(pipe):
        poison(pipe.store)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def omni(qwen3_omni_folder: Path) -> OscarOmniPipeline:
    pipe = OscarOmniPipeline(qwen3_omni_folder, policy="channel", device="cpu")
    pipe.model.generation_config.eos_token_id = NEVER
    return pipe


@pytest.mark.daily("bf16-None", "channel-24")
@pytest.mark.parametrize("chunk", [None, 24])
@pytest.mark.parametrize("policy", ["bf16", "channel"])
def test_reading_ends_at_the_layer(qwen3_vl_folder: Path, policy: str, chunk: int | None) -> None:
    pipe = loaded(qwen3_vl_folder, policy, prefill_chunk=chunk, kv_budget=1 << 24, spill=False)
    expected = alone(pipe, [LONG])
    assert empty(pipe)
    layers = pipe.model.get_decoder().layers
    for place, layer in enumerate(layers):
        answer, passed = made(pipe, LONG), 0 if chunk is None else 3
        pipe.engine.submit(answer)
        with at_layer(layer, answer.cancel, passed), counted(layers) as counts:
            run(pipe, [answer])
        assert counts == [passed + (index <= place) for index in range(len(layers))]
        assert answer.complete().token_ids == []
        assert empty(pipe)
        with nan_in_unused_memory(pipe):
            assert together(pipe, [made(pipe, LONG)]) == expected


@pytest.mark.parametrize("medium", ["image", "audio"])
def test_reading_ends_in_a_tower(omni: OscarOmniPipeline, medium: str) -> None:
    shown = {"images": noise(96, 160)} if medium == "image" else {"audio": tone(3.0)}
    tower = omni.model.get_encoder(modality=medium)
    layers = [*(tower.blocks if medium == "image" else tower.layers)]

    def ask() -> Request:
        sampling = omni.sampling({"max_new_tokens": TOKENS, "temperature": 0}, ())
        prompt = omni.read_request(first_turn("What?", media_parts(**shown)), TOKENS)
        return omni.new_request(prompt, sampling, 0.0)

    expected = together(omni, [ask()])
    answer = ask()
    omni.engine.submit(answer)
    with (
        at_layer(layers[0], answer.cancel),
        counted([*layers, omni.model.get_decoder().layers[0]]) as counts,
    ):
        run(omni, [answer])
    assert counts == [1] + [0] * len(layers)
    assert empty(omni)
    with nan_in_unused_memory(omni):
        assert together(omni, [ask()]) == expected


@pytest.mark.parametrize("policy", ["bf16", "channel"])
def test_some_of_those_that_are_read_together(qwen3_vl_folder: Path, policy: str) -> None:
    pipe = loaded(qwen3_vl_folder, policy)
    expected, layers = alone(pipe), pipe.model.get_decoder().layers
    for left in ([1], [0, 2], [0, 1, 2, 3]):
        answers = [made(pipe, prompt) for prompt in SHORT]
        for answer in answers:
            pipe.engine.submit(answer)

        def leave(left: list[int] = left, answers: list[Request] = answers) -> None:
            for index in left:
                answers[index].cancel()

        with counted(layers) as counts, at_layer(layers[1], leave):
            pipe.engine.run_until(lambda x=answers: all(one.ended or one.tokens for one in x))
        goes_on = len(left) < 4
        assert counts == [1, 1, *[int(goes_on)] * (len(layers) - 2)], "one pass"
        with nan_in_unused_memory(pipe):
            run(pipe, answers)
        found = [answer.complete().token_ids for answer in answers]
        assert found == [[] if i in left else ids for i, ids in enumerate(expected)]
        assert empty(pipe)


def test_a_caller_leaves_with_a_bad_prompt_in_the_batch(qwen3_vl_folder: Path) -> None:
    """When prompts run one by one after an error, each request is checked for cancellation."""
    pipe = loaded(qwen3_vl_folder, "channel")
    expected, layers = alone(pipe), pipe.model.get_decoder().layers
    answers = [made(pipe, prompt) for prompt in (BAD, *SHORT)]
    for answer in answers:
        pipe.engine.submit(answer)

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("broken")

    leaves = at_layer(layers[0], answers[2].cancel, 1)
    with embedding(pipe, fail), leaves, counted(layers) as counts:
        run(pipe, answers)
    assert counts[0] - 1 == counts[1]
    assert isinstance(answers[0].error, RuntimeError)
    found = [answer.complete().token_ids for answer in answers[1:]]
    assert found == [expected[0], [], *expected[2:]]
    assert empty(pipe)


def test_running_answers_continue_when_others_leave(
    qwen3_vl_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layered_prefill, "_PATIENCE_S", 0.0)
    pipe = loaded(qwen3_vl_folder, "channel")
    expected = alone(pipe, SHORT[:2], max_new_tokens=60)
    [read] = alone(pipe, [LONG])
    running = [made(pipe, prompt, max_new_tokens=60) for prompt in SHORT[:2]]
    for answer in running:
        pipe.engine.submit(answer)
    pipe.engine.run_until(lambda: len(running[1].tokens) > 3)
    layers = pipe.model.get_decoder().layers

    def steps_come(*_: Any) -> None:
        pipe.engine.scheduler._batches.pace = device_timer.StepTimer()

    hook = layers[0].register_forward_hook(steps_come)
    left, after = made(pipe, LONG), made(pipe, LONG)
    pipe.engine.submit(left)
    pipe.engine.submit(after)

    before, seen = len(running[0].tokens), list[int]()

    def leave(_: Any, args: tuple) -> None:
        if args[0].shape[1] > 100 and not seen:
            seen.append(len(running[0].tokens))
            left.cancel()

    hooks = [hook, layers[1].register_forward_pre_hook(leave)]
    with nan_in_unused_memory(pipe):
        run(pipe, [*running, left, after])
    for hook in hooks:
        hook.remove()
    assert seen[0] > before, "steps came before it"
    assert [answer.complete().token_ids for answer in running] == expected
    assert left.complete().token_ids == [] and after.complete().token_ids == read
    assert empty(pipe)


def test_a_prefix_that_others_have_stays(qwen3_vl_folder: Path) -> None:
    pipe = loaded(qwen3_vl_folder, "channel", prefix_cache=1 << 22, kv_budget=1 << 24, spill=False)
    picture = noise(300, 400)
    prefixes, layers = pipe.prefixes, pipe.model.get_decoder().layers
    assert prefixes is not None
    # A beginning that is incomplete is not kept.
    answer = made(pipe, SHORT[0], picture)
    pipe.engine.submit(answer)
    with at_layer(layers[1], answer.cancel):
        run(pipe, [answer])
    assert len(prefixes) == 0 and empty(pipe)
    twin = loaded(qwen3_vl_folder, "channel", prefix_cache=1 << 22)
    expected = [together(twin, [made(twin, x, picture)])[0] for x in (SHORT[0], SHORT[1])]
    assert together(pipe, [made(pipe, SHORT[0], picture)]) == expected[:1]
    assert len(prefixes) == 1
    used = pipe.store.memory().used_bytes
    # One that continues it leaves it to others.
    answer = made(pipe, SHORT[1], picture)
    pipe.engine.submit(answer)
    with at_layer(layers[1], answer.cancel):
        run(pipe, [answer])
    assert prefixes.hits == 1 and len(prefixes) == 1
    assert pipe.store.memory().used_bytes == used
    with nan_in_unused_memory(pipe):
        assert together(pipe, [made(pipe, SHORT[1], picture)]) == expected[1:]


@pytest.mark.parametrize("where", ["queue", "prompt", "before"])
def test_a_turn_that_is_cancelled_before_its_first_word(qwen3_vl_folder: Path, where: str) -> None:
    pipe = loaded(qwen3_vl_folder, "channel")
    chat, twin = pipe.chat(), pipe.chat()
    for one in (chat, twin):
        one.ask(SHORT[0], images=noise(96, 160), max_new_tokens=4)
    turns, used = chat.turns, pipe.store.memory().used_bytes
    layers = pipe.model.get_decoder().layers
    other = chat.fork() if where == "before" else chat
    with other.pipe.engine.keep_stepping(lambda: None):
        stream = other.stream(LONG, max_new_tokens=TOKENS)
        if where == "before":
            other.cancel()
        if where == "queue":
            pipe.engine.scheduler.max_rows = 0
            threading.Timer(0.1, other.cancel).start()
            with pytest.raises(Cancelled):
                list(stream)
            pipe.engine.scheduler.max_rows = 8
        elif where == "prompt":
            with (
                at_layer(layers[1], lambda: chat.answering and chat.answering.cancel()),
                counted(layers) as counts,
                pytest.raises(Cancelled),
            ):
                list(stream)
            assert counts[0] == counts[1] == 1 and not any(counts[2:])
        else:
            with counted(layers) as counts, pytest.raises(Cancelled):
                list(stream)
            assert not any(counts)
    if where == "before":
        other.close()
    assert chat.turns == turns and pipe.store.memory().used_bytes == used
    chat = chat.fork() if where == "queue" else chat
    with nan_in_unused_memory(pipe):
        found, expected = (one.ask(SHORT[1], max_new_tokens=6).text for one in (chat, twin))
    assert found == expected
    assert chat.turns == twin.turns


def test_an_answer_that_a_hook_of_others_cancels(qwen3_vl_folder: Path) -> None:
    """A hook may raise Cancelled, for example of another pipeline, which ends the answers."""
    pipe = loaded(qwen3_vl_folder, "channel")
    expected, layers = alone(pipe), pipe.model.get_decoder().layers

    def fail(*_: Any) -> None:
        raise Cancelled("of another pipeline")

    for prompts in ([LONG], SHORT):
        answers = [made(pipe, prompt) for prompt in prompts]
        hook = layers[1].register_forward_pre_hook(fail)
        for answer in answers:
            pipe.engine.submit(answer)
        run(pipe, answers)
        hook.remove()
        assert all(isinstance(answer.error, Cancelled) for answer in answers)
        del answers, answer
    assert alone(pipe) == expected
    assert empty(pipe)


def test_a_turn_that_is_added_and_cancelled(qwen3_vl_folder: Path) -> None:
    pipe = loaded(qwen3_vl_folder, "channel")
    chat, layers = pipe.chat(), pipe.model.get_decoder().layers
    with (
        at_layer(layers[1], chat.cancel),
        counted(layers) as counts,
        pytest.raises(Cancelled),
    ):
        chat.tell(LONG, "A fox.")
    assert counts[:2] == [1, 1] and not any(counts[2:])
    assert not chat.turns
    chat.close()
    assert empty(pipe)


def test_a_turn_that_is_cancelled_after_its_first_word(qwen3_vl_folder: Path) -> None:
    pipe = loaded(qwen3_vl_folder)
    chat = pipe.chat()
    stream = chat.stream(SHORT[0], max_new_tokens=500)
    text = next(stream)
    assert chat.answering is not None
    chat.answering.cancel()
    text += "".join(stream)
    assert [(turn.answer, turn.finish_reason) for turn in chat.turns] == [(text, "interrupted")]
    assert chat.ask(SHORT[1], max_new_tokens=4).text


def test_ranks_read_on(qwen3_vl_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a tensor-parallel group would have to agree on the layer to stop at."""
    pipe = loaded(qwen3_vl_folder)
    layers, answer = pipe.model.get_decoder().layers, made(pipe, LONG)
    two = type("TwoRanks", (), {"of": staticmethod(lambda _: TPGroup(count=2))})
    monkeypatch.setattr(running_batches, "TPGroup", two)
    pipe.engine.submit(answer)
    with at_layer(layers[0], answer.cancel), counted(layers) as counts:
        run(pipe, [answer])
    assert counts == [1] * len(layers)
    assert empty(pipe)


def test_other_threads_passes_go_on(qwen3_vl_folder: Path) -> None:
    """A pass of the same layers outside the engine is not stopped."""
    pipe = loaded(qwen3_vl_folder)
    layers, answer = pipe.model.get_decoder().layers, made(pipe, LONG)
    passes: list[tuple[int, ...]] = []

    @torch.inference_mode()
    def leave() -> None:
        answer.cancel()
        passes.append(pipe.model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.shape)

    pipe.engine.submit(answer)
    with at_layer(layers[0], leave):
        run(pipe, [answer])
    assert [shape[:2] for shape in passes] == [(1, 4)]


@pytest.mark.parametrize("is_long", [True, False])
def test_the_host_waits_for_layers_of_long_prompts(
    qwen3_vl_folder: Path, monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    """So most layers are not launched yet when a request is cancelled."""
    pipe, waited, in_flight = loaded(qwen3_vl_folder), [0], list[int]()
    layers = pipe.model.get_decoder().layers
    for index in range(len(layers), 8):
        layers.append(deepcopy(layers[0]))
        layers[-1].self_attn.layer_idx = index

    class Later(SimulatedTimer):
        def wait(self) -> None:
            waited[0] += 1

        def since(self, earlier: SimulatedTimer) -> float:
            return 0.006

    answer = made(pipe, LONG, max_new_tokens=1)
    monkeypatch.setattr(running_batches, "DeviceTimer", Later)
    if is_long:
        pipe.engine.reader.max_varlen_tokens = answer.prompt.tokens - 1
    with counted(layers) as counts:
        hooks = [
            layer.register_forward_pre_hook(lambda *_: in_flight.append(sum(counts) - waited[0]))
            for layer in layers
        ]
        assert len(together(pipe, [answer])[0]) == 1
    for hook in hooks:
        hook.remove()
    # Layers of 6 ms, of which two last longer than the host takes to launch a step.
    assert max(in_flight) == (3 if is_long else sum(counts)), "this one, and two before it"
    assert bool(waited[0]) is is_long


def test_no_prefix_of_weights_that_changed_once_the_last_request_was_left(
    qwen3_vl_folder: Path,
) -> None:
    """The engine has yet to notice that the request is over, so it has not been idle."""

    def change(pipe: Pipeline) -> None:
        with torch.no_grad():
            for weight in pipe.model.get_decoder().parameters():
                weight.mul_(1.2)

    pipe = loaded(qwen3_vl_folder, prefix_cache="1GB")
    plain = loaded(qwen3_vl_folder)
    shown, other = noise(300, 260), noise(280, 300, 1)
    together(pipe, [made(pipe, "What?", [shown])])
    left, following = made(pipe, "What?", [other]), made(pipe, "Why?", [shown])

    def leave() -> None:
        left.cancel()
        change(pipe)
        pipe.engine.submit(following)

    pipe.engine.submit(left)
    with at_layer(pipe.model.get_decoder().layers[0], leave):
        run(pipe, [left, following])
    change(plain)
    assert [following.complete().token_ids] == together(plain, [made(plain, "Why?", [shown])])
    assert pipe.prefixes is not None and pipe.prefixes.hits == 0
