"""A cell that fails is told of and takes nothing along."""

import gc
import weakref

import pytest
import torch

from benchmarks import cell
from benchmarks.decoder import Decoder
from benchmarks.ways import WAYS, Dynamic, Run
from oscar_mm.generation.sampling import NextTokens

pytestmark = pytest.mark.usefixtures("quick_collection")


class Failing(Dynamic):
    def __init__(self, error: Exception) -> None:
        self.error, self.held, self.finished = error, None, False

    def begin(self, decoder: Decoder, rows: int, tokens: int, steps: int) -> Run:
        large = torch.zeros(1000)
        self.held = weakref.ref(large)
        raise self.error

    def finish(self) -> None:
        gc.collect()
        self.finished = self.held() is None


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (ValueError("no such thing"), False),
    ],
)
def test_what_fails_is_in_its_row(decoder: Decoder, error: Exception, memory: bool) -> None:
    way = Failing(error)
    row = cell.measure(decoder, way, 2, 100, 1e9)
    assert row["out_of_memory"] is memory and "ms" not in row
    assert row["error"] == f"{type(error).__name__}: {str(error).splitlines()[0]}"
    assert (row["batch"], row["context"], row["way"]) == (2, 100, "DynamicCache")
    assert error.__traceback__ is not None
    # What the failed cell held is given back, unless somebody keeps the error.
    error.__traceback__ = None
    way.finish()
    assert way.finished


def test_figures_of_a_cell(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = iter([{"requested": 50, "peak": 60}, {}, {"requested": 950, "peak": 1_000_000}])
    monkeypatch.setattr(cell, "allocated", lambda device: next(stats))
    row = cell.measure(decoder, WAYS["bf16-eager"], 2, 100, 1e9)
    assert row["tokens_per_s"] == pytest.approx(2e3 / row["ms"])
    assert row["floor_ms"] == pytest.approx(1e-6 * (row["weights"] + row["kv_bytes"]))
    report = decoder.resident + row["kv_bytes"]
    assert row["memory"] == {"report": report, "peak": 1_000_000, "held": 900}
    assert decoder.resident == sum(weight.nbytes for weight in decoder.model.parameters())
    for peak, same in ((1.009, True), (1.011, False), (0.98, False)):
        assert cell.agrees(row | {"memory": {"report": 1000, "peak": 1000 * peak}}) is same
    assert cell.agrees(row | {"ours": False}) is None


def test_a_package_that_lacks(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    way = WAYS["quantized-hqq"]
    monkeypatch.setattr(type(way), "missing", lambda self: "hqq is not installed")
    row = cell.measure(decoder, way, 1, 100, 1e9)
    assert row["error"] == "hqq is not installed" and "out_of_memory" not in row


def test_the_next_step_is_launched_before_its_tokens_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    listed = NextTokens.listed
    monkeypatch.setattr(NextTokens, "listed", lambda one: (log.append("wait"), listed(one))[1])
    fed: list[torch.Tensor] = []

    def step(tokens: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
        log.append("step")
        fed.append(tokens)
        return torch.eye(9)[tokens + 1]

    run = Run(step, int, ahead=lambda tokens, ended: (log.append("ahead"), fed.append(tokens)))
    stepping = cell.Stepping(run, torch.device("cpu"), 2)
    stepping.once()
    stepping.once(last=True)
    assert log == ["step", "ahead", "wait", "step", "wait"]
    assert [tokens.tolist() for tokens in fed] == [[1, 2], [2, 3], [2, 3]]
    assert fed[1] is fed[2]
    cell.Stepping(Run(step, int), torch.device("cpu"), 2).once()
    assert log[-2:] == ["step", "wait"]
