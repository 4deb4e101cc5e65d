"""`oscar-mm serve`: what is refused before anything is loaded, and a server in its own process."""

import os
import signal
import socket
import time
import urllib.request

import pytest

from oscar_mm.cli import run
from tests.processes import Forked, command


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
    options = ["--device", "cpu", "--port", str(port), "--kv-budget", "50MB"]
    with Forked(command, "serve", "--model", str(qwen3_omni_folder), *options) as server:
        deadline = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                    assert answer.read() == b"ok"
                break
            except OSError:
                assert server.runs() and time.monotonic() < deadline
                time.sleep(0.1)
        os.kill(server.pid, signal.SIGINT)
        code, _, errors = server.end()
    said = errors.decode()
    assert f"http://127.0.0.1:{port}/v1" in said and "Traceback" not in said
    assert code in (0, 130)
