"""Remote pictures: only when allowed, only so large, only in time, only over http(s)."""

import io
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from PIL import Image

from oscar_mm.errors import InputError
from oscar_mm.media import MediaLimits, load_image


def png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (6, 5), (255, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


class Pages(BaseHTTPRequestHandler):
    """One page for each thing that a server can do to a client."""

    def do_GET(self) -> None:
        page = {
            "/%C3%BCber%20uns.png?q=%C3%A4%20b": self.good,
            "/%FC.png": self.good,
            "/50%25.png?a=%2F": self.good,
        }
        page.get(self.path, getattr(self, self.path.strip("/"), self.gone))()

    def answer(
        self, body: bytes, kind: str | None = "image/png", length: int | None = None
    ) -> None:
        self.send_response(200)
        if kind is not None:
            self.send_header("Content-Type", kind)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body)

    def good(self) -> None:
        self.answer(png(), length=len(png()))

    def no_length(self) -> None:
        self.answer(png(), kind="application/octet-stream")

    def no_type(self) -> None:
        self.answer(png(), kind=None)

    def odd_type(self) -> None:
        self.answer(png(), kind="png")

    def announced(self) -> None:
        self.answer(b"", length=10**9)

    def endless(self) -> None:
        try:
            self.answer(b"")
            while True:
                self.wfile.write(bytes(4096))
        except OSError:
            pass  # the client has hung up, as it should

    def drip(self) -> None:
        try:
            self.answer(b"")
            for _ in range(50):
                self.wfile.write(b"x")
                time.sleep(0.1)
        except OSError:
            pass  # as above

    def silent(self) -> None:
        time.sleep(1)

    def slow_headers(self) -> None:
        try:
            self.wfile.write(b"HTTP/1.0 200 OK\r\n")
            for _ in range(30):
                self.wfile.write(b"X-Slow: 1\r\n")
                time.sleep(0.2)
        except OSError:
            pass  # as above

    def slow_hops(self) -> None:
        time.sleep(0.3)
        self.redirect("/slow_more_hops")

    def slow_more_hops(self) -> None:
        time.sleep(0.3)
        self.redirect("/good")

    def short(self) -> None:
        self.answer(png()[:20], length=len(png()))

    def page(self) -> None:
        self.answer(b"<html>", kind="text/html; charset=utf-8")

    def noise(self) -> None:
        self.answer(b"no picture at all")

    def moved(self) -> None:
        self.redirect("/good")

    def moved_far(self) -> None:
        self.redirect("/\u00fcber uns.png?q=\u00e4 b".encode().decode("latin-1"))

    def local(self) -> None:
        self.redirect("file:///etc/hostname")

    def ftp(self) -> None:
        self.redirect("ftp://127.0.0.1/picture.png")

    def loop(self) -> None:
        self.redirect("/loop")

    def gone(self) -> None:
        self.send_error(404)

    def redirect(self, place: str) -> None:
        self.send_response(302)
        self.send_header("Location", place)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


LIMITS = MediaLimits(max_file_bytes=100_000, remote_timeout_s=0.4)


@pytest.mark.parametrize(
    "page",
    [
        *("good", "no_length", "no_type", "odd_type", "moved", "moved_far"),
        *(
            "über uns.png?q=ä b",
            "%C3%BCber%20uns.png?q=%C3%A4%20b",
            "über%20uns.png?q=%C3%A4 b#top",
        ),
        *("%FC.png", "50%25.png?a=%2F"),
    ],
)
def test_remote_image(site: str, page: str) -> None:
    limits = replace(LIMITS, remote_timeout_s=10)
    for address in (f"{site}/{page}", f"{site}/{page}".replace("http", "HTTP")):
        image = load_image(address, allow_remote=True, limits=limits)
        assert image.size == (6, 5) and image.getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize(
    ("host", "asked"),
    [("bücher.example", "xn--bcher-kva.example"), ("B.例え.jp", "b.xn--r8jz45g.jp")],
)
def test_hosts_that_are_not_ascii(
    site: str, host: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    connect = socket.create_connection

    def connected(place: tuple[str, int], *rest: object, **options: object) -> socket.socket:
        names.append(place[0])
        return connect(("127.0.0.1", place[1]), *rest, **options)

    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(socket, "create_connection", connected)
    address = f"{site}/good".replace("127.0.0.1", host)
    limits = replace(LIMITS, remote_timeout_s=10)
    assert load_image(address, allow_remote=True, limits=limits).size == (6, 5)
    assert names == [asked]


def test_nothing_is_fetched_unless_allowed(site: str) -> None:
    with pytest.raises(InputError, match="allow_remote=True"):
        load_image(f"{site}/good")


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("announced", "1,000,000,000 bytes are more"),
        ("endless", "more than the limit of 100,000"),
        ("drip", "no complete response in 0.4 s"),
        ("silent", "no complete response in 0.4 s"),
        ("slow_headers", "no complete response in 0.4 s"),
        ("slow_hops", "no complete response in 0.4 s"),
        ("short", "broke after 20 of"),
        ("page", "returned text/html"),
        ("noise", "not an image"),
        ("gone%20too.png", "404"),
        ("local", "302"),
        ("ftp", "ftp"),
        ("loop", "302"),
        ("gone", "404"),
    ],
)
def test_bad_answers(site: str, page: str, reason: str) -> None:
    start = time.monotonic()
    # Only who waits for nothing is to be given up on so soon: a busy machine is slow too.
    limits = LIMITS if "0.4 s" in reason else replace(LIMITS, remote_timeout_s=10)
    with pytest.raises(InputError, match=reason) as caught:
        load_image(f"{site}/{page}", allow_remote=True, limits=limits)
    assert str(caught.value).startswith(f"{site}/{page}: ")
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1:1/x.png", "http://", "http://[::1", "http://a b/"),
        *("http://127.0.0.1:1/a\nb", "http://127.0.0.1:1/\ud800", "http://127.0.0.1:99999/"),
    ],
)
def test_bad_addresses(url: str) -> None:
    with pytest.raises(InputError, match="cannot be fetched"):
        load_image(url, allow_remote=True, limits=LIMITS)


def test_local_addresses_stay_refused() -> None:
    with pytest.raises(InputError, match="pass the path itself"):
        load_image("file:///etc/hostname", allow_remote=True)
