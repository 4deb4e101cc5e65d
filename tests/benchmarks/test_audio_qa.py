"""Recordings and questions of the audio QA benchmark, without the program that speaks."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import audio_qa
from benchmarks.audio_qa import ratios
from oscar_mm.apps.audio_qa.rows import by_recording, read_rows
from oscar_mm.media import load_audio


@pytest.fixture
def quiet(monkeypatch) -> None:
    audio_qa._unit.cache_clear()
    monkeypatch.setattr(audio_qa, "speak", lambda words, *_: np.full(800 * len(words), 0.5, "f4"))
    yield
    audio_qa._unit.cache_clear()


def test_questions_about_recordings(quiet, tmp_path: Path) -> None:
    rows = audio_qa.spoken_questions(tmp_path, recordings=2, clips=5, questions=4)
    read = read_rows(audio_qa.write_jsonl(tmp_path / "q.jsonl", rows))
    assert [len(group) for group in by_recording(read)] == [4, 4]
    assert not any(row.error for row in read)
    assert {row.group for row in read} == {"free", "choices"}
    for row in read:
        assert len(row.audio) == 5 and (not row.choices or row.answer[0] in row.choices)
        for path in row.audio:
            assert 1 <= load_audio(path).seconds <= 3.5
    apart = read_rows(
        audio_qa.write_jsonl(tmp_path / "apart.jsonl", audio_qa.with_own_files(tmp_path, rows))
    )
    assert [len(group) for group in by_recording(apart)] == [1] * 8
    assert [row.question for row in apart] == [row.question for row in read]


def test_ratios() -> None:
    names = ("shared", "not shared", "shared, one by one", "not shared, one by one")
    fields = ("cpu_seconds", "kv_peak_bytes")
    rows = [{"run": name} | dict.fromkeys(fields, 2.0**i) for i, name in enumerate(names)]
    assert set(ratios(rows).values()) == {2.0} and len(ratios(rows)) == 4


@pytest.mark.slow
def test_full_size_in_small(tmp_path: Path) -> None:
    rows = audio_qa.measure_full_size(tmp_path, torch.device("cpu"), tiny=True)
    assert [(row["run"], row["batch"]) for row in rows] == [
        *(("shared", batch) for batch in (64, 8, 1)),
        ("not shared", 64),
    ]
    assert {row["rows"] for row in rows} == {6}
    assert {row["audio_seconds_read"] for row in rows} == {2 * 2, 6 * 2}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_full_size_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert audio_qa.main(["--full-size"]) == 2
    assert (
        "benchmarks.audio_qa needs a CUDA device; --tiny runs anywhere" in capsys.readouterr().err
    )
