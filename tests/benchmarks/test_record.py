"""Records are files that read back as they were written."""

import re
from pathlib import Path

import pytest

from benchmarks.record import Record, exit_code
from oscar_mm.errors import InputError


def test_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = Record("memory", "python -m x", "Some (R) CPU", [{"a": 1.5}], ["note"], {"b": 2})
    path = record.write(tmp_path / "new")
    assert path.name == "memory-some-r-cpu.json"
    assert Record.load(path) == record
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record.date)
    assert {"oscar_mm", "python", "torch", "transformers"} <= set(record.versions)


def test_an_interrupted_write_keeps_the_earlier_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Record("memory", "python -m x", "CPU", [{"a": 1}], [])
    path = record.write(tmp_path)
    write = Path.write_text

    def cut(file: Path, text: str) -> None:
        write(file, text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(KeyboardInterrupt):
        Record("memory", "python -m x", "CPU", [{"a": 2}], []).write(tmp_path)
    assert Record.load(path) == record and [*tmp_path.iterdir()] == [path]


def test_invalid_input_is_one_line_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    """Other runs return their exit code, and get the command without this machine's folders."""

    def invalid(_: str) -> None:
        raise InputError("--tokens must be 1 or more")

    lines = list[str]()
    assert exit_code("benchmarks.some", ["--tiny", "--out", "here"], lines.append) == 0
    assert lines == ["python -m benchmarks.some --tiny"]
    assert exit_code("benchmarks.some", [], lambda _: 3) == 3
    assert exit_code("benchmarks.some", [], invalid) == 2
    assert capsys.readouterr().err == "benchmarks.some: --tokens must be 1 or more\n"
