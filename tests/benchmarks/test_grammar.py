"""The benchmark of grammars with a small model on a CPU."""

from pathlib import Path

import pytest

from benchmarks import decode_step, grammar
from benchmarks.record import Record


def test_a_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_step, "STEPS", 3)
    monkeypatch.setattr(decode_step, "WARM_UP", 1)
    assert grammar.main(["--tiny", "--rows", "2", "--out", str(tmp_path)]) == 0
    [path] = tmp_path.iterdir()
    rows = Record.load(path).rows
    cells = [("none", 0), ("plain", 1), ("plain", 2), ("bounded", 1), ("bounded", 2)]
    assert [(row["grammar"], row["guided"]) for row in rows] == cells
    assert all(row["rows"] == 2 and row["ms"] > 0 for row in rows)
    assert ["mask_ms" in row for row in rows] == [False, True, True, True, True]
    assert "mask ms" in capsys.readouterr().out
