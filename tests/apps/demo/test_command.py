"""oscar-mm demo: what it needs, what it refuses, and that it serves until Ctrl-C."""

import importlib.util
from types import SimpleNamespace

import httpx
import pytest

from oscar_mm.apps.demo import server
from oscar_mm.apps.demo.command import DEFAULT_MODEL
from oscar_mm.cli import run
from oscar_mm.models import BUNDLED
from tests.apps.demo.test_server import free_port


def test_the_default_is_a_bundled_model() -> None:
    assert DEFAULT_MODEL in BUNDLED


def test_without_gradio_it_says_what_to_install(monkeypatch, capsys) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gradio" else find(name)
    )
    assert run(["demo"]) == 2
    assert "pip install 'oscar-mm[demo]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--policy", "fine"], "unknown policy 'fine'"),
        (["--kv-budget", "much"], "--kv-budget='much'"),
        (["--port", "0"], "--port"),
        (["--model", "/nowhere"], "no such folder"),
    ],
)
def test_what_it_refuses(options, why, capsys) -> None:
    assert run(["demo", *options]) == 2
    captured = capsys.readouterr()
    assert why in captured.err and captured.err.count("\n") == 1


def test_it_serves_until_ctrl_c(qwen3_omni_folder, monkeypatch, capsys) -> None:
    port, seen = free_port(), []

    def look_and_end() -> None:
        seen.append(httpx.get(f"http://127.0.0.1:{port}/", timeout=30))

    monkeypatch.setattr(server, "wait_for_ctrl_c", look_and_end)
    options = ["-m", str(qwen3_omni_folder), "--port", str(port), "--device", "cpu", "--compare"]
    assert run(["demo", *options]) == 0
    [page] = seen
    assert page.status_code == 200 and "oscar_mm" in page.text
    assert f"http://127.0.0.1:{port}/ (Ctrl-C ends it)" in capsys.readouterr().err
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/")


def test_ctrl_c(monkeypatch) -> None:
    class Interrupted:
        def wait(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(server, "threading", SimpleNamespace(Event=Interrupted))
    server.wait_for_ctrl_c()
