"""Connections: closed where no request comes, and bounded, and nobody else feels them."""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.apps.connections import HEAD, connected, is_closed, opened, seconds_until_closed
from tests.apps.serve.conftest import served, user
from tests.apps.serve.test_server import ask, client_of

POST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)
_PART = POST + b"Content-Length: 90\r\n\r\n{"


@pytest.fixture(scope="module")
def hasty(omni) -> Iterator[str]:
    """A server that waits for no client for long."""
    with served(omni, head_s=0.8, body_s=0.8) as address:
        yield address


UNCLEAR = [
    (b"", b""),
    (b"", HEAD + b"X: " + b"a" * 500),
    (HEAD, b""),
    (HEAD, b"X-Long: " + b"a" * 500),
    (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET", b" /health" + b"x" * 500),
    # The body comes after the answer, if ever.
    (HEAD + b"Content-Length: 1000\r\n\r\n", b"a" * 500),
    (b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", b""),
    (POST + b"Content-Length: 1000\r\n\r\n", b" " * 500),
]
"""What is sent at once, and then byte by byte."""


def test_requests_that_do_not_say_what_they_want(hasty) -> None:
    def seconds(sent: bytes, trickle: bytes) -> float:
        with connected(hasty) as connection:
            connection.sendall(sent)
            return seconds_until_closed(connection, trickle)

    with ThreadPoolExecutor(len(UNCLEAR)) as threads:
        found = [threads.submit(seconds, *one) for one in UNCLEAR]
    for one, waited in zip(UNCLEAR, found, strict=True):
        assert 0.5 < waited.result() < 8, one


def test_a_client_that_asks_in_time_may_ask_again(hasty) -> None:
    """Each head has its own time, and an answer takes as long as it takes."""
    connection = http.client.HTTPConnection(hasty.removeprefix("http://"), timeout=20)
    start, ports = time.monotonic(), set()
    while time.monotonic() - start < 1.2:
        connection.request("GET", "/health")
        ports.add(connection.sock.getsockname())
        assert connection.getresponse().read() == b"ok"
        time.sleep(0.1)
    assert len(ports) == 1
    body = json.dumps({"messages": [user("Why?")], "max_tokens": 300, "stream": True})
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    start = time.monotonic()
    assert connection.getresponse().read().endswith(b"data: [DONE]\n\n")
    assert time.monotonic() - start > 0.8
    connection.close()


@pytest.mark.daily("part")
@pytest.mark.parametrize("sent", [pytest.param(b"", id="nothing"), pytest.param(_PART, id="part")])
def test_connections_are_bounded(omni, sent: bytes) -> None:
    """The longest to wait give way to others, and who is answered does not."""
    limits: dict[str, Any] = {"running": 2, "waiting": 2, "idle": 10, "max_new_tokens": 4000}
    with served(omni, **limits) as address, client_of(address) as client:
        stream = ask(client, user("Why?"), stream=True, max_tokens=300)
        next(iter(stream))
        with opened(address, 60, sent) as connections:
            start = time.monotonic()
            with urllib.request.urlopen(f"{address}/health", timeout=10) as health:
                assert health.read() == b"ok"
            assert ask(client_of(address), user("Who?"), max_tokens=2).choices
            assert time.monotonic() - start < 5
            closed = [is_closed(one) for one in connections]
            assert 60 - 14 <= sum(closed) < 60
            assert closed == sorted(closed, reverse=True), "the first ones"
            assert sum(len(part.choices) for part in stream) > 100


@pytest.mark.parametrize("key", [None, "secret"])
def test_one_length(omni, key: str | None) -> None:
    """Else a proxy may take the second request for the body of the first."""
    with served(omni, api_key=key) as address, connected(address) as connection:
        body = json.dumps({"messages": [user("Why?")], "max_tokens": 1}).encode()
        connection.sendall(
            POST
            + f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n".encode()
            + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
            + HEAD
            + b"\r\n"
        )
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 400 and answer.getheader("Connection") == "close"
        assert "Content-Length and Transfer-Encoding" in answer.read().decode()
        assert connection.recv(100) == b"", "nothing comes of the second request"


def test_nothing_is_served_outside_the_protocol(address) -> None:
    for path in ("/openapi.json", "/redoc", "/"):
        with pytest.raises(urllib.error.HTTPError) as missing:
            urllib.request.urlopen(address + path)
        assert missing.value.code == 404
