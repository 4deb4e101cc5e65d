"""Engine: answers that run together are those that run alone, and nothing of one is another's."""

import gc
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from oscar_mm import OscarVLPipeline
from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.store import PageStore
from oscar_mm.chat.chat import Chat
from oscar_mm.errors import Busy, InputError
from oscar_mm.fast_decode import decode_steps
from oscar_mm.fast_decode.decode_steps import DecodeSteps, EarlyStep
from oscar_mm.generation import answer_groups, decode_batch
from oscar_mm.generation import prefill as prefill_module
from oscar_mm.generation.answer import AnswerWriter
from oscar_mm.generation.generation import Generation
from oscar_mm.pipelines.pipeline import Pipeline
from tests.fast_decode.test_decode_steps import Repeat
from tests.generation.pipelines import pipelines
from tests.pipelines.conftest import NEVER
from tests.prompts import noise

SHORT = ["What is on the sign?", "Why?", "Which month was the wettest?", "How much is it?"]
BAD = "Zq9 what?"
"""A prompt with tokens that no other one has."""
TOKENS = 12
pytestmark = pytest.mark.usefixtures("quick_collection")


@cache
def checkpoint(folder: Path) -> tuple[PreTrainedModel, Any]:
    """Its model and processor: a copy takes a sixth of the time of loading."""
    pipe = OscarVLPipeline(folder, device="cpu")
    return pipe.family.outer_model, pipe.processor


def loaded(folder: Path, policy: str = "bf16", **options: Any) -> OscarVLPipeline:
    """A pipeline whose model is its own; the processor is that of all."""
    model, processor = checkpoint(folder)
    pipe = OscarVLPipeline(deepcopy(model), processor=processor, policy=policy, **options)
    pipe.model.generation_config.eos_token_id = NEVER
    return pipe


@pytest.fixture(scope="module")
def plain(qwen3_vl_folder: Path) -> OscarVLPipeline:
    """Nobody changes it."""
    return loaded(qwen3_vl_folder)


def made(pipe: Pipeline, prompt: str, images: Any = None, **options: Any) -> Generation:
    """An answer that has not begun."""
    sampling = pipe.sampling({"max_new_tokens": TOKENS, "temperature": 0} | options, ())
    shown = {} if images is None else {"images": images}
    read = pipe.read_request(prompt, shown, None, sampling.max_new_tokens)
    return pipe.generation(read, sampling, time.perf_counter())


def run(pipe: Pipeline, answers: Sequence[Generation], most: int = 5000) -> None:
    """Go on until all have ended; fails where that takes more than so many steps."""
    left = itertools.count(most, -1)

    def done() -> bool:
        assert next(left), "the engine turns without an end"
        return all(answer.ended for answer in answers)

    pipe.engine.run_until(done)


def together(pipe: Pipeline, answers: Sequence[Generation]) -> list[list[int]]:
    for answer in answers:
        pipe.engine.submit(answer)
    run(pipe, answers)
    return [answer.complete().token_ids for answer in answers]


def alone(pipe: Pipeline, prompts: Sequence[str] = SHORT, **options: Any) -> list[list[int]]:
    return [together(pipe, [made(pipe, prompt, **options)])[0] for prompt in prompts]


@contextmanager
def embedding(pipe: Pipeline, meets: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """Calls ``meets`` with the ids of each pass that reads tokens of ``BAD`` and no others do."""
    tokenizer = pipe.processor.tokenizer
    [bad] = {tokenizer("Zq9")["input_ids"][-1]}

    def hook(_: Any, args: tuple) -> None:
        if bool((args[0] == bad).any()):
            meets(args[0])

    handle = pipe.model.get_input_embeddings().register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def spill(pipe: Pipeline, chat: Chat) -> None:
    assert pipe.budget is not None
    with pipe.lock:
        chat._spillable.spill(pipe.budget.new_file())


def empty(pipe: Pipeline) -> bool:
    """Whether no answer has left anything behind."""
    gc.collect()
    with pipe.lock:
        pipe.store.collect()
        used = pipe.store.memory().used_bytes
    taken = 0 if pipe.budget is None else pipe.budget.taken_bytes
    return not (used or taken or pipe.engine.running or pipe.engine.waiting)


@pytest.mark.parametrize("policy", ["bf16", "standard", "channel"])
@pytest.mark.parametrize("family", ["llava", "qwen", "moe", "omni"])
def test_answers_together_are_those_alone(folders, family: str, policy: str) -> None:
    pipe = pipelines({family: folders[family]}, policy)[family]
    pipe.model.generation_config.eos_token_id = NEVER
    long = "Compare the two pictures, and say what is written on the sign at the corner. " * 8
    requests = [
        {"prompt": long, "images": [noise(200, 220, 1), noise(90, 120, 2)]},
        {"prompt": SHORT[0]},
        {"prompt": long, "images": noise(160, 90, 3), "max_new_tokens": 3},
        {"prompt": SHORT[2] * 40, "max_new_tokens": 40},
    ]
    expected = [together(pipe, [made(pipe, **one)])[0] for one in requests]
    assert len({token for ids in expected for token in ids}) > 8
    assert together(pipe, [made(pipe, **one) for one in requests]) == expected
    # One after the other, where those before have come some steps.
    answers = [made(pipe, **one) for one in (requests[3], *requests[:3])]
    for answer in answers:
        pipe.engine.submit(answer)
        steps = iter(range(6))
        pipe.engine.run_until(lambda steps=steps: next(steps, None) is None)
    run(pipe, answers)
    found = [answer.complete().token_ids for answer in answers]
    assert found == [expected[3], *expected[:3]]
    del answers, answer
    assert empty(pipe)


def test_an_error_while_prompts_are_read_is_that_prompts(qwen3_vl_folder) -> None:
    pipe = loaded(qwen3_vl_folder, "channel")
    expected = alone(pipe)

    def fail(_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("a tower took too much")

    answers = [made(pipe, prompt) for prompt in (*SHORT[:2], BAD, *SHORT[2:])]
    bad = answers.pop(2)
    for answer in (*answers[:2], bad, *answers[2:]):
        pipe.engine.submit(answer)
    with embedding(pipe, fail):
        run(pipe, [*answers, bad])
    with pytest.raises(torch.OutOfMemoryError, match="a tower"):
        bad.complete()
    assert [answer.complete().token_ids for answer in answers] == expected
    del answers, answer, bad
    assert empty(pipe)


@pytest.mark.parametrize("policy", ["bf16", "channel"])
def test_nan_of_a_prompt_is_that_prompts(qwen3_vl_folder, policy: str) -> None:
    pipe = loaded(qwen3_vl_folder, policy)
    expected = alone(pipe)
    with torch.no_grad():
        place = pipe.processor.tokenizer("Zq9")["input_ids"][-1]
        pipe.model.get_input_embeddings().weight[place] = torch.nan
    answers = [made(pipe, prompt) for prompt in (BAD, *SHORT)]
    for answer in answers:
        pipe.engine.submit(answer)
    run(pipe, answers)
    with pytest.raises(FloatingPointError):
        answers[0].complete()
    assert [answer.complete().token_ids for answer in answers[1:]] == expected


def test_a_later_turn_that_is_read_beside_a_bad_prompt(qwen3_vl_folder) -> None:
    pipe = loaded(qwen3_vl_folder, "channel")

    def second(chat: Any) -> Any:
        return iter(chat.stream(SHORT[1], max_new_tokens=TOKENS))

    chats = [pipe.chat() for _ in range(2)]
    for chat in chats:
        chat.ask(SHORT[0] * 30, images=noise(120, 200), max_new_tokens=4)
    expected = "".join(second(chats[0]))

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("broken")

    bad, stream = made(pipe, BAD), second(chats[1])
    pipe.engine.submit(bad)
    with embedding(pipe, fail):
        assert "".join(stream) == expected
    assert isinstance(bad.error, RuntimeError)
    assert chats[1].turns == chats[0].turns


def test_a_tokenizers_error_is_that_answers(plain, monkeypatch) -> None:
    expected = alone(plain)
    answers = [made(plain, prompt) for prompt in SHORT]

    def push(token: int) -> str:
        raise ValueError(f"no text for {token}")

    monkeypatch.setattr(answers[1].written, "push", push)
    for answer in answers:
        plain.engine.submit(answer)
    run(plain, answers)
    with pytest.raises(ValueError, match="no text"):
        answers.pop(1).complete()
    found = [answer.complete().token_ids for answer in answers]
    assert found == [expected[0], *expected[2:]]


def test_answers_join_after_a_step_that_failed_while_their_prompt_was_read(
    qwen3_vl_folder, monkeypatch
) -> None:
    pipe = loaded(qwen3_vl_folder)
    expected = alone(pipe, [BAD])
    first, second = made(pipe, SHORT[0], max_new_tokens=200), made(pipe, BAD)
    pipe.engine.submit(first)
    steps = iter(range(4))
    pipe.engine.run_until(lambda: next(steps, None) is None)
    right, fails = decode_steps.DecodeSteps.__call__, [False]

    def call(*args: Any) -> torch.Tensor:
        if fails[0]:
            fails[0] = False
            raise RuntimeError("out of memory")
        return right(*args)

    def meets(_: torch.Tensor) -> None:
        fails[0] = not first.ended
        pipe.engine._groups.pace = answer_groups.Pace()

    monkeypatch.setattr(decode_steps.DecodeSteps, "__call__", call)
    pipe.engine.submit(second)
    with embedding(pipe, meets):
        run(pipe, [first, second])
    with pytest.raises(RuntimeError, match="out of memory"):
        first.complete()
    assert [second.complete().token_ids] == expected


def needed(pipe: Pipeline, answer: Generation) -> int:
    growth = pipe.admission.growth(answer.prompt, answer.sampling.max_new_tokens)
    return pipe.admission.growth_bytes(growth)


def test_one_waits_for_another_that_ends_at_its_first_token(qwen3_vl_folder) -> None:
    pipe = loaded(qwen3_vl_folder, kv_budget=1 << 24, spill=False)
    answers = [made(pipe, SHORT[0], max_new_tokens=1) for _ in range(3)]
    # Their pages are free before anybody asks for their text.
    assert pipe.budget is not None
    pipe.budget.limit = int(1.5 * needed(pipe, answers[0]))
    found = together(pipe, answers)
    assert found[0] == found[1] == found[2] and len(found[0]) == 1
    del answers
    assert empty(pipe)


def test_many_wait_for_one(qwen3_vl_folder) -> None:
    pipe = loaded(qwen3_vl_folder, "standard", kv_budget=1 << 24, spill=False)
    assert pipe.budget is not None
    expected = alone(pipe, [SHORT[i % 4] * 3 for i in range(8)])
    pipe.budget.limit = int(1.6 * needed(pipe, made(pipe, SHORT[2] * 3)))

    def work(index: int) -> list[int]:
        return pipe(None, SHORT[index % 4] * 3, max_new_tokens=TOKENS).token_ids

    for _ in range(3):
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(work, range(8))) == expected
    requests = [{"prompt": SHORT[i % 4] * 3, "max_new_tokens": 1 + i % 2} for i in range(12)]
    assert [result.error for result in pipe.batch(requests)] == [None] * 12
    assert empty(pipe)


def test_answers_with_balancing_of_their_own(folders, monkeypatch) -> None:
    pipe = loaded(folders["llava"], "channel")
    requests = [
        {"prompt": SHORT[0] * 30, "images": noise(300, 200)},
        {"prompt": SHORT[1] * 80},
    ]
    expected = [together(pipe, [made(pipe, **one)])[0] for one in requests]
    # Both begin before the first step.
    monkeypatch.setattr(answer_groups.Pace, "seconds", lambda _: 1e9)
    answers = [made(pipe, **one) for one in requests]
    right, balanced = decode_steps.DecodeSteps.__call__, []

    def call(steps: Any, *args: Any) -> torch.Tensor:
        of_rows = steps.cache.layers[0].sigma
        for row, answer in enumerate(x for x in answers if not x.ended):
            balanced.append((row, torch.equal(answer.cache.layers[0].sigma, of_rows[row])))
        return right(steps, *args)

    monkeypatch.setattr(decode_steps.DecodeSteps, "__call__", call)
    assert together(pipe, answers) == expected
    assert {row for row, _ in balanced} == {0, 1} and all(alike for _, alike in balanced)


def test_what_overtakes_is_read_as_it_would_be_alone(qwen3_vl_folder, monkeypatch) -> None:
    pipe = loaded(qwen3_vl_folder, kv_budget=1 << 24, spill=False)
    assert pipe.budget is not None
    small, large = made(pipe, SHORT[0]), made(pipe, SHORT[1], max_new_tokens=400)
    exact = made(pipe, SHORT[2], deterministic=True)
    pipe.budget.limit = max(needed(pipe, small) + needed(pipe, exact), needed(pipe, large))
    right, in_line = prefill_module.prefill, []

    def prefill(model: Any, prompt: Any, *rest: Any, **options: Any) -> torch.Tensor:
        in_line.append(prompt.tokens)
        return right(model, prompt, *rest, **options)

    monkeypatch.setattr(prefill_module, "prefill", prefill)
    order = []
    for answer in (small, large, exact):
        pipe.engine.submit(answer)
    for answer in (small, large, exact):
        taken = answer.take
        monkeypatch.setattr(
            answer, "take", lambda token, x=answer, y=taken: (order.append(x), y(token))
        )
    run(pipe, [small, large, exact])
    assert not any(answer.error for answer in (small, large, exact))
    assert in_line == [] and order.index(exact) < order.index(large)


def test_an_answer_that_is_left_while_it_gets_its_room(qwen3_vl_folder, monkeypatch) -> None:
    pipe = loaded(qwen3_vl_folder, kv_budget=1 << 24, spill=False)
    assert pipe.budget is not None
    answer, after = made(pipe, SHORT[0]), made(pipe, SHORT[1])
    right = type(pipe.admission).reserve

    def reserve(*args: Any) -> Any:
        room = right(*args)
        answer.cancel()
        return room

    monkeypatch.setattr(type(pipe.admission), "reserve", reserve)
    pipe.engine.submit(answer)
    pipe.engine.submit(after)
    run(pipe, [after])
    assert answer.room is None and answer.tokens == []
    assert pipe.budget.taken_bytes == pipe.budget.used_bytes


def test_a_finalizer_in_the_middle_of_the_queue(plain) -> None:
    class Left:
        """Somebody else's answer is collected while this one is looked at."""

        looked = 0

        @property
        def ended(self) -> bool:
            self.looked += 1
            if self.looked < 3:
                plain.engine.drop_ended()
            return self.looked > 1

    for _ in range(3):
        plain.engine.submit(Left())  # pyright: ignore[reportArgumentType]
    plain.engine.drop_ended()
    plain.engine.drop_ended()
    assert plain.engine.waiting == 0


@pytest.mark.parametrize("where", ["queue", "prompt", "step"])
def test_an_interrupt_is_that_threads(qwen3_vl_folder, monkeypatch, where: str) -> None:
    pipe = loaded(qwen3_vl_folder, kv_budget=1 << 22, spill=False)
    expected = alone(pipe, SHORT[:2])
    answers = [made(pipe, prompt) for prompt in SHORT[:2]]
    calls = itertools.count()
    name, owner, first = {
        "queue": ("reserve", type(pipe.admission), 1),
        "prompt": ("forward", pipe.model.get_decoder().layers[1], 0),
        "step": ("__call__", decode_steps.DecodeSteps, 1),
    }[where]
    right = getattr(owner, name)

    def interrupted(*args: Any, **options: Any) -> Any:
        if next(calls) == first:
            raise KeyboardInterrupt
        return right(*args, **options)

    for answer in answers:
        pipe.engine.submit(answer)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, interrupted)
        run(pipe, answers)
    # What had not begun goes on; nobody else is told that they pressed Ctrl-C.
    run(pipe, answers)
    for answer, ids in zip(answers, expected, strict=True):
        if answer.error is None:
            assert answer.complete().token_ids == ids
        else:
            with pytest.raises(RuntimeError, match="interrupted"):
                answer.complete()
    assert together(pipe, [made(pipe, prompt) for prompt in SHORT[:2]]) == expected
    del answers, answer
    assert empty(pipe)


def test_a_change_of_the_model_between_answers(qwen3_vl_folder, monkeypatch) -> None:
    repeat = Repeat()
    monkeypatch.setattr(
        decode_batch, "DecodeSteps", partial(decode_steps.DecodeSteps, record=repeat)
    )
    pipe = loaded(qwen3_vl_folder)
    before = together(pipe, [made(pipe, prompt) for prompt in SHORT])
    mlp = pipe.model.get_decoder().layers[1].mlp

    def fresh() -> list[list[int]]:
        """Of a pipeline that has never decoded anything."""
        return alone(OscarVLPipeline(pipe.model, processor=pipe.processor, policy="bf16"))

    hook = mlp.register_forward_hook(lambda _, __, output: -output)
    hooked = together(pipe, [made(pipe, prompt) for prompt in SHORT])
    assert hooked == fresh() != before
    hook.remove()
    assert together(pipe, [made(pipe, prompt) for prompt in SHORT]) == before
    weight = mlp.down_proj.weight
    mlp.down_proj.weight = torch.nn.Parameter(-weight.data)
    assert together(pipe, [made(pipe, prompt) for prompt in SHORT]) == hooked
    with torch.no_grad():
        mlp.down_proj.weight.neg_()
    assert together(pipe, [made(pipe, prompt) for prompt in SHORT]) == before
    assert repeat.replays > 0


@pytest.mark.parametrize("policy", ["bf16", "standard", "channel"])
def test_recorded_steps_of_answers_that_come_and_go(
    qwen3_vl_folder, monkeypatch, policy: str
) -> None:
    eager = loaded(qwen3_vl_folder, policy)
    repeat = Repeat()
    monkeypatch.setattr(
        decode_batch, "DecodeSteps", partial(decode_steps.DecodeSteps, record=repeat)
    )
    pipe = loaded(qwen3_vl_folder, policy)
    draw = random.Random(policy)
    requests = [
        {
            "prompt": draw.choice(SHORT) * draw.randint(1, 12),
            "max_new_tokens": draw.choice((1, 2, 5, 12, 30)),
            "images": noise(60, 90, index) if index % 3 == 0 else None,
        }
        for index in range(24)
    ]
    expected = [together(eager, [made(eager, **one)])[0] for one in requests]
    # A text that stops an answer where its step was launched ahead.
    texts = eager.processor.tokenizer.decode(expected[4])
    if len(expected[4]) > 10:
        requests[4]["stop"] = texts[8:10]
        expected[4] = together(eager, [made(eager, **requests[4])])[0]
    answers = [made(pipe, **one) for one in requests]
    left = set(draw.sample(range(24), 5)) - {4}
    for index, answer in enumerate(answers):
        pipe.engine.submit(answer)
        steps = iter(range(draw.randint(0, 5)))
        pipe.engine.run_until(lambda steps=steps: next(steps, None) is None)
        if index - 2 in left:
            answers[index - 2].cancel()
        if index % 7 == 6:
            with pipe.lock:
                pipe.store.trim()
    run(pipe, answers)
    for index, (answer, ids) in enumerate(zip(answers, expected, strict=True)):
        found = answer.complete().token_ids
        assert found == (ids[: len(found)] if index in left else ids)
    assert repeat.captures and repeat.replays > 40
    del answers, answer
    assert empty(pipe)


def test_a_deterministic_answer_is_bit_for_bit_the_same(qwen3_vl_folder, monkeypatch) -> None:
    pipe = loaded(qwen3_vl_folder, "standard")
    right = decode_steps.DecodeSteps.__call__
    logits: dict[int, list[torch.Tensor]] = {}

    def call(steps: Any, *args: Any) -> torch.Tensor:
        found = right(steps, *args)
        logits.setdefault(id(steps.cache), []).append(found.clone())
        return found

    monkeypatch.setattr(decode_steps.DecodeSteps, "__call__", call)
    options = {"deterministic": True, "temperature": 1.0, "seed": 3}
    single = made(pipe, SHORT[0] * 5, **options)
    [ids] = together(pipe, [single])
    beside = made(pipe, SHORT[0] * 5, **options)
    others = [made(pipe, prompt, temperature=1.0, max_new_tokens=9) for prompt in SHORT * 2]
    found = together(pipe, [*others[:3], beside, *others[3:]])
    assert found[3] == ids
    pairs = list(zip(logits[id(single.cache)], logits[id(beside.cache)], strict=True))
    assert len(pairs) == TOKENS - 1 and all(torch.equal(*pair) for pair in pairs)


def test_seeds_beside_the_same_answers(plain) -> None:
    def answered() -> list[list[int]]:
        options = [{"temperature": 1.0, "seed": seed} for seed in range(3)] + [{}]
        return together(plain, [made(plain, x, **y) for x, y in zip(SHORT, options, strict=True)])

    first = answered()
    torch.rand(5)
    assert answered() == first
    # Random numbers are an answer's own, whoever leaves.
    options = {"temperature": 1.0, "seed": 1}
    [beside, _] = together(plain, [made(plain, SHORT[1], **options), made(plain, SHORT[0])])
    assert beside == first[1]


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
        pipe.engine._groups.pace = answer_groups.Pace()
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


def test_many_threads(qwen3_vl_folder) -> None:
    # Pages of these prompts are none, so that reading a kept beginning again is exact.
    pipe = loaded(qwen3_vl_folder, "standard", prefix_cache=1 << 20, kv_budget=1 << 24)
    twin = loaded(qwen3_vl_folder, "standard")

    def work(pipe: OscarVLPipeline, index: int) -> Any:
        draw, kind = random.Random(index), index % 4
        prompt, most = SHORT[index % 4] * draw.randint(1, 4), draw.randint(1, 14)
        if kind == 0:
            return pipe(None, prompt, max_new_tokens=most).token_ids
        if kind == 1:
            with pipe.chat() as chat:
                both = [chat.ask(one, max_new_tokens=most) for one in (prompt, SHORT[0])]
                return [answer.token_ids for answer in both]
        if kind == 2:
            return "".join(pipe.stream(None, prompt, max_new_tokens=most))
        results = pipe.batch({"prompt": x, "max_new_tokens": most} for x in (prompt, SHORT[1]))
        return [result.answer and result.answer.token_ids for result in results]

    expected = [work(twin, index) for index in range(32)]
    with ThreadPoolExecutor(32) as threads:
        found = list(threads.map(partial(work, pipe), range(32)))
    assert found == expected
    assert pipe.engine.running == pipe.engine.waiting == 0


def test_a_fifth_leaves_at_random(qwen3_vl_folder) -> None:
    pipe = loaded(qwen3_vl_folder, "standard", kv_budget=1 << 24)
    expected = ["".join(pipe.stream(None, SHORT[i % 4], max_new_tokens=20)) for i in range(4)]

    def work(index: int) -> tuple[str, bool]:
        draw = random.Random(index)
        stream = pipe.stream(None, SHORT[index % 4], max_new_tokens=20)
        leaves = draw.randint(0, 18) if draw.random() < 0.4 else None
        text = ""
        for count, piece in enumerate(stream):
            if count == leaves:
                break
            text += piece
        if draw.random() < 0.5:
            stream.close()
        return text, leaves is None

    with ThreadPoolExecutor(16) as threads:
        for index, (text, whole) in enumerate(threads.map(work, range(64))):
            assert text == expected[index % 4] if whole else expected[index % 4].startswith(text)
    assert empty(pipe)


def test_a_stream_that_is_left_frees_its_slots_at_once(qwen3_vl_folder) -> None:
    pipe = loaded(qwen3_vl_folder, "standard", kv_budget=1 << 22)
    kept, left = (iter(pipe.stream(None, x, max_new_tokens=50)) for x in SHORT[:2])
    next(kept)
    alone = pipe.store.memory().used_bytes
    next(left)
    assert pipe.store.memory().used_bytes > 1.5 * alone
    gc.disable()
    try:
        del left
        assert pipe.store.memory().used_bytes < 1.4 * alone
        kept.close()
        del kept
        assert empty(pipe)
    finally:
        gc.enable()


def test_calls_inside_of_a_stream_under_the_lock(plain) -> None:
    expected = alone(plain)
    with ThreadPoolExecutor(2) as threads, plain.lock:
        others = [threads.submit(lambda x=x: together(plain, [made(plain, x)])) for x in SHORT[2:]]
        for count, _ in enumerate(plain.stream(None, SHORT[0], max_new_tokens=6)):
            if count == 2:
                found = plain(None, SHORT[1], max_new_tokens=TOKENS).token_ids
                assert found == expected[1]
    assert [other.result(60)[0] for other in others] == expected[2:]


def test_pipelines_of_one_lock(qwen3_vl_folder) -> None:
    pipe = loaded(qwen3_vl_folder, "standard")
    pair = [pipe, pipe.with_policy("bf16")]
    expected = [alone(one) for one in pair]
    with ThreadPoolExecutor(8) as threads:
        jobs = [
            threads.submit(lambda x=one, y=prompt: together(x, [made(x, y)]))
            for one in pair
            for prompt in SHORT
        ]
        found = [job.result(120)[0] for job in jobs]
    assert found == [*expected[0], *expected[1]]


def test_a_request_waits_for_the_answers_of_another_policy(qwen3_vl_folder) -> None:
    pipe = loaded(qwen3_vl_folder, kv_budget=1 << 24, spill=False)
    twin = pipe.with_policy("standard")
    assert pipe.budget is not None
    [expected] = alone(twin, SHORT[:1])
    running, waiting = made(pipe, SHORT[0], max_new_tokens=100), made(twin, SHORT[0])
    pipe.budget.limit = needed(pipe, running) + needed(twin, waiting) // 2
    pipe.engine.submit(running)
    pipe.engine.run_until(lambda: len(running.tokens) > 3)
    # Nobody else makes steps.
    assert together(twin, [waiting]) == [expected]
    assert running.complete().finish_reason == "length"
    late = made(twin, SHORT[0])
    pipe.budget.limit = 1
    with pytest.raises(Busy):
        together(twin, [late])


def test_a_request_begins_when_an_answer_of_another_policy_has_ended(qwen3_vl_folder) -> None:
    """Not only when one of its own policy has."""
    pipe = loaded(qwen3_vl_folder, kv_budget=1 << 24, spill=False)
    twin = pipe.with_policy("standard")
    assert pipe.budget is not None
    other = made(twin, SHORT[0], max_new_tokens=20)
    running, waiting = (made(pipe, prompt, max_new_tokens=100) for prompt in SHORT[1:3])
    for engine, answer in ((twin.engine, other), (pipe.engine, running)):
        engine.submit(answer)
        engine.run_until(lambda x=answer: len(x.tokens) > 2)
    pipe.budget.limit = pipe.budget.taken_bytes + needed(pipe, waiting) - 1
    pipe.engine.submit(waiting)
    pipe.engine.run_until(lambda: len(running.tokens) > 5)
    assert not waiting.tokens
    run(twin, [other])
    pipe.budget.limit = 1 << 24
    pipe.engine.run_until(lambda: bool(waiting.tokens))
    assert not running.ended


def test_requests_of_two_policies_wait_for_each_other(qwen3_vl_folder) -> None:
    pipe = loaded(qwen3_vl_folder, "standard", kv_budget=1 << 24, spill=False)
    pair = [pipe, pipe.with_policy("bf16")]
    assert pipe.budget is not None
    expected = [ids for one in pair for ids in alone(one)]
    pipe.budget.limit = int(1.2 * max(needed(one, made(one, SHORT[2])) for one in pair))
    for _ in range(3):
        with ThreadPoolExecutor(8) as threads:
            jobs = [
                threads.submit(lambda x=one, y=prompt: together(x, [made(x, y)]))
                for one in pair
                for prompt in SHORT
            ]
            assert [job.result(120)[0] for job in jobs] == expected


def test_a_chat_on_disk_waits_for_room(qwen3_vl_folder) -> None:
    pipe = loaded(qwen3_vl_folder, kv_budget=1 << 24)
    assert pipe.budget is not None
    expected, found = pipe.chat(), pipe.chat()
    for chat in (expected, found):
        chat.ask(SHORT[0] * 5, max_new_tokens=4)
    expected.ask(SHORT[2], max_new_tokens=TOKENS)
    turns = expected.turns
    expected.close()
    spill(pipe, found)
    running = made(pipe, SHORT[1], max_new_tokens=150)
    pipe.engine.submit(running)
    pipe.engine.run_until(lambda: len(running.tokens) > 3)
    pipe.budget.limit = pipe.budget.taken_bytes + 1000
    found.ask(SHORT[2], max_new_tokens=TOKENS)
    assert found.turns == turns
    assert running.complete().finish_reason == "length"
    spill(pipe, found)
    pipe.budget.limit = 1000
    with pytest.raises(Busy):
        found.undo()


@pytest.mark.parametrize("waits", ["tell", "load_chat"])
def test_turns_and_chats_that_are_read_wait_for_room(qwen3_vl_folder, tmp_path, waits: str) -> None:
    pipe = loaded(qwen3_vl_folder, kv_budget=1 << 24, spill=False)
    assert pipe.budget is not None
    told = {"prompt": SHORT[0] * 5, "answer": "A fox."}
    expected = pipe.chat()
    expected.tell(**told)
    expected.save(tmp_path / "chat")
    held = pipe.budget.used_bytes
    expected.close()
    running = made(pipe, SHORT[1], max_new_tokens=150)
    pipe.engine.submit(running)
    pipe.engine.run_until(lambda: len(running.tokens) > 3)
    pipe.budget.limit = pipe.budget.taken_bytes + held // 2

    def read() -> Chat:
        if waits == "load_chat":
            return pipe.load_chat(tmp_path / "chat")
        chat = pipe.chat()
        chat.tell(**told)
        return chat

    chat = read()
    assert running.complete().finish_reason == "length"
    assert len(chat.turns) == 1 and pipe.budget.used_bytes == held
    for limit, is_busy in ((held + held // 2, True), (held - 1, False)):
        pipe.budget.limit = limit
        with pytest.raises(InputError, match="raise") as refused:
            read()
        assert issubclass(refused.type, Busy) is is_busy
    chat.close()


def test_a_chat_on_disk_is_not_overtaken_for_ever(qwen3_vl_folder) -> None:
    pipe = loaded(qwen3_vl_folder, kv_budget=1 << 24)
    assert pipe.budget is not None
    chat = pipe.chat()
    chat.ask(SHORT[0] * 30, max_new_tokens=4)
    pipe.budget.limit = int(1.3 * chat.memory.kv_bytes)
    spill(pipe, chat)
    small = [made(pipe, SHORT[0], max_new_tokens=20 + 3 * (index % 4)) for index in range(30)]
    assert 3 * needed(pipe, small[3]) < pipe.budget.limit
    for answer in small:
        pipe.engine.submit(answer)
    steps = iter(range(3))
    pipe.engine.run_until(lambda: next(steps, None) is None)
    chat.undo()
    assert sum(answer.ended for answer in small) < 20
    run(pipe, small)
    assert not any(answer.error for answer in small)


@pytest.mark.parametrize("policy", ["bf16", "standard"])
@pytest.mark.parametrize("waits", ["request", "chat"])
def test_room_of_an_answer_that_ends_while_another_thread_has_the_lock(
    qwen3_vl_folder, policy: str, waits: str
) -> None:
    pipe = loaded(qwen3_vl_folder, kv_budget=1 << 24)
    twin = pipe if policy == "bf16" else pipe.with_policy(policy)
    assert pipe.budget is not None
    chat = pipe.chat()
    chat.ask(SHORT[0] * 5, max_new_tokens=4)
    spill(pipe, chat)
    stream = iter(twin.stream(None, SHORT[1] * 5, max_new_tokens=400))
    next(stream)
    pipe.budget.limit = pipe.budget.taken_bytes + 1000
    with ThreadPoolExecutor(1) as threads, pipe.lock:
        threads.submit(stream.close).result(60)
    if waits == "chat":
        chat.undo()
    else:
        assert together(pipe, [made(pipe, SHORT[0])])


def test_new_requests_are_prepared_between_steps(qwen3_vl_folder) -> None:
    """A lock that the thread of the steps takes again at once would keep others out."""
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
            with pipe.lock:
                waits.append(len(running.tokens) - before)
        assert steps and not running.ended
        assert sorted(waits)[-3] <= 8, waits
    finally:
        over.set()
        thread.join()
        running.cancel()


def test_a_step_that_was_launched_early_is_not_lost_when_others_join(
    qwen3_vl_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = loaded(qwen3_vl_folder, "standard")
    expected = alone(pipe, SHORT, max_new_tokens=40)
    launched, taken = list[EarlyStep](), list[EarlyStep]()
    made_early, is_step = EarlyStep.__new__, EarlyStep.is_step

    def note_launched(*arguments: Any) -> EarlyStep:
        launched.append(made_early(*arguments))
        return launched[-1]

    def note_taken(early: EarlyStep, *arguments: Any) -> bool:
        fits = is_step(early, *arguments)
        taken.extend([early] * fits)
        return fits

    monkeypatch.setattr(EarlyStep, "__new__", note_launched)
    monkeypatch.setattr(EarlyStep, "is_step", note_taken)
    monkeypatch.setattr(decode_batch, "DecodeSteps", partial(DecodeSteps, record=Repeat()))
    answers = [made(pipe, prompt, max_new_tokens=40) for prompt in SHORT]
    for answer in answers:
        pipe.engine.submit(answer)
        steps = iter(range(9))
        pipe.engine.run_until(lambda steps=steps: next(steps, None) is None)
    run(pipe, answers)
    assert [answer.complete().token_ids for answer in answers] == expected
    # Whoever ends with max_new_tokens is foretold too.
    assert len(launched) > 20 and len(launched) - len(taken) <= 1


def test_an_error_of_a_step_that_was_launched_early_is_not_that_of_who_joins(
    qwen3_vl_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = loaded(qwen3_vl_folder, "standard")
    expected = alone(pipe, max_new_tokens=40)
    monkeypatch.setattr(decode_batch, "DecodeSteps", partial(DecodeSteps, record=Repeat()))
    answers = [made(pipe, prompt, max_new_tokens=40) for prompt in SHORT]
    for answer in answers[:2]:
        pipe.engine.submit(answer)
    groups = pipe.engine._groups
    pipe.engine.run_until(lambda: bool(groups._shared and groups._shared.batch.is_ahead))
    right, failed = DecodeSteps.__call__, []

    def call(steps: DecodeSteps, *args: Any) -> torch.Tensor:
        if steps.is_ahead and not failed:
            failed.append(len(answers[2].tokens))
            raise RuntimeError("broken")
        return right(steps, *args)

    monkeypatch.setattr(DecodeSteps, "__call__", call)
    # No steps between layers.
    monkeypatch.setattr(answer_groups.Pace, "seconds", lambda _: 1e9)
    for answer in answers[2:]:
        pipe.engine.submit(answer)
    run(pipe, answers)
    assert failed == [1], "they had their first token, and waited to join"
    for answer in answers[:2]:
        with pytest.raises(RuntimeError, match="broken"):
            answer.complete()
    assert [answer.complete().token_ids for answer in answers[2:]] == expected[2:]
    assert empty(pipe)


class SimulatedMoment:
    """Of a device that takes a time for each layer of a prompt and for each step, and which the
    host never waits for."""

    clock = 0.0
    comes_later = True

    def __init__(self, _: torch.device) -> None:
        self.seconds = SimulatedMoment.clock

    def wait(self) -> None:
        """It is simulated."""

    def since(self, earlier: "SimulatedMoment") -> float:
        return self.seconds - earlier.seconds


@pytest.mark.parametrize(
    ("layer_seconds", "later_seconds", "lost_seconds"),
    [
        (0.0015, 0.0015, 0.0),
        (0.004, 0.004, 0.0),
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
    right = DecodeSteps.__call__

    def work(kind: str, seconds: float) -> None:
        SimulatedMoment.clock += seconds
        spent[kind] += seconds

    def step(*arguments: Any) -> torch.Tensor:
        work("steps", step_seconds)
        return right(*arguments)

    def layer_ends(_: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if not pipe.engine._groups.stepping:
            begins = spent["layers"] < 50 * layer_seconds
            work("layers", layer_seconds if begins else later_seconds)

    paused = OscarCache.paused

    def turns(cache: OscarCache) -> Any:
        work("turns", lost_seconds)
        return paused(cache)

    monkeypatch.setattr(OscarCache, "paused", turns)
    monkeypatch.setattr(answer_groups, "Moment", SimulatedMoment)
    monkeypatch.setattr(DecodeSteps, "__call__", step)
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
    # The step after the last layer is one too many.
    reading = spent["layers"] + spent["turns"]
    assert 0.97 <= (spent["steps"] - step_seconds) / reading <= 1.25


def test_an_answer_after_a_pause_has_not_waited_since_the_last_one(
    qwen3_vl_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, right = loaded(qwen3_vl_folder, prefill_chunk=16), DecodeSteps.__call__

    def step(*arguments: Any) -> torch.Tensor:
        SimulatedMoment.clock += 0.01
        return right(*arguments)

    monkeypatch.setattr(answer_groups, "Moment", SimulatedMoment)
    monkeypatch.setattr(DecodeSteps, "__call__", step)
    together(pipe, [made(pipe, SHORT[0])])
    SimulatedMoment.clock += 100.0
    first, second = made(pipe, SHORT[0], max_new_tokens=200), made(pipe, SHORT[1] * 200)
    for answer in (first, second):
        pipe.engine.submit(answer)
    pipe.engine.run_until(lambda: bool(second.tokens))
    assert len(first.tokens) < 20
    for answer in (first, second):
        answer.cancel()


def test_who_waits_for_an_answer_that_is_cancelled_before_anybody_looks(
    qwen3_vl_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = loaded(qwen3_vl_folder)
    answer, run_until, looks = made(pipe, SHORT[0]), pipe.engine.run_until, threading.Event()
    waits = threading.Thread(target=run_until, args=[lambda: answer.ended])

    def run_later(done: Callable[[], bool]) -> None:
        looks.wait()
        run_until(done)

    monkeypatch.setattr(pipe.engine, "run_until", run_later)
    with pipe.engine.stepping_thread(lambda: None):
        pipe.engine.submit(answer)
        waits.start()
        while not pipe.engine._threads._followers:
            time.sleep(0.001)
        answer.cancel()
        looks.set()
        waits.join(10)
        assert not waits.is_alive()
    assert empty(pipe)


@pytest.mark.parametrize("record", [None, Repeat()], ids=["eager", "recorded"])
@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "ends with it"])
def test_nan_of_a_token_that_was_chosen_is_its_answers(
    qwen3_vl_folder: Path, monkeypatch: pytest.MonkeyPatch, ends: bool, record: Repeat | None
) -> None:
    """Also where a step that was launched early has read it already."""
    monkeypatch.setattr(decode_batch, "DecodeSteps", partial(DecodeSteps, record=record))
    pipe = loaded(qwen3_vl_folder, "standard")
    expected = alone(pipe, SHORT, max_new_tokens=40)
    others = {token for tokens in expected[1:] for token in tokens}
    place, bad = next(
        (place, token)
        for place, token in enumerate(expected[0])
        if place > 4 and token not in {*others, *expected[0][:place]}
    )
    with torch.no_grad():
        pipe.model.get_input_embeddings().weight[bad] = torch.nan
    answers = [made(pipe, prompt, max_new_tokens=40) for prompt in SHORT]
    if ends:
        answers[0].end_tokens = frozenset({bad})
    for answer in answers:
        pipe.engine.submit(answer)
    run(pipe, answers)
    if ends:
        assert answers[0].complete().token_ids == expected[0][:place]
    else:
        with pytest.raises(FloatingPointError):
            answers[0].complete()
    assert [answer.complete().token_ids for answer in answers[1:]] == expected[1:]


@pytest.mark.parametrize("at_once", [True, False])
def test_many_that_wait_are_read_before_a_few_go_on(
    at_once: bool, qwen3_vl_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that ticks with each layer: one by one, a running answer has half of the time."""
    pipe = loaded(qwen3_vl_folder)
    pipe.engine.reader.most_in_line = 1  # Each prompt is read by itself.
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(now[0]))
    monkeypatch.setattr(answer_groups, "time", clock)
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
        # Nine wait for one that runs, then eight for two, ...: a layer of each passes meanwhile.
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


def test_between_two_prompts_answers_make_a_step(
    qwen3_vl_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device works on it while the host prepares the second prompt; of many that wait for a few
    that run each is read at once, see the test before."""
    pipe, read = loaded(qwen3_vl_folder), list[list[int]]()
    pipe.engine.reader.most_in_line = 1  # Each prompt is read by itself.
    monkeypatch.setattr(answer_groups.Pace, "seconds", lambda _: 1e9)  # No steps between layers.
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
    assert second == [*(tokens + 1 for tokens in first[:8]), 2, 0]
    for answer in (*running, *others):
        answer.cancel()


def test_nobody_is_overtaken_for_ever(qwen3_vl_folder) -> None:
    pipe = loaded(qwen3_vl_folder, kv_budget=1 << 24, spill=False)
    assert pipe.budget is not None
    large = made(pipe, SHORT[1], max_new_tokens=150)
    pipe.budget.limit = int(1.05 * needed(pipe, large))
    small = [made(pipe, SHORT[0], max_new_tokens=30) for _ in range(30)]
    pipe.engine.submit(small[0])
    pipe.engine.submit(large)
    for answer in small[1:]:
        pipe.engine.submit(answer)
    run(pipe, [large])
    assert large.error is None
    assert sum(answer.ended for answer in small) <= 10
    run(pipe, small)
    assert not any(answer.error for answer in small)
    too_large = made(pipe, SHORT[1], max_new_tokens=150)
    with pytest.raises(Busy):
        pipe.budget.limit //= 2
        together(pipe, [too_large])
    del small, large, answer, too_large
    assert empty(pipe)


@pytest.mark.parametrize("policy", ["bf16", "channel"])
def test_memory_that_the_next_prompt_takes_is_not_given_back_before(
    qwen3_vl_folder: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = loaded(qwen3_vl_folder, policy)
    # But for what an answer gives back at its end.
    monkeypatch.setattr(PageStore, "trim_after_answer", lambda store: None)
    long = " ".join(SHORT * 20)
    pools = []
    for prompt in (long, long + " So?", long, "Why?"):
        together(pipe, [made(pipe, prompt, max_new_tokens=3)])
        assert empty(pipe)
        pools.append((pipe.store.trims, pipe.store.memory().pool_bytes))
    trims, nbytes = zip(*pools, strict=True)
    assert trims[0] == trims[1] == trims[2] < trims[3]
    assert nbytes[1] == nbytes[2] > 4 * nbytes[3]


def test_a_step_wakes_only_those_for_whom_something_has_changed(plain: OscarVLPipeline) -> None:
    first, second = (made(plain, prompt, max_new_tokens=40) for prompt in SHORT[:2])
    for answer in (first, second):
        plain.engine.submit(answer)
    looks = [0] * 20

    def wait(index: int) -> None:
        thread = threading.get_ident()

        def done() -> bool:
            looks[index] += thread == threading.get_ident()
            return first.ended or second.ended

        plain.engine.run_until(done)

    threads = [threading.Thread(target=wait, args=(index,)) for index in range(len(looks))]
    leader = threading.Thread(target=run, args=(plain, [first, second]))
    leader.start()
    while not first.tokens:
        time.sleep(0.001)
    for thread in threads:
        thread.start()
    for thread in (leader, *threads):
        thread.join(60)
        assert not thread.is_alive()
    assert len(first.tokens) == 40
    # A few may have made steps themselves.
    assert sorted(looks)[15] < 10


@pytest.mark.parametrize("rows", [2, 256])
def test_no_thread_waits_for_a_step_that_nobody_makes(qwen3_vl_folder: Path, rows: int) -> None:
    """Answers that end, are left or fail, and threads that come while others leave."""
    pipe = loaded(qwen3_vl_folder)
    pipe.engine.most_rows = rows
    expected = alone(pipe)

    def ask(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(6):
            index = draw.randrange(len(SHORT))
            answer = made(pipe, SHORT[index])
            pieces, end = iter(answer), draw.choice(["all", "cancelled", "closed", "elsewhere"])
            for _ in range(draw.randint(0, 4)):
                next(pieces, None)
            if end == "cancelled":
                answer.cancel()
            elif end == "closed":
                pieces.close()
            elif end == "elsewhere":
                threading.Timer(0.02, answer.cancel).start()
            list(pieces)
            found = answer.tokens
            assert found == expected[index][: len(found)]
            assert end != "all" or found == expected[index]

    with ThreadPoolExecutor(16) as pool:
        for one in [pool.submit(ask, seed) for seed in range(16)]:
            one.result(timeout=300)
    assert empty(pipe)


def test_who_waits_for_the_lock_waits_for_one_prompt_of_many(qwen3_vl_folder: Path) -> None:
    pipe = loaded(qwen3_vl_folder)
    expected = alone(pipe, [BAD, *SHORT])
    pipe.engine.reader.most_in_line = 1  # Each prompt is read by itself.
    answers = [made(pipe, prompt) for prompt in (BAD, *SHORT)]
    for answer in answers:
        pipe.engine.submit(answer)
    begun: list[int] = []

    def wait() -> None:
        with pipe.lock:
            begun.append(sum(bool(answer.tokens) for answer in answers))

    waiting = threading.Thread(target=wait)

    def read(_: torch.Tensor) -> None:
        waiting.start()
        while not pipe.lock.is_contended:
            time.sleep(0.001)

    with embedding(pipe, read):
        run(pipe, answers)
    waiting.join(60)
    assert begun == [1]
    assert [answer.complete().token_ids for answer in answers] == expected


@pytest.mark.parametrize("brief", [True, False])
def test_who_waits_for_a_moment_comes_between_the_layers_of_a_prompt(
    qwen3_vl_folder: Path, brief: bool
) -> None:
    """And may free what would let pools shrink, of which the prompt reads on."""
    pipe = loaded(qwen3_vl_folder)
    chat, other = pipe.chat(), pipe.chat()
    chat.ask(SHORT[0], max_new_tokens=2)
    expected = chat.fork().ask(SHORT[1], max_new_tokens=4).token_ids
    other.ask(SHORT[2] * 20, max_new_tokens=2)
    layers, passed, found = pipe.model.get_decoder().layers, [0], list[int]()

    def work() -> None:
        with pipe.lock.briefly() if brief else pipe.lock:
            found.append(passed[0])
            other.close()
            pipe.store.trim()

    waiting = threading.Thread(target=work)

    def layer_begins(*_: object) -> None:
        if not passed[0]:
            waiting.start()
            while not pipe.lock.is_contended:
                time.sleep(0.001)
        passed[0] += 1

    hooks = [layer.register_forward_pre_hook(layer_begins) for layer in layers]
    assert chat.ask(SHORT[1], max_new_tokens=4).token_ids == expected
    for hook in hooks:
        hook.remove()
    waiting.join(60)
    assert found == [1] if brief else found[0] >= len(layers)


def test_a_thread_of_its_own_makes_all_steps(plain, monkeypatch) -> None:
    expected, steppers, seen = alone(plain), set[int](), list[int]()
    step = plain.engine._groups.step

    def noted() -> None:
        steppers.add(threading.get_ident())
        step()

    monkeypatch.setattr(plain.engine._groups, "step", noted)
    for _ in range(2):
        steppers.clear()
        answers = [made(plain, prompt) for prompt in SHORT]
        pieces: list[list[str]] = [[] for _ in answers]
        with plain.engine.stepping_thread(lambda: seen.append(plain.engine.running)):
            for answer in answers[:3]:
                plain.engine.submit(answer)
            # Nobody waits for these; a thread that waits makes no step.
            while not all(answer.ended for answer in answers[:3]):
                for answer, some in zip(answers, pieces, strict=True):
                    some += answer.take_pieces()
                time.sleep(0.001)
            pieces[3] += answers[3]
            assert len(steppers) == 1 and threading.get_ident() not in steppers
            idle = len(seen)
            time.sleep(0.05)
            assert max(seen) == 3 and len(seen) <= idle + 1
        for answer, some, ids in zip(answers, pieces, expected, strict=True):
            some += answer.take_pieces()
            written = answer.complete()
            assert written.token_ids == ids and written.text.startswith("".join(some))
    assert alone(plain) == expected
    assert threading.get_ident() in steppers, "as long as no such thread runs"


@pytest.mark.parametrize("interrupt", [False, True])
def test_an_error_in_the_thread_of_steps_is_that_of_the_answers(
    plain, monkeypatch, interrupt: bool
) -> None:
    expected, steppers = alone(plain, SHORT[:1]), set[int]()
    advance = plain.engine._advance

    def noted() -> None:
        steppers.add(threading.get_ident())
        advance()

    def prepare() -> None:
        raise KeyboardInterrupt if interrupt else ZeroDivisionError

    monkeypatch.setattr(plain.engine, "_advance", noted)
    with plain.engine.stepping_thread(lambda: None):
        with monkeypatch.context() as broken:
            broken.setattr(plain.engine, "_prepare", prepare)
            with pytest.raises(RuntimeError if interrupt else ZeroDivisionError):
                list(made(plain, SHORT[0]))
        assert together(plain, [made(plain, SHORT[0])]) == expected
        assert len(steppers) == 1 and threading.get_ident() not in steppers
    assert empty(plain)


def test_a_thread_of_steps_takes_over_what_runs(plain) -> None:
    """Also from a thread that makes steps, and gives it back."""
    expected = alone(plain, SHORT[:1], max_new_tokens=150)[0]
    answer, other = made(plain, SHORT[0], max_new_tokens=150), made(plain, SHORT[1])
    pieces = iter(answer)
    first = next(pieces)
    with ThreadPoolExecutor(1) as pool:
        with plain.engine.stepping_thread(lambda: None):
            rest = pool.submit(list, pieces)
            with plain.engine.stepping_thread(lambda: None):
                list(other)
        assert "".join([first, *rest.result(60)]) == answer.written.text
    assert answer.written.token_ids == expected


def test_an_answer_has_ended_once_its_last_piece_is_there(plain, monkeypatch) -> None:
    """Who looks while a step is made takes all pieces of an answer that has ended."""
    answer, writing, go_on = made(plain, SHORT[0]), threading.Event(), threading.Event()
    push = answer.written.push

    def slow(token: int) -> str:
        if len(answer.tokens) == TOKENS:
            writing.set()
            assert go_on.wait(60)
        return push(token)

    monkeypatch.setattr(answer.written, "push", slow)
    with plain.engine.stepping_thread(lambda: None):
        plain.engine.submit(answer)
        assert writing.wait(60)
        ended = answer.ended
        go_on.set()
        plain.engine.run_until(lambda: answer.ended)
    assert not ended and len(answer.take_pieces()) == TOKENS
    answer.complete()


def test_an_answer_that_is_cancelled_while_it_is_written_ends(plain, monkeypatch) -> None:
    answer = made(plain, SHORT[0])

    def stopped(_: AnswerWriter) -> bool:
        answer.cancel()  # As another thread may just now.
        return False

    monkeypatch.setattr(AnswerWriter, "stopped", property(stopped))
    plain.engine.submit(answer)
    run(plain, [answer])
    assert len(answer.tokens) == 1


@pytest.mark.parametrize("steps_of_twin", [True, False])
def test_a_chat_waits_for_an_answer_of_another_policy_beside_a_thread_of_steps(
    qwen3_vl_folder, steps_of_twin: bool
) -> None:
    """Whether anybody asks for pieces of that answer or not."""
    pipe = loaded(qwen3_vl_folder, kv_budget=1 << 24, spill=False)
    twin, chat = pipe.with_policy("standard"), pipe.chat()
    assert pipe.budget is not None
    running = made(twin, SHORT[0], max_new_tokens=100)
    pieces = iter(running)
    next(pieces)
    pipe.budget.limit = pipe.budget.taken_bytes + 100
    with ThreadPoolExecutor(1) as pool, pipe.engine.stepping_thread(lambda: None):
        telling = pool.submit(chat.tell, SHORT[1], answer="No.")
        while not pipe.engine._aside:
            time.sleep(0.001)
        if steps_of_twin:
            list(pieces)
        try:
            with suppress(Busy):  # It waited, and a little room may not be enough.
                telling.result(20)
        finally:
            pipe.budget.limit = 1 << 24
            running.cancel()
            pipe.engine._threads.wake()
    assert running.ended and not pipe.engine._aside
    chat.close()
