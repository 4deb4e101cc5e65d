"""The guard: what a web page of another site can make a browser send, and what a client sends."""

import asyncio
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette", reason="needs starlette")

from starlette.responses import PlainTextResponse

from oscar_mm.apps.guard import Guard, is_loopback

JSON = {"Content-Type": "application/json"}
FORM = {"Content-Type": "multipart/form-data; boundary=x"}


def status(method: str, listens: str = "127.0.0.1", path: str = "/v1/x", **headers: str) -> int:
    app = Guard(PlainTextResponse("ok"), host=listens, uploads=("/upload",))

    async def sent() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:80") as client:
            content = b"{}" if method == "POST" else None
            return await client.request(method, path, headers=headers, content=content)

    answer = asyncio.run(sent())
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    return answer.status_code


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("192.168.0.2", False),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:1", "[::1]"]
)
def test_names_of_this_machine(host: str) -> None:
    assert status("GET", Host=host) == status("POST", Host=host, **JSON) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "10.0.0.1", "127.0.0.1.nip.io"]
)
def test_other_names_are_refused_on_loopback_only(host: str) -> None:
    assert status("GET", Host=host) == status("POST", Host=host, **JSON) == 421
    assert status("GET", "0.0.0.0", Host=host) == 200


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (JSON, 200),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "text/plain; a=application/json"}, 415),
        ({}, 415),
        (FORM, 415),
    ],
)
def test_what_is_no_json_is_refused(headers: dict[str, str], expected: int) -> None:
    assert status("POST", **headers) == expected
    assert status("POST", "0.0.0.0", Host="there", **headers) == expected


def test_files_are_taken_where_they_are_uploaded() -> None:
    assert status("POST", path="/api/upload", **FORM) == 200


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Origin": "http://localhost:7860"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://localhost:3000"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
    ],
)
def test_pages_of_other_origins(headers: dict[str, Any], expected: int) -> None:
    for method in ("GET", "POST"):
        assert status(method, Host="localhost:7860", **JSON, **headers) == expected


def test_a_link_may_be_followed() -> None:
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert status("GET", **link) == 200
    assert status("POST", **JSON, **link) == 403
