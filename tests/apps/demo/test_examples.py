"""The example conversations: their files are there, their questions about what was shown."""

import json
from pathlib import Path

import pytest

from examples.train_pocket.language import QUESTIONS as TAUGHT
from oscar_mm.apps.demo.examples import EXAMPLES, FOLDER, QUESTIONS
from oscar_mm.apps.demo.visitor_input import MAX_FILES, files_by_kind
from oscar_mm.media.kinds import SUFFIXES


@pytest.mark.parametrize("example", QUESTIONS + EXAMPLES, ids=lambda one: one.title)
def test_files_are_shipped_and_may_be_shown(example) -> None:
    assert example.exists
    for message in example.messages:
        assert len(message.files) <= MAX_FILES
        kinds = files_by_kind(message.paths, [FOLDER])
        assert bool(kinds["audio"]) <= example.needs_sound
        assert sum(map(len, kinds.values())) == len(message.files)


@pytest.mark.parametrize("example", QUESTIONS + EXAMPLES, ids=lambda one: one.title)
def test_questions_are_about_what_was_shown(example) -> None:
    taught = {way.split("{")[0].split()[0] for ways in TAUGHT.values() for way in ways}
    pictures = clips = 0
    for message in example.messages:
        pictures += sum(Path(file).suffix in SUFFIXES["images"] for file in message.files)
        clips += sum(Path(file).suffix in SUFFIXES["audio"] for file in message.files)
        words = message.text.rstrip(".?").replace(",", "").split()
        assert words[0] in taught
        numbers = [int(word) for word in words if word.isdecimal()]
        assert numbers
        shown = clips if any(word.startswith("clip") for word in words) else pictures
        assert all(1 <= number <= shown for number in numbers), message.text


def test_the_contents_are_stated_for_every_file() -> None:
    contents = json.loads((FOLDER / "contents.json").read_text())
    files = {file for one in EXAMPLES for message in one.messages for file in message.files}
    for file in files:
        path = Path(file)
        assert path.stem in contents[path.parent.name]
