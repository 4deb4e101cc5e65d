"""Spoken turns of chats: against the speech of whole conversations, left, undone, spilled."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from oscar_mm import InputError, OscarOmniPipeline, Speech
from oscar_mm.chat.chat import Chat
from oscar_mm.chat.warm_up import answer_in_advance
from oscar_mm.pipelines.families.qwen3_omni_talker import OmniVoice, Qwen3OmniTalker
from tests.pipelines.conftest import exact
from tests.prompts import noise, tone
from tests.thinking import ids_of, saying
from tests.tool_template import CALL, FIND, with_tools

SEED = 2
"""A seed with which the talker speaks the answers in at least ``FRAMES`` frames."""
FRAMES = 12
QUESTIONS: list[dict[str, Any]] = [
    {"prompt": "What is it?", "images": noise(64, 96)},
    {"prompt": "And this?", "audio": tone(1)},
    {"prompt": "Why?"},
    {"prompt": "And now?", "audio": tone(2)},
]


@pytest.fixture(scope="module")
def speaking(qwen3_omni_talker_folder) -> OscarOmniPipeline:
    return exact(OscarOmniPipeline, qwen3_omni_talker_folder)


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen3OmniTalker, "max_frames", FRAMES)


@pytest.fixture
def chat(speaking) -> Iterator[Chat]:
    with speaking.chat("Be brief.") as chat:
        yield chat


def options(pipe: OscarOmniPipeline) -> dict[str, Any]:
    """Options of an answer whose text has the tokens of the answer."""
    [token] = pipe.processor.tokenizer(" the")["input_ids"]
    return {"max_new_tokens": 9, "speak": True, "seed": SEED, "logit_bias": {token: 100}}


def ask(chat: Chat, turn: int, **how: Any) -> Any:
    pipe: Any = chat.pipe
    return chat.ask(**QUESTIONS[turn], **options(pipe) | how)


def spoken_at_once(pipe: OscarOmniPipeline, answers: list[str], turns: list[int]) -> np.ndarray:
    """The speech of the last turn, when the pipeline reads the whole conversation."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for place, turn in enumerate(turns):
        asked = QUESTIONS[turn]
        media = [
            {"type": kind, kind: asked[name]}
            for kind, name in (("image", "images"), ("audio", "audio"))
            if name in asked
        ]
        content = [*media, {"type": "text", "text": asked["prompt"]}]
        messages.append({"role": "user", "content": content})
        if place < len(turns) - 1:
            messages.append({"role": "assistant", "content": answers[place]})
    found = pipe(messages=messages, **options(pipe))
    assert found.text == answers[-1] and len(found.speech)
    return found.speech


def told(chat: Chat) -> list[str]:
    return [turn.answer for turn in chat.turns]


def speech_bytes(pipe: OscarOmniPipeline) -> int:
    return pipe.engine.call(lambda: pipe.engine.speech_bytes)


@pytest.mark.slow
def test_later_turns_are_said_as_whole_conversations(speaking, chat: Chat) -> None:
    """A turn without media need not be spoken."""
    for turn in range(4):
        answer = ask(chat, turn, speak=turn != 2)
        if turn == 2:
            assert answer.speech is None
            continue
        expected = spoken_at_once(speaking, told(chat), list(range(turn + 1)))
        np.testing.assert_allclose(answer.speech, expected, atol=2e-4)
        assert answer.memory.tokens["speech"] == chat.memory.tokens["speech"] > 0
    chat.close()
    assert not speech_bytes(speaking)


def test_the_talker_reads_only_the_new_question(chat: Chat) -> None:
    ask(chat, 0)
    before = chat.memory.tokens["speech"]
    ask(chat, 2)
    assert 0 < chat.memory.tokens["speech"] - before < 15


def test_closing_a_chat_returns_the_talkers_memory(speaking) -> None:
    with speaking.chat() as chat:
        ask(chat, 1)
        voices: Any = speaking.engine.scheduler._voices
        assert speaking.engine.call(voices._view.store.memory).used_bytes
    assert not speaking.engine.call(voices._view.store.memory).pool_bytes


def test_a_turn_that_was_left_is_heard(speaking, chat: Chat, monkeypatch) -> None:
    """Before the talker reads its question, or while it speaks."""
    for turn, pieces in ((0, 1), (1, 6)):
        with monkeypatch.context() as patched:
            if pieces == 1:
                patched.setattr(OmniVoice, "read", lambda *_: itertools.repeat(None))
            stream = chat.stream(**QUESTIONS[turn], **options(speaking))
            spoken = stream.with_speech()
            for _ in range(pieces):
                next(spoken)
            spoken.close()
            stream.close()
    answer = ask(chat, 3)
    expected = spoken_at_once(speaking, told(chat), [0, 1, 3])
    np.testing.assert_allclose(answer.speech, expected, atol=2e-4)


def test_leaving_an_answer_without_text_frees_its_speech(speaking) -> None:
    """It is spoken, but it has no text, so it does not become a turn."""
    [silent] = ids_of(speaking, "<|im_start|>")
    with speaking.chat("Be brief.") as chat:
        how = options(speaking) | {"logit_bias": {silent: 100}}
        spoken = chat.stream(**QUESTIONS[1], **how).with_speech()
        assert isinstance(next(spoken), Speech)
        chat.stop()
    assert not speech_bytes(speaking)
    spoken.close()


def test_stop_ends_answer_and_speech(speaking, chat: Chat) -> None:
    stream = chat.stream(**QUESTIONS[0], **options(speaking))
    pieces = []
    for piece in stream.with_speech():
        pieces.append(piece)
        if isinstance(piece, Speech):
            chat.stop()
    assert len([piece for piece in pieces if isinstance(piece, Speech)]) <= 2
    assert chat.turns[-1].finish_reason in ("interrupted", "length")
    assert len(ask(chat, 1).speech)


def test_undo_and_forks(speaking, chat: Chat) -> None:
    ask(chat, 0)
    with chat.fork() as other:
        ask(chat, 1)
        chat.undo()
        for one in (chat, other):
            answer = ask(one, 3)
            expected = spoken_at_once(speaking, told(one), [0, 3])
            np.testing.assert_allclose(answer.speech, expected, atol=2e-4)
        chat.undo()
        chat.undo()
        assert "speech" not in chat.memory.tokens
    answer = ask(chat, 1)
    np.testing.assert_allclose(answer.speech, spoken_at_once(speaking, told(chat), [1]), atol=2e-4)


def test_forgotten_media_are_forgotten_by_the_talker(chat: Chat) -> None:
    ask(chat, 0)
    ask(chat, 1)
    before, tokens = chat.memory.tokens["speech"], chat.images[0].tokens
    chat.forget(chat.images[0])
    assert chat.memory.tokens["speech"] == before - tokens
    assert len(ask(chat, 2).speech)


def test_a_spilled_chat_is_said_alike(speaking, qwen3_omni_talker_folder, tmp_path) -> None:
    pipe = exact(OscarOmniPipeline, qwen3_omni_talker_folder)
    with pipe.chat("Be brief.") as chat:
        ask(chat, 0)
        spillable = chat._spillable
        pipe.engine.call(lambda: spillable.spill(tmp_path / "chat"))
        assert not speech_bytes(pipe) and len([*tmp_path.iterdir()]) == 2
        answer = ask(chat, 1)
        expected = spoken_at_once(speaking, told(chat), [0, 1])
        np.testing.assert_allclose(answer.speech, expected, atol=2e-4)
        assert not [*tmp_path.iterdir()]


def test_what_the_talker_has_not_heard_is_refused(chat: Chat) -> None:
    ask(chat, 0, speak=False)
    with pytest.raises(InputError, match="has not heard the media of an earlier turn"):
        ask(chat, 1)
    assert len(chat.turns) == 1 and ask(chat, 1, speak=False).text
    with pytest.raises(InputError, match="speaker requires speak=True"):
        chat.ask("What?", speaker="ethan")


def test_a_model_without_a_talker_refuses(speaking, chat: Chat, monkeypatch) -> None:
    monkeypatch.setattr(speaking.family, "talker", None)
    with pytest.raises(InputError, match="no talker"):
        chat.ask("What?", speak=True)


def test_calls_are_not_spoken(qwen3_omni_calls_folder) -> None:
    """The text before a call is, as without the call; and the answer to its result."""
    pipe = exact(OscarOmniPipeline, qwen3_omni_calls_folder)
    pipe.model.generation_config.eos_token_id = ids_of(pipe, "<|im_end|>")
    how: dict[str, Any] = {"max_new_tokens": 99, "speak": True, "seed": SEED}
    said: list[Any] = []
    for text in ("I look for it.", "I look for it." + CALL, CALL):
        with pipe.chat(tools=[FIND]) as chat:
            with saying(pipe, ids_of(pipe, text)):
                said.append(chat.ask("What is it?", **how))
            if text == CALL:
                result = {"role": "tool", "tool_call_id": said[-1].tool_calls[0].id, "content": "x"}
                with saying(pipe, ids_of(pipe, "Found.")):
                    said.append(chat.ask(messages=[result], **how))
    plain, both, call, found = said
    assert (both.text, both.finish_reason) == ("I look for it.", "tool_calls")
    assert len(plain.speech) and np.array_equal(plain.speech, both.speech)
    assert (len(call.speech), call.finish_reason) == (0, "tool_calls")
    assert found.text == "Found." and len(found.speech)


def test_calls_that_would_be_spoken_are_refused(qwen3_omni_talker_folder) -> None:
    pipe = exact(OscarOmniPipeline, qwen3_omni_talker_folder)
    pipe.processor.chat_template = with_tools(pipe.processor.chat_template)
    with pipe.chat(tools=[FIND]) as chat, pytest.raises(InputError, match=r"tools: .* spoken"):
        chat.ask("What is it?", speak=True)


def test_an_answer_in_advance_is_spoken_in_part(speaking, monkeypatch) -> None:
    """Up to a piece of full length, for which a GPU has kernels of its own; nothing is left."""
    made, talker = list[OmniVoice](), speaking.family.talker
    voice = talker.voice
    monkeypatch.setattr(talker, "voice", lambda inputs: made.append(voice(inputs)) or made[-1])
    monkeypatch.setattr(talker, "end_code", -1)
    monkeypatch.setattr(talker, "max_frames", 4000)
    answer_in_advance(speaking)
    [one] = made
    assert 5 < one.frames < 1000
    assert speaking.engine.call(lambda: speaking.store.memory().used_bytes) == 0


def test_an_answer_in_advance_may_fail(speaking, monkeypatch, caplog) -> None:
    def fail(_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(speaking.family.talker, "voice", fail)
    answer_in_advance(speaking)
    assert "the warm-up failed" in caplog.text and "out of memory" in caplog.text
