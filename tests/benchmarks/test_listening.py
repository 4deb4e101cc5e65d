"""The benchmark of recordings that are heard while they are made."""

from pathlib import Path

import pytest

from benchmarks import listening
from benchmarks.record import Record


def test_a_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "SECONDS", (10, 40))
    monkeypatch.setattr(listening, "REPEATS", 1)
    assert listening.main(["--out", str(tmp_path)]) == 0
    [path] = tmp_path.iterdir()
    rows = Record.load(path).rows
    assert [row["seconds"] for row in rows] == [10, 40]
    assert rows[1]["heard_s"] < rows[1]["whole_s"]
    assert "heard s" in capsys.readouterr().out
