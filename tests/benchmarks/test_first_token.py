"""The benchmark of first tokens with the same models in small."""

import re
from pathlib import Path
from threading import Thread

import pytest
import torch

from benchmarks import first_token
from benchmarks.cache_variants import Decoder
from benchmarks.record import Record
from oscar_mm.fast_decode.decoder import supports
from oscar_mm.media.media import MediaReader


@pytest.mark.slow
def test_each_case_in_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_token, "_CALLS", 2)
    read = MediaReader.read
    assert first_token.main(["--tiny", "--out", str(tmp_path)]) == 0
    assert MediaReader.read is read
    [path] = tmp_path.iterdir()
    texts, rows = [], []
    for row in Record.load(path).rows:
        (rows if "wall_s" in row else texts).append(row)
    assert len(texts) == len(first_token.MODELS) * len(first_token.WORDS)
    for model in first_token.MODELS:
        tokens = [row["prompt_tokens"] for row in texts if row["model"] == model]
        assert tokens == sorted(tokens) and tokens[-1] > first_token.WORDS[-1]
    assert all(row["first_token_s"] > 0 for row in texts)
    assert [row["case"] for row in rows] == [case.name for case in first_token.CASES]
    for row, case in zip(rows, first_token.CASES, strict=True):
        assert row["files"] == case.tiny().count and row["file_bytes"] > 0
        assert row["prompt_tokens"] > (13 * row["files"] * int(case.seconds / 600) or 3 * 4)
        assert list(row["wall_s"]) == list(row["cpu_s"]) == list(first_token.STAGES)
        assert all(seconds > 0 for seconds in row["wall_s"].values())
        assert sum(row["wall_s"].values()) == pytest.approx(row["profiled_s"])
        assert row["first_token_s"] > 0
        own = sum(row["wall_s"][name] for name in first_token.OWN)
        assert row["share"]["decode"] == pytest.approx(row["wall_s"]["decode"] / own)
    assert len(re.findall(r"(?: | NOT )met", capsys.readouterr().out)) == 7 * len(rows)


def test_rows_of_the_other_model_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_token, "report", lambda rows: None)
    for number, name in enumerate((*first_token.MODELS, first_token.MODELS[0])):
        row = {"number": number}
        monkeypatch.setattr(
            first_token, "measure", lambda name, *_, row=row, **__: [row | {"model": name}]
        )
        add = ["--add"] if number else []
        assert first_token.main(["--tiny", "--models", name, "--out", str(tmp_path), *add]) == 0
    [path] = tmp_path.iterdir()
    numbers = {row["model"]: row["number"] for row in Record.load(path).rows}
    assert numbers == {first_token.MODELS[1]: 1, first_token.MODELS[0]: 2}


def test_stages_within_others_count_once_and_other_threads_not() -> None:
    clock = first_token.StageClock(torch.device("cpu"))
    pack = clock.timed("pack", lambda: clock.wall["rest"])
    with clock.stage("rest"):
        before = pack()
        thread = Thread(target=clock.timed("decode", pack))
        thread.start()
        thread.join()
    assert 0 < before < clock.wall["rest"]
    assert clock.wall["pack"] > 0 and clock.wall["decode"] == 0


def test_fast_layers_run_while_they_are_timed(decoder: Decoder) -> None:
    with first_token.stages(decoder.pipe, first_token.StageClock(torch.device("cpu"))):
        assert "forward" in vars(decoder.pipe.model.get_decoder())
        assert supports(decoder.pipe.model)
    assert "forward" not in vars(decoder.pipe.model.get_decoder())


def test_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert first_token.main(["--tiny", "--models", "gpt-5"]) == 2
    assert "no such model: gpt-5; choose from qwen3-vl-8b" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_full_size_needs_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    assert first_token.main([]) == 2
    assert "CUDA" in capsys.readouterr().err
