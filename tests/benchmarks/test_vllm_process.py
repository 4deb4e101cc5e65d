"""Child processes of benchmarks: they import, begin when told, end with their parent."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Timer
from time import monotonic, sleep
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from benchmarks.vllm_process import Child, wait_to_begin, waiting_worker

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
    ended = subprocess.Popen([sys.executable, "-c", ""])
    never = {"begin": f"{begin}-never", "parent": ended.pid}
    with pytest.raises(SystemExit, match="has ended"):
        wait_to_begin(never)
    ended.wait()  # Until now, the system knew the process.
    with pytest.raises(SystemExit, match="has ended"):
        wait_to_begin(never)


def test_a_worker_of_vllm_waits_before_it_uses_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of vLLM's own, which knows only the environment."""

    class Worker:
        def init_device(self) -> None:
            used.append(begin.exists())

    used, begin = list[bool](), tmp_path / "begin"
    runner = ModuleType("gpu_model_runner")
    package = SimpleNamespace(gpu_model_runner=runner)
    monkeypatch.setenv("BENCHMARKS_WAIT", "")
    for name, module in {
        "vllm": SimpleNamespace(),
        "vllm.v1": SimpleNamespace(),
        "vllm.v1.worker": package,
        "vllm.v1.worker.gpu_model_runner": runner,
        "vllm.v1.worker.gpu_worker": SimpleNamespace(Worker=Worker),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    options = waiting_worker({"begin": str(begin), "parent": os.getppid(), "rows": "?"})
    module, _, name = options["worker_cls"].rpartition(".")
    monkeypatch.delitem(sys.modules, module, raising=False)
    worker = getattr(import_module(module), name)()
    timer = Timer(0.2, begin.touch)
    timer.start()
    worker.init_device()
    assert used == [True]


GRANDCHILD = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
"""


def test_processes_that_a_child_leaves_behind_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would keep the memory of the GPU from the next one."""
    (tmp_path / "one_that_leaves.py").write_text(GRANDCHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = Child("one_that_leaves", {})
    assert child.finish(60) == ([], None)
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError, psutil.Error):
            same = os.getpgid(process.pid) == child._process.pid
            assert not same or process.status() == psutil.STATUS_ZOMBIE
