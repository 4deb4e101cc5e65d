"""`bench accuracy`, `inspect` and `plan` of a language model."""

import json
from pathlib import Path

import pytest

from oscar_mm.cli import run
from oscar_mm.compare.methods import DEFAULT, PUBLISHED, REFERENCE
from tests.checkpoints import build_decoder
from tests.languages import build_language_model, write_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_language_model("qwen3", tmp_path_factory.mktemp("language") / "qwen3")


@pytest.fixture
def words(tmp_path: Path) -> Path:
    return write_text(tmp_path / "words.txt")


def test_accuracy(folder: Path, words: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "rows.json"
    asked = ["bench", "accuracy", "--model", str(folder), "--text", str(words), "--device", "cpu"]
    names = [f"--methods={name}" for name in (PUBLISHED, DEFAULT, "channel, audio in 16 bit")]
    sizes = ["--tokens", "300", "--passages", "3", "--max-new-tokens", "20"]
    assert run([*asked, *names, *sizes, "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and "\u2026" not in captured.out
    assert "3 passages of 300 tokens and more" in " ".join(captured.out.split())
    assert "no such tokens: channel, audio in 16 bit" in " ".join(captured.out.split())
    record = json.loads(out.read_text())
    about = {"tokens": 300, "passages": 3, "texts": [str(words)], "max_new_tokens": 20}
    assert record.items() >= about.items() and record["policies"][DEFAULT]["window"] == 32
    rows = {row["method"]: row for row in record["rows"]}
    exact, packed = rows[REFERENCE], rows[DEFAULT]
    assert (exact["kl"], exact["agreement"], exact["perplexity_ratio"]) == (0, 1, 1)
    assert packed["prompts"] == 3 and packed["tokens"] == 60 and packed["kl"] > 0
    assert f"{1000 * packed['kl']:.3g}" in captured.out
    assert f"{1000 * packed['kl_error']:.2g}" in captured.out
    assert f"{packed['perplexity']:.3g}" in captured.out
    # One passage has no standard error, and a short one no page.
    assert run([*asked, "--methods", DEFAULT, "--tokens", "20", "--passages", "1"]) == 0
    printed = capsys.readouterr().out
    assert "no prompt fills a page" in " ".join(printed.split())
    [line, *_] = [line for line in printed.splitlines() if line.strip().startswith(f"{DEFAULT} ")]
    assert len(line.split()) == 7, "method, page, held, KL, agree, ppl, rise"


def test_inspect(folder: Path, words: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "inspection"
    asked = ["inspect", "--text", str(words), "--model", str(folder), "--device", "cpu"]
    assert run([*asked, "--out", str(out), "--tokens", "500"]) == 0
    captured = capsys.readouterr()
    assert "On this prompt" in captured.out
    assert captured.err.startswith("oscar-mm: the first 500 tokens of the text are read\n")
    record = json.loads((out / "inspection.json").read_text())
    assert record["tokens"] == {"text": 500} and record["text"] == "words.txt"
    assert "media" not in record and "prompt" not in record
    assert record["qk_norm"] and len(record["layers"]) == 2
    assert "Text: words.txt." in (out / "inspection.html").read_text()
    words.write_text("A few words.\n")
    assert run(asked) == 0
    captured = capsys.readouterr()
    assert "a longer text" in " ".join(captured.out.split()) and captured.err == ""


def test_the_context_bounds_an_inspection(folder: Path, words: Path, capsys) -> None:
    assert run(["inspect", "--text", str(words), "-m", str(folder), "--device", "cpu"]) == 0
    assert "the first 1,024 tokens of the text are read" in capsys.readouterr().err


def test_plan(folder: Path, capsys) -> None:
    asked = ["plan", "--model", str(folder), "--gpu", "H100"]
    assert run([*asked, "--text-tokens", "900", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"]["text"] == found["total"] == 900 and found["fits_context"]
    assert found["kv_bytes"] < found["bf16_bytes"]
    assert run([*asked, "--text-tokens", "5000"]) == 0
    captured = capsys.readouterr()
    assert "qwen3, " in captured.out and "5,000" in captured.out
    assert "5,000 tokens exceed the model's context of 1,024" in captured.err


ACCURACY = ["bench", "accuracy", "--device", "cpu", "--methods", "16 bit"]
INSPECT = ["inspect", "--device", "cpu"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (ACCURACY, "pass either --questions FILE or, for a language model, --text FILE"),
        ([*ACCURACY, "--text", "WORDS", "--questions", "WORDS"], "pass either"),
        ([*ACCURACY, "--text", "WORDS"], "--text needs --model"),
        ([*ACCURACY, "--text", "gone.txt", "-m", "MODEL"], "--text gone.txt: no such file"),
        ([*ACCURACY, "--text", "EMPTY", "-m", "MODEL"], "empty.txt: is empty"),
        ([*ACCURACY, "--text", "EMPTY", "-m", "gone/at/all"], "empty.txt: is empty"),
        ([*ACCURACY, "--text", "WORDS", "-m", "gone/at/all"], "no such folder"),
        ([*ACCURACY, "--text", "WORDS", "-m", "pocket-vl"], "does not load pocket-vl as one"),
        ([*ACCURACY, "--text", "WORDS", "-m", "BARE"], "has no readable tokenizer"),
        (
            [*ACCURACY, "--text", "WORDS", "-m", "MODEL"],
            "--tokens 1024: a passage with the scored tokens that follow it takes up to 1,216",
        ),
        ([*ACCURACY, "--text", "SHORT", "-m", "MODEL", "--tokens", "800"], "is too short for a"),
        (
            [*ACCURACY, "--text", "WORDS", "-m", "MODEL", "--limit", "3"],
            "--limit requires",
        ),
        ([*ACCURACY, "--questions", "WORDS", "--tokens", "3"], "--tokens requires --text"),
        ([*ACCURACY, "--questions", "WORDS", "--passages", "3"], "--passages requires --text"),
        (
            [*ACCURACY, "--questions", "ROWS", "-m", "MODEL"],
            "is a language model: pass --text",
        ),
        ([*INSPECT, "--text", "WORDS"], "--text needs --model"),
        ([*INSPECT, "--text", "WORDS", "-m", "pocket-vl"], "does not load pocket-vl as one"),
        ([*INSPECT, "--text", "WORDS", "-m", "BARE"], "has no readable tokenizer"),
        ([*INSPECT, "--text", "gone.txt", "-m", "MODEL"], "--text gone.txt: no such file"),
        ([*INSPECT, "--text", "EMPTY", "-m", "MODEL"], "empty.txt: is empty"),
        (
            [*INSPECT, "--text", "WORDS", "-p", "Why?", "-m", "MODEL"],
            "--text cannot be combined with",
        ),
        ([*INSPECT, "a.png", "--text", "WORDS", "-m", "MODEL"], "--text cannot be combined with"),
        ([*INSPECT, "-m", "MODEL"], "is a language model: pass a text with --text FILE"),
        (["plan", "--images", "3", "-m", "MODEL"], "which supports no images, audio or videos"),
    ],
)
def test_bad_input_is_one_line(arguments, message, folder, words, tmp_path, capsys) -> None:
    for name in ("empty", "short"):
        (tmp_path / f"{name}.txt").write_text("" if name == "empty" else "A few words.\n")
    (tmp_path / "rows.jsonl").write_text('{"question": "What?"}')
    bare = tmp_path / "bare"
    if "BARE" in arguments:
        build_decoder("llama").save_pretrained(bare)
    paths = {
        "MODEL": folder,
        "BARE": bare,
        "WORDS": words,
        "EMPTY": tmp_path / "empty.txt",
        "SHORT": tmp_path / "short.txt",
        "ROWS": tmp_path / "rows.jsonl",
    }
    capsys.readouterr()
    assert run([str(paths.get(one, one)) for one in arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""
