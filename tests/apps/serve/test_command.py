"""`oscar-mm serve`: what is refused before anything is loaded, and a server in its own process."""

import os
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Timer
from typing import Any

import openai
import pytest

from oscar_mm.apps.options import KEY_VARIABLE
from oscar_mm.apps.serve.command import prefix_bytes
from oscar_mm.cli import run
from tests.apps.serve.conftest import user
from tests.apps.serve.test_server import ask
from tests.engine.engine_waits import engine_waits
from tests.processes import Forked, command


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--policy", "tiny"], "unknown policy 'tiny'"),
        (["--max-request", "much"], "--max-request='much'"),
        (["--running", "0"], "--running 0: must be at least 1"),
        (["--conversations", "0"], "--conversations 0"),
        (["--port", "0"], "--port 0: must be from 1 to 65535"),
        (["--waiting", "-1"], "--waiting -1: must be at least 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0: must be at least 1"),
        (["--max-new-tokens", "-5"], "--max-new-tokens -5: must be at least 1"),
        (["--max-context", "0"], "'--max-context'"),
        (["--prefill-chunk", "0"], "'--prefill-chunk'"),
        (["--kv-budget", "much"], "--kv-budget='much'"),
        (["--prefix-cache", "much"], "--prefix-cache='much'"),
        (["--grace", "-1"], "--grace -1: must be seconds"),
        (["--grace", "nan"], "--grace nan: must be seconds"),
        (["--queue-timeout", "-1"], "--queue-timeout -1: must be seconds"),
        (["--queue-timeout", "nan"], "--queue-timeout nan: must be seconds"),
        (["--trusted-proxy", "proxy"], "--trusted-proxy proxy: must be an IP address"),
        (["--trusted-proxy", "*"], "--trusted-proxy *: must be an IP address"),
        (["--log-level", "loud"], "--log-level loud: must be info, warning or error"),
        (["--served-model-name", " "], "--served-model-name ' ': must be"),
        (["--lora", "legal"], "--lora 'legal': must be NAME=FOLDER, such as legal=./legal"),
        (["--lora", "=./legal"], "--lora '=./legal': must be NAME=FOLDER"),
        (["--lora", "legal="], "--lora 'legal=': must be NAME=FOLDER"),
        (["--lora", "a=b", "--lora", "a=c"], "--lora 'a=c': another --lora has this name"),
        (["--lora", "pocket-vl=./a", "--model", "pocket-vl"], "--lora pocket-vl: the model has"),
        (
            ["--lora", "b=./a", "--served-model-name", "b", "--model", "pocket-vl"],
            "--lora b: the model has this name already; choose another, or set --served-model-name",
        ),
        (
            ["--lora", "a=./no/such", "--model", "pocket-vl"],
            "'a': the adapter in no/such has no adapter_config",
        ),
        (["--served-model-name", "a\nb"], "--served-model-name 'a\\nb': must be"),
        (["--allow-origin", "*"], "--allow-origin *: any web page could use"),
        (["--allow-origin", "null"], "--allow-origin null: any web page could use"),
        (["--allow-origin", "localhost:3000"], "--allow-origin localhost:3000: must be the scheme"),
        (["--api-key", "secret"], "No such option"),
        (["--api-key-file", "no-such-file"], "--api-key-file no-such-file: cannot be read"),
    ],
)
def test_refused(options: list[str], expected: str, capsys) -> None:
    assert run(["serve", "--model", "no-such-folder", *options]) == 2
    said = capsys.readouterr().err
    assert said.startswith("oscar-mm: error: ") and said.count("\n") == 1 and expected in said


def test_size_of_the_prefix_cache() -> None:
    """By default a share of the budget."""
    assert prefix_bytes(None, None) == 10**9
    assert prefix_bytes(None, 8 * 10**9) == 2 * 10**9
    assert prefix_bytes("3GB", 8 * 10**9) == 3 * 10**9
    assert prefix_bytes("off", None) is prefix_bytes("0", 10**9) is None


def test_where_it_cannot_listen(capsys) -> None:
    """It is told before the model is looked for."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for where, expected in (
            (["--port", str(port)], f"--port {port}: cannot be used (Address already in use)"),
            (
                ["--host", "192.0.2.1"],
                "--port 8000: cannot be used (Cannot assign",
            ),
            (["--host", "name.invalid"], "--host name.invalid: is not a known name or address"),
            (["--host", "a..b"], "--host a..b: is not a known name or address"),
        ):
            assert run(["serve", "--model", "no-such-folder", *where]) == 2
            said = capsys.readouterr().err
            assert said.startswith("oscar-mm: error: ") and said.count("\n") == 1
            assert expected in said


def command_that_reads_for_ever(*arguments: str) -> None:
    """With a model that does not let go of a prompt, for which nobody waits for long."""
    from oscar_mm.apps.serve import command as serve_command
    from oscar_mm.apps.serve import service as serve_service
    from oscar_mm.apps.serve.conversations import Conversations

    def answer_steps(self: Conversations, _: Any) -> Iterator[str]:
        with engine_waits(self.pipe):
            Event().wait()
        yield ""

    Conversations.answer_steps = answer_steps
    serve_service._CLOSING_S = serve_command._RELEASE_S = 0.5
    command(*arguments)


@contextmanager
def running(
    program: Callable, folder: Path, temporary: Path, grace: str = "0.5"
) -> Iterator[tuple[Forked, Any]]:
    """A server in a process of its own, and a client."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    options = ["--device", "cpu", "--port", str(port), "--kv-budget", "50MB", "--grace", grace]
    options += ["--max-new-tokens", "100000", "--model", str(folder)]
    environment = {KEY_VARIABLE: "secret", "TMPDIR": str(temporary)}
    with Forked(program, "serve", *options, environment=environment) as server:
        deadline = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                    assert answer.read() == b"ok"
                break
            except OSError:
                assert server.runs() and time.monotonic() < deadline
                time.sleep(0.1)
        yield server, openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_served_and_stopped(qwen3_omni_folder, tmp_path, sent) -> None:
    """With a stream that runs; temporary files go with the process."""
    with running(command, qwen3_omni_folder, tmp_path) as (server, client):
        assert [*tmp_path.glob("oscar-mm-*")], "the folder for chats that give way"
        options = {"model": openai.omit, "stream": True, "max_tokens": 20_000}
        with pytest.raises(openai.APIError, match="stopping"):
            for count, _ in enumerate(ask(client, user("Why?"), **options)):
                if count == 3:
                    os.kill(server.pid, sent)
                    start = time.monotonic()
        code, _, errors = server.end()
    said = errors.decode()
    assert time.monotonic() - start < 10
    assert "http://127.0.0.1:" in said and "Traceback" not in said
    assert code == 0
    assert not [*tmp_path.glob("oscar-mm-*")]


def test_stopped_while_a_prompt_is_read(qwen3_omni_folder, tmp_path) -> None:
    with running(command_that_reads_for_ever, qwen3_omni_folder, tmp_path) as (server, client):
        Timer(0.5, os.kill, (server.pid, signal.SIGTERM)).start()
        with pytest.raises(openai.APIError):
            ask(client, user("Why?"), model=openai.omit)
        assert server.wait(20) == 0
    assert not [*tmp_path.glob("oscar-mm-*")]


@pytest.mark.parametrize("again", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_ends_the_grace_time(qwen3_omni_folder, tmp_path, again) -> None:
    with running(command, qwen3_omni_folder, tmp_path, "600") as (server, client):
        options = {"model": openai.omit, "stream": True, "max_tokens": 20_000}
        with pytest.raises(openai.APIError, match="stopping"):
            for count, _ in enumerate(ask(client, user("Why?"), **options)):
                if count == 3:
                    os.kill(server.pid, signal.SIGINT)
                    Timer(0.5, os.kill, (server.pid, again)).start()
                    start = time.monotonic()
        code, _, errors = server.end()
    assert time.monotonic() - start < 15
    address, *requests = errors.decode().splitlines()
    assert code == 0 and "http://127.0.0.1:" in address
    assert "GET /health 200" in requests[0] and "POST /v1/chat/completions 200" in requests[-1]
    assert len(requests) == 2, requests
    assert not [*tmp_path.glob("oscar-mm-*")]
