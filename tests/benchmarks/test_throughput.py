"""The search for the largest batch, and the verdicts."""

import pytest
import torch

from benchmarks import throughput
from benchmarks.cache_variants import Decoder, Dynamic, FilledCache
from benchmarks.record import Record

pytestmark = pytest.mark.usefixtures("quick_collection")


class Small(Dynamic):
    """A device that has room for so many rows and no more."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def fill(self, decoder: Decoder, rows: int, tokens: int, steps: int) -> FilledCache:
        if rows > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().fill(decoder, rows, tokens, steps)


@pytest.mark.parametrize(("fit", "batches"), [(5, [5]), (3, [5, 4, 3])])
def test_the_largest_batch_that_fits(decoder: Decoder, fit: int, batches: list[int]) -> None:
    variant = Small(fit)
    free = 5 * variant.row_bytes(decoder, 64, 24) + 1
    rows = list(throughput.largest(decoder, variant, 64, 1e9, free))
    assert [row["batch"] for row in rows] == batches
    assert ["error" in row for row in rows] == [True] * (len(batches) - 1) + [False]
    assert {row["free"] for row in rows} == {free}


def test_no_row_fits(decoder: Decoder) -> None:
    assert list(throughput.largest(decoder, Dynamic(), 64, 1e9, 10)) == []
    assert len(list(throughput.largest(decoder, Small(0), 64, 1e9, 10**6))) <= 12


def test_another_error_is_no_reason_to_try_fewer(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dynamic, "fill", lambda *_: 1 / 0)
    [row] = throughput.largest(decoder, Dynamic(), 64, 1e9, 10**6)
    assert row["error"].startswith("ZeroDivisionError") and row["out_of_memory"] is False


def test_verdicts() -> None:
    def row(way: str, batch: int, speed: float, context: int = 131072) -> dict:
        return {
            "model": "m",
            "way": way,
            "context": context,
            "batch": batch,
            "tokens_per_s": speed,
        }

    rows = [
        row("DynamicCache", 7, 1.0) | {"error": "out of memory"},
        row("DynamicCache", 6, 100.0),
        row("compact, graph", 30, 449.0),
    ]
    assert [(bound["found"], bound["met"]) for bound in throughput.bounds(rows)] == [
        (5.0, True),
        (4.49, False),
    ]
    shorter = [row | {"context": 32768} for row in rows]
    assert [bound["met"] for bound in throughput.bounds(shorter)] == [None, None]
    assert throughput.bounds(rows[:2]) == [] and throughput.bounds(rows[2:]) == []


@pytest.mark.slow
def test_a_dry_run(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tiny", "--models", "llava-1.6-vicuna-7b", "--out", str(tmp_path)]
    assert throughput.main([*arguments, "--contexts", "1000"]) == 0
    [path] = tmp_path.iterdir()
    plain, ours = Record.load(path).rows
    assert (plain["way"], ours["way"]) == ("DynamicCache", "compact, graph")
    assert ours["captures"] and not plain["captures"]
    # Of 2 layers with 2 KV heads of 128 channels.
    assert plain["row_bytes"] == 1024 * 2 * 2 * 2 * 128 * 2
    assert plain["batch"] == throughput.TINY_ROOM // plain["row_bytes"] < ours["batch"]
    assert ours["kv_bytes"] < throughput.TINY_ROOM * 1.1
    assert "batch / 16 bit" in capsys.readouterr().out
