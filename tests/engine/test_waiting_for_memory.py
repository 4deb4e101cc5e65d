"""Requests and chats that wait for memory in the budget, and requests that may overtake them."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from oscar_mm.cache.page_store import PageStore
from oscar_mm.chat.chat import Chat
from oscar_mm.engine import prefill as prefill_module
from oscar_mm.engine.request import Request
from oscar_mm.errors import InputError, MemoryBusy
from tests.engine.engine import (
    SHORT,
    TOKENS,
    alone,
    empty,
    loaded,
    made,
    needed,
    run,
    spill,
    together,
)
from tests.engine.engine_waits import engine_waits

pytestmark = pytest.mark.usefixtures("quick_collection")


def test_one_waits_for_another_that_ends_at_its_first_token(qwen3_vl_folder) -> None:
    pipe = loaded(qwen3_vl_folder, kv_budget=1 << 24, spill=False)
    answers = [made(pipe, SHORT[0], max_new_tokens=1) for _ in range(3)]
    # Their pages are free before their texts are read.
    assert pipe.budget is not None
    pipe.budget.limit = int(1.5 * needed(pipe, answers[0]))
    found = together(pipe, answers)
    assert found[0] == found[1] == found[2] and len(found[0]) == 1
    del answers
    assert empty(pipe)


@pytest.mark.daily("1")
@pytest.mark.parametrize("together_at_most", [1, 2])
def test_clients_take_turns_in_waiting_for_memory(qwen3_vl_folder, together_at_most: int) -> None:
    pipe = loaded(qwen3_vl_folder, kv_budget=1 << 24, spill=False)
    assert pipe.budget is not None
    expected = alone(pipe, [SHORT[0]])[0]
    clients = [*[("a", "x")] * 6, ("a", "y"), ("b", ""), ("b", "")]
    answers = [made(pipe, SHORT[0]) for _ in clients]
    for answer, client in zip(answers, clients, strict=True):
        answer.client = client
    pipe.budget.limit = int((together_at_most + 0.5) * needed(pipe, answers[0]))
    begun: list[tuple[str, str]] = []
    for answer in answers:
        write = answer.write

        def noted(token: int, answer: Any = answer, write: Any = write) -> None:
            if not answer.written.token_ids:
                begun.append(answer.client)
            write(token)

        answer.write = noted
    assert together(pipe, answers) == [expected] * len(answers)
    # After the first ones a and b alternate, and at a its users do.
    places = [place for place, client in enumerate(begun) if client == ("b", "")]
    assert places[0] <= 2 and places[1] <= places[0] + 2
    assert [client for client in begun if client[0] == "a"].index(("a", "y")) <= 2
    assert len(begun) == len(clients)
    del answers, answer, write, noted
    assert empty(pipe)


def test_a_client_whose_request_runs_longer_has_no_more_of_them(qwen3_vl_folder) -> None:
    pipe = loaded(qwen3_vl_folder, kv_budget=1 << 24, spill=False)
    assert pipe.budget is not None
    lengths = [("a", 200), ("b", 2), ("a", 2), ("b", 2), ("b", 2)]
    answers = [made(pipe, SHORT[0], max_new_tokens=length) for _, length in lengths]
    for answer, (client, _) in zip(answers, lengths, strict=True):
        answer.client = (client,)
    pipe.budget.limit = needed(pipe, answers[0]) + int(1.5 * needed(pipe, answers[1]))
    for answer in answers:
        pipe.engine.submit(answer)
    run(pipe, [answers[1], *answers[3:]])
    assert not answers[2].written.token_ids and not answers[0].ended
    run(pipe, answers)
    for answer in answers:
        answer.complete()
    del answers, answer
    assert empty(pipe)


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_overtakes_is_read_as_it_would_be_alone(qwen3_vl_folder, monkeypatch) -> None:
    pipe = loaded(qwen3_vl_folder, kv_budget=1 << 24, spill=False)
    assert pipe.budget is not None
    small, large = made(pipe, SHORT[0]), made(pipe, SHORT[1], max_new_tokens=400)
    exact = made(pipe, SHORT[2], deterministic=True)
    pipe.budget.limit = max(needed(pipe, small) + needed(pipe, exact), needed(pipe, large))
    right, varlen = prefill_module.prefill, []

    def prefill(model: Any, prompt: Any, *rest: Any, **options: Any) -> torch.Tensor:
        varlen.append(prompt.tokens)
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
    assert varlen == [] and order.index(exact) < order.index(large)


def test_an_answer_that_is_left_while_it_gets_its_memory(qwen3_vl_folder, monkeypatch) -> None:
    pipe = loaded(qwen3_vl_folder, kv_budget=1 << 24, spill=False)
    assert pipe.budget is not None
    answer, after = made(pipe, SHORT[0]), made(pipe, SHORT[1])
    right = type(pipe.admission).reserve

    def reserve(*args: Any) -> Any:
        reservation = right(*args)
        answer.cancel()
        return reservation

    monkeypatch.setattr(type(pipe.admission), "reserve", reserve)
    pipe.engine.submit(answer)
    pipe.engine.submit(after)
    run(pipe, [after])
    assert answer.reservation is None and answer.tokens == []
    assert pipe.budget.taken_bytes == pipe.budget.used_bytes


def test_pipelines_of_one_engine_thread(qwen3_vl_folder) -> None:
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
    with pytest.raises(MemoryBusy):
        together(twin, [late])


def test_a_request_begins_when_an_answer_of_another_policy_has_ended(qwen3_vl_folder) -> None:
    """An answer of another policy frees memory too, not only one of the same policy."""
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


@pytest.mark.slow
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


def test_a_chat_on_disk_waits_for_memory(qwen3_vl_folder) -> None:
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
    with pytest.raises(MemoryBusy):
        found.undo()


@pytest.mark.parametrize("waits", ["tell", "load_chat"])
def test_turns_and_chats_that_are_read_wait_for_memory(
    qwen3_vl_folder, tmp_path, waits: str
) -> None:
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
        assert issubclass(refused.type, MemoryBusy) is is_busy
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
    for answer in small[:6]:
        pipe.engine.submit(answer)
    pipe.engine.run_until(lambda: bool(small[0].tokens))
    queue = pipe.engine.scheduler._queue
    with ThreadPoolExecutor(1) as pool:
        undone = pool.submit(chat.undo)
        pipe.engine.run_until(lambda: any(not isinstance(entry, Request) for entry in queue))
        for answer in small[6:]:
            pipe.engine.submit(answer)
        undone.result(60)
    assert sum(answer.ended for answer in small) < 20
    run(pipe, small)
    assert not any(answer.error for answer in small)


@pytest.mark.parametrize("policy", ["bf16", "standard"])
@pytest.mark.parametrize("waits", ["request", "chat"])
def test_memory_of_an_answer_that_ends_while_the_engine_is_busy(
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
    with ThreadPoolExecutor(1) as threads, engine_waits(pipe):
        threads.submit(stream.close).result(60)
    if waits == "chat":
        chat.undo()
    else:
        assert together(pipe, [made(pipe, SHORT[0])])


def test_nobody_is_overtaken_for_ever(qwen3_vl_folder) -> None:
    pipe = loaded(qwen3_vl_folder, kv_budget=1 << 24, spill=False)
    assert pipe.budget is not None
    large = made(pipe, SHORT[1], max_new_tokens=150)
    pipe.budget.limit = int(1.05 * needed(pipe, large))
    small = [made(pipe, SHORT[0], max_new_tokens=30) for _ in range(18)]
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
    with pytest.raises(MemoryBusy):
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


@pytest.mark.daily("True")
@pytest.mark.parametrize("steps_of_twin", [True, False])
def test_a_chat_waits_for_an_answer_of_another_policy_while_all_are_stepped(
    qwen3_vl_folder, steps_of_twin: bool
) -> None:
    """Covers an answer whose pieces are read, and one whose pieces are not."""
    pipe = loaded(qwen3_vl_folder, kv_budget=1 << 24, spill=False)
    twin, chat = pipe.with_policy("standard"), pipe.chat()
    assert pipe.budget is not None
    running = made(twin, SHORT[0], max_new_tokens=100)
    pieces = iter(running)
    next(pieces)
    pipe.budget.limit = pipe.budget.taken_bytes + 100
    with ThreadPoolExecutor(1) as pool, pipe.engine.keep_stepping(lambda: None):
        telling = pool.submit(chat.tell, SHORT[1], answer="No.")
        while not pipe.engine.waiting:
            time.sleep(0.001)
        if steps_of_twin:
            list(pieces)
        try:
            with suppress(MemoryBusy):  # It waited, and the little free memory may not be enough.
                telling.result(20)
        finally:
            pipe.budget.limit = 1 << 24
            running.cancel()
    assert running.ended and not pipe.engine.waiting
    chat.close()
