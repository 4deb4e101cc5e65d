"""Chats of one pipeline, in turns and in threads."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from oscar_mm import OscarVLPipeline
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
