"""The benchmark of several GPUs, rehearsed on a CPU."""

import pytest

import tests.processes  # noqa: F401 - ranks are forked from its server, which has their imports.
from benchmarks import several_gpus
from benchmarks.record import Record

pytestmark = pytest.mark.usefixtures("quick_collection")


@pytest.mark.slow
def test_a_dry_run(tmp_path, capsys) -> None:
    assert several_gpus.main(["--tiny", "--out", str(tmp_path)]) == 0
    [path] = tmp_path.glob("several_gpus-*.json")
    rows = {row["way"]: row for row in Record.load(path).rows}
    assert list(rows) == ["one", "layers", "heads"]
    assert all(row["ms"] > 0 and row["same"].endswith("of 24") for row in rows.values())
    assert rows["layers"]["same"] == "24 of 24" and rows["heads"]["ranks_agree"]
    assert "heads" in capsys.readouterr().out
