"""The server: a conversation over HTTP, and what a hostile visitor asks of it in vain."""

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from oscar_mm.apps.demo import server as server_module
from oscar_mm.apps.demo import sessions as sessions_module
from oscar_mm.apps.demo import visitor_input as bounds
from oscar_mm.apps.demo.server import RunningPage, serve_page
from oscar_mm.apps.demo.visitor_input import stored_bytes
from oscar_mm.apps.server_process import bind
from oscar_mm.errors import InputError
from tests.apps.connections import HEAD, connected, is_closed, opened, seconds_until_closed
from tests.apps.demo.conftest import COMPACT
from tests.waits import until

WHERE = ["H100", "Qwen3-VL-8B", "32K tokens"]


@pytest.fixture(scope="module")
def served(pipe) -> Iterator[RunningPage]:
    with serve_page(pipe, COMPACT, bind("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def client(served: RunningPage) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.address, timeout=60) as made:
        yield made


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def call(
    client: httpx.Client, served: RunningPage, name: str, data: list, session: str
) -> list[dict]:
    """What the queue sends about a call of a handler."""
    join(client, served, name, data, session)
    sent = []
    with client.stream(
        "GET", "gradio_api/queue/data", params={"session_hash": session}
    ) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                sent.append(json.loads(line[6:]))
                if sent[-1]["msg"] in ("process_completed", "close_stream"):
                    break
    return sent


def join(client: httpx.Client, served: RunningPage, name: str, data: list, session: str) -> None:
    """Have a handler called."""
    [index] = [i for i, one in served.page.fns.items() if one.name == name]
    body = {"data": data, "fn_index": index, "session_hash": session}
    client.post("gradio_api/queue/join", json=body).raise_for_status()


def upload(client: httpx.Client, path: Path) -> dict[str, Any]:
    answer = client.post("gradio_api/upload", files={"files": (path.name, path.read_bytes())})
    answer.raise_for_status()
    return file_of(answer.json()[0])


def file_of(path: str) -> dict[str, Any]:
    return {"path": path, "meta": {"_type": "gradio.FileData"}}


def test_a_conversation(served, client, uploads) -> None:
    file = upload(client, uploads / "0.png")
    sent = call(client, served, "ask", [{"text": "What?", "files": [file]}, 0, 20, *WHERE], "s1")
    assert sent[-1]["success"], sent[-1]
    session = served.sessions.session("s1")
    [exchange] = session.exchanges
    assert exchange.counts and exchange.previews[0].name == "0.png"
    pieces = [one for one in sent if one["msg"] == "process_generating"]
    assert len(pieces) >= 3
    shown = client.get(f"gradio_api/file={exchange.previews[0].path}")
    assert shown.content == (uploads / "0.png").read_bytes()
    sent = call(client, served, "report", [], "s1")
    link = sent[-1]["output"]["data"][0]["url"]
    assert client.get(link).json()["memory"] == session.conversation.chat.memory.to_dict()


def test_a_message_that_is_refused_comes_back_to_the_box(served, client, uploads) -> None:
    file = upload(client, uploads / "broken.png")
    data = [{"text": "What?", "files": [file]}, 0, 20, *WHERE]
    sent = call(client, served, "ask", data, "s2")
    assert sent[-1]["success"]
    history, *_, box = sent[-1]["output"]["data"]
    assert 'role="alert"' in history and "broken.png" in history
    text = json.dumps(box)
    assert "What?" in text and "broken.png" in text


@pytest.mark.parametrize("path", ["/etc/passwd", "../../etc/passwd", str(Path(__file__))])
def test_other_files_are_neither_read_nor_served(served, client, path) -> None:
    assert client.get(f"gradio_api/file={path}").status_code in (403, 404)
    sent = call(client, served, "ask", [{"text": "", "files": [file_of(path)]}, 0, 9, *WHERE], "s3")
    assert not sent[-1]["success"]
    assert served.sessions.session("s3").exchanges == []


def test_nothing_is_fetched(served, client, monkeypatch) -> None:
    fetched = []

    async def fetch(url: str, *_: Any, **__: Any) -> str:
        fetched.append(url)
        return url

    monkeypatch.setattr("gradio.processing_utils.async_ssrf_protected_download", fetch)
    address = "http://example.com/x.png"
    for data in (
        [{"text": "a", "files": [file_of(address)]}, 0, 9, *WHERE],
        [{"text": "a", "files": []}, file_of(address), 9, *WHERE],
    ):
        assert not call(client, served, "ask", data, "s4")[-1]["success"]
    assert not call(client, served, "load", [file_of(address), *WHERE], "s4")[-1]["success"]
    for path in (f"file={address}", "file=HTTPS://example.com/", "proxy=https://example.com/"):
        assert client.get(f"gradio_api/{path}").status_code == 403
    assert fetched == []


def test_pages_of_other_sites_cannot_use_it(served, client, uploads) -> None:
    """By a name that points here, by a form, by a script."""
    evil = {"Host": "evil.example:7860"}
    for path in ("", "config", "gradio_api/heartbeat/s9"):
        assert client.get(path, headers=evil).status_code == 421
    [index] = [i for i, one in served.page.fns.items() if one.name == "ask"]
    data = [{"text": "What?", "files": []}, 0, 9, *WHERE]
    body = json.dumps({"data": data, "fn_index": index, "session_hash": "s9"})
    join = "gradio_api/queue/join"
    assert (
        client.post(join, content=body, headers={"Content-Type": "text/plain"}).status_code == 415
    )
    there = {"Content-Type": "application/json", "Origin": "http://evil.example"}
    assert client.post(join, content=body, headers=there).status_code == 403
    files = {"files": ("a.png", (uploads / "0.png").read_bytes())}
    foreign = {"Sec-Fetch-Site": "cross-site"}
    assert client.post("gradio_api/upload", files=files, headers=foreign).status_code == 403
    assert client.post("gradio_api/upload", files=files).status_code == 200
    assert "s9" not in served.sessions._visits


def test_the_browser_is_told_to_stay_here(client) -> None:
    page = client.get("")
    policy = page.headers["content-security-policy"]
    assert "default-src 'self' data: blob:" in policy and "http" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "--o-lead" in page.text, "style.css is not on the page"


def test_files_that_are_too_large_are_refused_in_the_chat(served, client, tmp_path) -> None:
    large = tmp_path / "large.png"
    large.write_bytes(bytes(33 * 2**20))
    data = [{"text": "What?", "files": [upload(client, large)]}, 0, 20, *WHERE]
    sent = call(client, served, "ask", data, "s6")
    assert (
        "large.png is larger than the 32 MiB allowed for one file" in sent[-1]["output"]["data"][0]
    )


def test_uploads_are_bounded(client, uploads, monkeypatch) -> None:
    monkeypatch.setattr(bounds, "MAX_STORED_BYTES", 1000)
    files = {"files": ("a.png", (uploads / "0.png").read_bytes())}
    client.post("gradio_api/upload", files=files)
    assert client.post("gradio_api/upload", files=files).status_code == 507


def test_uploads_that_come_together_have_a_bound_together(served, client, monkeypatch) -> None:
    """Each counts with what it has announced, until it has come or its sender has left."""
    monkeypatch.setattr(bounds, "MAX_STORED_BYTES", 10**15)
    [isolation] = [
        one.kwargs["folder"] for one in served.page.app.user_middleware if "folder" in one.kwargs
    ]
    limit = stored_bytes(isolation) + 100_000
    monkeypatch.setattr(bounds, "MAX_STORED_BYTES", limit)
    port = int(served.address.rstrip("/").rpartition(":")[2])
    head = (
        f"POST /gradio_api/upload HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 60000\r\n\r\n--b\r\n"
    )
    files = {"files": ("a.bin", bytes(60_000))}
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(head.encode())
        until(lambda: client.post("gradio_api/upload", files=files).status_code == 507, 30)
        small = {"files": ("a.bin", bytes(1_000))}
        assert client.post("gradio_api/upload", files=small).status_code == 200
    until(lambda: client.post("gradio_api/upload", files=files).status_code == 200, 30)


def test_uploads_say_how_long_they_are(client) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"--b\r\n"

    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    assert client.post("gradio_api/upload", content=pieces(), headers=kind).status_code == 411


def test_the_page_does_not_show_where_files_are(served, client) -> None:
    folder = Path(os.environ["GRADIO_TEMP_DIR"])
    for path in ("", "config", "theme.css", "gradio_api/info"):
        answer = client.get(path)
        assert answer.status_code == 200
        assert str(folder.name) not in answer.text and str(folder.parent) not in answer.text
    assert "#example-0::before" in client.get("").text, "the pictures of buttons"
    for path in ("openapi.json", "gradio_api/openapi.json", "docs", "redoc"):
        assert client.get(path).status_code == 404


def test_one_length(client) -> None:
    two = {"Content-Length": "2", "Transfer-Encoding": "chunked"}
    body = [b"2\r\n{}\r\n0\r\n\r\n"]
    answer = client.post("gradio_api/queue/join", content=iter(body), headers=two)
    assert answer.status_code == 400 and answer.headers["connection"] == "close"


def test_a_visitor_who_returns_continues_and_another_leaves_nothing(
    served, client, uploads, monkeypatch
) -> None:
    sessions, budget = served.sessions, served.sessions.pipe.budget
    used = budget.used_bytes
    with client.stream("GET", "gradio_api/heartbeat/s5") as beats:
        lines = beats.iter_lines()  # kept: the connection ends with it
        next(lines)
        data = [{"text": "What?", "files": [upload(client, uploads / "1.png")]}, 0, 9, *WHERE]
        assert call(client, served, "ask", data, "s5")[-1]["success"]
        session = sessions.session("s5")
    until(lambda: "s5" not in sessions._visits, 30)
    assert budget.used_bytes > used
    sent = call(client, served, "open_page", [session.id, *WHERE], "s7")[-1]
    *parts, address, visitor = sent["output"]["data"]
    assert "What?" in parts[0] and address == session.id and visitor == "s7"
    assert sessions.session("s7") is session
    monkeypatch.setattr(sessions_module, "MAX_UNVISITED_S", -1.0)
    sessions.leave("s7")
    assert budget.used_bytes == used


def test_a_conversation_goes_on_after_a_restart(pipe, uploads, tmp_path) -> None:
    ids, histories = [""], []
    for _ in range(2):
        with (
            serve_page(pipe, COMPACT, bind("127.0.0.1", 0), keep=tmp_path / "kept") as page,
            httpx.Client(base_url=page.address, timeout=60) as visitor,
        ):
            data = [ids[-1], *WHERE]
            parts = call(visitor, page, "open_page", data, "s1")[-1]["output"]["data"]
            histories.append(parts[0])
            ids.append(parts[-2])
            message = {"text": "What?", "files": [upload(visitor, uploads / "0.png")]}
            assert call(visitor, page, "ask", [message, 0, 9, *WHERE], "s1")[-1]["success"]
    assert ids[1] == ids[2]
    assert "What?" not in histories[0] and "What?" in histories[1] and "<img" in histories[1]


def test_a_page_that_ends_leaves_an_earlier_one_its_files(pipe, served, client, uploads) -> None:
    """Gradio shows the files of a message again only if they are in its folder."""
    with serve_page(pipe, COMPACT, bind("127.0.0.1", 0)):
        pass
    message = {"text": "What?", "files": [upload(client, uploads / "broken.png")]}
    sent = call(client, served, "ask", [message, 0, 9, *WHERE], "s8")
    assert sent[-1]["success"] and "broken.png" in json.dumps(sent[-1]["output"]["data"][-1])
    assert os.environ["GRADIO_TEMP_DIR"] == str(served.sessions.folders[0])


def test_a_page_is_told_what_others_change(pipe) -> None:
    """And a page that listens does not delay the end of the server."""
    with httpx.Client(timeout=60) as client:
        with serve_page(pipe, COMPACT, bind("127.0.0.1", 0)) as page:
            client.base_url = page.address
            own = page.sessions.session("s1")
            call(client, page, "open_page", [own.id, *WHERE], "s2")
            sent = client.build_request("GET", "changes", params={"visitor": "s1"})
            lines = client.send(sent, stream=True).iter_lines()
            assert next(lines) == ":", "the page knows that it will be told"
            message = {"text": "What?", "files": []}
            assert call(client, page, "ask", [message, 0, 9, *WHERE], "s2")[-1]["success"]
            assert next(line for line in lines if line) == "data: s1"
            began = time.monotonic()
        assert time.monotonic() - began < 3


BEATS = b"GET /gradio_api/heartbeat/s1 HTTP/1.1\r\nHost: localhost\r\n\r\n"
"""What a page that is open has asked for."""


def test_a_request_that_does_not_say_what_it_wants(pipe) -> None:
    """Connections without a whole head are closed; a page that is open stays open."""
    with serve_page(pipe, COMPACT, bind("127.0.0.1", 0), head_s=0.5) as page:
        address = page.address.rstrip("/")
        with connected(address) as visitor:
            visitor.sendall(BEATS)
            assert b"200 OK" in visitor.recv(4096)
            for sent, trickle in ((b"", b""), (HEAD, b""), (HEAD, b"X: " + b"a" * 500)):
                with connected(address) as connection:
                    connection.sendall(sent)
                    assert 0.4 < seconds_until_closed(connection, trickle) < 3
            assert not is_closed(visitor)


def test_connections_are_bounded(pipe, monkeypatch) -> None:
    """The longest to wait give way to others, and a page that is open does not."""
    monkeypatch.setattr(server_module, "_CONNECTIONS", 10)
    with serve_page(pipe, COMPACT, bind("127.0.0.1", 0)) as page:
        address = page.address.rstrip("/")
        with connected(address) as visitor:
            visitor.sendall(BEATS)
            assert b"200 OK" in visitor.recv(4096)
            with opened(address, 40, HEAD) as connections:
                assert httpx.get(page.address, timeout=60).status_code == 200
                closed = [is_closed(one) for one in connections]
            assert 40 - 10 <= sum(closed) < 40
            assert closed == sorted(closed, reverse=True), "the first ones"
            assert not is_closed(visitor)


def test_a_port_that_is_taken(served, pipe) -> None:
    port = int(served.address.rstrip("/").rpartition(":")[2])
    with pytest.raises(InputError, match=f"--port {port}: cannot be used "):
        bind("127.0.0.1", port)
