"""Streams in coroutines: ``async for`` over the pieces of an answer."""

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from oscar_mm import InputError, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.engine.answer import AnswerStream
from oscar_mm.engine.async_pieces import AsyncPieces
from oscar_mm.errors import Cancelled
from tests.engine.engine import empty
from tests.pipelines.conftest import NEVER
from tests.prompts import noise

LONG = {"max_new_tokens": 200, "temperature": 0}
SHORT = {"max_new_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def pipe(qwen3_vl_folder) -> OscarVLPipeline:
    made = OscarVLPipeline(qwen3_vl_folder, policy="standard", device="cpu")
    made.model.generation_config.eos_token_id = NEVER
    return made


class NoPool(ThreadPoolExecutor):
    """Default executor of an event loop that fails when it is used."""

    def submit(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a stream waits in the default pool")


def run(coroutine: Any) -> Any:
    async def main() -> Any:
        asyncio.get_running_loop().set_default_executor(NoPool(1))
        return await asyncio.wait_for(coroutine, 60)

    return asyncio.run(main())


def ends(condition: Any) -> bool:
    """Wait a short time for a condition; return whether it holds."""
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return condition()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert ends(lambda: not any(one.name == "oscar-stream" for one in threading.enumerate()))


def test_the_pieces_are_those_of_a_stream(pipe) -> None:
    picture = noise(40, 40)
    expected = list(pipe.stream([picture], "What?", **SHORT))

    async def ask() -> tuple[list[str], Any]:
        stream = pipe.stream([picture], "What?", **SHORT)
        return [piece async for piece in stream], stream.result

    pieces, answer = run(ask())
    assert pieces == expected and answer.text == "".join(pieces) and len(pieces) > 3


@pytest.mark.slow
def test_fifty_streams_at_once(pipe) -> None:
    prompts, options = (
        [f"What is {number}?" for number in range(50)],
        SHORT | {"max_new_tokens": 40},
    )
    expected = pipe.batch([{"prompt": prompt, **options} for prompt in prompts], batch_size=50)
    open_streams, most = 0, 0

    async def ask(stream: AnswerStream) -> str:
        nonlocal open_streams, most
        text = ""
        async for piece in stream:
            open_streams += not text
            most = max(most, open_streams)
            text += piece
        open_streams -= 1
        return text

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*[ask(pipe.stream([], one, **options)) for one in prompts])

    assert run(all_of_them()) == [one.answer.text for one in expected]
    assert most > 32, "more than a default pool has threads"


def test_the_loop_goes_on_meanwhile(pipe) -> None:
    ticks = []

    async def tick() -> None:
        while True:
            await asyncio.sleep(0.001)
            ticks.append(time.perf_counter())

    async def ask() -> float:
        ticking = asyncio.ensure_future(tick())
        begin = time.perf_counter()
        async for _ in pipe.stream([], "What?", **LONG | {"max_new_tokens": 60}):
            pass
        ticking.cancel()
        return time.perf_counter() - begin

    seconds = run(ask())
    assert len(ticks) > 20 * seconds


@pytest.mark.parametrize("how", ["break", "aclose", "cancel"])
def test_leaving_ends_the_answer(pipe, how: str) -> None:
    async def leave() -> AnswerStream:
        stream = pipe.stream([], "What?", **LONG)
        async for _ in stream:
            break
        return stream

    async def close() -> AnswerStream:
        stream = pipe.stream([], "What?", **LONG)
        pieces = aiter(stream)
        await anext(pieces)
        await pieces.aclose()
        return stream

    async def cancel() -> AnswerStream:
        stream, begun = pipe.stream([], "What?", **LONG), asyncio.Event()

        async def ask() -> None:
            async for _ in stream:
                begun.set()

        task = asyncio.ensure_future(ask())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return stream

    stream = run({"break": leave, "aclose": close, "cancel": cancel}[how]())
    assert ends(lambda: not pipe.engine.running and empty(pipe))
    # Where it ended, long before its longest.
    assert ends(lambda: stream._result is not None) and len(stream.result.token_ids) < 150


def test_a_chat_goes_on_at_once_after_a_stream_was_left(pipe) -> None:
    async def ask() -> Any:
        with pipe.chat() as chat:
            pieces = aiter(chat.stream("What?", **LONG))
            first = await anext(pieces)
            del pieces
            chat.ask("And now?", **SHORT)
            async for _ in chat.stream("Again?", **SHORT):
                pass
            pieces = aiter(chat.stream("More?", **LONG))
            await anext(pieces)
            pieces.close()
            forked = chat.fork()
            forked.close()
            return first, chat.turns

    first, turns = run(ask())
    assert turns[0].answer.startswith(first) and len(turns[0].answer) < 1000
    assert [turn.finish_reason for turn in turns] == [
        *("interrupted", "length", "length", "interrupted"),
    ]
    assert empty(pipe)


def test_a_stream_that_ended_does_not_end_the_next(pipe) -> None:
    async def ask() -> Any:
        with pipe.chat() as chat:
            pieces = aiter(chat.stream("What?", **SHORT))
            async for _ in pieces:
                pass
            following = chat.stream("And?", **SHORT)
            next(following)
            pieces.close()
            del pieces
            return following.complete()

    assert run(ask()).finish_reason == "length"


def test_errors_arrive(pipe, monkeypatch) -> None:
    async def ask() -> list[str]:
        return [piece async for piece in pipe.stream([], "What?", **SHORT)]

    with pytest.raises(InputError, match="unknown argument"):
        pipe.stream([], "What?", words=5)
    layer = pipe.model.get_decoder().layers[1]

    def fail(*_: Any) -> None:
        raise FloatingPointError("the sum of all fears")

    handle = layer.register_forward_pre_hook(fail)
    try:
        with pytest.raises(FloatingPointError, match="the sum of all fears"):
            run(ask())
    finally:
        handle.remove()
    assert run(ask()) == list(pipe.stream([], "What?", **SHORT))

    async def cancelled() -> None:
        with pipe.chat() as chat:
            chat.cancel()
            async for _ in chat.stream("What?", **SHORT):
                pass

    with pytest.raises(Cancelled):
        run(cancelled())


def test_without_a_way_to_cancel_an_answer_ends_with_its_next_piece() -> None:
    ended, given = threading.Event(), []

    def pieces() -> Iterator[str]:
        try:
            while True:
                given.append(len(given))
                yield "a"
                time.sleep(0.005)
        finally:
            ended.set()

    async def ask() -> None:
        async for _ in AnswerStream(pieces()):  # pyright: ignore[reportArgumentType]
            break

    run(ask())
    assert ended.wait(5) and len(given) < 1000


def test_a_loop_that_is_closed_ends_the_answer(pipe) -> None:
    kept: list[AsyncPieces[str]] = []

    async def ask() -> None:
        kept.append(aiter(pipe.stream([], "What?", **LONG)))
        await anext(kept[0])

    run(ask())
    assert ends(lambda: not pipe.engine.running)
    kept.clear()


def test_all_kinds_of_pieces_and_the_end(pipe) -> None:
    async def ask() -> Any:
        stream = pipe.stream([], "What?", **SHORT)
        pieces = stream.async_pieces()
        found = [piece async for piece in pieces]
        with pytest.raises(StopAsyncIteration):
            await anext(pieces)
        return "".join(map(str, found)), stream.result.text

    found, text = run(ask())
    assert found == text


def test_omni_too(qwen3_omni_folder) -> None:
    omni = OscarOmniPipeline(qwen3_omni_folder, device="cpu")
    expected = list(omni.stream(prompt="What?", **SHORT))

    async def ask() -> list[str]:
        return [piece async for piece in omni.stream(prompt="What?", **SHORT)]

    assert run(ask()) == expected
