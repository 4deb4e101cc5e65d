"""What benchmarks of several models have in common: their command line and their record."""

from collections.abc import Iterator

import pytest
import torch

from benchmarks import sweep
from benchmarks.decoder import Decoder
from benchmarks.record import Record

pytestmark = pytest.mark.usefixtures("quick_collection")


@pytest.fixture(autouse=True)
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "Decoder", lambda name, device, *, tiny: name)


def run(tmp_path, arguments: list[str], batches: dict[str, list[int]], speed: float) -> int:
    arguments = ["--tiny", "--out", str(tmp_path), *arguments]
    chosen = sweep.options_of("decode_step", None, (100,)).parse_args(arguments)

    def measure(decoder: Decoder, bandwidth: float) -> Iterator[dict]:
        for batch in batches[decoder]:
            if not batch:
                raise MemoryError("none left")
            place = {"model": decoder, "way": "w", "context": 100, "batch": batch}
            yield place | {"ms": 1.0, "tokens_per_s": speed}

    cell = ("model", "way", "context", "batch")
    return sweep.sweep("decode_step", arguments, chosen, [], measure, lambda rows: None, cell)


def test_rows_that_are_not_measured_again_stay(tmp_path) -> None:
    names = ["qwen3-vl-8b", "llava-1.6-vicuna-7b"]
    both = ["--models", ",".join(names)]
    assert run(tmp_path, both, {names[0]: [1, 2], names[1]: [1]}, 10.0) == 0
    assert run(tmp_path, ["--add", "--models", names[0]], {names[0]: [2, 3]}, 20.0) == 0
    [path] = tmp_path.iterdir()
    found = {(x["model"], x["batch"]): x["tokens_per_s"] for x in Record.load(path).rows}
    assert found == {
        (names[0], 1): 10.0,
        (names[0], 2): 20.0,
        (names[0], 3): 20.0,
        (names[1], 1): 10.0,
    }
    assert {row["command"].count("--add") for row in Record.load(path).rows} == {0, 1}
    assert run(tmp_path, both, {names[0]: [1], names[1]: []}, 10.0) == 0
    assert len(Record.load(path).rows) == 1


def test_a_model_that_fails(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["qwen3-vl-8b", "llava-1.6-vicuna-7b"]
    models = ["--models", ",".join(names)]
    assert run(tmp_path, models, {names[0]: [4, 0], names[1]: [1]}, 10.0) == 1
    [path] = tmp_path.iterdir()
    record = Record.load(path)
    assert [row["batch"] for row in record.rows] == [4, 1]
    assert record.extra["failures"] == {names[0]: "MemoryError: none left"}
    assert "FAILED qwen3-vl-8b" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "gpt-5,qwen3-vl-8b"], "no such name: gpt-5; choose from llava"),
        (["--contexts", "2K"], "2K: give whole numbers from 1"),
        (["--contexts", "0"], "0: give whole numbers from 1"),
        (["--ways", "magic"], "no such name: magic; choose from dynamic"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = sweep.options_of("decode_step", None, (100,))
    sweep.add_ways(options, None)
    with pytest.raises(SystemExit):
        options.parse_args(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_needs_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = sweep.options_of("throughput", None, (100,)).parse_args([])
    assert sweep.sweep("throughput", [], chosen, [], None, None, ()) == 2
    assert "CUDA" in capsys.readouterr().err
