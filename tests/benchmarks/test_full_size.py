"""The benchmark of full-size models with the same models in small."""

from pathlib import Path

import pytest
import torch

from benchmarks import full_size
from benchmarks.conversation import TINY
from benchmarks.random_model import RELEASED
from benchmarks.record import Record


@pytest.mark.slow
def test_a_model_of_each_family_in_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(full_size, "LONGER", {"llava-1.6-vicuna-7b": (2 * full_size.CONTEXT,)})
    names = ("llava-1.6-vicuna-7b", "qwen3-vl-8b", "qwen3-omni-30b-a3b")
    arguments = ["--tiny", "--models", ",".join(names), "--out", str(tmp_path)]
    assert full_size.main(arguments) == 0
    [path] = tmp_path.iterdir()
    record = Record.load(path)
    assert [row["model"] for row in record.rows] == [names[0], *names]
    assert record.extra["failures"] == {}
    longer = record.rows.pop(1)
    assert longer["context"] == 2 * full_size.TINY_CONTEXT and "kept" not in longer
    for row in (longer, record.rows[0]):
        # In 16 bit are sinks and window, less than a page of text and of images, and what an
        # answer has to spare, however long the prompt is.
        memory = row["memory"]
        token = memory["bf16_bytes"] / sum(memory["tokens"].values())
        assert 0 < memory["by_kind"]["tails"] <= (4 + 32 + 2 * 127 + 32) * token
    assert longer["memory"]["by_kind"]["codes"] > record.rows[0]["memory"]["by_kind"]["codes"] > 0
    assert longer["chunked"]["chunk"] == TINY.chunk < longer["prompt_tokens"] / 4
    assert longer["chunked"]["prefill_ms"] > 0
    for row in record.rows:
        assert full_size.TINY_CONTEXT * 0.75 < row["prompt_tokens"] <= full_size.TINY_CONTEXT
        tokens = row["memory"]["tokens"]
        assert sum(tokens.values()) == row["prompt_tokens"] + TINY.answer - 1
        assert bool(tokens["audio"]) == bool(row["audio_s"]) == ("omni" in row["model"])
        assert row["same_after_load"] and row["freed_bytes"] > 0
        assert 0 < row["kept"]["difference"] < 0.05 and row["kept"]["dynamic"] < 0.05
        assert all(ms > 0 for cache in ("oscar", "dynamic") for ms in row["ms"][cache].values())
        assert row["ms"]["tokens"]["turn_text"] > TINY.text
        assert row["ms"]["tokens"]["turn_picture"] > row["ms"]["tokens"]["turn_text"]
        assert bool(row["experts"]) == ("30b" in row["model"])
        assert set(row["kernels"].values()) == {False}, "there is no GPU"
        figures = {bound["figure"]: bound for bound in row["bounds"]}
        assert figures["kept logits"]["met"] and not figures["saved / 16 bit"]["met"]
    printed = capsys.readouterr().out
    rows = [*record.rows, longer]
    assert printed.count("at most") == sum(len(row["bounds"]) for row in rows)


def test_a_model_that_fails_does_not_take_the_others_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(name: str, device: torch.device, *, tiny: bool) -> list:
        if name == "qwen3-vl-8b":
            raise MemoryError("none left")
        return []

    monkeypatch.setattr(full_size, "measure", broken)
    assert full_size.main(["--tiny", "--out", str(tmp_path)]) == 1
    [path] = tmp_path.iterdir()
    extra = Record.load(path).extra
    assert extra["failures"] == {"qwen3-vl-8b": "MemoryError: none left"}
    assert list(extra["seconds"]) == list(RELEASED)
    assert "FAILED qwen3-vl-8b" in capsys.readouterr().out


def test_rows_of_other_models_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_size, "_tables", lambda rows: None)
    for number, names in enumerate(("qwen3-vl-8b,llava-1.6-vicuna-7b", "qwen3-vl-8b")):
        row = {"number": number}
        monkeypatch.setattr(
            full_size, "measure", lambda name, *_, row=row, **__: [row | {"model": name}]
        )
        add = ["--add"] if number else []
        assert full_size.main(["--tiny", "--models", names, "--out", str(tmp_path), *add]) == 0
    [path] = tmp_path.iterdir()
    record = Record.load(path)
    assert {row["model"]: row["number"] for row in record.rows} == {
        "llava-1.6-vicuna-7b": 0,
        "qwen3-vl-8b": 1,
    }
    assert set(record.extra["seconds"]) == {"llava-1.6-vicuna-7b", "qwen3-vl-8b"}


def test_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert full_size.main(["--tiny", "--models", "gpt-5,qwen3-vl-8b"]) == 2
    assert "no such model: gpt-5; choose from llava" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_full_size_needs_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    assert full_size.main([]) == 2
    assert "CUDA" in capsys.readouterr().err
