"""`oscar-mm verify`: tables, a row to paste and a file, whatever questions and Ctrl-C do."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

import oscar_mm
from oscar_mm.apps.verify import lmms_tasks
from oscar_mm.apps.verify.command import policies_of
from oscar_mm.cli import run
from oscar_mm.extras import install_command
from oscar_mm.models import SAMPLES
from oscar_mm.pipelines.pipeline import Pipeline
from oscar_mm.policy import KVPolicy
from tests.processes import Forked, command, without_notes

ROOT = Path(__file__).parents[2]
CARDS = sorted(map(str, (SAMPLES / "cards").glob("*.png")))
CODE = {"images": CARDS[:14], "question": "What is the code in picture 3?", "answer": "93015"}
SHORT = ["--max-new-tokens", "8", "--repeats", "2", "--device", "cpu"]


def written(folder: Path, *rows: object) -> Path:
    path = folder / "questions.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.slow
def test_a_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The whole command with the questions in the package: what is printed is in the file."""
    monkeypatch.chdir(tmp_path)
    formats = "standard,compact:window=16,bits=3/2"
    chosen = ["--model", "pocket-vl", "--limit", "3", "--formats", formats]
    assert run(["verify", *chosen, *SHORT]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    record = json.loads(Path("verify-pocket-vl.json").read_text())
    assert record["complete"] and (record["asked"], record["failed"]) == (3, 0)
    assert (record["dtype"], record["schema"]) == ("bfloat16", 1)
    assert record["model"]["id"] == "pocket-vl" and record["model"]["revision"] is None
    assert record["versions"]["oscar_mm"] == oscar_mm.__version__
    names = ["16 bit", "standard", "compact:window=16,bits=3/2"]
    assert [row["method"] for row in record["rows"]] == names
    assert record["policies"][names[2]]["window"] == 16
    exact, standard, _ = record["rows"]
    assert exact["kl"] == 0 < standard["kl"] and exact["right"] == standard["right"] == 1
    assert standard["memory_ratio"] > 3 and exact["memory_ratio"] == pytest.approx(1, rel=0.01)
    assert [entry["id"] for entry in record["answers"]] == ["code 1", "code 3", "code 6"]
    for entry, text in zip(record["answers"], ("7KQ2", "93015", "LEMON"), strict=True):
        assert list(entry["formats"]) == names and entry["prompt_tokens"] > 400
        assert entry["formats"]["16 bit"]["text"] == text
    tokens = [entry["formats"]["16 bit"]["tokens"] for entry in record["answers"]]
    assert sum(tokens) == exact["tokens"]
    for row in record["rows"]:
        assert row["tokens_per_s_low"] <= row["tokens_per_s"] <= row["tokens_per_s_high"]
        assert 0 < row["first_token_s_low"] <= row["first_token_s"] <= row["first_token_s_high"]
    assert record["speed"]["repeats"] == 2 and record["speed"]["new_tokens"] == 8
    shown = captured.out
    assert "pocket-vl: 3 of 3 questions, 14 decode steps" in shown
    assert "float32" not in shown and "nothing was packed" not in shown
    [pasted] = [line for line in shown.splitlines() if line.startswith("| ")]
    cells = [cell.strip() for cell in pasted.strip("|").split("|")]
    heads = (ROOT / "docs" / "results.md").read_text().partition("\n| model |")[2]
    assert len(cells) == 1 + heads.partition("\n")[0].strip("|").count("|") + 1
    assert cells[0] == "pocket-vl" and cells[1] == f"{record['device']}, bfloat16"
    assert f"oscar_mm {oscar_mm.__version__}" in cells[2] and cells[3] == "3 of 3, 14 steps"
    assert cells[4].split("<br>") == names
    assert cells[5].split("<br>")[1] == f"{1000 * standard['kl']:.3g}"
    assert cells[-3].split("<br>")[1] == f"{standard['memory_ratio']:.2f}"
    assert cells[-2].split("<br>")[1] == f"{standard['tokens_per_s']:.1f}"


def test_a_question_that_fails_is_named_and_the_others_go_on(tmp_path: Path, capsys) -> None:
    questions = written(
        tmp_path,
        {"id": "gone", "image": "gone.png", "question": "What is it?"},
        '{"images": ["a.png"',
        {"id": "deaf", "audio": str(SAMPLES / "clips" / "01.wav"), "question": "What was said?"},
        {"id": "right", **CODE},
        {"id": "short", "question": "Hello?"},
        {"id": "long", "question": "word " * 70_000},
        {"id": "short", "question": "Who?"},
    )
    out = tmp_path / "out.json"
    chosen = ["--questions", str(questions), "--model", "pocket-llava", "--out", str(out)]
    assert run(["verify", *chosen, "--formats", "compact", *SHORT]) == 1
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        f"{questions}, line {n}" for n in (1, 2, 3, 6, 7)
    ]
    assert "gone.png: no such file" in lines[0] and "audio" in lines[2] and "context" in lines[3]
    assert "id 'short' already occurs at" in lines[4]
    assert 'a line must be an object such as {"images"' in lines[1]
    record = json.loads(out.read_text())
    assert record["complete"] and (record["asked"], record["failed"]) == (7, 5)
    failed = {entry["id"]: entry["error"] for entry in record["answers"] if "error" in entry}
    assert [*failed] == ["gone", "line 2", "deaf", "long", "short (line 7)"]
    assert all(failed.values())
    assert record["rows"][1]["prompts"] == 2 and record["rows"][1]["right"] == 1
    assert record["source"] == "questions.jsonl"
    assert "2 of 7 questions" in captured.out and "| 2 of 7, " in captured.out


def test_prompts_too_short_to_pack_are_reported(tmp_path: Path, capsys) -> None:
    questions = written(tmp_path, {"question": "Hello?"})
    chosen = ["--questions", str(questions), "--model", "pocket-vl", "--formats", "channel"]
    chosen += ["--dtype", "float32", "--out", str(tmp_path / "out.json")]
    assert run(["verify", *chosen, *SHORT]) == 0
    captured = capsys.readouterr()
    assert "The weights are float32, so the 16-bit cache keeps" in captured.out
    assert captured.out.startswith("channel: nothing was packed, because no prompt is long enough.")
    assert "right:" not in captured.out


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        (None, [], "q.jsonl: no such file"),
        (None, ["--questions", "."], ".: is not a file; pass a JSONL or CSV file"),
        ([], [], "contains no questions"),
        (["nothing"], [], "line 1: is not valid JSON: Expecting value at character 1; a line must"),
        (["{}"], ["--formats", "stanard"], "unknown policy 'stanard': choose one of standard"),
        (["{}"], ["--formats", "compact:window=-1"], "window='-1': must be a number of tokens"),
        (["{}"], ["--formats", "standard,bf16"], "bf16: packs nothing, and a 16-bit cache is"),
        (["{}"], ["--formats", " , "], "--formats is empty: name one or more of standard, compact"),
        (["{}"], ["--limit", "0"], "--limit"),
        (["{}"], ["--max-new-tokens", "5000"], "--max-new-tokens"),
        (["{}"], ["--repeats", "0"], "--repeats"),
        (["{}"], ["--out", "gone/x.json"], "gone/x.json: must be a file in an existing folder"),
        (["{}"], ["--model", "pocket-lm"], "pocket-lm: no such folder"),
        (["{}"], [], "none of the 1 questions in q.jsonl could be answered"),
    ],
)
def test_bad_input_is_named(rows, more, message, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    if rows is not None:
        Path("q.jsonl").write_text("\n".join(rows))
    assert run(["verify", "--model", "pocket-vl", "--questions", "q.jsonl", *SHORT, *more]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err


def test_results_do_not_replace_the_questions_or_their_media(tmp_path: Path, capsys) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(Path(CARDS[0]).read_bytes())
    questions = written(tmp_path, {"image": "a.png", "question": "What is the code?"})
    for out in (questions, picture):
        before = out.read_bytes()
        chosen = ["--questions", str(questions), "--model", "pocket-vl", "--out", str(out)]
        assert run(["verify", *chosen]) == 2
        assert f"{out}: is the " in capsys.readouterr().err and out.read_bytes() == before


def test_tasks_need_lmms_eval(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "lmms_eval", None)
    assert run(["verify", "--model", "pocket-vl", "--tasks", "ocrbench, mmmu_val"]) == 2
    said = capsys.readouterr().err
    assert "--tasks requires the lmms_eval package" in said
    assert install_command("lmms-eval") in said


def test_a_task_or_timing_that_fails_leaves_the_other_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def task(pipe: Pipeline, names: list[str], limit: int | None) -> dict[str, dict[str, float]]:
        assert (names, limit) == (["ocrbench"], 1)
        if pipe.policy.packs:
            raise OSError("no data set")
        return {"ocrbench": {"accuracy,none": 0.5, "accuracy_stderr,none": 0.1}}

    def slow(*_: object) -> None:
        raise RuntimeError("too slow")

    monkeypatch.setattr(lmms_tasks, "check", lambda names: None)
    monkeypatch.setattr(lmms_tasks, "run", task)
    monkeypatch.setattr("oscar_mm.compare.decoded_answers.AnswerComparison.speeds", slow)
    out = tmp_path / "out.json"
    chosen = ["--model", "pocket-vl", "--formats", "compact", "--limit", "1", "--out", str(out)]
    assert run(["verify", *chosen, *SHORT, "--tasks", "ocrbench"]) == 1
    captured = capsys.readouterr()
    record = json.loads(out.read_text())
    assert record["complete"] and record["failed"] == 2 and record["rows"][1]["right"] == 1
    assert record["speed"]["error"] == "RuntimeError: too slow"
    assert record["tasks"]["error"] == "OSError: no data set"
    assert captured.err == (
        "oscar-mm: speed: RuntimeError: too slow\n"
        "oscar-mm: --tasks with compact: OSError: no data set\n"
    )
    assert "ocrbench, accuracy,none: 16 bit 0.5\n" in captured.out


def test_an_interrupt_leaves_a_valid_file(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    chosen = ["--model", "pocket-vl", "--device", "cpu", "--out", str(out)]
    with Forked(command, "verify", *chosen) as process:
        deadline = time.monotonic() + 60
        while not (out.exists() and json.loads(out.read_text())["asked"]):
            assert time.monotonic() < deadline and process.runs()
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGINT)
        code, printed, errors = process.end()
    record = json.loads(out.read_text())
    assert (code, printed) == (130, b"")
    said = without_notes(errors).decode()
    assert said == f"oscar-mm: interrupted; {out} has the results so far\n"
    assert not record["complete"] and 1 <= record["asked"] < 13
    assert len(record["answers"]) == record["asked"] == record["rows"][0]["prompts"]
    assert list(out.parent.iterdir()) == [out]


def test_a_folder_is_named_without_its_place(
    llava_next_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are meant for others, whom the paths of this machine do not concern."""
    questions = written(tmp_path, {"question": "What is in this picture? " * 20})
    monkeypatch.chdir(llava_next_folder)
    out = tmp_path / "out.json"
    chosen = ["--model", ".", "--questions", str(questions), "--out", str(out)]
    assert run(["verify", *chosen, "--formats", "compact", *SHORT]) == 0
    record = json.loads(out.read_text())
    assert record["model"]["id"] == llava_next_folder.name
    assert str(tmp_path) not in out.read_text()


def test_formats_with_changes() -> None:
    found = policies_of(" standard,compact:window=64, bits=3/2 ,kivi,standard")
    assert list(found) == ["standard", "compact:window=64, bits=3/2", "kivi"]
    assert found["compact:window=64, bits=3/2"] == KVPolicy.preset("compact:window=64,bits=3/2")
