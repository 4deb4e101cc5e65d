"""The benchmark of speech with a tiny model."""

import re
from pathlib import Path

import pytest

from benchmarks import speech
from benchmarks.record import Record


@pytest.mark.slow
def test_a_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"VOICES": (1, 2), "FRAMES": 12, "WORDS": 3, "QUESTION_S": 1.0, "PAST_S": 30.0}
    sizes["SESSIONS"] = 6
    for name, value in sizes.items():
        monkeypatch.setattr(speech, name, value)
    assert speech.main(["--tiny", "--out", str(tmp_path)]) == 0
    [path] = tmp_path.iterdir()
    long, *others, left = Record.load(path).rows
    assert (left["sessions"], left["held_bytes"]) == (6, 0)
    assert [row["voices"] for row in others] == [1, 2]
    assert all(row["factor"] > 0 and row["first_audio_s"] > 0 for row in (long, *others))
    assert 13 * 30 <= long["past_tokens"] < 13 * 30 + 60
    assert 0 < long["talker_bytes_an_hour"] < long["bf16_bytes_an_hour"]
    assert long["bytes_an_hour"] + long["talker_bytes_an_hour"] < long["bf16_bytes_an_hour"]
    said = capsys.readouterr().out
    assert "first audio in a chat of 0.5 minutes" in said
    assert re.search(r"bytes held after 6 interrupted conversations\W+0.000\W+0: met", said)


def test_each_bound_is_compared_with_what_was_measured() -> None:
    long = {"case": "in a chat", "past_s": 1.0, "first_audio_s": 0.4, "voices": 1, "factor": 0.2}
    long |= {"bytes_an_hour": 8e8, "talker_bytes_an_hour": 1e8}
    many = {"case": "new", "voices": 16, "factor": 0.81, "first_audio_s": 1.0}
    left = {"sessions": 100, "held_bytes": 1, "grown_bytes": 51_200}
    found = [speech.verdict(*one[1:]) for one in speech.bounds([long, many, left])]
    assert ["NOT" in one for one in found] == [True, False, False, True, True, True]


def test_the_factor_and_its_bound() -> None:
    assert speech.factor([5.0, 5.5, 6.0], 4.0) == 0.25
    assert speech.verdict(0.25, 0.25) == "0.25: met"
    assert speech.verdict(0.26, 0.25) == "0.25: NOT met"
    assert not speech.verdict(1.0, None)
