"""Prompts of several chunks, between which other requests start, decode, fail and are cancelled."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from oscar_mm.engine.prefill_runner import usual_chunk
from oscar_mm.engine.request import Request
from oscar_mm.errors import Cancelled
from oscar_mm.pipelines.pipeline import Pipeline
from tests.engine.engine import BAD, SHORT, alone, empty, loaded, made, needed, run
from tests.engine.engine_waits import engine_waits
from tests.prompts import noise, prepare

CHUNK = 48
LONG = "What is written on the sign at the corner of the street? " * 12
LONGER = "How far is it to the station, and which bus goes there? " * 25
pytestmark = pytest.mark.usefixtures("quick_collection")


@contextmanager
def at_passes(pipe: Pipeline, calls: dict[int, Any]) -> Iterator[list[int]]:
    """Record the tokens of each prefill pass, and call functions before passes, by their number."""
    passes: list[int] = []

    def begins(_: Any, args: tuple) -> None:
        if args[0].shape[1] > 1:
            passes.append(args[0].shape[1])
            calls.get(len(passes) - 1, lambda: None)()

    hook = pipe.model.get_decoder().layers[0].register_forward_pre_hook(begins)
    try:
        yield passes
    finally:
        hook.remove()


def noted(answers: Sequence[Request], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the index of an answer with each of its tokens."""
    order: list[int] = []

    def take(index: int, taken: Any, token: int) -> None:
        order.append(index)
        taken(token)

    for index, answer in enumerate(answers):
        monkeypatch.setattr(answer, "take", partial(take, index, answer.take))
    return order


@pytest.mark.daily("None-compact", "3-bf16")
@pytest.mark.parametrize("policy", ["bf16", "compact"])
@pytest.mark.parametrize("before", [None, 3])
def test_short_prompts_begin_between_chunks(
    qwen3_vl_folder: Path, monkeypatch: pytest.MonkeyPatch, policy: str, before: int | None
) -> None:
    """Covers requests that waited behind the long one, and requests that arrive meanwhile."""
    pipe = loaded(qwen3_vl_folder, policy, prefill_chunk=CHUNK)
    expected = alone(pipe, [LONGER, *SHORT[:2]])
    answers = [made(pipe, prompt) for prompt in (LONGER, *SHORT[:2])]
    order = noted(answers, monkeypatch)
    submit = [partial(pipe.engine.submit, answer) for answer in answers]
    with at_passes(pipe, {} if before is None else {before: submit[1]}) as passes:
        for index in (0, 1, 2) if before is None else (0, 2):
            submit[index]()
        run(pipe, answers)
    assert order.index(1) < order.index(0) and order.index(2) < order.index(0)
    assert [answer.complete().token_ids for answer in answers] == expected
    assert len(passes) >= 8 and max(passes) <= CHUNK
    assert empty(pipe)


@pytest.mark.slow
def test_long_prompts_take_turns(qwen3_vl_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last request has fewer chunks and finishes first; running answers continue."""
    pipe = loaded(qwen3_vl_folder, prefill_chunk=CHUNK)
    expected = alone(pipe, [SHORT[0]], max_new_tokens=200) + alone(pipe, [LONGER, LONG])
    answers = [made(pipe, SHORT[0], max_new_tokens=200), made(pipe, LONGER), made(pipe, LONG)]
    order = noted(answers, monkeypatch)
    for answer in answers:
        pipe.engine.submit(answer)
    run(pipe, answers)
    steps = order[: order.index(2)].count(0)
    assert steps > 3 and order.index(2) < order.index(1)
    assert [answer.complete().token_ids for answer in answers] == expected
    assert empty(pipe)


@pytest.mark.daily("0-bf16", "1-compact")
@pytest.mark.parametrize("policy", ["bf16", "compact"])
@pytest.mark.parametrize("leaves", [0, 1])
def test_a_caller_leaves_between_chunks(qwen3_vl_folder: Path, policy: str, leaves: int) -> None:
    """The memory is free before the next pass."""
    pipe = loaded(qwen3_vl_folder, policy, prefill_chunk=CHUNK, kv_budget=1 << 24, spill=False)
    assert pipe.budget is not None
    prompts = [LONGER, LONG, SHORT[0]]
    expected = alone(pipe, prompts)
    answers, reservations = [made(pipe, prompt) for prompt in prompts], []
    with at_passes(
        pipe,
        {
            4: answers[leaves].cancel,
            6: lambda: reservations.append(answers[leaves].reservation),
        },
    ):
        for answer in answers:
            pipe.engine.submit(answer)
        run(pipe, answers)
    assert reservations == [None] and answers[leaves].cancelled
    expected[leaves] = []
    assert [answer.complete().token_ids for answer in answers] == expected
    assert empty(pipe)


@pytest.mark.daily("1")
@pytest.mark.parametrize("where", [0, 1])
def test_a_prompt_that_fails_in_the_middle(qwen3_vl_folder: Path, where: int) -> None:
    """Keys are NaN in a middle chunk or in the last one."""
    pipe = loaded(qwen3_vl_folder, "compact", prefill_chunk=CHUNK)
    tokenizer, embeddings = pipe.processor.tokenizer, pipe.model.get_input_embeddings()
    bad = [LONGER + BAD + LONG, LONGER + BAD][where]
    [token] = {tokenizer("Zq9")["input_ids"][-1]}
    expected = alone(pipe, [LONG, SHORT[0]])
    with torch.no_grad():
        embeddings.weight[token] = torch.nan
    answers = [made(pipe, prompt) for prompt in (bad, LONG, SHORT[0])]
    for answer in answers:
        pipe.engine.submit(answer)
    run(pipe, answers)
    with pytest.raises(FloatingPointError):
        answers[0].complete()
    assert [answer.complete().token_ids for answer in answers[1:]] == expected
    assert empty(pipe)


def test_a_request_without_memory_waits_for_a_long_prompt(qwen3_vl_folder: Path) -> None:
    """Nothing decodes meanwhile, and smaller requests may overtake."""
    pipe = loaded(qwen3_vl_folder, prefill_chunk=CHUNK, kv_budget=1 << 24, spill=False)
    assert pipe.budget is not None
    prompts = [LONGER, LONG, SHORT[0]]
    expected = alone(pipe, prompts)
    answers = [made(pipe, prompt) for prompt in prompts]
    pipe.budget.limit = needed(pipe, answers[0]) + needed(pipe, answers[2])
    for answer in answers:
        pipe.engine.submit(answer)
    running = []
    with at_passes(pipe, {5: lambda: running.append((pipe.engine.running, pipe.engine.waiting))}):
        run(pipe, answers)
    assert running[0][1] == 1
    assert [answer.complete().token_ids for answer in answers] == expected
    assert empty(pipe)


def test_a_prompt_of_one_chunk_is_read_exactly(qwen3_vl_folder: Path) -> None:
    """With pages of few bits too, it equals transformers' own attention without a cache."""
    pipe = loaded(qwen3_vl_folder, "compact", prefill_chunk=400)
    images = [noise(96, 64), noise(64, 96, 1)]
    prompt = prepare(pipe, LONG, pipe.read_media(images))
    assert 200 < prompt.tokens <= 400
    cache = pipe.new_cache()
    with engine_waits(pipe):
        found = pipe.engine.reader.read(prompt, cache)
        cache.close()
    pipe.model.set_attn_implementation({"text_config": "sdpa"})
    with torch.inference_mode():
        whole = pipe.model(
            **prompt.arguments(), position_ids=prompt.positions, use_cache=False
        ).logits[:, -1]
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)


def test_added_turns_let_others_run(qwen3_vl_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long answer is added as history while others ask questions; the chat equals one to which it
    was added at once."""
    pipe = loaded(qwen3_vl_folder, prefill_chunk=CHUNK)
    whole = loaded(qwen3_vl_folder)
    with whole.chat() as chat:
        chat.tell("What?", LONGER)
        expected = chat.ask("And?", max_new_tokens=6, temperature=0).token_ids
    [said] = alone(pipe, SHORT[:1])
    short, order = made(pipe, SHORT[0]), list[str]()
    taken = short.take
    monkeypatch.setattr(short, "take", lambda token: (order.append("short"), taken(token)))
    with pipe.chat() as chat, at_passes(pipe, {2: partial(pipe.engine.submit, short)}) as passes:
        chat.tell("What?", LONGER)
        order.append("told")
        assert len(passes) >= 8 and max(passes) <= CHUNK
        assert chat.ask("And?", max_new_tokens=6, temperature=0).token_ids == expected
    run(pipe, [short])
    assert order[0] == "short" and short.complete().token_ids == said
    assert empty(pipe)


def test_a_caller_leaves_while_turns_are_added(qwen3_vl_folder: Path) -> None:
    """Turns read before the cancellation are kept; pages of the others are free."""
    pipe = loaded(qwen3_vl_folder, "compact", prefill_chunk=CHUNK)
    with pipe.chat() as chat:
        chat.tell("Who?", "Nobody.")
        used = pipe.store.memory().used_bytes
        with at_passes(pipe, {3: chat.stop}), pytest.raises(Cancelled):
            chat.tell("What?", LONGER)
        assert pipe.store.memory().used_bytes == used
        assert [turn.prompt for turn in chat.turns] == ["Who?"]
        chat.ask("And?", max_new_tokens=3)
    assert empty(pipe)


def test_a_thread_that_adds_turns_and_one_that_asks(qwen3_vl_folder: Path) -> None:
    """Either of two independent threads may run the steps."""
    pipe = loaded(qwen3_vl_folder, prefill_chunk=CHUNK)
    expected = alone(pipe, SHORT)
    events: list[Any] = []

    def tell() -> None:
        with pipe.chat() as chat:
            chat.tell("What?", LONGER)
            events.append("told")

    begun = threading.Event()
    with at_passes(pipe, {1: begun.set}):
        thread = threading.Thread(target=tell)
        thread.start()
        assert begun.wait(60)
        events += alone(pipe, SHORT)
        thread.join(60)
    assert [event for event in events if event != "told"] == expected and "told" in events
    assert empty(pipe)


@pytest.mark.parametrize(("device", "tokens"), [("cpu", 1024), ("cuda", 32_768), ("mps", 32_768)])
def test_chunks_of_services(device: str, tokens: int) -> None:
    assert usual_chunk(torch.device(device)) == tokens


def test_the_usual_chunk_of_a_pipeline(qwen3_vl_folder: Path) -> None:
    assert loaded(qwen3_vl_folder, prefill_chunk="auto").prefill_chunk == 1024
    assert loaded(qwen3_vl_folder).prefill_chunk is None
