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
from typing import Any

from benchmarks.record import Row, versions

CHILD = "--child"
"""First argument of a benchmark that runs as such a process; the second argument is JSON text."""
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
    line = [sys.executable, "-m", module, CHILD, json.dumps(spec)]
    # A session of its own, so that all of vLLM's processes can be killed and free the GPU's memory.
    process = subprocess.Popen(line, env={**os.environ, **_ENVIRONMENT}, start_new_session=True)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"more than {seconds:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return f"exit code {code}" if code else None


def rows_of_child(
    module: str, spec: dict[str, Any], seconds: float
) -> tuple[list[Row], str | None]:
    """Run a benchmark's module in a child process, and return its rows and its error, if any.

    Args:
        module, seconds: see ``run_child``.
        spec: argument of the child process; "rows", the file for ``write_rows``, and "folder", a
            path for the files of a model, are added to it.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows"
        file.touch()
        error = run_child(module, spec | {"folder": f"{folder}/model", "rows": str(file)}, seconds)
        return [json.loads(row) for row in file.read_text().splitlines()], error


def write_rows(path: str, rows: Iterable[Row]) -> None:
    """Append each row to a file as soon as it is measured."""
    with open(path, "a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            file.flush()


def vllm_versions() -> dict[str, str]:
    """Return the versions of the software that affects the results, including that of vLLM."""
    return versions() | {"vllm": version("vllm")}
