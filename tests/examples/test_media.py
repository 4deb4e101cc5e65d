"""The example media of the pocket models are what contents.json says, small, and remade alike."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFont

from examples.train_pocket.words import COLOURS, ITEMS, SHAPES, SPOKEN
from oscar_mm.media import load_audio, load_image

MEDIA = Path(__file__).parents[2] / "examples" / "media"
CONTENTS = json.loads((MEDIA / "contents.json").read_text())
CARDS = sorted((MEDIA / "cards").iterdir())
CLIPS = sorted((MEDIA / "clips").iterdir())
FONTS = ("DejaVuSans.ttf", "LiberationSans-Regular.ttf")


def run(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [script, str(folder)])
    runpy.run_path(str(MEDIA / script), run_name="__main__")


def test_every_file_is_listed_and_small() -> None:
    assert [path.name for path in CARDS] == [f"{card}.png" for card in CONTENTS["cards"]]
    assert [path.name for path in CLIPS] == [f"{clip}.wav" for clip in CONTENTS["clips"]]
    assert max(path.stat().st_size for path in CARDS) < 15_000
    assert max(path.stat().st_size for path in CLIPS) < 120_000
    for card in CARDS:
        assert load_image(card).size == (192, 96)
    for clip in CLIPS:
        assert 0.8 <= load_audio(clip).seconds <= 3.5


def test_only_what_the_models_know() -> None:
    for shown in CONTENTS["cards"].values():
        if isinstance(shown, str):
            assert 4 <= len(shown) <= 6 and shown.isascii() and shown == shown.upper()
        elif "receipt" in shown:
            assert set(shown["receipt"]) <= set(ITEMS)
        else:
            names = [name.split() for name in shown["shapes"]]
            assert all(colour in COLOURS and shape in SHAPES for colour, shape in names)
            assert all(
                1 <= row <= 3 and 1 <= column <= 6 for row, column in shown["shapes"].values()
            )
    for said in CONTENTS["clips"].values():
        assert said in SPOKEN or (said.isdecimal() and 3 <= len(said) <= 6)


def answer_to(question: str) -> list[str]:
    """The answer that contents.json gives, line by line."""
    numbers = [f"{int(number):02}" for number in re.findall(r"\b\d{1,2}\b", question)]
    kind = "clips" if "clip" in question else "cards"
    shown = [CONTENTS[kind][number] for number in numbers]
    match question.split():
        case ["Write", "all", *_]:
            return [one for one in CONTENTS[kind].values() if isinstance(one, str)]
        case ["Which", "picture", "says", said]:
            return [str(int(next(k for k, v in CONTENTS[kind].items() if v == said.rstrip("?"))))]
        case ["How", "much", "is", item, *_]:
            return [str(shown[0]["receipt"][item])]
        case ["What", "is", "the", "sum", *_]:
            return [str(sum(shown[0]["receipt"].values()))]
        case ["Where", "is", "the", colour, shape, *_]:
            row, column = shown[0]["shapes"][f"{colour} {shape}"]
            names = ("top", "middle", "bottom"), ("left", "center", "right")
            return [f"{names[0][row - 1]} {names[1][(column - 1) // 2]}"]
    return shown


def test_questions_have_the_answers_of_the_contents() -> None:
    rows = [json.loads(line) for line in (MEDIA / "questions.jsonl").read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows) == 22
    for row in rows:
        assert row["answer"].split("\n") == answer_to(row["question"]), row["id"]
        for kind, folder in (("images", "cards"), ("audio", "clips")):
            files = [path.name for path in sorted((MEDIA / folder).iterdir())]
            shown = row.get(kind, [])
            # The first files in order, so that numbers in questions are those of the contents.
            assert shown == [f"{folder}/{name}" for name in files[: len(shown)]]


def has_fonts() -> bool:
    try:
        for font in FONTS:
            ImageFont.truetype(font, 10)
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_fonts(), reason="fonts-dejavu or fonts-liberation2 is not installed")
def test_cards_are_drawn_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("make_cards.py", tmp_path, monkeypatch)
    for card in CARDS:
        drawn, shipped = (
            np.asarray(Image.open(path), int) for path in (tmp_path / "cards" / card.name, card)
        )
        # Other versions of FreeType draw letters a little otherwise.
        assert np.abs(drawn - shipped).mean() < 4


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")
def test_clips_are_spoken_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("soundfile", reason="needs soundfile: run pip install '.[audio]'")
    run("make_clips.py", tmp_path, monkeypatch)
    for clip in CLIPS:
        spoken, shipped = load_audio(tmp_path / "clips" / clip.name), load_audio(clip)
        assert abs(spoken.seconds - shipped.seconds) < 0.25
