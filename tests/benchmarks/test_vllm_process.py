"""Child processes of benchmarks: they import, begin when told, end with their parent."""

import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

import pytest

from benchmarks.vllm_process import Child

MODULE = """
import json, sys
from benchmarks.vllm_process import wait_to_begin, write_rows
spec = json.loads(sys.argv[2])
open(spec["imported"], "w").close()
wait_to_begin(spec)
open(spec["begun"], "w").close()
write_rows(spec["rows"], [{"ms": 1.5}])
if spec.get("fails"):
    sys.exit(3)
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    (tmp_path / "one_that_waits.py").write_text(MODULE)
    here = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{here}")
    return {name: str(tmp_path / name) for name in ("imported", "begun")}


def appears(path: str) -> bool:
    until = monotonic() + 60
    while not Path(path).exists() and monotonic() < until:
        sleep(0.02)
    return Path(path).exists()


@pytest.mark.parametrize(("fails", "error"), [(False, None), (True, "exit code 3")])
def test_it_begins_when_it_may(spec: dict, fails: bool, error: str | None) -> None:
    child = Child("one_that_waits", spec | {"fails": fails})
    assert appears(spec["imported"])
    sleep(0.2)
    assert not Path(spec["begun"]).exists()
    assert child.finish(60) == ([{"ms": 1.5}], error)


def test_it_is_stopped_before_it_begins(spec: dict) -> None:
    child = Child("one_that_waits", spec)
    assert appears(spec["imported"])
    child.stop()
    assert child._process.returncode and not Path(spec["begun"]).exists()


def test_it_ends_with_its_parent(spec: dict) -> None:
    parent = f"from benchmarks.vllm_process import Child; c = Child('one_that_waits', {spec})"
    parent += "; print(c._process.pid, flush=True); import os; os._exit(0)"
    printed = subprocess.run([sys.executable, "-c", parent], capture_output=True, check=True).stdout
    assert appears(spec["imported"])
    until, process = monotonic() + 60, Path(f"/proc/{int(printed)}")
    while is_running(process) and monotonic() < until:
        sleep(0.02)
    assert not is_running(process) and not Path(spec["begun"]).exists()


def is_running(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
