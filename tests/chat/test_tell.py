"""Turns that took place elsewhere: the chat goes on as if they had been asked here."""

import time

import pytest

from oscar_mm import InputError
from oscar_mm.generation.sampling import Sampling
from tests.pipelines.conftest import llava, omni, qwen  # noqa: F401 - fixtures
from tests.prompts import noise, tone

MORE = {"prompt": "And what is this?", "images": [noise(64, 64, 3)], "max_new_tokens": 5}
TURNS = {
    "llava": [({"images": [noise(64, 96)]}, "Two dogs."), ({}, "")],
    "qwen": [({"images": [noise(64, 96)]}, "Two dogs."), ({"images": [noise(70, 40, 1)]}, "")],
    "omni": [({"audio": tone(1.2)}, "A sound."), ({"images": [noise(64, 96)]}, "brown")],
}


@pytest.mark.parametrize("name", TURNS)
def test_goes_on_from_what_was_said(name, request) -> None:
    pipe = request.getfixturevalue(name)
    messages, shown = [], pipe.read_media()
    with pipe.chat("Be brief.") as chat:
        for media, answer in TURNS[name]:
            chat.tell("What is it?", answer, **media)
            earlier = [medium.modality for medium in shown]
            new = pipe.read_media(**media)
            system = None if messages else "Be brief."
            messages += pipe.family.messages("What is it?", system, new, earlier)
            said = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
            messages.append(said)
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
    messages += pipe.family.messages(MORE["prompt"], None, new)
    prompt = pipe.family.prompt(messages, shown + new)
    *_, whole = pipe.answer(prompt, Sampling(max_new_tokens=5), time.perf_counter())
    assert found.token_ids == whole.token_ids
    assert chat.pipe.store.memory().used_bytes == 0


@pytest.mark.parametrize(
    ("question", "answer", "expected"),
    [
        (" ", "yes", "prompt is empty"),
        ("Why?", "<|im_end|>", "answer holds '<|im_end|>'"),
        ("Why?", "yes " * 65536, "over the context"),
    ],
)
def test_refused(question: str, answer: str, expected: str, qwen) -> None:  # noqa: F811
    with qwen.chat() as chat:
        with pytest.raises(InputError) as refused:
            chat.tell(question, answer)
        assert expected in str(refused.value)
        assert chat.turns == ()
