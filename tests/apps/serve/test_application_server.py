"""A server whose connections are in a process of their own answers as one that has both."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import struct
import tempfile
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import AsyncIterator, Iterator
from itertools import cycle
from typing import Any

import httpx
import openai
import psutil
import pytest
import websockets
from fastapi import WebSocket, WebSocketDisconnect
from fastapi.responses import StreamingResponse

from oscar_mm.apps.channel import Channel
from oscar_mm.apps.serve.application_server import ApplicationServer, _Exchange
from oscar_mm.apps.serve.chat_writer import ChatWriter
from oscar_mm.apps.serve.running_answer import RunningAnswer
from oscar_mm.apps.serve.server import create_app
from oscar_mm.apps.serve.service import ServerLimits
from tests.apps.connections import connected, is_closed
from tests.apps.serve.conftest import served, started, user
from tests.apps.serve.realtime.client import PUSH
from tests.apps.serve.realtime.client import ask as say
from tests.apps.serve.realtime.client import connected as talking
from tests.apps.serve.test_command import running
from tests.apps.serve.test_server import ask
from tests.processes import command
from tests.waits import until

pytestmark = pytest.mark.skipif(os.name != "posix", reason="sockets are passed on as on Unix")
KEY = "secret"
LIMITS = {"api_key": KEY, "max_new_tokens": 100_000, "max_request_bytes": 4_000_000}


@pytest.fixture(scope="module")
def app(omni) -> Any:
    return create_app(omni, "tiny", ServerLimits(**LIMITS))


@pytest.fixture(scope="module")
def two_processes(app) -> Iterator[tuple[Any, str]]:
    with started(app, ApplicationServer) as server:
        yield server


@pytest.fixture
def client(two_processes) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{two_processes[1]}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def post(address: str, path: str, body: Any, padding: int = 0) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    sent = urllib.request.Request(
        address + path, json.dumps(body).encode() + b" " * padding, headers
    )
    try:
        with urllib.request.urlopen(sent, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_answers_are_those_of_one_process(omni, two_processes, client) -> None:
    options = {"max_tokens": 40, "temperature": 0}
    streamed = ask(client, user("Why?"), stream=True, **options)
    text = "".join(piece.choices[0].delta.content or "" for piece in streamed)
    with served(omni, **LIMITS) as address:
        body = {"model": "tiny", "messages": [user("Why?")], **options}
        status, whole = post(address, "/v1/chat/completions", body)
        assert status == 200 and whole["choices"][0]["message"]["content"] == text != ""
        # A body of many parts.
        status, padded = post(two_processes[1], "/v1/chat/completions", body, padding=300_000)
        assert status == 200 and padded["choices"] == whole["choices"]


def events(address: str, path: str, body: Any) -> list[dict[str, Any]]:
    """The events of a stream, as JSON."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    sent = urllib.request.Request(
        address + path, json.dumps(body | {"stream": True}).encode(), headers
    )
    with urllib.request.urlopen(sent, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]


@pytest.mark.parametrize("waits", [(False,), (False, True, True), (True,)])
def test_streams_have_the_text_of_whole_answers(two_processes, monkeypatch, waits) -> None:
    """In every API, also if some pieces have to wait for the client."""
    try_send, turns = _Exchange.try_send, cycle(waits)
    monkeypatch.setattr(
        _Exchange, "try_send", lambda exchange, part: not next(turns) and try_send(exchange, part)
    )
    usual = {"temperature": 0, "seed": 3}
    asked: dict[str, Any] = usual | {"messages": [user("Why?")], "max_tokens": 40}
    chat, address = "/v1/chat/completions", two_processes[1]
    for more in ({}, {"logprobs": True}, {"n": 2, "temperature": 1}):
        _, whole = post(address, chat, asked | more)
        texts, probabilities = [""] * len(whole["choices"]), list[Any]()
        for event in events(address, chat, asked | more):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
                probabilities += (choice.get("logprobs") or {}).get("content") or []
        assert texts == [choice["message"]["content"] for choice in whole["choices"]]
        if more == {"logprobs": True}:
            assert probabilities == whole["choices"][0]["logprobs"]["content"]
    asked = usual | {"prompt": "Why?", "max_tokens": 40}
    _, whole = post(address, "/v1/completions", asked)
    streamed = events(address, "/v1/completions", asked)
    assert "".join(x["choices"][0]["text"] for x in streamed) == whole["choices"][0]["text"] != ""
    asked = {"temperature": 0, "input": "Why?", "max_output_tokens": 40}
    _, whole = post(address, "/v1/responses", asked)
    streamed = events(address, "/v1/responses", asked)
    assert [event["sequence_number"] for event in streamed] == [*range(len(streamed))]
    text = "".join(x["delta"] for x in streamed if x["type"] == "response.output_text.delta")
    assert text == whole["output"][0]["content"][0]["text"] != ""
    asked = {"model": "tiny", "temperature": 0, "messages": [user("Why?")], "max_tokens": 40}
    _, whole = post(address, "/v1/messages", asked)
    streamed = events(address, "/v1/messages", asked)
    deltas = [x["delta"] for x in streamed if x["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == whole["content"][0]["text"] != ""


def test_an_answer_is_freed_when_its_stream_ends(two_processes, client, monkeypatch) -> None:
    """Without the garbage collector, which stops all answers while it works."""
    begin, begun = RunningAnswer.begin, weakref.WeakSet[RunningAnswer]()

    async def noted(answer: RunningAnswer, memory_wait_s: float) -> None:
        begun.add(answer)
        await begin(answer, memory_wait_s)

    monkeypatch.setattr(RunningAnswer, "begin", noted)
    gc.disable()
    try:
        pieces = ask(client, user("Why?"), stream=True, max_tokens=20)
        assert next(pieces) and len(begun) == 1
        assert len(list(pieces)) > 1
        until(lambda: not begun)
    finally:
        gc.enable()


def test_an_answer_that_cannot_be_written_ends_alone(two_processes, client, monkeypatch) -> None:
    write, failed = ChatWriter.piece, list[ChatWriter]()

    def fail_once(self: ChatWriter, *arguments: Any) -> Iterator[str]:
        if "3" in str(self._header["model"]) and len(failed) > 5:
            raise ValueError("no text")
        failed.append(self)
        return write(self, *arguments)

    monkeypatch.setattr(ChatWriter, "piece", fail_once)
    app = two_processes[0].service
    monkeypatch.setattr(app, "names", ("tiny", "tiny3"))
    options = {"max_tokens": 300, "stream": True, "temperature": 0}
    good = ask(client, user("Why?"), **options)
    first = next(iter(good))
    with pytest.raises((openai.APIError, httpx.HTTPError)):
        list(ask(client, user("Why?"), model="tiny3", **options))
    rest = list(good)
    assert rest[-1].choices[0].finish_reason == "length" and first.choices
    until(lambda: app.metrics.running._value.get() == 0)


def test_a_body_that_is_too_large(two_processes) -> None:
    """It is refused before the client sends it."""
    with connected(two_processes[1]) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        head += "Content-Type: application/json\r\nContent-Length: 5000000\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_client_that_waits_for_leave_to_send(two_processes) -> None:
    """It is told to go on if its request is read, and not if that is refused before."""
    body = json.dumps({"messages": [user("Why?")], "max_tokens": 2}).encode()
    for key, told in ((KEY, b"HTTP/1.1 100 "), ("wrong", b"HTTP/1.1 401 ")):
        with connected(two_processes[1]) as connection:
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
            )
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            connection.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
            assert connection.recv(4096).startswith(told)
            if key == KEY:
                connection.sendall(body)
                assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_leaves_ends_its_answer(two_processes, client) -> None:
    running = two_processes[0].service.metrics.running._value
    stream = ask(client, user("Why?"), stream=True, max_tokens=90_000)
    next(iter(stream))
    assert running.get() == 1
    stream.close()
    until(lambda: running.get() == 0)


def test_a_client_that_reads_nothing_stops_its_answer(app, two_processes) -> None:
    """Each process stores only a bounded part of the answer for the client."""
    made = list[int]()

    async def flood() -> AsyncIterator[bytes]:
        for _ in range(1000):
            made.append(1)
            yield b"x" * 100_000

    app.add_api_route("/flood", lambda: StreamingResponse(flood()))
    with connected(two_processes[1]) as connection:
        connection.sendall(b"GET /flood HTTP/1.1\r\nHost: x\r\n\r\n")
        until(lambda: len(made) > 1)
        before = 0
        while len(made) > before:
            before = len(made)
            time.sleep(1)
        assert 1 < len(made) < 200  # The operating system holds some megabytes.
        read = 0
        while read < 100_000_000:
            read += len(connection.recv(1 << 20))
        assert len(made) == 1000


def test_sessions_over_websockets(two_processes) -> None:
    async def talk() -> None:
        async with talking(two_processes[1]) as one:
            await one.connection.session.update(session=PUSH | {"max_output_tokens": 8})
            await say(one, "What is it?")
            await one.until("response.done")

    asyncio.run(talk())
    until(lambda: not two_processes[0]._exchanges)


def test_an_error_of_the_application(omni, monkeypatch, capfd) -> None:
    """The client gets no details; the server prints a traceback."""

    async def fail(*_: Any) -> None:
        raise KeyError("nowhere")

    app = create_app(omni, "tiny", ServerLimits(**LIMITS))
    monkeypatch.setattr(app.state.service, "complete", fail)
    with started(app, ApplicationServer) as (server, address):
        status, told = post(address, "/v1/chat/completions", {})
        assert status == 500 and "failed to answer this request" in told["error"]["message"]
        until(lambda: not server._exchanges)
    errors = capfd.readouterr().err
    assert errors.count("KeyError: 'nowhere'") == 1 and "in fail" in errors


def test_websockets_that_leave_at_once(omni, capfd) -> None:
    """They are no errors of the server."""
    with started(create_app(omni, "tiny", ServerLimits()), ApplicationServer) as (_, address):
        for _ in range(50):
            with connected(address) as connection:
                reset = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                head = "GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
                head += "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                head += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
                connection.sendall(head.encode())
        time.sleep(1)
    assert "Traceback" not in capfd.readouterr().err


def test_bytes_that_are_no_request(two_processes) -> None:
    with connected(two_processes[1]) as connection:
        connection.sendall(b"\x16\x03\x01" * 100)
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
        until(lambda: is_closed(connection))


def test_messages_arrive_whole_and_in_order() -> None:
    """Also when the operating system cuts them anywhere."""

    async def exchange() -> list[tuple[int, str, Any]]:
        found, ended = list[tuple[int, str, Any]](), asyncio.Event()
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        _, one = await loop.create_unix_connection(
            lambda: Channel(lambda *_: None, ended.set), sock=ours
        )
        held = Channel(lambda *message: found.append(message), lambda: None)

        class Cut(asyncio.Protocol):
            def data_received(self, data: bytes) -> None:
                for at in range(0, len(data), 7):
                    held.data_received(data[at : at + 7])

        transport, _ = await loop.create_unix_connection(Cut, sock=theirs)
        for number in range(3):
            one.put(number, "send", {"body": b"x" * 1000 * number})
            one.put(number, "end")
            await asyncio.sleep(0)
        while len(found) < 6:
            await asyncio.sleep(0.01)
        transport.close()
        await ended.wait()
        one.put(9, "send", {})  # Nobody is there.
        await asyncio.sleep(0.01)
        return found

    found = asyncio.run(asyncio.wait_for(exchange(), 20))
    assert [message[0] for message in found] == [0, 0, 1, 1, 2, 2]
    assert [len(message[2]["body"]) for message in found[::2]] == [0, 1000, 2000]


def test_without_the_process_of_connections_the_server_ends(qwen3_omni_folder, tmp_path) -> None:
    with running(command, qwen3_omni_folder, tmp_path) as (server, client):
        options = {"model": openai.omit, "stream": True, "max_tokens": 20_000}
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            for count, _ in enumerate(ask(client, user("Why?"), **options)):
                if count == 3:
                    connection_process(server.pid).send_signal(signal.SIGKILL)
        code, _, errors = server.end()
    assert code == 1
    assert "the process that held the connections ended" in errors.decode()


def command_in_temporary_folder(*arguments: str) -> None:
    os.chdir(tempfile.gettempdir())
    command(*arguments)


def test_modules_of_the_current_folder_are_not_imported(qwen3_omni_folder, tmp_path) -> None:
    """As in any program that is not begun with Python's ``-m``."""
    (tmp_path / "queue.py").write_text("raise SystemExit('not this one')")
    with running(command_in_temporary_folder, qwen3_omni_folder, tmp_path) as (server, client):
        assert client.models.list().data
        psutil.Process(server.pid).terminate()
        code, _, errors = server.end()
    assert code == 0 and "not this one" not in errors.decode()


def test_connections_end_with_the_server(qwen3_omni_folder, tmp_path) -> None:
    with running(command, qwen3_omni_folder, tmp_path) as (server, client):
        holder = connection_process(server.pid)
        psutil.Process(server.pid).kill()
        until(lambda: not holder.is_running() or holder.status() == psutil.STATUS_ZOMBIE)
        with pytest.raises(openai.APIConnectionError):
            client.models.list()
        with contextlib.suppress(Exception):
            server.end()


def connection_process(server: int | None) -> psutil.Process:
    """The process that holds the connections of a server."""
    assert server is not None
    found = [
        x
        for x in psutil.Process(server).children()
        if "oscar_mm.apps.connection_process" in x.cmdline()
    ]
    assert len(found) == 1
    return found[0]


def test_a_client_that_reads_nothing_is_still_heard(app, two_processes) -> None:
    """Its messages arrive while those to it wait."""
    heard = list[str]()

    async def flood(web: WebSocket) -> None:
        await web.accept()
        flooding = asyncio.ensure_future(_flood(web))
        while len(heard) < 3:
            heard.append(await web.receive_text())
        flooding.cancel()

    async def _flood(web: WebSocket) -> None:
        while True:
            await web.send_text("x" * 100_000)

    app.add_api_websocket_route("/talk", flood)

    async def talk() -> None:
        url = two_processes[1].replace("http", "ws") + "/talk"
        async with websockets.connect(url, max_queue=1) as client:
            await asyncio.sleep(1)
            for _ in range(3):
                await client.send("stop")
                await asyncio.sleep(0.2)
            async with asyncio.timeout(10):
                while len(heard) < 3:
                    await asyncio.sleep(0.1)

    asyncio.run(talk())
    assert heard == ["stop"] * 3


def test_an_answer_to_a_websocket_that_is_gone_ends(app, two_processes) -> None:
    """Also if the application does not read what the client says."""
    ended = list[bool]()

    async def flood(web: WebSocket) -> None:
        await web.accept()
        try:
            while True:
                await web.send_text("x" * 10_000)
        except WebSocketDisconnect:
            ended.append(True)

    app.add_api_websocket_route("/speech", flood)

    async def leave() -> None:
        url = two_processes[1].replace("http", "ws") + "/speech"
        async with websockets.connect(url) as client:
            await client.recv()
            client.transport.abort()

    asyncio.run(leave())
    until(lambda: ended)
    until(lambda: not two_processes[0]._exchanges)
