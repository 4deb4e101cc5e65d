"""The output file: whole lines on the disk, of one run, by one process."""

import errno
import json
import os
import resource
from pathlib import Path

import pytest

from oscar_mm import InputError, KVPolicy
from oscar_mm.apps.audio_qa.engine import AnswerSettings
from oscar_mm.apps.audio_qa.results import AnswerFile, Work, print_summary, summarize
from oscar_mm.apps.audio_qa.rows import Row

HOW = AnswerSettings(KVPolicy.preset("compact")).fingerprint("a model")
ROW = {"id": "a", "error": None, "digest": "1", "answer": "\u00e4\u2028b"}
BAD = {"id": "b", "error": "no such file", "digest": "2"}


def begun(path: Path, *rows: dict, how: dict = HOW) -> Path:
    answers = AnswerFile(path, how)
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
    answers = AnswerFile(path, AnswerSettings(KVPolicy.preset("compact")).fingerprint())
    assert answers.done == {"a": ROW, "b": BAD}
    answers.confirm(HOW)
    answers.write({"id": "c", "error": None, "digest": "3"})
    answers.close()
    assert [json.loads(line)["id"] for line in path.open()] == ["a", "b", "c"]
    answers = AnswerFile(path, HOW)
    answers.resume([], retry_failed=True)
    assert list(answers.done) == ["a", "c"]
    answers.write(BAD | {"error": None})
    with pytest.raises(InputError, match="another process is writing to this file"):
        AnswerFile(path, HOW)
    answers.close()
    assert [json.loads(line)["id"] for line in path.open()] == ["a", "c", "b"]
    before = path.read_text()
    answers = AnswerFile(path, {}, overwrite=True)
    # Until the model is there.
    assert answers.done == {} and path.read_text() == before
    answers.confirm(HOW | {"model": "another"})
    assert path.read_text() == ""
    answers.close()
    AnswerFile(path, HOW | {"model": "another"}).close()


def test_no_other_process_has_the_file_while_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = begun(tmp_path / "a.jsonl", ROW, BAD)
    answers, replace, refused = AnswerFile(path, HOW), os.replace, []

    def meanwhile(source: str, target: str) -> None:
        for move in (None, replace):
            if move is not None:
                move(source, target)
            with pytest.raises(InputError, match="another process is writing to this file"):
                AnswerFile(path, HOW)
            refused.append(move)

    monkeypatch.setattr(os, "replace", meanwhile)
    answers.resume([], retry_failed=True)
    answers.write(BAD | {"error": None})
    answers.close()
    assert len(refused) == 2
    assert [json.loads(line)["id"] for line in path.open()] == ["a", "b"]


def test_a_file_that_cannot_be_replaced_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = begun(tmp_path / "a.jsonl", ROW, BAD)
    answers = AnswerFile(path, HOW)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space is left")

    with monkeypatch.context() as patch, pytest.raises(InputError, match="no space is left"):
        patch.setattr(os, "replace", full)
        answers.resume([], retry_failed=True)
    answers.write(BAD | {"id": "c"})
    with pytest.raises(InputError, match="another process is writing to this file"):
        AnswerFile(path, HOW)
    answers.close()
    assert [json.loads(line)["id"] for line in path.open()] == ["a", "b", "c"]


def test_another_run_is_refused(tmp_path: Path) -> None:
    path = begun(tmp_path / "a.jsonl", ROW)
    other = AnswerSettings(
        KVPolicy.preset("compact", window=64), system="Be brief.", max_new_tokens=9
    )
    with pytest.raises(InputError) as refused:
        AnswerFile(path, other.fingerprint())
    for part in ("policy.window was 32 and is 64", "system was None and is 'Be brief.'", "_tokens"):
        assert part in str(refused.value)
    answers = AnswerFile(path, HOW | {"model": None})
    with pytest.raises(InputError, match="model was 'a model' and is 'b model'"):
        answers.confirm(HOW | {"model": "b model"})
    moved = Row("a", "Another question?", where="q.jsonl, line 3")
    with pytest.raises(InputError, match=r"row 'a' was answered for a different question"):
        answers.resume([moved])
    answers.close()


def test_a_question_that_failed_may_be_mended(tmp_path: Path) -> None:
    path = begun(tmp_path / "a.jsonl", ROW, BAD)
    asked = Row("b", "Another question?", where="q.jsonl, line 3")
    answers = AnswerFile(path, HOW)
    with pytest.raises(InputError, match="; pass --retry-failed, a different --out, or --overw"):
        answers.resume([asked])
    assert list(answers.done) == ["a", "b"]
    answers.resume([asked], retry_failed=True)
    assert list(answers.done) == ["a"]
    answers.close()


def test_half_a_surrogate_pair(tmp_path: Path) -> None:
    halves = ["\ud800", "\udcff", "\ud83d\\ude00", "x\\ud800"]
    rows = [ROW | {"id": half, "answer": half} for half in halves]
    path = begun(tmp_path / "a.jsonl", *rows)
    assert path.read_bytes().startswith(b'{"id": "\\ud800"')
    for _ in range(2):
        answers = AnswerFile(path, HOW)
        assert list(answers.done.values()) == rows
        answers.sort([Row(half, "?") for half in reversed(halves)])
        answers.close()
        rows.reverse()


def test_in_the_order_of_the_questions(tmp_path: Path) -> None:
    path = begun(tmp_path / "a.jsonl", *(ROW | {"id": name} for name in "gcab"))
    answers = AnswerFile(path, HOW)
    answers.sort([Row(name, "?") for name in "abcd"])
    assert [json.loads(line)["id"] for line in path.open()] == [*"abcg"] == list(answers.done)
    with pytest.raises(InputError, match="another process is writing to this file"):
        AnswerFile(path, HOW)
    answers.write(ROW | {"id": "d"})
    answers.close()
    assert [json.loads(line)["id"] for line in path.open()] == [*"abcgd"]


def test_a_full_disk(tmp_path: Path) -> None:
    """No file may grow beyond a size, which the system says in the middle of a write."""
    path = begun(tmp_path / "a.jsonl", BAD, ROW)
    answers = AnswerFile(path, HOW)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 7, limits[1]))
        with pytest.raises(InputError, match=r"a\.jsonl: cannot be written: File too large"):
            answers.write(ROW | {"id": "c"})
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) - 7, limits[1]))
        with pytest.raises(InputError, match=r"a\.jsonl: cannot be written: File too large"):
            answers.sort([Row("a", "?"), Row("b", "?")])
        with pytest.raises(InputError, match=r"a\.jsonl\.run\.json: cannot be written: File too"):
            Path(f"{path}.run.json").unlink()
            answers.confirm(HOW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a.jsonl"]
    answers.write(ROW | {"id": "c"})
    answers.confirm(HOW)
    answers.close()
    answers = AnswerFile(path, HOW)
    assert list(answers.done) == ["b", "a", "c"]
    answers.close()


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine\n")
    with pytest.raises(
        InputError, match=r"was not written by audio-qa: notes.txt.run.json is missing"
    ):
        AnswerFile(path, HOW)
    assert path.read_text() == "mine\n"
    damaged = begun(tmp_path / "a.jsonl", ROW)
    damaged.write_text("{}\n" + damaged.read_text())
    with pytest.raises(InputError, match=r"a.jsonl, line 1: is not a row written by audio-qa"):
        AnswerFile(damaged, HOW)
    deep = "[" * 100_000
    for line in (deep, "[]", '{"id": [], "error": null, "digest": ""}'):
        damaged.write_text(f"{line}\n")
        with pytest.raises(InputError, match=r"a.jsonl, line 1: is not a row written by audio-qa"):
            AnswerFile(damaged, HOW)
    for text in (deep, "[]", "\ud800"):
        Path(f"{damaged}.run.json").write_text(text, errors="surrogatepass")
        with pytest.raises(
            InputError, match=r"was not written by audio-qa: a.jsonl.run.json is missing"
        ):
            AnswerFile(damaged, HOW)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(InputError, match=r"cannot be written: [iI]s "):
            AnswerFile(path, HOW)


def test_a_link_leads_to_the_file(tmp_path: Path) -> None:
    path = begun(tmp_path / "a.jsonl", ROW, BAD)
    (tmp_path / "link").symlink_to(path)
    Path(f"{path}.run.json").rename(tmp_path / "link.run.json")
    answers = AnswerFile(tmp_path / "link", HOW)
    answers.resume([], retry_failed=True)
    answers.close()
    assert (tmp_path / "link").is_symlink() and len(path.read_bytes().splitlines()) == 1


def test_a_run_that_had_nothing_left_to_do(capsys) -> None:
    print_summary(summarize([], Work(0, 0.0, 0.0, 0.0, 0, 0)))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "0 rows in 0.0 s, 0.0 hours of audio per hour"
