"""The benchmark of speech with a tiny model."""

from pathlib import Path

import pytest

from benchmarks import speech
from benchmarks.record import Record


def test_a_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"VOICES": (1, 2), "FRAMES": 12, "WORDS": 3, "QUESTION_S": 1.0, "PAST_S": 30.0}
    for name, value in sizes.items():
        monkeypatch.setattr(speech, name, value)
    assert speech.main(["--tiny", "--out", str(tmp_path)]) == 0
    [path] = tmp_path.iterdir()
    long, *others = Record.load(path).rows
    assert [row["voices"] for row in others] == [1, 2]
    assert all(row["factor"] > 0 and row["first_audio_s"] > 0 for row in (long, *others))
    assert 13 * 30 <= long["past_tokens"] < 13 * 30 + 60
    assert 0 < long["talker_bytes_an_hour"] < long["bf16_bytes_an_hour"]
    assert long["bytes_an_hour"] + long["talker_bytes_an_hour"] < long["bf16_bytes_an_hour"]
    assert "real-time factor" in capsys.readouterr().out


def test_the_factor_and_its_bound() -> None:
    assert speech.factor([5.0, 5.5, 6.0], 4.0) == 0.25
    assert speech.verdict(0.25, 0.25) == "0.25: met"
    assert speech.verdict(0.26, 0.25) == "0.25: NOT met"
    assert not speech.verdict(1.0, None)
