"""The benchmark of speech with a tiny talker."""

from pathlib import Path

import pytest

from benchmarks import speech
from benchmarks.record import Record


def test_a_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speech, "VOICES", (1, 2))
    monkeypatch.setattr(speech, "FRAMES", 12)
    monkeypatch.setattr(speech, "WORDS", 3)
    assert speech.main(["--tiny", "--out", str(tmp_path)]) == 0
    [path] = tmp_path.iterdir()
    rows = Record.load(path).rows
    assert [row["voices"] for row in rows] == [1, 2]
    for row in rows:
        assert 0 < row["first_s"] < row["frame_ms"] * 12 / 1000
        assert row["times"] == pytest.approx(80 / row["frame_ms"])
    assert "times real time" in capsys.readouterr().out
