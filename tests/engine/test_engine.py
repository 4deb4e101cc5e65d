"""Engine: concurrent answers equal those that run alone, and do not affect each other."""

import random
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from oscar_mm import OscarVLPipeline
from oscar_mm.cache.page_store import PageStore
from oscar_mm.engine import decode_runner
from oscar_mm.engine.prefill_runner import PrefillRunner
from oscar_mm.engine.scheduler import Scheduler
from oscar_mm.fast_decode import graph_runner
from oscar_mm.fast_decode.graph_runner import GraphRunner
from tests.engine.engine import (
    BAD,
    SHORT,
    TOKENS,
    alone,
    embedding,
    empty,
    loaded,
    made,
    run,
    together,
)
from tests.engine.engine_waits import engine_waits
from tests.engine.pipelines import pipelines
from tests.fast_decode.test_graph_runner import Repeat
from tests.pipelines.conftest import NEVER
from tests.prompts import noise

pytestmark = pytest.mark.usefixtures("quick_collection")


@pytest.mark.daily("omni-standard")
@pytest.mark.parametrize(
    ("family", "policy"),
    [
        *((family, "standard") for family in ("llava", "qwen", "moe", "omni")),
        *(("qwen", policy) for policy in ("bf16", "channel")),
    ],
)
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


@pytest.mark.daily("True")
@pytest.mark.parametrize("grows", [True, False])
def test_pools_grow_when_requests_are_admitted(qwen3_vl_folder, monkeypatch, grows: bool) -> None:
    """On a GPU, steps of short requests find free slots, and so can be launched early."""
    monkeypatch.setattr(PageStore, "is_on_cpu", not grows)
    pipe, step, grew = loaded(qwen3_vl_folder, "standard"), decode_runner.DecodeRunner.step, set()
    alone(pipe, SHORT[:1])  # Makes the pools.
    pipe.store.trim()

    def noted(*args: Any, **options: Any) -> None:
        before = [slots.capacity for slots in pipe.store.allocators.values()]
        step(*args, **options)
        grew.add(before != [slots.capacity for slots in pipe.store.allocators.values()])

    monkeypatch.setattr(decode_runner.DecodeRunner, "step", noted)
    together(pipe, [made(pipe, prompt, max_new_tokens=90) for prompt in SHORT])
    assert grew == ({False} if grows else {False, True})


def test_closed_chats_leave_their_memory_to_running_answers(qwen3_vl_folder, monkeypatch) -> None:
    monkeypatch.setattr(PageStore, "is_on_cpu", False)  # No answer ends with a trim.
    pipe = loaded(qwen3_vl_folder, "standard")
    running = made(pipe, SHORT[0], max_new_tokens=500)
    pipe.engine.submit(running)

    def trims_at_close() -> bool:
        with pipe.chat() as chat:
            chat.ask(SHORT[1] * 20, max_new_tokens=2)
            before = pipe.store.trims
        return pipe.store.trims > before

    assert [trims_at_close() for _ in range(3)] == [True, False, False]
    assert not running.ended
    trims = pipe.store.trims
    running.complete()
    pipe.engine.call(lambda: None)
    assert pipe.store.trims > trims, "once nothing runs"
    assert trims_at_close()


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


@pytest.mark.daily("channel")
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


@pytest.mark.parametrize("policy", ["bf16", "standard"])
def test_a_chat_that_begins_with_a_bad_prompt_in_the_batch(qwen3_vl_folder, policy: str) -> None:
    """Covers the first prompts of a pipeline, and a later turn of the good chat."""
    pipe = loaded(qwen3_vl_folder, policy)
    with torch.no_grad():
        place = pipe.processor.tokenizer("Zq9")["input_ids"][-1]
        pipe.model.get_input_embeddings().weight[place] = torch.nan
    found = []
    for beside in ([made(pipe, BAD)], []):
        chat = pipe.chat()
        for answer in beside:
            pipe.engine.submit(answer)
        found.append([chat.ask(text, max_new_tokens=3).token_ids for text in ("Why?", "How?")])
        for answer in beside:
            with pytest.raises(FloatingPointError):
                answer.complete()
    assert found[0] == found[1]


@pytest.mark.parametrize("policy", ["bf16", "standard"])
def test_beginnings_of_bad_prompts_are_not_kept(qwen3_vl_folder, policy: str) -> None:
    """The beginning of a good prompt of the same pass is kept."""
    pipe = loaded(qwen3_vl_folder, policy, prefix_cache=1 << 22)
    with torch.no_grad():
        place = pipe.processor.tokenizer("Zq9")["input_ids"][-1]
        pipe.model.get_input_embeddings().weight[place] = torch.nan
    good = " ".join(SHORT) * 6
    answers = [made(pipe, prompt) for prompt in (BAD, f"{good} {BAD}", f"{good} Then?")]
    for answer in answers:
        pipe.engine.submit(answer)
    run(pipe, answers)
    for answer in answers[:2]:
        with pytest.raises(FloatingPointError):
            answer.complete()
    assert pipe.prefixes is not None and len(pipe.prefixes) == 1
    again = together(pipe, [made(pipe, f"{good} Then?")])[0]
    assert pipe.prefixes.hits
    if policy == "bf16":
        assert answers[2].complete().token_ids == again


def test_a_later_turn_that_is_read_with_a_bad_prompt(qwen3_vl_folder) -> None:
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

    def push(token: int, at: float) -> str:
        raise ValueError(f"no text for {token}")

    monkeypatch.setattr(answers[1].written, "push", push)
    for answer in answers:
        plain.engine.submit(answer)
    run(plain, answers)
    with pytest.raises(ValueError, match="no text"):
        answers.pop(1).complete()
    found = [answer.complete().token_ids for answer in answers]
    assert found == [expected[0], *expected[2:]]


@pytest.mark.daily("1")
@pytest.mark.parametrize("old", [0, 1])
def test_a_cache_with_balancing_of_its_own(folders, monkeypatch, old: int) -> None:
    """Chats of earlier versions have such a cache; they decode in a batch of their own."""
    pipe = loaded(folders["llava"], "channel")
    pipe.model.generation_config.eos_token_id = NEVER
    together(pipe, [made(pipe, SHORT[0])])  # The batch has the balancing of the model.
    usual = pipe.engine.reader.sigmas
    others = {index: sigma.flip(-1) for index, sigma in usual.items()}
    shown = usual
    monkeypatch.setattr(PrefillRunner, "sigmas", property(lambda _: shown))
    requests = [{"prompt": words * 60, "max_new_tokens": 40} for words in SHORT[:3]]

    def begun(index: int) -> Any:
        nonlocal shown
        shown = others if index == old else usual
        answer = made(pipe, **requests[index])
        pipe.engine.submit(answer)
        steps = iter(range(3))
        pipe.engine.run_until(lambda: next(steps, None) is None)
        return answer

    expected = []
    for index in range(3):
        answer = begun(index)
        run(pipe, [answer])
        expected.append(answer.complete().token_ids)
    seen, right = set(), graph_runner.GraphRunner.__call__

    def call(steps: Any, *args: Any) -> torch.Tensor:
        seen.add((steps.cache.batch_size, bool(torch.equal(steps.cache.layers[0].sigma, usual[0]))))
        return right(steps, *args)

    monkeypatch.setattr(graph_runner.GraphRunner, "__call__", call)
    answers = [begun(index) for index in range(3)]
    run(pipe, answers)
    assert [answer.complete().token_ids for answer in answers] == expected
    assert (2, True) in seen and (1, False) in seen and (2, False) not in seen


@pytest.mark.slow
def test_a_change_of_the_model_between_answers(qwen3_vl_folder, monkeypatch) -> None:
    repeat = Repeat()
    monkeypatch.setattr(
        decode_runner, "GraphRunner", partial(graph_runner.GraphRunner, capture=repeat)
    )
    pipe = loaded(qwen3_vl_folder)
    before = together(pipe, [made(pipe, prompt) for prompt in SHORT])
    mlp = pipe.model.get_decoder().layers[1].mlp

    def fresh() -> list[list[int]]:
        """Return the answers of a pipeline that has never decoded."""
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


@pytest.mark.daily("standard")
@pytest.mark.parametrize("policy", ["bf16", "standard", "channel"])
def test_captured_steps_of_answers_that_come_and_go(
    qwen3_vl_folder, monkeypatch, policy: str
) -> None:
    eager = loaded(qwen3_vl_folder, policy)
    repeat = Repeat()
    monkeypatch.setattr(
        decode_runner, "GraphRunner", partial(graph_runner.GraphRunner, capture=repeat)
    )
    pipe = loaded(qwen3_vl_folder, policy)
    draw = random.Random(policy)
    requests = [
        {
            "prompt": draw.choice(SHORT) * draw.randint(1, 12),
            "max_new_tokens": draw.choice((1, 2, 5, 12, 30)),
            "images": noise(60, 90, index) if index % 3 == 0 else None,
        }
        for index in range(16)
    ]
    expected = [together(eager, [made(eager, **one)])[0] for one in requests]
    # A text that stops an answer where its step was launched ahead.
    texts = eager.processor.tokenizer.decode(expected[4])
    if len(expected[4]) > 10:
        requests[4]["stop"] = texts[8:10]
        expected[4] = together(eager, [made(eager, **requests[4])])[0]
    answers = [made(pipe, **one) for one in requests]
    left = set(draw.sample(range(16), 4)) - {4}
    for index, answer in enumerate(answers):
        pipe.engine.submit(answer)
        steps = iter(range(draw.randint(0, 5)))
        pipe.engine.run_until(lambda steps=steps: next(steps, None) is None)
        if index - 2 in left:
            answers[index - 2].cancel()
        if index % 7 == 6:
            with engine_waits(pipe):
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
    right = graph_runner.GraphRunner.__call__
    logits: dict[int, list[torch.Tensor]] = {}

    def call(steps: Any, *args: Any) -> torch.Tensor:
        found = right(steps, *args)
        logits.setdefault(id(steps.cache), []).append(found.clone())
        return found

    monkeypatch.setattr(graph_runner.GraphRunner, "__call__", call)
    options = {"deterministic": True, "temperature": 1.0, "seed": 3}
    single = made(pipe, SHORT[0] * 5, **options)
    [ids] = together(pipe, [single])
    beside = made(pipe, SHORT[0] * 5, **options)
    others = [made(pipe, prompt, temperature=1.0, max_new_tokens=9) for prompt in SHORT * 2]
    found = together(pipe, [*others[:3], beside, *others[3:]])
    assert found[3] == ids
    pairs = list(zip(logits[id(single.cache)], logits[id(beside.cache)], strict=True))
    assert len(pairs) == TOKENS - 1 and all(torch.equal(*pair) for pair in pairs)


def test_seeds_in_a_batch_with_the_same_answers(plain) -> None:
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


@pytest.mark.daily("goes on-eager", "ends with it-recorded")
@pytest.mark.parametrize("record", [None, Repeat()], ids=["eager", "recorded"])
@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "ends with it"])
def test_nan_of_a_token_that_was_chosen_is_its_answers(
    qwen3_vl_folder: Path, monkeypatch: pytest.MonkeyPatch, ends: bool, record: Repeat | None
) -> None:
    """Also if an in-flight step has already read the token."""
    monkeypatch.setattr(decode_runner, "GraphRunner", partial(GraphRunner, capture=record))
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


def test_what_was_captured_is_released(qwen3_vl_folder, monkeypatch) -> None:
    """Graphs of a pipeline with another policy are released too; a running answer keeps its own."""
    repeats = list[weakref.ref[Repeat]]()

    def steps(*arguments: Any) -> GraphRunner:
        repeat = Repeat()
        repeats.append(weakref.ref(repeat))
        return GraphRunner(*arguments, capture=repeat)

    monkeypatch.setattr(decode_runner, "GraphRunner", steps)
    pipe = loaded(qwen3_vl_folder)
    other = pipe.with_policy("channel")
    asked = {"images": [], "prompt": SHORT[0], "max_new_tokens": 8}
    expected = [one(**asked).token_ids for one in (pipe, other)]
    pieces = pipe.stream(**asked | {"max_new_tokens": 30})
    next(pieces)
    pipe.release_graphs()
    assert [one() is None for one in repeats] == [False, True]
    pieces.complete()
    pipe.release_graphs()
    assert all(one() is None for one in repeats)
    assert [one(**asked).token_ids for one in (pipe, other)] == expected


def test_a_request_may_come_while_others_are_put_in_order(qwen3_vl_folder, monkeypatch) -> None:
    pipe = loaded(qwen3_vl_folder)
    expected = alone(pipe)
    answers = [made(pipe, prompt) for prompt in SHORT]
    turn, late = Scheduler._turn_key, answers[:1]

    def coming(self: Scheduler, *taken: Any) -> Callable[[Any], Any]:
        key = turn(self, *taken)

        def noted(entry: Any) -> Any:
            if taken and late:  # While the pass is filled.
                pipe.engine.submit(late.pop())
            return key(entry)

        return noted

    monkeypatch.setattr(Scheduler, "_turn_key", coming)
    with engine_waits(pipe):
        for answer in answers[1:]:
            pipe.engine.submit(answer)
    run(pipe, answers)
    assert not late
    assert [answer.complete().token_ids for answer in answers] == expected
