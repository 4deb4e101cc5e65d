"""Solved problems: their texts and answers, the figures, and a run that is continued."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import solved
from benchmarks.record import Record
from benchmarks.solved import Tally, Texts
from benchmarks.word_problems import WordProblem, word_problems
from oscar_mm.pipelines.text import load_text_model
from tests.languages import build_language_model

TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"


def test_solutions_of_word_problems_are_right() -> None:
    """Each step is an equation that holds, and the last one gives the answer."""
    problems = word_problems(64)
    for problem in problems:
        results = []
        for equation in re.findall(r"[\d+*\- ]+= \d+", problem.solution):
            given, _, result = equation.partition("=")
            assert eval(given) == int(result), problem.solution
            results.append(int(result))
        assert results[-1] == problem.answer > 0
        assert problem.passes(problem.solution)
        assert not problem.passes(f"The answer is {problem.answer + 1}.")
        assert not problem.passes(f"{problem.answer}")
    assert len({problem.question for problem in problems}) == len(problems)
    assert word_problems(8) == problems[:8]


@pytest.mark.parametrize(
    ("number", "passes"),
    [
        *[("1200", True), ("1,200", True), ("1200.00", True), ("1,200, or 7", True)],
        *[("1200.5", False), ("-1200", False), ("-,", False), (",", False), ("$1200", False)],
        ("1" * 5000, False),
    ],
)
def test_numbers_in_answers(number: str, passes: bool) -> None:
    problem = WordProblem("word problem 0", "", "", 1200)
    assert problem.passes(f"So the rest is 7. The answer is {number}.") == passes


def test_a_prompt_shows_solved_problems_of_each_kind() -> None:
    *shown, asked = word_problems(1)[0].messages
    assert [turn["role"] for turn in shown] == ["user", "assistant"] * 8
    questions = {turn["content"] for turn in shown if turn["role"] == "user"}
    assert len(questions) == 8 and asked["content"] not in questions
    assert not questions & {problem.question for problem in word_problems(200)}


class Letters:
    """Tokenizer whose tokens are letters."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(token) for token in tokens if token or not skip_special_tokens)


def test_where_an_answer_ends() -> None:
    texts = Texts(Letters(), ("\n\n", "STOP"), frozenset([0]))

    def ids(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    assert not texts.ended(ids("a b\nc")) and texts.ended(ids("a\n\n")) and texts.ended([97, 0])
    assert texts.text(ids("a bSTOP\n\nc")) == "a b" and texts.text([97, 0]) == "a"
    assert texts.text(ids("all of it")) == "all of it"


def test_figures() -> None:
    means = [{"bits": 3.0, "prompt": 10, "tokens": count, "packed": 6} for count in (4, 8)]
    tally = Tally({"method": "KIVI"}, None)
    tally.add(True, False, means[0])
    first = tally.row("1")
    assert (first["problems"], first["passed"], first["same"], first["tokens"]) == (1, 1, 0, 4)
    later = Tally({"method": "KIVI"}, first)
    later.add(False, True, means[1])
    row = later.row("11")
    assert (row["marks"], row["alike"]) == ("10", "01")
    assert (row["lost"], row["gained"], row["pass_rate"], row["tokens"]) == (1, 0, 0.5, 6)
    assert row["pass_rate_error"] == pytest.approx((0.25 / 2) ** 0.5)


def test_a_run_is_continued(tmp_path: Path, monkeypatch, capsys) -> None:
    folder = build_language_model("llama", tmp_path / "llama", template=TEMPLATE)
    monkeypatch.setattr(
        solved, "load_released", lambda *_: load_text_model(folder, device="cpu", dtype="bfloat16")
    )
    line = ["--task", "words", "--problems", "3", "--max-new-tokens", "6", "--rows", "4"]
    line += ["--methods", "KIVI", "--methods", "FP8", "--out", str(tmp_path / "out"), "--add"]
    assert solved.main(line) == 0
    [path] = (tmp_path / "out").glob("solved-*.json")
    whole = Record.load(path).rows
    assert [row["method"] for row in whole] == ["16 bit", "KIVI", "FP8, own tokens"]
    assert all(row["problems"] == len(row["marks"]) == 3 for row in whole)
    assert whole[0]["same"] == 1 and whole[0]["packed"] == 0 < whole[1]["packed"]
    assert whole[0]["bits"] == pytest.approx(16, abs=0.1) and whole[2]["bits"] == 8
    assert "Solved problems" in capsys.readouterr().out

    path.unlink()
    decode, given = solved.decode, list[int]()

    def cut(model, prompts, methods, ended, **how):
        given.append(len(prompts))
        for found in decode(model, prompts, methods, ended, **how):
            yield found
            if len(given) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(solved, "decode", cut)
    with pytest.raises(KeyboardInterrupt):
        solved.main(line)
    assert {row["problems"] for row in Record.load(path).rows} == {1}
    assert solved.main(line) == 0 and given == [3, 2]
    assert Record.load(path).rows == whole
    assert solved.main([*line, "--methods", "channel"]) == 2
    assert "omit --add" in capsys.readouterr().err
    before = path.read_bytes()
    for wrong, expected in (
        (["--max-new-tokens", "7"], "--max-new-tokens 7: the file's rows of these problems have 6"),
        (
            ["--dtype", "float32"],
            "--dtype float32: the file's rows of these problems have bfloat16",
        ),
        (["--problems", "0"], "--problems, --max-new-tokens and --rows must be"),
        (["--minutes", "0"], "--minutes 0: must be more than 0"),
        (["--minutes", "nan"], "--minutes nan: must be"),
        (["--methods", "FP9"], "--methods FP9: is no part of a method's name; there are 16 bit; "),
    ):
        assert solved.main([*line, *wrong]) == 2
        assert expected in capsys.readouterr().err
    assert path.read_bytes() == before
