"""Bounds of realtime sessions: who may connect, and how much it may send."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect as raw_connect

from oscar_mm.apps.serve.realtime_responses import RealtimeResponses
from oscar_mm.apps.serve.server import create_app
from oscar_mm.apps.serve.service import ServerLimits
from tests.apps.serve.conftest import started
from tests.apps.serve.realtime.client import KEY, PUSH, RATE, Talk, ask, connected, sound, talked


def test_who_may_connect(address: str) -> None:
    uri = address.replace("http", "ws") + "/v1/realtime"
    for headers, query, status in (
        ({}, "?model=tiny", 401),
        ({"Authorization": "Bearer wrong"}, "?model=tiny", 401),
        ({"Authorization": f"Bearer {KEY}"}, "?model=other", 404),
    ):
        with pytest.raises(InvalidStatus) as refused:
            raw_connect(uri + query, additional_headers=headers)
        assert refused.value.response.status_code == status
    protocols = ["realtime", f"openai-insecure-api-key.{KEY}"]
    with raw_connect(uri, subprotocols=protocols) as client:
        assert json.loads(client.recv(5))["type"] == "session.created"
        assert client.subprotocol == "realtime"


def test_a_client_has_no_more_sessions_than_it_leaves_free(address: str) -> None:
    async def talk(one: Talk) -> None:
        async with connected(address):
            with pytest.raises(InvalidStatus) as refused:
                async with connected(address):
                    pass
            assert refused.value.response.status_code == 503
        request = urllib.request.Request(f"{address}/metrics")
        request.add_header("Authorization", f"Bearer {KEY}")
        read = await asyncio.to_thread(lambda: urllib.request.urlopen(request).read().decode())
        assert 'oscar_mm_refusals_total{reason="realtime"} ' in read
        assert "oscar_mm_realtime_sessions " in read

    talked(address, talk)


def test_large_and_half_messages(address: str) -> None:
    uri = address.replace("http", "ws") + "/v1/realtime?model=tiny"
    headers = {"Authorization": f"Bearer {KEY}"}
    with raw_connect(uri, additional_headers=headers) as client:
        client.recv(5)
        with pytest.raises(ConnectionClosed) as closed:
            client.send("x" * (5 << 20))
            while True:
                client.recv(5)
        assert closed.value.rcvd is None or closed.value.rcvd.code == 1009
    with raw_connect(uri, additional_headers=headers) as client:
        client.recv(5)
        client.send('{"type": ' for _ in range(3))
        with pytest.raises(AssertionError, match="went on"):
            client.send(_unfinished())
        # The session is idle until its end, and others are served meanwhile.
        with urllib.request.urlopen(f"{address}/health", timeout=2) as health:
            assert health.read() == b"ok"


def _unfinished() -> Iterator[str]:
    yield '{"type": "input_audio'
    raise AssertionError("went on")


def test_a_flood_is_slowed_down_and_others_are_served(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"_BURST": 100, "_MAX_SLOWED": 20, "_EVENTS_PER_S": 20}.items():
        monkeypatch.setattr(f"oscar_mm.apps.serve.realtime.{name}", value)
    uri = address.replace("http", "ws") + "/v1/realtime?model=tiny"
    headers = {"Authorization": f"Bearer {KEY}"}

    def flood() -> int:
        how: dict[str, Any] = {"additional_headers": headers, "max_queue": None}
        with raw_connect(uri, **how) as client, pytest.raises(ConnectionClosed) as closed:
            while True:
                client.send('{"type": "response.cancel"}')
        return closed.value.rcvd.code

    async def talk(one: Talk) -> None:
        flooding = asyncio.ensure_future(asyncio.to_thread(flood))
        await asyncio.sleep(0.3)
        start = time.monotonic()
        await ask(one, "What is it?")
        await one.until("response.done")
        assert time.monotonic() - start < 20
        assert await flooding == 1008

    talked(address, talk, max_output_tokens=3, output_modalities=["text"])


def test_replies_count_like_events(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small events that are answered by large ones are a flood too."""
    settings = {"_BURST": 200, "_MAX_SLOWED": 3, "_EVENTS_PER_S": 200, "_EVENT_BYTES": 100}
    for name, value in settings.items():
        monkeypatch.setattr(f"oscar_mm.apps.serve.realtime.{name}", value)
    uri = address.replace("http", "ws") + "/v1/realtime?model=tiny"
    headers = {"Authorization": f"Bearer {KEY}"}
    with raw_connect(uri, additional_headers=headers) as client:
        update = {"type": "session.update", "session": {"instructions": "Word " * 1000}}
        client.send(json.dumps(update))
        with pytest.raises(ConnectionClosed) as closed:
            for _ in range(20):
                client.recv(5)
                client.send('{"type": "session.update", "session": {}}')
    assert closed.value.rcvd.code == 1008


def test_a_client_that_does_not_read_is_left(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oscar_mm.apps.serve.realtime._SEND_S", 0.3)
    monkeypatch.setattr("oscar_mm.apps.connections._LINGER_S", 0.3)
    with upgraded(address) as narrow:
        update = {"type": "session.update", "session": {"instructions": "Word " * 8000}}
        data = json.dumps(update).encode()
        sent = itertools.count()
        with pytest.raises(OSError):
            while next(sent) < 1000:
                narrow.sendall(frame(TEXT, data))
        assert next(sent) > 1


TEXT, CONTINUATION, PING, PONG = 1, 0, 9, 10


@contextmanager
def upgraded(address: str) -> Iterator[socket.socket]:
    """A socket with a session, whose frames are up to the caller; it receives little at a time."""
    with socket.socket() as narrow:
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        narrow.connect(("127.0.0.1", int(address.rpartition(":")[2])))
        head = f"GET /v1/realtime HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
        head += "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        narrow.sendall(f"{head}Sec-WebSocket-Key: {'A' * 22}==\r\n\r\n".encode())
        yield narrow


def frame(kind: int, data: bytes, *, last: bool = True) -> bytes:
    """A frame of a client, masked with zeros."""
    short, more = len(data), b""
    if short > 125:
        short, more = 126, short.to_bytes(2, "big")
    return bytes([kind | (0x80 if last else 0), 0x80 | short]) + more + bytes(4) + data


@pytest.mark.parametrize(
    ("first", "flood"),
    [
        (b"", frame(PING, b"a" * 125)),
        (b"", frame(PONG, b"")),
        (frame(TEXT, b"{", last=False), frame(CONTINUATION, b"", last=False)),
        (frame(TEXT, b"{", last=False), frame(CONTINUATION, b" ", last=False)),
    ],
    ids=["pings", "pongs", "empty parts", "small parts"],
)
def test_a_flood_of_frames_that_are_no_messages_ends(
    address: str, first: bytes, flood: bytes
) -> None:
    """They never reach the session, whose bounds are on events."""
    deadline = time.monotonic() + 3  # An idle session would end later.
    with upgraded(address) as client, pytest.raises(ConnectionError):
        client.settimeout(3)
        client.sendall(first)
        while time.monotonic() < deadline:
            client.sendall(flood * 1000)


def test_messages_in_parts_among_pings_are_taken(address: str) -> None:
    uri = address.replace("http", "ws") + "/v1/realtime?model=tiny"
    with raw_connect(uri, additional_headers={"Authorization": f"Bearer {KEY}"}) as client:
        client.recv(5)
        text = json.dumps({"type": "session.update", "more": "x" * 3_000_000, "session": {}})
        for part_size, parts in ((1 << 11, 1500), (1 << 16, 50)):
            client.send(text[at : at + part_size] for at in range(0, len(text), part_size))
            assert json.loads(client.recv(10))["type"] == "session.updated", parts
            assert all(client.ping().wait(5) for _ in range(50))


def test_events_wait_while_many_are_queued(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A truncation waits for the running answer, and what follows it waits too."""
    monkeypatch.setattr("oscar_mm.apps.serve.realtime_tasks._MAX_QUEUED", 8)
    goes_on, send = threading.Event(), RealtimeResponses._send_piece

    async def held_up(*arguments: Any) -> None:
        while not goes_on.is_set():
            await asyncio.sleep(0.01)
        await send(*arguments)

    async def talk(one: Talk) -> None:
        await ask(one, "What is it?")
        item = (await one.until("response.done")).response.output[0]
        monkeypatch.setattr(RealtimeResponses, "_send_piece", held_up)
        await ask(one, "And?")
        await one.until("response.created")
        for _ in range(20):
            end = {"item_id": item.id, "content_index": 0, "audio_end_ms": 0}
            await one.connection.conversation.item.truncate(**end)
        await one.connection.session.update(session=PUSH)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await one.connection.recv()
        goes_on.set()
        kinds = list[str]()
        while "session.updated" not in kinds:
            kinds.append((await one.connection.recv()).type)
        assert kinds.count("error") >= 12

    talked(address, talk, max_output_tokens=9)


def test_sound_faster_than_it_is_read_waits(address: str) -> None:
    async def talk(one: Talk) -> None:
        await one.say(sound(70.0), size=RATE * 10)
        await one.connection.input_audio_buffer.commit()
        await one.connection.response.create()
        done = await one.until("response.done")
        assert done.response.usage.input_token_details.audio_tokens == 70 * 13

    talked(address, talk, max_output_tokens=3, output_modalities=["text"])


def test_an_idle_session_ends(pipe) -> None:
    limits = ServerLimits(realtime_idle_s=0.6, head_s=0.2)
    with started(create_app(pipe, "tiny", limits)) as (_, address):
        client = raw_connect(address.replace("http", "ws") + "/v1/realtime")
        with client, pytest.raises(ConnectionClosed) as closed:
            while True:
                client.recv(5)
        assert "idle" in closed.value.rcvd.reason


def test_web_pages_of_other_sites_are_refused(pipe) -> None:
    with started(create_app(pipe, "tiny", ServerLimits())) as (_, address):
        with pytest.raises(InvalidStatus) as refused:
            raw_connect(
                address.replace("http", "ws") + "/v1/realtime", origin="https://evil.example"
            )
        assert refused.value.response.status_code == 403
