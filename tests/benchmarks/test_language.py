"""The language benchmark on a tiny random model."""

import json
from pathlib import Path

import pytest

from benchmarks import language
from benchmarks.record import Record
from oscar_mm.compare.comparison import longest
from oscar_mm.compare.methods import DEFAULT, PUBLISHED, REFERENCE
from tests.languages import build_language_model, write_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_language_model("llama", tmp_path_factory.mktemp("language") / "llama")


@pytest.fixture
def words(tmp_path: Path) -> Path:
    return write_text(tmp_path / "words.txt")


def run(folder: Path, words: Path, out: Path, *more: str) -> int:
    arguments = ["--model", str(folder), "--text", str(words), "--out", str(out), "--passages", "2"]
    return language.main([*arguments, "--decoded", "24", *more])


def load(out: Path) -> tuple[Record, dict]:
    [path] = out.glob("language-*.json")
    record = Record.load(path)
    return record, {(row["context"], row["method"]): row for row in record.rows}


@pytest.mark.slow
def test_lengths_methods_and_what_is_added(folder, words, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(language, "GENERATED", 5)
    out = tmp_path / "out"
    methods = [f"--methods={name}" for name in (REFERENCE, PUBLISHED, DEFAULT, "quanto, 2 bit")]
    assert run(folder, words, out, "--tokens", "300", "200", "--stepwise", "1", *methods) == 0
    printed = capsys.readouterr()
    assert "300 tokens and more" in printed.out and "200 tokens: " in printed.err
    record, rows = load(out)
    alone = [f"{name}, one by one" for name in (PUBLISHED, DEFAULT)]
    names = {REFERENCE, PUBLISHED, DEFAULT, "quanto, 2 bit", *alone}
    assert set(rows) == {(tokens, name) for tokens in (200, 300) for name in names}
    assert [row["context"] for row in record.rows] == [200] * 6 + [300] * 6
    quanto = rows[200, "quanto, 2 bit"]
    if "missing" in quanto:
        assert quanto["missing"] == "optimum.quanto is not installed"
        assert "quanto, 2 bit: optimum.quanto is not installed" in printed.out
    assert rows[300, DEFAULT]["tokens"] == 2 * language.JUDGED
    assert rows[300, DEFAULT]["prompts"] == 2 and rows[300, alone[0]]["prompts"] == 1
    assert rows[300, REFERENCE]["model"] == str(folder)
    assert {"same_error", "greedy_error", "kl_ratio_error"} <= set(rows[300, alone[1]])
    assert rows[300, DEFAULT]["decoded_tokens"] == 2 * 24
    before = rows[300, DEFAULT]
    # Another length and another method; what was measured stays.
    options = ["--stepwise", "0", "--add", "--methods", "channel, 4 bit"]
    assert run(folder, words, out, "--tokens", "300", "250", *options) == 0
    longer, rows = load(out)
    assert longer.command.startswith(record.command + "; ") and len(longer.rows) == 14
    assert rows[300, DEFAULT] == before and (250, "channel, 4 bit") in rows
    # The same cell is replaced; without --add the file begins anew.
    arguments = ["--tokens", "300", "--stepwise", "0", "--methods", "channel, 4 bit"]
    assert run(folder, words, out, *arguments, "--add", "--passages", "3") == 0
    assert load(out)[1][300, "channel, 4 bit"]["prompts"] == 3
    assert run(folder, words, out, *arguments) == 0
    assert set(load(out)[1]) == {(300, "channel, 4 bit")}
    json.loads(next(out.glob("*.json")).read_text(), parse_constant=pytest.fail)


def test_what_is_missing_replaces_nothing_measured() -> None:
    row = {"model": "m", "context": 1, "method": "hqq, 2 bit"}
    complete, missing = row | {"kl": 1.0}, row | {"missing": "hqq is not installed"}
    assert language.merge([complete], [missing]) == [complete]
    assert language.merge([missing], [complete]) == [complete]
    assert language.merge([], [missing]) == language.merge([missing], [missing]) == [missing]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--text", "gone.txt"], "--text gone.txt: no such file"),
        (["--tokens", "9", "3000"], "the model's context is 1,024"),
        (
            ["--tokens", "900"],
            "--tokens 900: with the tokens after it, a passage has up to 1,292 tokens",
        ),
        (["--tokens", "0"], "must be 1 or more"),
        (["--decoded", "-1"], "--stepwise and --decoded 0 or more"),
        (["--stepwise", "0", "--decoded", "800"], "a passage has up to 1,952 tokens"),
        (["--methods", "magic"], "--methods magic: matches no method; available: 16 bit;"),
        (["--model", "gone/at/all"], "no such folder"),
    ],
)
def test_bad_input_is_one_line(folder, words, tmp_path, capsys, more, message) -> None:
    assert run(folder, words, tmp_path / "out", *more) == 2
    printed = capsys.readouterr()
    # Above it may be transformers' bar over the weights.
    line = printed.err.splitlines()[-1]
    assert line.startswith("benchmarks.language: ") and message in line and not printed.out
    assert "Traceback" not in printed.err
    assert not (tmp_path / "out").exists()


def test_the_text_of_this_python_is_long_enough() -> None:
    for text in language.python_texts().values():
        assert len(text) > 8 * longest(7168)


def test_a_run_that_is_cut_keeps_its_passages(folder, words, tmp_path, monkeypatch) -> None:
    add, seen = language.PassageComparison.add, []

    def cut(self, ids, **how):
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(ids)
        add(self, ids, **how)

    monkeypatch.setattr(language.PassageComparison, "add", cut)
    options = ["--tokens", "200", "--stepwise", "0", "--methods", DEFAULT, "--passages", "9"]
    with pytest.raises(KeyboardInterrupt):
        run(folder, words, tmp_path, *options)
    assert load(tmp_path)[1][200, DEFAULT]["prompts"] == 2
