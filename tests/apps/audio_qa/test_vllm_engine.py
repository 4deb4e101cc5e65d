"""A run whose workers start vLLM's server, with stand-ins for vLLM: rows, deaths, what is left."""

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from oscar_mm import InputError, KVPolicy
from oscar_mm.apps import server_process
from oscar_mm.apps.audio_qa import audio_qa, chat_client
from oscar_mm.apps.audio_qa.engine import AnswerSettings
from oscar_mm.apps.audio_qa.results import print_summary
from oscar_mm.apps.audio_qa.server_worker import VllmSettings
from oscar_mm.cli import run
from oscar_mm.extras import install_command
from tests.apps.audio_qa.conftest import read_lines, write_lines
from tests.apps.audio_qa.test_server_worker import MEDIA, clips
from tests.processes import ROOT, Forked, command

OURS = """
import os, sys
from oscar_mm.cli import main

given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
os.environ["OSCAR_MM_API_KEY"] = os.environ["VLLM_API_KEY"]
sys.argv = ["oscar-mm", "serve", "--model", given["--served-model-name"], "--policy", "bf16"]
sys.argv += ["--device", "cpu", "--host", given["--host"], "--port", given["--port"]]
main()
"""
"""Our own server with vLLM's arguments."""
SCRIPTED = """
import json, os, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
pids = Path(os.environ["STAND_IN_PIDS"])
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
for pid in (os.getpid(), engine.pid):
    (pids / str(pid)).touch()
print("INFO a server")
if os.environ.get("STAND_IN") == "broken":
    raise ValueError("the model does not fit")

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.respond({"data": [{"id": given["--served-model-name"]}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"][-1]["text"]
        if "dies" in question and not (pids / "died").exists():
            (pids / "died").touch()
            print("RuntimeError: out of memory", flush=True)
            os._exit(1)
        time.sleep(float(os.environ.get("STAND_IN_S", "0")))
        content = {"message": {"content": question}, "finish_reason": "stop"}
        self.respond({"choices": [content]})

    def respond(self, content):
        known = self.headers["Authorization"] == "Bearer " + os.environ["VLLM_API_KEY"]
        data = json.dumps(content).encode()
        self.send_response(200 if known else 401)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass

time.sleep(float(os.environ.get("STAND_IN_LOADS_S", "0")))
ThreadingHTTPServer((given["--host"], int(given["--port"])), Handler).serve_forever()
"""
"""A server that repeats questions, with a process of its own as vLLM's engine is one."""


def install(source: str, folder: Path, monkeypatch) -> None:
    """Put a package vllm with this server into a folder that processes import from."""
    place = folder / "vllm" / "entrypoints" / "openai"
    place.mkdir(parents=True)
    for package in (place, place.parent, place.parents[1]):
        (package / "__init__.py").touch()
    (place / "api_server.py").write_text(source)
    path = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.syspath_prepend(folder)


@pytest.fixture
def pids(tmp_path, monkeypatch) -> Path:
    """The folder in which scripted servers name their processes, none of which is left."""
    install(SCRIPTED, tmp_path / "site", monkeypatch)
    monkeypatch.setattr(chat_client, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(chat_client, "_LONGEST_PAUSE_S", 0.05)
    folder = tmp_path / "pids"
    folder.mkdir()
    monkeypatch.setenv("STAND_IN_PIDS", str(folder))
    return folder


def assert_none_left(pids: Path, servers: int) -> None:
    """So many servers have run, and none of their processes runs any more."""
    names = [name.name for name in pids.iterdir() if name.name.isdecimal()]
    assert len(names) == 2 * servers
    deadline = time.monotonic() + 30
    while left := [name for name in names if running(int(name))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def asked(records: list[dict[str, Any]], folder: Path, **options: Any) -> Any:
    """The rows of a run, and its summary."""
    file, out = write_lines(folder / "q.jsonl", records), folder / "a.jsonl"
    summary = audio_qa(file, out, "pocket-omni", engine="vllm", **options)
    return read_lines(out), summary


def texts(count: int) -> list[dict[str, Any]]:
    return [
        {"id": f"{n}", "question": f"question {n}", "answer": f"question {n}"} for n in range(count)
    ]


@pytest.mark.slow
def test_the_rows_of_a_local_run(tmp_path, monkeypatch) -> None:
    install(OURS, tmp_path / "site", monkeypatch)
    records = [
        *clips(2, answer="4729"),
        {"id": "gone", "audio": "gone.wav", "question": "What was said?"},
        {"id": "card", "image": str(MEDIA / "cards" / "01.png"), "question": "What is the code?"},
    ]
    here = tmp_path / "here.jsonl"
    file = write_lines(tmp_path / "q.jsonl", records)
    audio_qa(file, here, "pocket-omni", policy="bf16", device="cpu", max_new_tokens=12)
    expected = read_lines(here)
    found, summary = asked(records, tmp_path, max_new_tokens=12, concurrency=2)
    assert list(found) == list(expected) and found["1"].keys() == expected["1"].keys()
    for name, row in found.items():
        for field in ("answer", "correct", "finish_reason", "tokens", "error", "digest"):
            assert row[field] == expected[name][field], (name, field)
    assert found["1"]["correct"] is True and summary["failed"] == 1


def test_resumed(pids, tmp_path) -> None:
    """Another engine, policy or model does not go on with the rows."""
    rows, summary = asked(texts(3), tmp_path)
    assert [row["answer"] for row in rows.values()] == [f"question {n}" for n in range(3)]
    assert summary["accuracy"] == 1.0
    rows, summary = asked(texts(5), tmp_path)
    assert summary["work"]["rows"] == 2 and summary["rows"] == 5
    for options, expected in (
        ({"engine": "oscar"}, "engine was 'vllm' and is None"),
        ({"policy": "quarot"}, "belongs to another run: policy"),
        ({"model": "pocket-vl"}, "model was 'pocket-omni' and is 'pocket-vl'"),
    ):
        how = {"model": "pocket-omni", "engine": "vllm", **options}
        with pytest.raises(InputError, match=expected):
            audio_qa(tmp_path / "q.jsonl", tmp_path / "a.jsonl", **how)
    assert_none_left(pids, 2)


def test_a_server_that_does_not_start(pids, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STAND_IN", "broken")
    with pytest.raises(InputError) as refused:
        asked(texts(1), tmp_path)
    assert str(refused.value) == (
        "vLLM's server exited before it responded; its log: ValueError: the model does not fit"
    )
    assert (tmp_path / "a.jsonl").read_bytes() == b""
    assert_none_left(pids, 1)


def test_a_server_that_loads(pids, tmp_path, monkeypatch, capsys) -> None:
    """It is spoken of while one waits; what a server does not tell is left out of the summary."""
    monkeypatch.setattr(server_process, "_TELL_S", 0.01)
    monkeypatch.setattr(server_process, "_POLL_S", 0.02)
    monkeypatch.setenv("STAND_IN_LOADS_S", "1")
    _, summary = asked(texts(1), tmp_path)
    told = capsys.readouterr().err
    assert "starting vLLM's server with pocket-omni" in told
    assert re.search(r"vLLM's server has been loading for \d+ s", told)
    print_summary(summary)
    shown = capsys.readouterr().out
    assert "peak memory: process" in shown and "0 B" not in shown and "0.00x" not in shown


def test_a_server_that_dies(pids, tmp_path) -> None:
    records = [*texts(3), {"id": "last", "question": "It dies."}]
    with pytest.raises(
        InputError, match=r"stopped responding: .*; its log: RuntimeError: out of memory$"
    ):
        asked(records, tmp_path, concurrency=1)
    assert len(read_lines(tmp_path / "a.jsonl")) == 3
    assert_none_left(pids, 1)
    rows, summary = asked(records, tmp_path)
    assert rows["last"]["answer"] == "It dies." and summary["work"]["rows"] == 1


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_ends(sent: signal.Signals, pids, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STAND_IN_S", "0.3")
    file, out = write_lines(tmp_path / "q.jsonl", texts(40)), tmp_path / "a.jsonl"
    words = ["audio-qa", str(file), "--out", str(out), "--engine", "vllm", "--concurrency", "1"]
    environment = {name: value for name, value in os.environ.items() if name.startswith("STAND_IN")}
    environment |= {"PYTHONPATH": os.environ["PYTHONPATH"]}
    with Forked(
        command_importing, str(tmp_path / "site"), *words, environment=environment
    ) as process:
        deadline = time.monotonic() + 100
        while not out.exists() or out.read_bytes().count(b"\n") < 2:
            assert process.runs() and time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, sent)
        code, _, errors = process.end()
    assert code == (-signal.SIGKILL if sent is signal.SIGKILL else 130)
    assert b"Traceback" not in errors
    assert_none_left(pids, 1)


def command_importing(folder: str, *words: str) -> None:
    sys.path.insert(0, folder)
    command(*words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], f"--engine vllm requires the vllm package: run {install_command('vllm')}"),
        (["--batch-size", "4"], "engine vllm: batch_size: only supported without a server"),
        (["--device", "cpu"], "engine vllm: device: only"),
        (["--policy", "channel"], "policy channel has key_axis='channel'"),
        (["--server", "http://127.0.0.1:1"], "server with engine vllm"),
        (["--concurrency", "0"], "concurrency=0: must be"),
        (["--engine", "sglang"], "engine='sglang': must be oscar or vllm"),
    ],
)
def test_refused(words: list[str], expected: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    file, out = write_lines(tmp_path / "q.jsonl", texts(1)), tmp_path / "a.jsonl"
    words = ["--engine", "vllm", "--model", "pocket-vl", *words]
    assert run(["audio-qa", str(file), "--out", str(out), *words]) == 2
    shown = capsys.readouterr().err
    assert expected in shown and shown.count("\n") == 1
    assert not out.exists()


def test_what_a_server_is_started_with() -> None:
    how = AnswerSettings(KVPolicy.preset("quarot"), dtype="bfloat16", engine="vllm")
    words = VllmSettings("pocket-vl", "quarot", how, kv_budget=10**9)._arguments(80)
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert (given["--host"], given["--port"]) == ("127.0.0.1", "80")
    assert (given["--kv-cache-memory-bytes"], given["--dtype"]) == ("1000000000", "bfloat16")
    assert given["--max-model-len"] == "auto" and "quarot" in given["--additional-config"]


@pytest.mark.slow
def test_on_a_cluster(pids, tmp_path, monkeypatch) -> None:
    """Two workers with a server each, one of which dies; Ray starts another for it."""
    pytest.importorskip("ray", reason="needs ray: run pip install '.[batch]'")
    monkeypatch.setenv("STAND_IN_S", "0.2")
    records = clips(10)
    records[3]["question"] = "It dies."
    start = time.monotonic()
    rows, summary = asked(records, tmp_path, ray="local", workers=2, concurrency=4)
    assert list(rows) == [record["id"] for record in records]
    assert [row["answer"] for row in rows.values()] == [record["question"] for record in records]
    assert summary["failed"] == 0 and (pids / "died").exists()
    assert_none_left(pids, 3)
    assert time.monotonic() - start < 200


@pytest.mark.slow
def test_no_server_on_a_cluster(pids, tmp_path, monkeypatch) -> None:
    pytest.importorskip("ray", reason="needs ray: run pip install '.[batch]'")
    monkeypatch.setenv("STAND_IN", "broken")
    with pytest.raises(InputError, match=r"^Ray: vLLM's server ended .*: the model does not fit$"):
        asked(texts(1), tmp_path, ray="local", workers=1)
