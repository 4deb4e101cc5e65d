"""benchmarks.cpu: rows and a record, on small shapes."""

import json
from pathlib import Path

import pytest

from benchmarks import cpu


def test_rows_and_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "SHAPES", (cpu.Shape("standard", 64, 2, 2, 2, 2400),))
    monkeypatch.setattr(cpu, "STORED", ((3, 1), (1, 256)))
    monkeypatch.setattr(cpu, "_ROUNDS", 1)
    assert cpu.main(["--out", str(tmp_path)]) == 0
    record = json.loads(next(tmp_path.glob("cpu-*.json")).read_text())
    decode, *others = record["rows"]
    assert decode["met"] == (decode["loops_ms"] <= decode["sdpa_ms"])
    assert decode["of_sdpa"] == pytest.approx(decode["loops_ms"] / decode["sdpa_ms"])
    operations = [row["operation"] for row in others]
    assert operations == ["store"] * 2 + ["unpack"] * len(cpu.UNPACKED)
    assert all(row["loops_ms"] > 0 and row["torch_ms"] > 0 for row in record["rows"])
    assert record["extra"]["threads"] == 1 if "extra" in record else record["threads"] == 1
