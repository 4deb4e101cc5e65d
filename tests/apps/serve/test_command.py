"""`oscar-mm serve`: what is refused before anything is loaded, and a server in its own process."""

import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from oscar_mm.cli import run

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--policy", "tiny"], "unknown policy 'tiny'"),
        (["--max-request", "much"], "--max-request='much'"),
        (["--running", "0"], "--running 0: must be at least 1"),
        (["--conversations", "0"], "--conversations 0"),
        (["--port", "0"], "--port from 1 to 65535"),
        (["--waiting", "-1"], "--waiting must be at least 0"),
    ],
)
def test_refused(options: list[str], expected: str, capsys) -> None:
    assert run(["serve", "--model", "no-such-folder", *options]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.slow
def test_served_and_stopped(qwen3_omni_folder) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "oscar_mm.cli", "serve", "--model", str(qwen3_omni_folder)]
    command += ["--device", "cpu", "--port", str(port), "--kv-budget", "50MB"]
    quiet = {"stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen(command, **quiet) as server:
        deadline = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                    assert answer.read() == b"ok"
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
        server.send_signal(signal.SIGINT)
        said = server.communicate(timeout=30)[1]
    assert f"http://127.0.0.1:{port}/v1" in said and "Traceback" not in said
    assert server.returncode in (0, 130)
