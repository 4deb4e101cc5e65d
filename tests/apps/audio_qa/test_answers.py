"""The output file: whole lines on the disk, of one run, by one process."""

import json
import os
from pathlib import Path

import pytest

from oscar_mm import InputError, KVPolicy
from oscar_mm.apps.audio_qa.answers import Answers
from oscar_mm.apps.audio_qa.rows import Row
from oscar_mm.apps.audio_qa.settings import Settings

HOW = Settings(KVPolicy.preset("compact")).fingerprint("a model")
ROW = {"id": "a", "error": None, "digest": "1", "answer": "\u00e4\u2028b"}
BAD = {"id": "b", "error": "no such file", "digest": "2"}


def begun(path: Path, *rows: dict, how: dict = HOW) -> Path:
    answers = Answers(path, how)
    answers.confirm(how)
    for row in rows:
        answers.write(row)
    answers.close()
    return path


def test_every_row_is_on_the_disk_before_the_next(tmp_path, monkeypatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    path = begun(tmp_path / "deep" / "a.jsonl", ROW, BAD)
    assert synced[-2:] == [len(path.read_bytes().splitlines(True)[0]), path.stat().st_size]
    assert [json.loads(line) for line in path.read_text().split("\n")[:-1]] == [ROW, BAD]


def test_resumed(tmp_path: Path) -> None:
    path = begun(tmp_path / "a.jsonl", ROW, BAD)
    with path.open("a") as file:
        file.write('{"id": "c", "err')
    answers = Answers(path, Settings(KVPolicy.preset("compact")).fingerprint())
    assert answers.done == {"a": ROW, "b": BAD}
    answers.confirm(HOW)
    answers.write({"id": "c", "error": None, "digest": "3"})
    answers.close()
    assert [json.loads(line)["id"] for line in path.open()] == ["a", "b", "c"]
    answers = Answers(path, HOW)
    answers.drop_failed()
    assert list(answers.done) == ["a", "c"]
    answers.write(BAD | {"error": None})
    with pytest.raises(InputError, match="another process writes to it"):
        Answers(path, HOW)
    answers.close()
    assert [json.loads(line)["id"] for line in path.open()] == ["a", "c", "b"]
    answers = Answers(path, {}, overwrite=True)
    assert answers.done == {} and path.read_text() == ""
    answers.close()


def test_another_run_is_refused(tmp_path: Path) -> None:
    path = begun(tmp_path / "a.jsonl", ROW)
    other = Settings(KVPolicy.preset("compact", window=64), system="Be brief.", max_new_tokens=9)
    with pytest.raises(InputError) as refused:
        Answers(path, other.fingerprint())
    for part in ("policy.window was 32 and is 64", "system was None and is 'Be brief.'", "_tokens"):
        assert part in str(refused.value)
    answers = Answers(path, HOW | {"model": None})
    with pytest.raises(InputError, match="model was 'a model' and is 'b model'"):
        answers.confirm(HOW | {"model": "b model"})
    moved = Row("a", "Another question?", where="q.jsonl, line 3")
    with pytest.raises(InputError, match=r"row 'a' was answered, but to another question than q"):
        answers.check_questions([moved])
    answers.close()


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine\n")
    with pytest.raises(InputError, match=r"is not of audio-qa: notes.txt.run.json is missing"):
        Answers(path, HOW)
    assert path.read_text() == "mine\n"
    damaged = begun(tmp_path / "a.jsonl", ROW)
    damaged.write_text("{}\n" + damaged.read_text())
    with pytest.raises(InputError, match=r"a.jsonl, line 1: is no row of audio-qa"):
        Answers(damaged, HOW)
    with pytest.raises(InputError, match="cannot be written"):
        Answers(tmp_path, HOW)
