"""Web pages that may ask, and those that may not."""

import json
import urllib.error
import urllib.request
from email.message import Message
from typing import Any

import pytest

from oscar_mm.apps.serve.origins import read_origins
from oscar_mm.apps.serve.server import create_app
from oscar_mm.apps.serve.service import ServerLimits
from oscar_mm.errors import InputError
from tests.apps.serve.conftest import started, user

PAGE, EVIL = "http://localhost:3000", "http://evil.example"
JSON = {"Content-Type": "application/json"}
CHAT = "/v1/chat/completions"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


def sent(address: str, path: str, method: str, origin: str, **headers: str) -> tuple[int, Message]:
    """Status and headers of the response that a browser gets for a page."""
    data = None
    if method == "POST":
        data = json.dumps({"messages": [user("hi")], "max_tokens": 2}).encode()
    made = {"Origin": origin, "Sec-Fetch-Site": "cross-site"} | headers
    request = urllib.request.Request(address + path, data, made, method=method)
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, response.headers
    except urllib.error.HTTPError as error:
        return error.code, error.headers


def allowed(headers: Message) -> str | None:
    assert "Access-Control-Allow-Credentials" not in headers
    return headers["Access-Control-Allow-Origin"]


@pytest.fixture(scope="module", params=[None, "secret"])
def key(request) -> str | None:
    return request.param


@pytest.fixture(scope="module")
def page_address(omni, key) -> Any:
    limits = ServerLimits(api_key=key)
    with started(create_app(omni, "tiny", limits, origins=(PAGE, "http://b"))) as (_, address):
        yield address


def test_a_page_that_may_ask(page_address, key) -> None:
    status, headers = sent(page_address, CHAT, "OPTIONS", PAGE, **PREFLIGHT)
    assert (status, allowed(headers)) == (200, PAGE)
    assert "POST" in headers["Access-Control-Allow-Methods"]
    assert "x-stainless-os" in headers["Access-Control-Allow-Headers"]
    given = JSON | ({"Authorization": f"Bearer {key}"} if key else {})
    status, headers = sent(page_address, CHAT, "POST", PAGE, **given)
    assert (status, allowed(headers)) == (200, PAGE)
    assert "X-Request-Id" in headers["Access-Control-Expose-Headers"]
    wrong = JSON | {"Authorization": "Bearer other"} if key else {"Content-Type": "text/plain"}
    status, headers = sent(page_address, CHAT, "POST", PAGE, **wrong)
    assert (status, allowed(headers)) == (401 if key else 415, PAGE), "it reads the reason"


def test_a_page_that_may_not(page_address, key) -> None:
    for origin in (EVIL, "null", "http://localhost:3001", "https://localhost:3000", PAGE + ".b"):
        status, headers = sent(page_address, CHAT, "OPTIONS", origin, **PREFLIGHT)
        assert status == 400 and allowed(headers) is None
        status, headers = sent(page_address, CHAT, "POST", origin, **JSON)
        assert status == (401 if key else 403) and allowed(headers) is None


def test_a_name_that_points_here_is_refused_all_the_same(page_address, key) -> None:
    status, _ = sent(page_address, "/v1/models", "GET", PAGE, Host="evil.example")
    assert status == (401 if key else 421)


def test_without_the_option_no_page_may_ask(omni) -> None:
    with started(create_app(omni, "tiny", ServerLimits())) as (_, address):
        status, headers = sent(address, CHAT, "OPTIONS", PAGE, **PREFLIGHT)
        assert status == 403 and allowed(headers) is None
        assert sent(address, CHAT, "POST", PAGE, **JSON)[0] == 403


def test_any_page_where_there_is_a_key(omni) -> None:
    origins = read_origins(["*"], has_key=True)
    app = create_app(omni, "tiny", ServerLimits(api_key="secret"), origins=origins)
    with started(app) as (_, address):
        assert allowed(sent(address, CHAT, "OPTIONS", EVIL, **PREFLIGHT)[1]) == "*"
        status, headers = sent(address, CHAT, "POST", EVIL, **JSON)
        assert (status, allowed(headers)) == (401, "*")


def test_origins() -> None:
    given = [
        "HTTP://Localhost:3000",
        "http://localhost:3000",
        "app://obsidian.md",
        "http://[::1]:1",
    ]
    assert read_origins(given, has_key=False) == (given[1], given[2], given[3])
    assert read_origins(["null"], has_key=True) == ("null",)
    for wrong in (
        "http://a/",
        "http://a/b",
        "a",
        "http://",
        "http://a b",
        "http://*.a",
        "http://a:x",
    ):
        with pytest.raises(InputError, match="must be the scheme, host and port"):
            read_origins([wrong], has_key=True)
