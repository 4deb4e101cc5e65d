"""`oscar-mm bench accuracy`: a table of methods on a user's questions."""

import json
from pathlib import Path

import pytest

from oscar_mm import KVPolicy
from oscar_mm.cli import run
from oscar_mm.pages.layout import PageFormat
from oscar_mm.policy import Bits

CARDS = Path(__file__).parents[2] / "examples" / "media" / "cards"
CODES = json.loads((CARDS.parent / "contents.json").read_text())["cards"]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Two questions about fourteen cards: two pages of images."""
    (tmp_path / "cards").symlink_to(CARDS)
    shown = [f"cards/{number:02}.png" for number in range(1, 15)]
    rows = [
        {"id": "a", "images": shown, "question": "What is the code in picture 3?"},
        {"images": shown, "question": "What is the code in picture 8?", "answer": CODES["08"]},
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(questions: Path, *more: str) -> list[str]:
    return ["bench", "accuracy", "--questions", str(questions), "--device", "cpu", *more]


def test_a_table_and_its_rows(questions: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "rows.json"
    names = ("INT2", "compact", "audio", "channel, image in 16 bit")
    chosen = ["--model", "pocket-vl", *(f"--methods={name}" for name in names)]
    assert run(asked(questions, *chosen, "--out", str(out), "--max-new-tokens", "12")) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and "pocket-vl: 2 questions" in captured.out
    assert "no such tokens: channel, audio in 16 bit" in " ".join(captured.out.split())
    record = json.loads(out.read_text())
    assert record["compared"] == 2 and record["policies"]["compact"]["window"] == 32
    rows = {row["method"]: row for row in record["rows"]}
    assert {"KIVI", "QuaRot", "channel, norm plain"}.isdisjoint(rows)
    exact, packed = rows["16 bit"], rows["compact"]
    assert (exact["kl"], exact["exact"], exact["agreement"]) == (0, 1, 1)
    # The second card is digits, which the model reads surely.
    assert exact["right"] == packed["right"] == 1
    page_bits = PageFormat.of(KVPolicy(), Bits(2, 2), 1, 128).bits_per_value
    assert packed["page_bits"] == page_bits < packed["held_bits"] < exact["held_bits"]
    assert packed["prompts"] == 2 and 0 < packed["kl"] < rows["INT2 per token"]["kl"]
    assert rows["channel, image in 16 bit"]["kl"] == 0
    assert f"{1000 * packed['kl']:.3g}" in captured.out


@pytest.mark.slow
def test_recordings_and_pictures_of_a_model_with_audio(tmp_path: Path, capsys) -> None:
    clips = sorted(str(path) for path in (CARDS.parent / "clips").glob("*.wav"))
    cards = [str(CARDS / f"{number:02}.png") for number in range(1, 13)]
    row = {"audio": clips, "images": cards, "question": "What is the code in picture 3?"}
    path, out = tmp_path / "q.jsonl", tmp_path / "rows.json"
    path.write_text(json.dumps(row))
    chosen = [f"--methods={name}" for name in ("compact", "channel, image in 16 bit")]
    assert run(asked(path, *chosen, "--out", str(out), "--max-new-tokens", "6")) == 0
    assert "pocket-omni: 1 questions" in capsys.readouterr().out
    rows = {row["method"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["compact"]["held_bits"] < rows["channel, image in 16 bit"]["held_bits"]
    assert rows["compact"]["tokens"] > 1 and rows["compact"]["kl"] > 0


def test_one_bad_question_does_not_stop_the_others(questions: Path, capsys) -> None:
    text = questions.read_text().splitlines()[0]
    bad = {"id": "b", "images": "gone.png", "question": "What is it?"}
    questions.write_text(f"{json.dumps(bad)}\n\n{text}\n")
    assert run(asked(questions, "--methods", "QuaRot", "--max-new-tokens", "4")) == 0
    captured = capsys.readouterr()
    assert "line 1: " in captured.err and "gone.png: no such file" in captured.err
    assert "1 questions" in captured.out and "right" not in captured.out
    assert "no prompt fills" not in captured.out


def test_a_prompt_without_a_full_page_is_reported(tmp_path: Path, capsys) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"images": str(CARDS / "01.png"), "question": "What is the code?"}))
    assert run(asked(path, "--methods", "QuaRot", "--max-new-tokens", "4")) == 0
    assert capsys.readouterr().out.startswith("Nothing was packed: no prompt fills")


@pytest.mark.parametrize(
    ("lines", "more", "message"),
    [
        (None, [], "no such file"),
        (["nothing"], [], "line 1: is not valid JSON"),
        ([], [], "contains no questions"),
        (
            ['{"question": "What?"}'],
            ["--methods", "magic"],
            "magic: matches no method; available: 16 bit; INT2",
        ),
        (
            ['{"question": "What?"}'],
            ["--out", "gone/x.json"],
            "must be a file in an existing folder",
        ),
        (['{"question": "What?"}'], ["--limit", "0"], "--limit"),
        (['{"question": " "}'], [], "none of its 1 questions could be compared"),
    ],
)
def test_bad_input_is_named(lines, more, message, tmp_path, capsys) -> None:
    path = tmp_path / "q.jsonl"
    if lines is not None:
        path.write_text("\n".join(lines))
    assert run(asked(path, "--model", "pocket-vl", *more)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err


def test_a_group_of_commands(capsys) -> None:
    assert run(["bench"]) == 2
    assert "Missing command" in capsys.readouterr().err
