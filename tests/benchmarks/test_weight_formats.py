"""The benchmark of quantized weights on a tiny random model."""

import json

import pytest
import torch

from benchmarks import weight_formats
from benchmarks.weight_formats import Reading, differences
from tests.languages import build_language_model, write_text


def test_rows(tmp_path, capsys) -> None:
    folder = build_language_model("llama", tmp_path / "llama")
    words = write_text(tmp_path / "words.txt")
    arguments = ["--model", str(folder), "--text", str(words), "--out", str(tmp_path / "out")]
    assert weight_formats.main([*arguments, "--tokens", "100", "--passages", "2"]) == 0
    [path] = (tmp_path / "out").glob("weight_formats-*.json")
    fp8, int4 = json.loads(path.read_text())["rows"]
    assert (fp8["format"], int4["format"]) == ("fp8", "int4")
    assert 0 < fp8["kl"] < int4["kl"]
    assert int4["agreement"] <= 1 and 0 <= int4["same"] <= weight_formats.GENERATED
    assert "int4" in capsys.readouterr().out
    assert weight_formats.main([*arguments, "--passages", "0"]) == 2
    assert "must be 1 or more" in capsys.readouterr().err


def test_differences() -> None:
    """The divergence of two distributions is known; the answers differ from the third token on."""
    exact = Reading(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([0]), [1, 2, 3, 4])
    found = Reading(torch.tensor([[0.25, 0.75]]).log(), torch.tensor([0]), [1, 2, 9, 4])
    row = differences(found, exact)
    assert row["kl"] == pytest.approx(0.5 * torch.log(torch.tensor(4 / 3)).item(), rel=1e-5)
    assert row["perplexity_ratio"] == pytest.approx(2, rel=1e-5)
    assert (row["agreement"], row["same"]) == (0, 2)
