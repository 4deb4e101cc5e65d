"""The benchmark of answers through vLLM, without vLLM: what it asks, and how it judges."""

from pathlib import Path

import pytest

from benchmarks import vllm_answers
from benchmarks.record import Record
from benchmarks.vllm_answers import Question, our_answers, questions


def test_questions_have_one_right_answer() -> None:
    asked = questions(200)
    assert asked == questions(200) and len({question.right for question in asked}) > 20
    for question in asked:
        assert 4 <= len(question.cards) <= 16 and len(set(question.cards)) == len(question.cards)
    assert sum(question.text.startswith("Which picture") for question in asked) == 100


def test_our_engine_answers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from oscar_mm import OscarVLPipeline

    pipe = OscarVLPipeline("pocket-vl", policy="standard", device="cpu")
    monkeypatch.setattr("oscar_mm.OscarVLPipeline", lambda *_, **__: pipe)
    asked = questions(4)
    assert our_answers("pocket-vl", "standard", asked) == [question.right for question in asked]


def test_a_record_of_what_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answered(
        model: str, policy: str, way: str, asked: list[Question], seconds: float
    ) -> list[str] | str:
        if way == "ngram":
            return "exit code 1"
        # One in ten of our own answers is wrong, and vLLM gives a half of those rightly.
        every = {"bf16": 1000, "standard": 10}[policy] * (1 if way == "ours" else 2)
        return ["?" if not n % every else question.right for n, question in enumerate(asked)]

    monkeypatch.setattr(vllm_answers, "answered", answered)
    monkeypatch.setattr(vllm_answers, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(vllm_answers, "vllm_versions", lambda: {"vllm": "0"})
    line = ["--out", str(tmp_path), "--models", "pocket-vl", "--ways", "graphs,ngram"]
    assert vllm_answers.main(line) == 1
    printed = capsys.readouterr().out
    assert "pocket-vl, standard, graphs: 0.950 the same, at least 0.95: met" in printed
    [path] = tmp_path.glob("vllm_answers-*.json")
    rows = {row["way"]: row for row in Record.load(path).rows}
    assert (rows["ours"]["right"], rows["graphs"]["right"]) == (180, 190)
    assert rows["graphs"]["same"] == 190 and rows["ngram"]["error"] == "exit code 1"
    assert vllm_answers.main([*line[:-1], "eager", "--add"]) == 0
    kept = [row["way"] for row in Record.load(path).rows]
    assert kept == ["exact", "ours", "graphs", "ngram", "eager"]
    with pytest.raises(SystemExit):
        vllm_answers.main(["--ways", "graph"])
    assert "choose from graphs, eager" in capsys.readouterr().err
