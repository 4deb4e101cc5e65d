"""Processes in which benchmarks run vLLM; each process ends with all of vLLM's child processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil

from benchmarks.record import Row, versions

CHILD = "--child"
"""First argument of a benchmark that runs as such a process; the second argument is JSON text."""
_POLL_SECONDS = 0.05
_END_SECONDS = 20.0
"""Maximum time, in seconds, to wait until killed processes have freed the GPU's memory."""
_WORKER_WAIT = "BENCHMARKS_WAIT"
"""Environment variable that passes the argument of ``wait_to_begin`` to vLLM's worker."""
_ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    # A forked engine may hang, because image processors leave OpenMP threads behind.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def run_child(module: str, spec: dict[str, Any], seconds: float) -> str | None:
    """Run a benchmark's module in a child process; return its error, or None if it succeeded.

    Args:
        module: name of the module.
        spec: argument of the child process, passed as JSON.
        seconds: maximum time, in seconds.
    """
    return _ended(_started(module, spec), seconds)


def _started(module: str, spec: dict[str, Any]) -> subprocess.Popen[bytes]:
    line = [sys.executable, "-m", module, CHILD, json.dumps(spec)]
    # A session of its own, so that all of vLLM's processes can be killed and free the GPU's memory.
    return subprocess.Popen(line, env={**os.environ, **_ENVIRONMENT}, start_new_session=True)


def _ended(process: subprocess.Popen[bytes], seconds: float) -> str | None:
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"more than {seconds:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        until = monotonic() + _END_SECONDS
        while _is_running(process.pid) and monotonic() < until:
            sleep(_POLL_SECONDS)
    return f"exit code {code}" if code else None


def _is_running(group: int) -> bool:
    """Return whether a process of a group still runs, and so may hold memory of the GPU."""
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


class Child:
    """Child process that runs a benchmark's module: it imports, then waits until it may begin.

    So a process can import while another one uses the GPU.

    Args:
        module: name of the module. Before it uses the GPU, it calls ``wait_to_begin``, or lets vLLM
            do so (``waiting_worker``).
        spec: argument of the child process; "rows", the file for ``write_rows``, "folder", a path
            for the files of a model, "begin", the file that lets it begin, and "parent", the id of
            this process, are added to it.
    """

    def __init__(self, module: str, spec: dict[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._rows, self._begin = folder / "rows", folder / "begin"
        self._rows.touch()
        paths = {"rows": str(self._rows), "begin": str(self._begin), "folder": f"{folder}/model"}
        self._process = _started(module, spec | paths | {"parent": os.getpid()})

    def finish(self, seconds: float) -> tuple[list[Row], str | None]:
        """Let the process begin; return its rows when it ends, and its error, if any.

        Args:
            seconds: maximum time from now on, in seconds.
        """
        with self._folder:
            self._begin.touch()
            error = _ended(self._process, seconds)
            return [json.loads(row) for row in self._rows.read_text().splitlines()], error

    def stop(self) -> None:
        """End a process that is no longer needed."""
        with self._folder:
            _ended(self._process, 0)


def wait_to_begin(spec: dict[str, Any]) -> None:
    """Wait, in the child process, until it may begin; exit if its parent has ended."""
    begin = Path(spec["begin"])
    while not begin.exists():
        if _has_ended(spec["parent"]):
            sys.exit("the benchmark that started this process has ended")
        sleep(_POLL_SECONDS)


def _has_ended(process: int) -> bool:
    """Return whether a process has ended; its parent may not have collected its exit code yet."""
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def waiting_worker(spec: dict[str, Any]) -> dict[str, str]:
    """Return arguments of ``vllm.LLM``, by which it imports, then waits before it uses the GPU.

    Processes that this one starts find in the environment what to wait for. ``vllm.LLM`` returns
    only after the child process may begin.
    """
    os.environ[_WORKER_WAIT] = json.dumps({name: spec[name] for name in ("begin", "parent")})
    return {"worker_cls": "benchmarks.waiting_worker.WaitingWorker"}


def wait_in_worker() -> None:
    """Wait, in vLLM's worker, until the child process that started vLLM may begin."""
    wait_to_begin(json.loads(os.environ[_WORKER_WAIT]))


def rows_of_child(
    module: str, spec: dict[str, Any], seconds: float
) -> tuple[list[Row], str | None]:
    """Run a benchmark's module in a ``Child``; return its rows and its error, if any."""
    return Child(module, spec).finish(seconds)


def write_rows(path: str, rows: Iterable[Row]) -> None:
    """Append each row to a file as soon as it is measured."""
    with open(path, "a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            file.flush()


def vllm_versions() -> dict[str, str]:
    """Return the versions of the software that affects the results, including that of vLLM."""
    return versions() | {"vllm": version("vllm")}
