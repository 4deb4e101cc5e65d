"""Turns that took place elsewhere: the chat goes on as if they had been asked here."""

import time
from dataclasses import replace
from typing import Any

import pytest

from oscar_mm import InputError
from oscar_mm.chat.history import PastTurn
from oscar_mm.engine.message import Message, first_turn, user_message
from oscar_mm.engine.sampling import Sampling
from oscar_mm.errors import RequestTooLarge
from oscar_mm.media.part import media_parts
from tests.engine.engine import counted
from tests.pipelines.conftest import llava, omni, qwen  # noqa: F401 - fixtures
from tests.prompts import noise, tone

MORE = {"prompt": "And what is this?", "images": [noise(64, 64, 3)], "max_new_tokens": 5}
TURNS = {
    "llava": [({"images": [noise(64, 96)]}, "Two dogs."), ({}, "")],
    "qwen": [({"images": [noise(64, 96)]}, "Two dogs."), ({"images": [noise(70, 40, 1)]}, "")],
    "omni": [({"audio": tone(1.2)}, "A sound."), ({"images": [noise(64, 96)]}, "brown")],
}


def past(prompt: str, answer: str, images: Any = None, audio: Any = None) -> PastTurn:
    question = user_message(prompt, media_parts(images, audio=audio))
    return PastTurn([question], Message("assistant", (answer,), "answer"))


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("name", TURNS)
def test_goes_on_from_what_was_said(name, at_once: bool, request) -> None:
    pipe = request.getfixturevalue(name)
    messages, shown = [], pipe.read_media()
    with pipe.chat("Be brief.") as chat:
        if at_once:
            chat.tell_all(past("What is it?", said, **media) for media, said in TURNS[name])
        for media, answer in TURNS[name]:
            if not at_once:
                chat.tell("What is it?", answer, **media)
            new = pipe.read_media(**media)
            system = None if messages else "Be brief."
            messages += first_turn("What is it?", new.parts, system)
            messages.append(Message("assistant", (answer,)))
            shown = shown + new
        assert [(turn.prompt, turn.answer) for turn in chat.turns] == [
            ("What is it?", answer) for _, answer in TURNS[name]
        ]
        found = chat.ask(**MORE)
        assert [one.tokens > 0 for one in chat.segments] == [True] * len(chat.segments)
    if name == "llava":
        # Its tokenizer writes a word another way at the beginning of a text.
        return
    new = pipe.read_media(MORE["images"])
    messages += first_turn(MORE["prompt"], new.parts)
    prompt = pipe.family.prompt(messages, shown + new)
    whole = pipe.answer(prompt, Sampling(max_new_tokens=5), time.perf_counter()).complete()
    assert found.token_ids == whole.token_ids
    assert chat.pipe.store.memory().used_bytes == 0


@pytest.mark.parametrize(
    ("question", "answer", "expected"),
    [
        (" ", "yes", "prompt is empty"),
        ("Why?", "<|im_end|>", "answer contains '<|im_end|>'"),
        ("Why?", "yes " * 65536, "over the context"),
    ],
)
def test_refused(question: str, answer: str, expected: str, qwen) -> None:  # noqa: F811
    with qwen.chat() as chat:
        with pytest.raises(InputError) as refused:
            chat.tell(question, answer)
        assert expected in str(refused.value)
        assert chat.turns == ()
        with pytest.raises(InputError, match=r"empty|contains|over the context"):
            chat.tell_all([past("Why?", "Yes."), past(question, answer)])
        assert [turn.answer for turn in chat.turns] in ([], ["Yes."])


def test_what_is_no_turn_and_no_message(qwen) -> None:  # noqa: F811
    odd: Any = [("Why?", "Yes.")]
    with qwen.chat() as chat:
        with pytest.raises(InputError, match="turns: must be a list of PastTurns, not of tuple"):
            chat.tell_all(odd)
        with pytest.raises(InputError, match="answer must be text, not int"):
            chat.tell("Why?", 5)  # type: ignore
        assert chat.turns == ()


def test_too_many_are_refused_before_any_is_looked_at(qwen, monkeypatch) -> None:  # noqa: F811
    """Each by itself has room."""
    monkeypatch.setattr(type(qwen.admission), "check_text", lambda *_, **__: 1 / 0)
    long = "yes " * 12_000
    with qwen.chat() as chat:
        with pytest.raises(RequestTooLarge, match=r"^the turns: .* are over the context"):
            chat.tell_all([past(long, long)] * 140)
        assert chat.turns == ()


@pytest.mark.slow
def test_short_texts_are_read_together(qwen) -> None:  # noqa: F811
    """Media by themselves, and of long texts as many as others can wait for."""
    short = [past(f"What is {place}?", "Yes.") for place in range(30)]
    shown, long = past("This?", "Noise.", [noise(64, 64)]), past("Why? " * 1100, "So.")
    passes = {1: short, 4: [*short, shown, *short, long, long, *short]}
    with qwen.chat() as chat:
        for count, told in passes.items():
            with counted(qwen.model.get_decoder().layers[:1]) as found:
                chat.tell_all(iter(told))
            assert found == [count]
        assert len(chat.turns) == sum(map(len, passes.values()))
        chat.tell_all([])


def test_a_chat_stays_while_turns_are_added(qwen) -> None:  # noqa: F811
    """A request that needs memory meanwhile does not spill the chat, which would free nothing."""
    found = []
    with qwen.chat() as chat:
        chat.tell("Why?", "So.")
        layer, calls = qwen.model.get_decoder().layers[0], [True, False]

        def at_layer(*_: Any) -> None:
            found.append(chat._spillable.can_be_spilled)
            if not calls.pop(0):
                raise ZeroDivisionError

        hook = layer.register_forward_pre_hook(at_layer)
        chat.tell("Why?", "So.")
        with pytest.raises(ZeroDivisionError):
            chat.tell("Why?", "So.")
        hook.remove()
        assert found == [False, False] and chat._spillable.can_be_spilled and len(chat.turns) == 2
    assert qwen.store.memory().used_bytes == 0


@pytest.mark.parametrize("first", [0, 1])
def test_turns_that_are_added_are_turns(omni, first: int) -> None:  # noqa: F811
    """They are forgotten and taken back as those that were asked, however many were told before."""
    told = [
        past("What is it?", "A sound.", audio=tone(1.2)),
        past("And what is this?", "Two dogs.", [noise(64, 96), noise(40, 70, 1)]),
        past("Why?", ""),
    ]
    chats = omni.chat(), omni.chat()
    for turn in told:
        chats[0].tell_all([turn])
    for some in (told[:first], told[first:]):
        chats[1].tell_all(some)
    assert chats[0].turns == chats[1].turns
    bare = [[replace(x, bytes=0) for x in chat.segments] for chat in chats]
    assert bare[0] == bare[1] and [x.tokens > 0 for x in bare[0]] == [True] * 6
    for chat in chats:
        chat.forget(4)
        chat.undo()
    assert chats[0].turns == chats[1].turns
    answers = [chat.ask("And now?", max_new_tokens=4).token_ids for chat in chats]
    assert answers[0] == answers[1]
    for chat in chats:
        chat.close()
    assert omni.store.memory().used_bytes == 0
