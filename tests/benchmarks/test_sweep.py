"""Sweeps: figures of a cell, command line and record, cells and models that fail."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from benchmarks import sweep
from benchmarks.cache_variants import VARIANTS, Decoder, Dynamic, FilledCache
from benchmarks.record import Record
from oscar_mm.generation.sampling import NextTokens

pytestmark = pytest.mark.usefixtures("quick_collection")


class Failing(Dynamic):
    def __init__(self, error: Exception) -> None:
        self.error, self.tensor, self.freed = error, None, False

    def fill(self, decoder: Decoder, rows: int, tokens: int, steps: int) -> FilledCache:
        large = torch.zeros(1000)
        self.tensor = weakref.ref(large)
        raise self.error

    def release(self) -> None:
        gc.collect()
        self.freed = self.tensor() is None


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (ValueError("no such thing"), False),
    ],
)
def test_what_fails_is_in_its_row(decoder: Decoder, error: Exception, memory: bool) -> None:
    variant = Failing(error)
    row = sweep.measure_cell(decoder, variant, 2, 100, 1e9)
    assert row["out_of_memory"] is memory and "ms" not in row
    assert row["error"] == f"{type(error).__name__}: {str(error).splitlines()[0]}"
    assert (row["batch"], row["context"], row["way"]) == (2, 100, "DynamicCache")
    assert error.__traceback__ is not None
    # What the failed cell held is given back, unless somebody keeps the error.
    error.__traceback__ = None
    variant.release()
    assert variant.freed


def test_figures_of_a_cell(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = iter([{"requested": 50, "peak": 60}, {}, {"requested": 950, "peak": 1_000_000}])
    monkeypatch.setattr(sweep, "allocated", lambda device: next(stats))
    row = sweep.measure_cell(decoder, VARIANTS["bf16-eager"], 2, 100, 1e9)
    assert row["tokens_per_s"] == pytest.approx(2e3 / row["ms"])
    assert row["floor_ms"] == pytest.approx(1e-6 * (row["weights"] + row["kv_bytes"]))
    report = decoder.resident + row["kv_bytes"]
    assert row["memory"] == {"report": report, "peak": 1_000_000, "held": 900}
    assert decoder.resident == sum(weight.nbytes for weight in decoder.model.parameters())
    for peak, same in ((1.009, True), (1.011, False), (0.98, False)):
        assert sweep.report_agrees(row | {"memory": {"report": 1000, "peak": 1000 * peak}}) is same
    assert sweep.report_agrees(row | {"ours": False}) is None


def test_a_package_that_lacks(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = VARIANTS["quantized-hqq"]
    monkeypatch.setattr(type(variant), "missing", lambda self: "hqq is not installed")
    row = sweep.measure_cell(decoder, variant, 1, 100, 1e9)
    assert row["error"] == "hqq is not installed" and "out_of_memory" not in row


def test_the_next_step_is_launched_before_its_tokens_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    listed = NextTokens.listed
    monkeypatch.setattr(
        NextTokens, "listed", lambda choice: (log.append("wait"), listed(choice))[1]
    )
    fed: list[torch.Tensor] = []

    def step(tokens: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
        log.append("step")
        fed.append(tokens)
        return torch.eye(9)[tokens + 1]

    cache = FilledCache(
        step, int, ahead=lambda tokens, ended: (log.append("ahead"), fed.append(tokens))
    )
    loop = sweep.DecodeLoop(cache, torch.device("cpu"), 2)
    loop.step()
    loop.step(last=True)
    assert log == ["step", "ahead", "wait", "step", "wait"]
    assert [tokens.tolist() for tokens in fed] == [[1, 2], [2, 3], [2, 3]]
    assert fed[1] is fed[2]
    sweep.DecodeLoop(FilledCache(step, int), torch.device("cpu"), 2).step()
    assert log[-2:] == ["step", "wait"]


@pytest.fixture(autouse=True)
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "Decoder", lambda name, device, *, tiny: name)


def run(tmp_path, arguments: list[str], batches: dict[str, list[int]], speed: float) -> int:
    arguments = ["--tiny", "--out", str(tmp_path), *arguments]
    options = sweep.options_of("decode_step", None, (100,)).parse_args(arguments)

    def measure(decoder: Decoder, bandwidth: float) -> Iterator[dict]:
        for batch in batches[decoder]:
            if not batch:
                raise MemoryError("none left")
            place = {"model": decoder, "way": "w", "context": 100, "batch": batch}
            yield place | {"ms": 1.0, "tokens_per_s": speed}

    cell = ("model", "way", "context", "batch")
    return sweep.sweep("decode_step", arguments, options, [], measure, lambda rows: None, cell)


def test_rows_that_are_not_measured_again_stay(tmp_path) -> None:
    names = ["qwen3-vl-8b", "llava-1.6-vicuna-7b"]
    both = ["--models", ",".join(names)]
    assert run(tmp_path, both, {names[0]: [1, 2], names[1]: [1]}, 10.0) == 0
    assert run(tmp_path, ["--add", "--models", names[0]], {names[0]: [2, 3]}, 20.0) == 0
    [path] = tmp_path.iterdir()
    speeds = {(x["model"], x["batch"]): x["tokens_per_s"] for x in Record.load(path).rows}
    assert speeds == {
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
    sweep.add_variants(options, None)
    with pytest.raises(SystemExit):
        options.parse_args(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_needs_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    options = sweep.options_of("throughput", None, (100,)).parse_args([])
    assert sweep.sweep("throughput", [], options, [], None, None, ()) == 2
    assert "CUDA" in capsys.readouterr().err
