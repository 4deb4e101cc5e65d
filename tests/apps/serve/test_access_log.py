"""One line for each request: what came of it, and nothing of what was said."""

import logging
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.apps.serve.conftest import served, user
from tests.apps.serve.test_server import ask, client_of
from tests.apps.serve.test_service import asking, eventually

CHAT = "POST /v1/chat/completions"
SECRET = "the moon is blue"


@pytest.fixture
def lines(caplog) -> list[str]:
    """The log's lines, seconds and names left out."""
    caplog.set_level(logging.INFO, "oscar_mm.serve.access")

    class Lines(list):
        def __iter__(self) -> Iterator[str]:
            found = (one.getMessage() for one in caplog.records if one.name.endswith("access"))
            return (re.sub(r" \d+\.\d{3}s id=\w+", " 0s", line) for line in found)

    return Lines()


def get(address: str, path: str, **headers: str) -> None:
    try:
        urllib.request.urlopen(urllib.request.Request(address + path, headers=headers)).read()
    except urllib.error.HTTPError as error:
        error.read()


def logged(lines: list[str], count: int) -> list[str]:
    """The lines once there are so many, which come after the answers."""
    eventually(lambda: len(list(lines)) >= count)
    return list(lines)


def test_answers(omni, lines) -> None:
    with served(omni) as address, client_of(address) as client:
        answer = ask(client, user(SECRET), max_tokens=7)
        list(ask(client, user(SECRET), max_tokens=7, stream=True))
        get(address, "/health")
        found = logged(lines, 3)
    tokens = answer.usage.prompt_tokens
    assert found == [f"{CHAT} 200 in={tokens} out=7 0s"] * 2 + ["GET /health 200 0s"]


def test_refusals(omni, lines) -> None:
    with served(omni, api_key="secret") as address:
        get(address, "/v1/models?a=b")
        get(address, "/nothing%0A200%20ok/" + "x" * 500)
        client = client_of(address).with_options(api_key="secret")
        refused: list[Any] = [
            ([user(SECRET)], {"temperature": -1}),
            ([user(SECRET), {"role": "assistant", "content": SECRET}], {}),
            ([user(SECRET)], {"model": "x\n" * 200}),
        ]
        for messages, options in refused:
            with pytest.raises(openai.APIStatusError):
                ask(client, *messages, **options)
        found = logged(lines, 5)
    assert found[0] == 'GET /v1/models 401 0s "a valid API key is needed"'
    assert found[1].startswith("GET /nothing%0A200%20ok/xxx") and found[1].endswith(
        '404 0s "Not Found"'
    )
    assert found[2].startswith(f'{CHAT} 400 0s "temperature=-1.0: must be')
    assert found[3].startswith(f"{CHAT} 400 0s \"messages: must not end with an assistant's")
    assert found[4].startswith(f'{CHAT} 404 0s "The model `x\\nx\\n')
    for line in found:
        assert line.isprintable() and len(line) < 700 and SECRET not in line


def test_web_pages_and_failures(omni, lines, monkeypatch) -> None:
    with served(omni) as address:
        get(address, "/v1/models", Origin="http://evil.example")
        monkeypatch.setattr(omni.family, "render", lambda *_, **__: 1 / 0)
        with pytest.raises(openai.InternalServerError):
            ask(client_of(address), user(SECRET))
        found = logged(lines, 2)
    assert found[0] == 'GET /v1/models 403 0s "web pages of other sites may not use this server"'
    assert found[1] == f'{CHAT} 500 0s "the server failed to answer this request"'


def test_a_client_leaves(omni, lines) -> None:
    with served(omni, running=1, max_new_tokens=4000) as address:
        with asking(address, stream=True, max_tokens=4000) as first:
            first.getresponse().readline()
            with asking(address, max_tokens=3):
                pass
            assert logged(lines, 1) == [f'{CHAT} 499 0s "the client has disconnected"']
        assert logged(lines, 2)[1] == f'{CHAT} 200 0s "the client has disconnected"'


def test_what_is_no_request_is_no_line(omni, lines) -> None:
    with served(omni) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(b"\x16\x03\x01 no http\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert list(lines) == []


def test_names_of_requests(omni, caplog) -> None:
    """A client may choose it; the server makes one where it is none to write into a log."""
    caplog.set_level(logging.INFO, "oscar_mm.serve.access")
    with served(omni, api_key="secret") as address:

        def named(given: str, path: str = "/health") -> str:
            request = urllib.request.Request(address + path, headers={"X-Request-Id": given})
            try:
                with urllib.request.urlopen(request) as response:
                    return response.headers["X-Request-Id"]
            except urllib.error.HTTPError as error:
                return error.headers["X-Request-Id"]

        assert named("page-7.a/B=") == named("page-7.a/B=", "/v1/models") == "page-7.a/B="
        made = [named(given) for given in ("", "a b", 'a"b', "é", "x" * 129)]
        assert all(re.fullmatch(r"[0-9a-f]{32}", name) for name in made) and len({*made}) == 5
        eventually(lambda: len(caplog.records) >= 7)
    told = [re.findall(r" id=(\S+)", record.getMessage()) for record in caplog.records]
    assert told[:2] == [["page-7.a/B="]] * 2 and [[name] for name in made] == told[2:7]


def test_levels(omni, caplog, monkeypatch) -> None:
    caplog.set_level(logging.INFO, "oscar_mm.serve.access")
    with served(omni) as address:
        get(address, "/health")
        get(address, "/nothing")
        get(address, "/v1/models", Origin="http://evil.example")
        monkeypatch.setattr(omni.family, "render", lambda *_, **__: 1 / 0)
        with pytest.raises(openai.InternalServerError):
            ask(client_of(address), user(SECRET))
        eventually(lambda: len(caplog.records) >= 4)
    assert [record.levelname for record in caplog.records] == [
        "INFO",
        "WARNING",
        "WARNING",
        "ERROR",
    ]
