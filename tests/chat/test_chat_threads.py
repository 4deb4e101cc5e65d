"""Chats of one pipeline, in turns and in threads."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from oscar_mm import OscarVLPipeline
from oscar_mm.errors import RequestTooLarge
from tests.chats import MORE, OTHER, QUESTION, asked, packed_pipeline


@pytest.fixture(scope="module")
def packed(qwen3_vl_folder) -> OscarVLPipeline:
    return packed_pipeline(qwen3_vl_folder)


def test_chats_take_turns(packed) -> None:
    questions = [(QUESTION, OTHER, MORE), (OTHER, MORE, QUESTION), (MORE, QUESTION, OTHER)]
    expected = [asked(packed.chat(), *three) for three in questions]
    chats = [packed.chat() for _ in questions]
    found = [[] for _ in questions]
    for turn in range(3):
        streams = [chat.stream(**three[turn]) for chat, three in zip(chats, questions, strict=True)]
        # Token by token in turns.
        for _ in range(6):
            for stream in streams:
                next(stream, None)
        for stream, answers in zip(streams, found, strict=True):
            list(stream)
            answers.append(stream.result.token_ids)
    assert found == expected


@pytest.mark.slow
def test_threads_take_turns(packed) -> None:
    def work(questions: tuple[dict[str, Any], ...]) -> list[list[int]]:
        chat = packed.chat()
        answers = []
        for question in questions:
            answers += asked(chat, question)
            other = packed(question.get("images"), question["prompt"], max_new_tokens=6)
            answers.append(other.token_ids)
            stream = chat.fork().stream(**MORE)
            list(stream)
            answers.append(stream.result.token_ids)
        return answers

    rounds = [(QUESTION, OTHER), (OTHER, MORE), (MORE, QUESTION)]
    expected = [work(questions) for questions in rounds]
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(work, rounds)) == expected


@contextmanager
def busy_engine(pipe: OscarVLPipeline) -> Iterator[None]:
    """Keep the engine thread busy within the block."""
    over = threading.Event()
    pipe.engine.thread.post(lambda: over.wait(60))
    try:
        yield
    finally:
        over.set()


def test_a_first_turn_is_checked_while_the_engine_is_busy(packed) -> None:
    chat = packed.chat()
    with busy_engine(packed), pytest.raises(RequestTooLarge, match="lower max_new_tokens"):
        chat.stream("Why?", max_new_tokens=10**6)
    with busy_engine(packed):
        stream = chat.stream("Why?", max_new_tokens=10**6, cut_to_fit=True)
    stream.close()


def test_threads_share_a_chat(packed) -> None:
    chat = packed.chat()
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda _: chat.ask(**MORE), range(3)))
    alone = packed.chat()
    assert asked(alone, MORE, MORE, MORE)
    assert chat.turns == alone.turns
    stream = chat.stream(**MORE)
    started = threading.Event()
    hook = packed.model.lm_head.register_forward_pre_hook(lambda *_: started.set())
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(list, stream)
        assert started.wait(30)
        hook.remove()
        try:
            chat.undo()
        except RuntimeError as error:
            assert "answering in another thread" in str(error)
            reading.result(30)
            assert len(chat.turns) == 4
        else:
            # Between two steps: the stream ended there.
            reading.result(30)
            assert len(chat.turns) in (2, 3)
    assert asked(chat, MORE)


@pytest.mark.parametrize("way", ["stream", "tell", "pipeline"])
def test_others_answer_while_a_prompt_is_prepared(packed, monkeypatch, way: str) -> None:
    [expected] = asked(packed.chat(), OTHER)
    began, go_on = threading.Event(), threading.Event()
    right = packed.family.encode

    def encode(text: str, *args: Any) -> Any:
        if "Slow" in text:
            began.set()
            assert go_on.wait(60)
        return right(text, *args)

    monkeypatch.setattr(packed.family, "encode", encode)
    chat = packed.chat()
    asked(chat, MORE)
    prepare = {
        "stream": lambda: list(chat.stream("Slow?", max_new_tokens=3)),
        "tell": lambda: chat.tell("Slow?", "No."),
        "pipeline": lambda: packed(None, "Slow?", max_new_tokens=3),
    }[way]
    with ThreadPoolExecutor(2) as threads:
        prepared = threads.submit(prepare)
        try:
            assert began.wait(60)
            assert threads.submit(asked, packed.chat(), OTHER).result(30) == [expected]
        finally:
            go_on.set()
        prepared.result(60)
    assert len(chat.turns) == 1 + (way != "pipeline")


def test_a_stream_that_becomes_a_turn_while_the_next_prompt_is_prepared(packed) -> None:
    chats = packed.chat(), packed.chat()
    for chat, closes in zip(chats, (True, False), strict=True):
        stream = chat.stream(**MORE)
        next(stream)
        if closes:
            stream.close()
        chat.tell("And then?", "Nothing.")
    assert len(chats[0].turns) == 2
    assert chats[0].turns == chats[1].turns


def test_a_new_chat_does_not_wait_for_the_engine(qwen3_vl_folder) -> None:
    """Also with a budget, in which a chat without turns has nothing to spill."""
    pipe = OscarVLPipeline(qwen3_vl_folder, kv_budget="1MB", device="cpu")
    over, ended = threading.Event(), list[bool]()
    pipe.engine.thread.post(lambda: ended.append(over.wait(10)))
    chat = pipe.chat()
    assert not ended
    over.set()
    assert chat.ask(**QUESTION).token_ids
