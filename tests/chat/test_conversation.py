"""A later turn is read as the chat template would have written the whole conversation."""

import re
from pathlib import Path
from typing import Any

import pytest

from examples.train_pocket.configs import NAMES, build
from oscar_mm import OscarCache, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.chat.chat import Chat
from oscar_mm.engine.decode_runner import decode
from oscar_mm.engine.message import Message, user_message
from oscar_mm.engine.sampling import Sampling
from oscar_mm.media.media import Media
from oscar_mm.media.part import media_parts
from oscar_mm.pipelines.pipeline import Pipeline
from tests.pipelines.conftest import NEVER
from tests.prompts import noise, tone

PICTURES = [noise(96, 192, seed) for seed in range(4)]
SIX = {"max_new_tokens": 6}


@pytest.fixture(scope="module", params=NAMES)
def pipe(request: pytest.FixtureRequest) -> Pipeline:
    """A pocket model with random weights, whose template numbers the media."""
    pocket = build(request.param)
    kind = OscarOmniPipeline if request.param == "pocket-omni" else OscarVLPipeline
    return kind(pocket.model, processor=pocket.processor, policy="bf16")


def end_answers_at(pipe: Pipeline, ids: int | list[int]) -> None:
    pipe.model.generation_config.eos_token_id = ids


def said(chat: Chat) -> list[str]:
    """The names of the media as the model has read them."""
    ids = chat._spillable.conversation.token_ids[0]
    text = chat.pipe.processor.tokenizer.decode(ids)
    return re.findall(r"(?:Picture|Clip) \d+:", text)


@pytest.mark.daily("pocket-vl")
def test_numbers_go_on_and_the_cache_is_a_fresh_prefill(pipe: Pipeline) -> None:
    clips = [tone(0.9), tone(1.4, 660)] if isinstance(pipe, OscarOmniPipeline) else []
    turns: list[dict[str, Any]] = [
        {"images": PICTURES[:2], **({"audio": clips[:1]} if clips else {})},
        {},
        {"images": PICTURES[2:3], **({"audio": clips[1:]} if clips else {})},
    ]
    everything = list(range(pipe.model.get_input_embeddings().num_embeddings))
    messages, media = [], Media()
    with pipe.chat() as chat:
        for place, shown in enumerate(turns):
            last = place == len(turns) - 1
            # Whatever the model begins an answer with ends it: so the answers are known.
            end_answers_at(pipe, NEVER if last else everything)
            answer = chat.ask("What does it say?", **shown, **SIX)
            messages.append(user_message("What does it say?", media_parts(**shown)))
            if not last:
                assert answer.text == ""
                messages.append(Message("assistant", ("",)))
            media += pipe.read_media(**shown)
        held = chat._spillable.conversation.token_ids[0].tolist()
        numbers = said(chat)
    assert sorted(numbers) == sorted(
        ["Picture 1:", "Picture 2:", "Picture 3:"] + ["Clip 1:", "Clip 2:"] * bool(clips)
    )
    whole = pipe.family.prompt(messages, media)
    assert held[: whole.tokens] == whole.inputs["input_ids"][0].tolist()
    steps = decode(
        pipe.model,
        whole,
        OscarCache("bf16", model=pipe.model),
        Sampling(**SIX),
        end_tokens=frozenset(),
    )
    assert answer.token_ids == [token for [token] in steps]


@pytest.mark.parametrize("pipe", ["pocket-vl"], indirect=True)
def test_numbers_after_forget_undo_fork_and_load(pipe: Pipeline, tmp_path: Path) -> None:
    end_answers_at(pipe, NEVER)
    with pipe.chat() as chat:
        chat.ask("Read both.", images=PICTURES[:2], **SIX)
        chat.forget(1)  # its number stays taken
        chat.ask("And this?", images=PICTURES[2], **SIX)
        chat.undo()  # and its number is free again
        chat.save(tmp_path / "chat.safetensors")
        for other in (chat.fork(), pipe.load_chat(tmp_path / "chat.safetensors")):
            with other:
                other.ask("Or this?", images=PICTURES[3], **SIX)
                assert said(other) == ["Picture 1:", "Picture 2:", "Picture 3:"]
