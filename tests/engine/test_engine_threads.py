"""The engine thread, and the threads that wait for it."""

import gc
import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from oscar_mm import OscarVLPipeline
from oscar_mm.engine.output_processor import OutputProcessor
from oscar_mm.engine.request import Request
from oscar_mm.fast_decode import graph_runner
from tests.engine.engine import (
    SHORT,
    TOKENS,
    alone,
    empty,
    loaded,
    made,
    run,
    together,
)
from tests.engine.engine_waits import engine_waits
from tests.prompts import noise

pytestmark = pytest.mark.usefixtures("quick_collection")


@pytest.mark.parametrize("where", ["queue", "prompt", "step"])
def test_an_interrupt_is_that_threads(qwen3_vl_folder, monkeypatch, where: str) -> None:
    pipe = loaded(qwen3_vl_folder, kv_budget=1 << 22, spill=False)
    expected = alone(pipe, SHORT[:2])
    answers = [made(pipe, prompt) for prompt in SHORT[:2]]
    calls = itertools.count()
    name, owner, first = {
        "queue": ("reserve", type(pipe.admission), 1),
        "prompt": ("forward", pipe.model.get_decoder().layers[1], 0),
        "step": ("__call__", graph_runner.GraphRunner, 1),
    }[where]
    right = getattr(owner, name)

    def interrupted(*args: Any, **options: Any) -> Any:
        if next(calls) == first:
            raise KeyboardInterrupt
        return right(*args, **options)

    for answer in answers:
        pipe.engine.submit(answer)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        run(pipe, answers)  # The interrupt reaches no thread that waits.
    assert any(answer.error for answer in answers)
    for answer, ids in zip(answers, expected, strict=True):
        if answer.error is None:
            assert answer.complete().token_ids == ids
        else:
            with pytest.raises(RuntimeError, match="interrupted"):
                answer.complete()
    assert together(pipe, [made(pipe, prompt) for prompt in SHORT[:2]]) == expected
    del answers, answer
    assert empty(pipe)


@pytest.mark.slow
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


@pytest.mark.slow
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
    alone = pipe.engine.call(pipe.store.memory).used_bytes
    next(left)
    assert pipe.engine.call(pipe.store.memory).used_bytes > 1.5 * alone
    gc.disable()
    try:
        del left
        assert pipe.engine.call(pipe.store.memory).used_bytes < 1.4 * alone
        kept.close()
        del kept
        assert empty(pipe)
    finally:
        gc.enable()


def test_calls_within_a_stream(plain) -> None:
    expected = alone(plain)
    with ThreadPoolExecutor(2) as threads:
        others = [threads.submit(lambda x=x: together(plain, [made(plain, x)])) for x in SHORT[2:]]
        for count, _ in enumerate(plain.stream(None, SHORT[0], max_new_tokens=6)):
            if count == 2:
                found = plain(None, SHORT[1], max_new_tokens=TOKENS).token_ids
                assert found == expected[1]
    assert [other.result(60)[0] for other in others] == expected[2:]


@pytest.mark.parametrize("images", [None, noise(90, 120, 1)], ids=["text", "image"])
def test_a_request_is_read_and_checked_during_a_step(qwen3_vl_folder: Path, images: Any) -> None:
    """It only reads counters of the store, so it waits for no step."""
    pipe = loaded(qwen3_vl_folder, kv_budget=1 << 24)
    requests: list[Request] = []
    with engine_waits(pipe):
        thread = threading.Thread(target=lambda: requests.append(made(pipe, SHORT[0], images)))
        thread.start()
        thread.join(20)
        assert len(requests) == 1
    assert together(pipe, requests) == together(pipe, [made(pipe, SHORT[0], images)])


def test_a_first_token_does_not_wait_for_the_step_after_it(qwen3_vl_folder: Path) -> None:
    pipe = loaded(qwen3_vl_folder)
    first, second = (made(pipe, prompt, max_new_tokens=40) for prompt in SHORT[:2])
    pipe.engine.submit(first)
    pipe.engine.run_until(lambda: len(first.tokens) > 2)
    seen: list[int] = []
    with pipe.engine.keep_stepping(lambda: seen.append(len(second.tokens))):
        pipe.engine.submit(second)
        run(pipe, [first, second])
    assert sorted({*seen} - {0}) == list(range(1, 41))


def test_the_engine_thread_does_not_wait_for_itself(plain) -> None:
    with pytest.raises(RuntimeError, match="its own steps"):
        plain.engine.call(lambda: list(made(plain, SHORT[0])))
    assert empty(plain)


def test_a_thread_that_waits_for_an_answer_that_is_cancelled(qwen3_vl_folder: Path) -> None:
    pipe = loaded(qwen3_vl_folder)
    answer, thread = made(pipe, SHORT[0]), pipe.engine.thread
    waits = threading.Thread(target=pipe.engine.run_until, args=[lambda: answer.ended])
    with engine_waits(pipe):
        pipe.engine.submit(answer)
        waits.start()
        while not thread.has_calls:
            time.sleep(0.001)
        answer.cancel()
    waits.join(10)
    assert not waits.is_alive()
    assert empty(pipe)


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
    assert max(looks) < 10


@pytest.mark.daily("256")
@pytest.mark.parametrize("rows", [2, 256])
def test_no_thread_waits_for_a_step_that_nobody_makes(qwen3_vl_folder: Path, rows: int) -> None:
    """Answers end, are abandoned or fail, and threads arrive while others leave."""
    pipe = loaded(qwen3_vl_folder)
    pipe.engine.scheduler.max_rows = rows
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


def test_one_thread_makes_all_steps(plain, monkeypatch) -> None:
    expected, steppers, seen = alone(plain), set[int](), list[int]()
    step = plain.engine.scheduler._batches.step

    def noted() -> None:
        steppers.add(threading.get_ident())
        step()

    monkeypatch.setattr(plain.engine.scheduler._batches, "step", noted)
    for _ in range(2):
        answers = [made(plain, prompt) for prompt in SHORT]
        pieces: list[list[str]] = [[] for _ in answers]
        with plain.engine.keep_stepping(lambda: seen.append(plain.engine.running)):
            for answer in answers[:3]:
                plain.engine.submit(answer)
            # No thread waits for these.
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
    assert len(steppers) == 1


@pytest.mark.parametrize("interrupt", [False, True])
def test_an_error_in_the_thread_of_steps_is_that_of_the_answers(
    plain, monkeypatch, interrupt: bool
) -> None:
    expected, steppers = alone(plain, SHORT[:1]), set[int]()
    advance = plain.engine.scheduler.advance

    def noted() -> None:
        steppers.add(threading.get_ident())
        advance()

    def prepare() -> None:
        raise KeyboardInterrupt if interrupt else ZeroDivisionError

    monkeypatch.setattr(plain.engine.scheduler, "advance", noted)
    with plain.engine.keep_stepping(lambda: None):
        with monkeypatch.context() as broken:
            broken.setattr(plain.engine.scheduler, "_prepare", prepare)
            with pytest.raises(RuntimeError if interrupt else ZeroDivisionError):
                list(made(plain, SHORT[0]))
        assert together(plain, [made(plain, SHORT[0])]) == expected
        assert len(steppers) == 1 and threading.get_ident() not in steppers
    assert empty(plain)


@pytest.mark.slow
def test_an_answer_that_began_before_all_requests_are_stepped(plain) -> None:
    expected = alone(plain, SHORT[:1], max_new_tokens=150)[0]
    answer, other = made(plain, SHORT[0], max_new_tokens=150), made(plain, SHORT[1])
    pieces = iter(answer)
    first = next(pieces)
    with ThreadPoolExecutor(1) as pool:
        with plain.engine.keep_stepping(lambda: None):
            rest = pool.submit(list, pieces)
            with plain.engine.keep_stepping(lambda: None):
                list(other)
        assert "".join([first, *rest.result(60)]) == answer.written.text
    assert answer.written.token_ids == expected


def test_an_answer_has_ended_once_its_last_piece_is_there(plain, monkeypatch) -> None:
    """A thread that looks during a step gets all pieces of an answer that has ended."""
    answer, writing, go_on = made(plain, SHORT[0], stop="#?"), threading.Event(), threading.Event()
    push = answer.written.push

    def slow(token: int, at: float) -> list[str]:
        if len(answer.tokens) == TOKENS:
            writing.set()
            assert go_on.wait(60)
        return push(token, at)

    monkeypatch.setattr(answer.written, "push", slow)
    with plain.engine.keep_stepping(lambda: None):
        plain.engine.submit(answer)
        assert writing.wait(60)
        ended = answer.ended
        go_on.set()
        plain.engine.run_until(lambda: answer.ended)
    assert not ended and len(answer.take_pieces()) == TOKENS
    answer.complete()


def test_an_answer_that_is_released_while_its_thread_asks_for_its_memory(
    plain, monkeypatch
) -> None:
    """It says what its cache stored, not that a closed cache stores nothing."""
    answer, asked = made(plain, SHORT[0]), threading.Event()
    settle, call = answer.settle, plain.engine.call

    def settle_late() -> None:
        assert asked.wait(60)
        settle()

    def call_first(function: Any) -> Any:
        asked.set()
        return call(function)

    monkeypatch.setattr(answer, "settle", settle_late)
    monkeypatch.setattr(plain.engine, "call", call_first)
    with plain.engine.keep_stepping(lambda: None):
        plain.engine.submit(answer)
        deadline = time.monotonic() + 60
        while not answer.ended:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        memory = answer.answer().memory
    assert answer.cache.closed
    # The last token of an answer is not stored.
    assert memory.tokens["text"] == answer.prompt_tokens + TOKENS - 1


@pytest.mark.parametrize("stop", [(), ("#?",)])
def test_who_detokenizes(plain, monkeypatch, stop: tuple[str, ...]) -> None:
    """The thread that takes the pieces, unless a stop string may end the answer."""
    answer, threads = made(plain, SHORT[0], stop=stop), set[str]()
    push = answer.written.push

    def noted(token: int, at: float) -> list[str]:
        threads.add(threading.current_thread().name)
        return push(token, at)

    monkeypatch.setattr(answer.written, "push", noted)
    with plain.engine.keep_stepping(lambda: None):
        plain.engine.submit(answer)
        plain.engine.run_until(lambda: answer.ended)
        assert bool(threads) == bool(stop)
        assert "".join(answer.take_pieces()) == answer.complete().text
    here = threading.current_thread().name
    assert (here not in threads) if stop else (threads == {here})


def test_an_error_of_the_tokenizer_releases_the_memory(plain, monkeypatch) -> None:
    """Also if nothing is asked afterwards."""
    answer = made(plain, SHORT[0], max_new_tokens=500)

    def fail(token: int, at: float) -> list[str]:
        raise RuntimeError("no text")

    monkeypatch.setattr(answer.written, "push", fail)
    with pytest.raises(RuntimeError, match="no text"):
        list(answer)
    deadline = time.monotonic() + 10
    while not answer.cache.closed:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_answer_that_is_cancelled_while_it_is_written_ends(plain, monkeypatch) -> None:
    answer = made(plain, SHORT[0], stop="#?")

    def stopped(_: OutputProcessor) -> bool:
        answer.cancel()  # As another thread may just now.
        return False

    monkeypatch.setattr(OutputProcessor, "stopped", property(stopped))
    plain.engine.submit(answer)
    run(plain, [answer])
    assert len(answer.tokens) == 1
