"""What the page says about its model, and to a question that a bundled model was never taught."""

import re
from types import SimpleNamespace

import pytest

from examples.train_pocket.language import QUESTIONS
from examples.train_pocket.words import COLOURS, SHAPES
from oscar_mm.apps.demo.examples import EXAMPLES
from oscar_mm.apps.demo.examples import QUESTIONS as OFFERED
from oscar_mm.apps.model_card import ModelCard
from oscar_mm.modality import Modality
from oscar_mm.models import BUNDLED, bundled

VALUES = {"label": "12", "label2": "3", "label3": "40", "code": "K7Q4", "item": "TEA"}


def card(path: str, parameters: int = 4_995_360) -> ModelCard:
    model = SimpleNamespace(name_or_path=path, num_parameters=lambda: parameters)
    family = SimpleNamespace(outer_model=model, name="Qwen3-VL", reads={Modality.IMAGE})
    return ModelCard.of(SimpleNamespace(family=family))


def test_a_bundled_model_is_named_as_a_demo_model() -> None:
    assert card(str(bundled("pocket-omni"))).title == "pocket-omni, 5M parameters, demo model"


def test_other_models_have_their_name_and_size_and_no_hints() -> None:
    other = card("Qwen/Qwen3-VL-8B-Instruct", 8_767_123_696)
    assert other.title == "Qwen3-VL-8B-Instruct, 8.8B parameters"
    assert other.abilities == "reads image" and other.hint("hi") == ""
    assert not card("/somewhere/pocket-omni").is_demo
    assert card("").name == "Qwen3-VL"


def test_every_question_that_was_taught_is_known() -> None:
    omni = card(str(bundled("pocket-omni")))
    for ways in QUESTIONS.values():
        for way in ways:
            for colour in COLOURS:
                for shape in SHAPES:
                    values = VALUES | {"item2": "HAM", "colour": colour, "shape": shape}
                    assert omni.hint(way.format(**values)) == ""
    for example in (*OFFERED, *EXAMPLES):
        assert [omni.hint(message.text) for message in example.messages] == [""] * len(
            example.messages
        )


@pytest.mark.parametrize("name", BUNDLED)
@pytest.mark.parametrize("question", ["hi", "Describe the photo.", "What is the weather?", "?"])
def test_other_questions_get_a_hint_with_one_that_it_knows(name: str, question: str) -> None:
    model = card(str(bundled(name)))
    hint = model.hint(question)
    assert "not trained" in hint
    assert model.hint(re.search("for example: (.*)", hint)[1]) == ""


def test_a_model_without_audio_was_not_trained_on_it() -> None:
    assert card(str(bundled("pocket-vl"))).hint("What was said in clip 1?")
