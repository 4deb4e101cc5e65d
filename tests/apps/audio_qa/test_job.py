"""A whole run: resumed after kill -9, summary, samples, exit codes, progress."""

import json
import os
import resource
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from oscar_mm import InputError
from oscar_mm.apps.audio_qa import audio_qa
from oscar_mm.apps.audio_qa.engine import Worker, WorkerSettings
from oscar_mm.cli import run
from tests.apps.audio_qa.conftest import assert_same, questions, read_lines, write_lines
from tests.processes import Forked, command

OPTIONS = {"max_new_tokens": 5, "batch_size": 4, "device": "cpu"}


@pytest.fixture
def loaded(worker, monkeypatch) -> Worker:
    """Runs use one worker that is loaded already."""

    def load(plan: object) -> Worker:
        assert replace(plan, settings=worker.plan.settings) == worker.plan
        return worker

    monkeypatch.setattr(WorkerSettings, "start", load)
    worker._engine.audio_seconds = 0.0
    return worker


def test_summary_and_samples(loaded, recordings, tmp_path) -> None:
    records = [*questions(2), {"id": "bad", "audio": "gone.wav", "question": "?"}]
    file = write_lines(recordings / "q.jsonl", records)
    out, samples = tmp_path / "a.jsonl", tmp_path / "samples.jsonl"
    summary = audio_qa(file, out, loaded.plan.model, samples=samples, **OPTIONS)
    assert json.loads((tmp_path / "a.jsonl.summary.json").read_text()) == summary
    rows = read_lines(out)
    assert (summary["rows"], summary["failed"], summary["marked"]) == (7, 1, 6)
    assert "gone.wav: no such file" in rows["bad"]["error"]
    for record in records:
        row, right = rows[record["id"]], record.get("answer", [])
        assert row["question"] == record["question"]
        assert row["files"] == [str(recordings / record["audio"])]
        assert row["expected"] == (right if isinstance(right, list) else [right])
    assert summary["failures"] == {"bad": rows["bad"]["error"]}
    right = [row["correct"] for row in rows.values() if row["choice"] is not None]
    assert summary["choice_accuracy"] == round(sum(right) / 2, 4) and summary["exact_match"] == 0
    group = summary["groups"]["recording 1"]
    assert (group["rows"], group["failed"]) == (3, 0)
    assert list(summary["groups"]) == ["recording 0", "recording 1"]
    assert summary["work"]["audio_seconds"] == pytest.approx(2.4)
    rate = summary["throughput"]["audio_hours_per_hour"]
    assert rate == pytest.approx(2.4 / summary["work"]["seconds"], rel=1e-3)
    assert 10**5 < summary["work"]["kv_peak_bytes"] < 10**8 < summary["work"]["process_peak_bytes"]
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [line["doc_id"] for line in lines] == list(range(6))
    assert lines[0]["filtered_resps"] == [rows["0-0"]["answer"]] and lines[0]["exact_match"] == 0.0
    scored = lines[2]
    assert scored["target"] == "white" and scored["acc"] == float(rows["0-2"]["correct"])
    assert [pair[1] for pair in scored["filtered_resps"]].index(True) == rows["0-2"]["choice"]
    assert scored["resps"] == [[pair] for pair in scored["filtered_resps"]]
    # Once more: nothing is left to do, then only what failed.
    content = out.read_bytes()
    again = audio_qa(file, out, loaded.plan.model, **OPTIONS)
    assert out.read_bytes() == content and again["work"]["rows"] == 0
    write_lines(file, [*records[:-1], records[-1] | {"audio": "gone.wav", "group": "other"}])
    (recordings / "gone.wav").write_bytes((recordings / "0.wav").read_bytes())
    retried = audio_qa(file, out, loaded.plan.model, retry_failed=True, **OPTIONS)
    assert (retried["work"]["rows"], retried["failed"], retried["rows"]) == (1, 0, 7)
    assert "other" in retried["groups"]
    (recordings / "gone.wav").unlink()


def test_refused(loaded, recordings, tmp_path) -> None:
    file = write_lines(recordings / "q.jsonl", questions(1))
    out, model = tmp_path / "a.jsonl", loaded.plan.model
    content = file.read_bytes()
    symbolic, hard = tmp_path / "symbolic", tmp_path / "hard"
    symbolic.symlink_to(file)
    hard.hardlink_to(file)
    (tmp_path / "b.jsonl.summary.json").symlink_to(file)
    for path, samples in (
        *((file, None), (symbolic, None), (hard, None), (tmp_path / "b.jsonl", None)),
        *((out, file), (out, symbolic), (out, hard)),
    ):
        with pytest.raises(InputError, match="is the file with the questions"):
            audio_qa(file, path, model, overwrite=True, samples=samples)
    for samples, expected in ((out, "answers"), (f"{out}.run.json", "run")):
        with pytest.raises(InputError, match=f"is the file for the {expected}"):
            audio_qa(file, out, model, samples=samples)
    assert file.read_bytes() == content
    for options, expected in (
        ({"batch_size": 0}, "batch_size=0"),
        ({"kv_budget": "much"}, "kv_budget='much'"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"policy": "tiny"}, "unknown policy 'tiny'"),
    ):
        with pytest.raises(InputError, match=expected):
            audio_qa(file, out, model, **options)
    assert not out.exists()
    audio_qa(file, out, model, **OPTIONS)
    with pytest.raises(InputError, match=r"system was None and is 'Be brief\.'"):
        audio_qa(file, out, model, system="Be brief.", **OPTIONS)
    rows = read_lines(out)
    summary = audio_qa(file, out, model, overwrite=True, **OPTIONS)
    assert summary["work"]["rows"] == 3
    assert_same(read_lines(out), rows)


def test_what_is_asked_about_is_not_written_over(recordings, tmp_path) -> None:
    sound = (recordings / "0.wav").read_bytes()
    for name in ("a.wav", "b.png", "c.mp4"):
        (tmp_path / name).write_bytes(sound)
    (tmp_path / "hard.jsonl").hardlink_to(tmp_path / "a.wav")
    (tmp_path / "x.summary.json").symlink_to("c.mp4")
    records = [
        {"audio": ["gone.wav", "a.wav"], "question": "?"},
        {"image": "b.png", "video": "c.mp4", "question": "?"},
        {"audio": "no\0name.wav", "question": "?"},
    ]
    file = write_lines(tmp_path / "q.jsonl", records)
    new = tmp_path / "new.jsonl"
    for line, out, samples in (
        (1, "a.wav", None),
        (1, "hard.jsonl", None),
        (2, "x", None),
        (1, new, "a.wav"),
        (2, new, "sub/../b.png"),
    ):
        samples = samples and tmp_path / samples
        (tmp_path / "sub").mkdir(exist_ok=True)
        with pytest.raises(
            InputError, match=f"is the media file that {file}, line {line} asks about; choose"
        ):
            audio_qa(file, tmp_path / out, "no-such-model", samples=samples, overwrite=True)
    for name in ("a.wav", "b.png", "c.mp4"):
        assert (tmp_path / name).read_bytes() == sound
    with pytest.raises(InputError, match=r"0\.wav: is the media file that .* asks about"):
        audio_qa(recordings, recordings / "0.wav", "no-such-model", question="?", overwrite=True)
    assert (recordings / "0.wav").read_bytes() == sound and not new.exists()


def test_command(loaded, recordings, tmp_path, capsys) -> None:
    file = write_lines(recordings / "q.jsonl", questions(2))
    out = tmp_path / "a.jsonl"
    how = ["--model", loaded.plan.model, "--max-new-tokens", "5", "--batch-size", "4"]
    command = ["audio-qa", str(file), "--out", str(out), "--device", "cpu", *how]
    assert run(command) == 0
    shown = capsys.readouterr()
    assert "recording 1" in shown.out and "6 rows in" in shown.out
    assert len(read_lines(out)) == 6
    write_lines(file, [*questions(2), {"id": "bad", "audio": "gone.wav", "question": "?"}])
    assert run(command) == 1
    assert len(read_lines(out)) == 7
    capsys.readouterr()
    assert run([*command, "--system", "Be brief."]) == 2
    assert "belongs to another run: system was None" in capsys.readouterr().err
    file.write_text('{"id": \n')
    assert run([*command, "--overwrite"]) == 2
    assert f"{file}, line 1: is not valid JSON" in capsys.readouterr().err
    assert len(read_lines(out)) == 7
    assert run(["audio-qa", str(recordings), "--out", str(out), *how]) == 2
    assert "pass the question to ask" in capsys.readouterr().err


def test_bad_rows_stop_nothing(loaded, recordings, tmp_path, capsys) -> None:
    """Lines that are no JSON, and names that UTF-8 has no bytes for; then the same once more."""
    asked = {"audio": "0.wav", "question": "?"}
    file = write_lines(
        recordings / "q.jsonl",
        [{"id": "\ud800", **asked, "group": "[/b]\ud800"}, {"id": 2, **asked}],
    )
    whole = file.read_text()
    file.write_text(f"no JSON\n{whole}{'[' * 100_000}\n")
    out, samples = tmp_path / "a.jsonl", tmp_path / "samples.jsonl"
    how = ["--model", loaded.plan.model, "--max-new-tokens", "5", "--batch-size", "4"]
    command = ["audio-qa", str(file), "--out", str(out), "--device", "cpu", *how]
    for _ in range(2):
        assert run([*command, "--samples", str(samples)]) == 1
        shown = capsys.readouterr()
        assert "[/b]\\ud800" in shown.out and shown.err == ""
        rows = read_lines(out)
        assert list(rows) == ["line 1", "\ud800", "2", "line 4"]
        assert [row["error"] for row in rows.values()] == [
            "is not valid JSON: Expecting value at character 1; a line must be an object such as "
            '{"images": ["a.png"], "question": "What is it?"}',
            *(None, None, "is nested too deeply"),
        ]
        assert len(samples.read_text().splitlines()) == 2
    file.write_text(whole)
    assert run([*command, "--retry-failed"]) == 0
    assert list(read_lines(out)) == ["\ud800", "2"]


def test_same_order_when_resumed(loaded, recordings, tmp_path) -> None:
    records = questions(3)
    records = [*records[1::2], *records[::2]]  # choices and recordings mixed
    file = write_lines(recordings / "q.jsonl", records)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "a.jsonl"
    audio_qa(file, whole, loaded.plan.model, **OPTIONS)
    lines = whole.read_text().splitlines(keepends=True)
    assert list(read_lines(whole)) == [record["id"] for record in records]
    out.write_text("".join(lines[6:2:-1]))
    Path(f"{out}.run.json").write_bytes(Path(f"{whole}.run.json").read_bytes())
    summary = audio_qa(file, out, loaded.plan.model, **OPTIONS)
    assert summary["work"]["rows"] == 5
    assert list(read_lines(out)) == [record["id"] for record in records]
    assert_same(read_lines(out), read_lines(whole))


def test_a_full_disk_is_named(loaded, recordings, tmp_path, capsys) -> None:
    file = write_lines(recordings / "q.jsonl", questions(2))
    out = tmp_path / "a.jsonl"
    how = ["--model", loaded.plan.model, "--max-new-tokens", "5", "--batch-size", "4"]
    command = ["audio-qa", str(file), "--out", str(out), "--device", "cpu", *how]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        # Room for about two rows, and for what run it is.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        assert run(command) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"oscar-mm: error: {out}: cannot be written: File too large" in capsys.readouterr().err
    assert 1 <= len(read_lines(out)) < 6 and out.read_bytes().endswith(b"\n")
    assert run(command) == 0
    assert list(read_lines(out)) == [record["id"] for record in questions(2)]


@pytest.mark.slow
def test_killed_and_resumed(worker, loaded, recordings, tmp_path) -> None:
    file = write_lines(recordings / "q.jsonl", questions(6, 9))
    whole = tmp_path / "whole.jsonl"
    audio_qa(file, whole, worker.plan.model, **OPTIONS)
    out = tmp_path / "a.jsonl"
    options = ["--model", worker.plan.model, "--max-new-tokens", "5", "--batch-size", "4"]
    options += ["--out", str(out), "--device", "cpu"]
    with Forked(command, "audio-qa", str(file), *options) as process:
        deadline = time.monotonic() + 100
        while not out.exists() or out.read_bytes().count(b"\n") < 3:
            assert process.runs() and time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    left = out.read_bytes()
    rows = [json.loads(line) for line in left.splitlines()]
    assert left.endswith(b"\n") and 3 <= len(rows) < 50, "whole lines, before the end"
    summary = audio_qa(file, out, worker.plan.model, **OPTIONS)
    assert summary["work"]["rows"] == 54 - len(rows)
    assert set(left.splitlines()) <= set(out.read_bytes().splitlines())
    assert_same(read_lines(out), read_lines(whole))
