"""Child processes of benchmarks: they import, begin when told, end with their parent."""

import os
import signal
from pathlib import Path
from threading import Timer
from time import monotonic, sleep

import pytest

from benchmarks.vllm_process import Child, wait_to_begin

MODULE = """
import json, os, sys, time
spec = json.loads(sys.argv[2])
assert spec["parent"] == os.getppid()
open(spec["imported"], "w").close()
while not os.path.exists(spec["begin"]):
    time.sleep(0.02)
with open(spec["rows"], "a") as rows:
    rows.write('{"ms": 1.5}\\n')
sys.exit(3)
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    (tmp_path / "one_that_waits.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return {"imported": str(tmp_path / "imported")}


def test_it_begins_when_it_may(spec: dict) -> None:
    child, until = Child("one_that_waits", spec), monotonic() + 60
    while not Path(spec["imported"]).exists() and monotonic() < until:
        sleep(0.02)
    sleep(0.1)
    assert child._process.poll() is None, "it waits"
    assert child.finish(60) == ([{"ms": 1.5}], "exit code 3")


def test_it_is_stopped(spec: dict) -> None:
    child = Child("one_that_waits", spec)
    child.stop()
    assert child._process.returncode == -signal.SIGKILL


def test_it_waits_as_long_as_its_parent_runs(tmp_path: Path) -> None:
    begin = tmp_path / "begin"
    timer, start = Timer(0.2, begin.touch), monotonic()
    timer.start()
    wait_to_begin({"begin": str(begin), "parent": os.getppid()})
    assert monotonic() - start >= 0.2
    with pytest.raises(SystemExit, match="has ended"):
        wait_to_begin({"begin": f"{begin}-never", "parent": os.getppid() + 1})
