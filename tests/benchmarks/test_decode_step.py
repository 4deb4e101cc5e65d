"""The benchmark of decode steps with small models on a CPU."""

import pytest

from benchmarks import decode_step, sweep
from benchmarks.cache_variants import Decoder
from benchmarks.record import Record
from benchmarks.sweep import STEPS, WARM_UP

pytestmark = pytest.mark.usefixtures("quick_collection")
WAYS = ["dynamic", "bf16-eager", "bf16-graph", "compact-eager", "compact-graph"]


def test_every_variant_is_measured(
    tmp_path, mixture: Decoder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "Decoder", lambda name, device, *, tiny: mixture)
    arguments = ["--tiny", "--models", "qwen3-vl-30b-a3b", "--batches", "2"]
    arguments += ["--ways", ",".join(WAYS), "--kernels", "--out", str(tmp_path)]
    assert decode_step.main(arguments) == 0
    [path] = tmp_path.iterdir()
    rows = Record.load(path).rows
    assert [row["way"] for row in rows] == [
        "DynamicCache",
        "bf16, eager",
        "bf16, graph",
        "compact, eager",
        "compact, graph",
    ]
    assert all(row["ms"] > 0 and row["floor_ms"] > 0 for row in rows)
    assert [row["captures"] for row in rows] == [0, 0, 1, 0, 1]
    kv_bytes = {row["way"]: row["kv_bytes"] for row in rows}
    # 2 rows, 2 layers, keys and values of all tokens, 1 KV head of 128 in bfloat16.
    assert kv_bytes["DynamicCache"] == 2 * 2 * 2 * (300 + WARM_UP + STEPS) * 128 * 2
    assert kv_bytes["compact, graph"] < kv_bytes["bf16, graph"]
    assert all(row["kernels"]["launches"] > 100 for row in rows)
    printed = capsys.readouterr().out
    assert "compact, graph" in printed and "aten::mm" in printed


def test_the_compiled_peer_once_unless_chosen(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cells(variants: list[str] | None) -> list[tuple[str, int]]:
        rows = decode_step.rows_of(decoder, 1.0, (2048, 32768), (1,), variants)
        return [cell for cell in rows if "compiled" in cell[0]]

    monkeypatch.setattr(
        decode_step,
        "measure_cell",
        lambda _, variant, rows, context, __, **___: (variant.title, context),
    )
    assert cells(None) == [("StaticCache, compiled", 32768)]
    assert len(cells(["static-compiled"])) == 2
    assert cells(["dynamic"]) == []


def test_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "model": "m",
        "way": "compact, graph",
        "batch": 1,
        "context": 2048,
        "kv_bytes": 10**9,
        "ms": 5.0,
        "tokens_per_s": 200.0,
        "floor_ms": 4.0,
        "ours": True,
        "memory": {"report": 100e9, "peak": 100.5e9},
    }
    slow = row | {"context": 32768, "ms": 5.3, "memory": {"report": 100e9, "peak": 102e9}}
    decode_step.report([row, slow, row | {"context": 4096, "ms": 9.0}])
    printed = capsys.readouterr().out.splitlines()
    assert "m, compact, graph, 1 x 2,048 tokens: 1.25 floors, at most 1.3: met" in printed
    assert "m, compact, graph, 1 x 32,768 tokens: 1.32 floors, at most 1.3: NOT met" in printed
    assert sum("met" in line for line in printed) == 3
    assert "m, compact, graph, 1 x 32,768 tokens: peak 102.00 GB, report 100.00 GB" in printed[-1]
