"""Chat: whatever ends an answer, the chat continues a whole turn."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from oscar_mm import InputError, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.pipelines.pipeline import Pipeline
from tests.chats import MORE, OTHER, QUESTION, asked, packed_pipeline
from tests.pipelines.conftest import exact
from tests.prompts import noise

FAMILIES = [
    (OscarVLPipeline, "llava_next_folder"),
    (OscarVLPipeline, "qwen3_vl_folder"),
    (OscarOmniPipeline, "qwen3_omni_folder"),
]


@pytest.fixture(scope="module")
def packed(qwen3_vl_folder) -> OscarVLPipeline:
    return packed_pipeline(qwen3_vl_folder)


@contextmanager
def failing(pipe: Pipeline, forward: int, error: BaseException) -> Iterator[None]:
    """An error in the middle of the n-th forward pass: some layers have stored their tokens."""
    passes = [0]

    def fail(*_: Any) -> None:
        passes[0] += 1
        if passes[0] == forward:
            raise error

    hook = pipe.model.get_decoder().layers[1].register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.daily("RuntimeError('out of memory')-1", "KeyboardInterrupt()-3")
@pytest.mark.parametrize("forward", [1, 3])
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=repr)
def test_errors_leave_the_chat_as_it_was(forward, error, packed) -> None:
    plain, chat = packed.chat(), packed.chat()
    assert asked(plain, QUESTION) == asked(chat, QUESTION)
    held = packed.store.memory().used_bytes
    # An interrupt that a hook raises in the engine thread is none of the thread that asks.
    expected = type(error) if isinstance(error, Exception) else RuntimeError
    for ask in (chat.ask, lambda **question: list(chat.stream(**question))):
        with failing(packed, forward, error), pytest.raises(expected):
            ask(**OTHER)
    with pytest.raises(InputError, match=r"gone\.png"):
        chat.ask("What?", images=["gone.png"])
    with pytest.raises(InputError, match="unknown argument shout: choose from prompt, images"):
        chat.ask("What?", shout=True)
    with pytest.raises(InputError, match="prompt is empty"):
        chat.ask(" ")
    gc.collect()
    assert packed.store.memory().used_bytes == held
    assert chat.turns == plain.turns
    assert asked(chat, OTHER, MORE) == asked(plain, OTHER, MORE)


def test_a_stream_ends_where_its_reader_leaves(packed) -> None:
    whole = packed.chat()
    pieces = list(whole.stream(**QUESTION))
    ids = whole.turns[0]
    for count in (1, 2, len(pieces)):
        left = packed.chat()
        stream = left.stream(**QUESTION)
        for index, _ in enumerate(stream, 1):
            if index == count:
                break
        kept = count == 2
        if kept:
            assert left.turns == ()  # It may go on.
        else:
            del stream
        left_off = left.ask(**MORE)
        assert [turn.answer for turn in left.turns[:-1]] == ["".join(pieces[:count])]
        assert left.turns[0].finish_reason == "interrupted"
        if kept:
            assert list(stream) == []
            with pytest.raises(RuntimeError, match="not complete"):
                _ = stream.result
        short = packed.chat()
        # As many tokens as were read: pieces may be of more than one.
        tokens = left.turns[0].stop - left.turns[0].start - whole_prompt(ids)
        short.ask(**{**QUESTION, "max_new_tokens": tokens + 1})
        assert short.ask(**MORE).token_ids == left_off.token_ids
    unread = packed.chat()
    stream = unread.stream(**QUESTION)
    assert unread.ask(**QUESTION).text == "".join(pieces)
    assert list(stream) == [] and len(unread.turns) == 1
    stream = unread.stream(**MORE)
    next(stream)
    stream.close()
    stream.close()
    assert unread.turns[-1].finish_reason == "interrupted"


def whole_prompt(turn: Any) -> int:
    """Tokens of the prompt of a turn of six tokens, the last of which is not in the cache."""
    return turn.stop - turn.start - 5


def test_an_answer_of_no_tokens(packed, monkeypatch) -> None:
    chat = packed.chat()
    everything = frozenset(range(packed.model.config.get_text_config().vocab_size))
    monkeypatch.setattr(packed.family, "end_tokens", lambda: everything)
    assert chat.ask(**QUESTION).token_ids == []
    monkeypatch.undo()
    assert len(chat.ask(**MORE).token_ids) == 6
    assert chat.turns[0].answer == ""


@pytest.mark.parametrize(("kind", "folder"), FAMILIES)
def test_an_answer_that_ends_with_a_placeholder(kind, folder, request) -> None:
    pipe = exact(kind, request.getfixturevalue(folder))
    chat = pipe.chat()

    def choose(_: Any, __: Any, output: Any) -> None:
        output.logits[..., pipe.model.config.image_token_id] = 1e6

    hook = pipe.model.register_forward_hook(choose)
    answer = chat.ask("What?", images=[noise(64, 96)], max_new_tokens=3)
    hook.remove()
    assert answer.token_ids == [pipe.model.config.image_token_id] * 3
    assert [segment.modality.label for segment in chat.segments] == ["text", "image"]
    assert chat.ask("And this?", images=[noise(64, 96)], max_new_tokens=3).token_ids
