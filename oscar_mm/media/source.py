"""Read media from a path, a data URI or an http(s) URL, within limits."""

from __future__ import annotations

import base64
import binascii
import http.client
import io
import re
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import IO, Any, Self, TypeGuard, TypeVar

from oscar_mm.errors import InputError
from oscar_mm.media.limits import MediaLimits

T = TypeVar("T")

_CHUNK = 64 * 1024
# There must be at least two letters before "://", so that a Windows drive counts as a path.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


class NamedBytes(bytes):
    """Encoded bytes with a name for messages.

    Attributes:
        name: name chosen by the sender.
    """

    name: str

    def __new__(cls, data: bytes, name: str) -> NamedBytes:
        """Copy ``data`` and name it."""
        named = super().__new__(cls, data)
        named.name = name
        return named


def describe(source: object, argument: str) -> str:
    """Return a source's name for error messages: its path, URL or name, else ``argument``."""
    if isinstance(source, NamedBytes):
        return source.name
    if is_open_file(source):
        name = getattr(source, "name", None)
        return describe(name, argument) if isinstance(name, str) and name else argument
    if isinstance(source, Path):
        return str(source)
    if isinstance(source, str):
        if _is_data_uri(source):
            return f"{argument} (data URI)"
        return source if len(source) <= 200 else f"{source[:197]}..."
    return argument


def is_open_file(source: object) -> TypeGuard[IO[Any]]:
    """Whether a source is an open file or a stream in memory."""
    return callable(getattr(source, "read", None)) and not isinstance(source, str | Path | bytes)


def is_address(source: object) -> TypeGuard[str]:
    """Whether a source is a ``data:`` URI or an http(s) URL, which ``read_bytes`` can read."""
    return isinstance(source, str) and (_is_data_uri(source) or is_fetched(source))


def has_scheme(source: str) -> bool:
    """Whether a source is a URL of any kind, including unsupported ones such as s3://."""
    return _SCHEME.match(source) is not None


def is_fetched(source: object) -> bool:
    """Whether a source is an http(s) URL."""
    scheme = _SCHEME.match(source) if isinstance(source, str) else None
    return scheme is not None and scheme[1].lower() in ("http", "https")


def _is_data_uri(source: str) -> bool:
    return source[:5].lower() == "data:"


def existing_file(source: str | Path, label: str) -> Path:
    """Return the path of a file after checking that it exists and is not empty.

    Raises:
        InputError: if the source is a URL, a missing file, a folder or an empty file.
    """
    if isinstance(source, str) and (scheme := _SCHEME.match(source)):
        if scheme[1].lower() == "file":
            raise InputError(f"{label}: file:// URLs are not supported; pass the path itself")
        raise InputError(f"{label}: is a URL, not a path; download the file first")
    path = Path(source)
    try:
        if not path.exists():
            raise InputError(f"{label}: no such file")
        if not path.is_file():
            raise InputError(f"{label}: is a folder or a device; pass the path of a file")
        if path.stat().st_size == 0:
            raise InputError(f"{label}: the file is empty")
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{label}: cannot be used as a path ({reason})") from error
    return path


def local_source(source: Any) -> Any:
    """Return a path or a byte stream for a parser. For an http(s) URL or a data URI, return None,
    which makes parsers raise an error."""
    if isinstance(source, bytes | bytearray | memoryview):
        return io.BytesIO(source)
    return None if is_address(source) else existing_file(source, "")


def none_if_unreadable(read: Callable[..., T]) -> Callable[..., T | None]:
    """Decorate ``read`` to return None where it would raise; decoding the media item later reports
    the error."""

    @wraps(read)
    def guarded(*args: Any, **kwargs: Any) -> T | None:
        try:
            return read(*args, **kwargs)
        except Exception:  # any error of any parser: the bytes are not trusted
            return None

    return guarded


class AllowedHosts:
    """Hosts from which media may be fetched, on any port; redirects are not followed.

    Args:
        names: host names, which must match exactly; "*.example.org" matches all subdomains of
            example.org, but not example.org itself.

    Raises:
        InputError: if a name is not a host name.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self._exact, self._above = set[str](), set[str]()
        for name in self.names:
            below = name.startswith("*.")
            (self._above if below else self._exact).add(_host(name.removeprefix("*.")))

    def check(self, url: str, label: str) -> None:
        """Reject a URL on a host that is not allowed.

        Args:
            url: the URL in ASCII.
            label: name of the media item in error messages.

        Raises:
            InputError: if the host is not allowed; the message names it.
        """
        host = urllib.parse.urlsplit(url).hostname or ""
        above = host.split(".")[1:]
        parents = {".".join(above[place:]) for place in range(len(above))}
        if host not in self._exact and not parents & self._above:
            raise InputError(f"{label}: media may not be fetched from the host {host[:200]!r}")


def _host(name: str) -> str:
    """Convert a host name to ASCII and lower case."""
    try:
        found = urllib.parse.urlsplit(_encoded(f"http://{name}/"))
        has_more = found.port is not None or found.path != "/" or found.username or found.query
        if found.hostname and not has_more and "*" not in name:
            return found.hostname
    except ValueError:
        pass
    raise InputError(f"{name!r} is not a host name; use one such as example.org or *.example.org")


def read_bytes(
    source: str | Path,
    *,
    allow_remote: bool,
    limits: MediaLimits,
    label: str,
    hosts: AllowedHosts | None = None,
) -> bytes:
    """Read encoded bytes from a path, a ``data:`` URI or, with ``allow_remote``, an http(s) URL.

    Without ``hosts`` any URL is fetched, including URLs on the local network: a server that accepts
    URLs from strangers must be isolated from its own network.

    Raises:
        InputError: if there is nothing to read, remote media are not allowed, the host is not
            allowed, or the file has more than ``limits.max_file_bytes``.
    """
    if is_address(source):
        if _is_data_uri(source):
            return _data_uri(source, limits, label)
        if not allow_remote:
            raise InputError(
                f"{label}: remote media are disabled; pass allow_remote=True (--allow-remote) or "
                "download the file"
            )
        return _fetch(source, limits, label, hosts)
    path = existing_file(source, label)
    limits.check_bytes(path.stat().st_size, label)
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{label}: cannot be read ({error.strerror})") from error


def read_file(file: IO[Any], limits: MediaLimits, label: str) -> bytes:
    """Read an open binary file from its beginning, or a stream that cannot seek from here on.

    Raises:
        InputError: if the file is open as text or closed, cannot be read, or has more than
            ``limits.max_file_bytes``.
    """
    try:
        if file.seekable():
            file.seek(0)
        data = file.read(limits.max_file_bytes + 1)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise InputError(f"{label}: cannot be read ({error})") from error
    if not isinstance(data, bytes):
        raise InputError(f"{label}: is not a binary file; open it with open(path, 'rb')")
    limits.check_bytes(len(data), label)
    return data


def _data_uri(uri: str, limits: MediaLimits, label: str) -> bytes:
    header, comma, body = uri.partition(",")
    if not comma:
        raise InputError(
            f"{label}: has no comma after the media type; use data:image/png;base64,..."
        )
    limits.check_bytes(len(body) * 3 // 4, label)
    if not header.lower().endswith(";base64"):
        return urllib.parse.unquote_to_bytes(body)
    try:
        return base64.b64decode(urllib.parse.unquote_to_bytes(body), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"{label}: is not valid base64 ({error})") from error


class _Deadline(urllib.request.AbstractHTTPHandler):
    """HTTP handler with a deadline for a full request, including redirects.

    The timeout of urllib limits only each pause; this handler closes the connections at the
    deadline, even while headers are being read.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.end = time.monotonic() + seconds
        self._connections: list[http.client.HTTPConnection] = []
        self._timer = threading.Timer(seconds, self._disconnect)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    @property
    def is_over(self) -> bool:
        """Whether there is no time left."""
        return time.monotonic() > self.end

    def http_open(self, request: urllib.request.Request) -> Any:
        return self._open(http.client.HTTPConnection, request)

    def https_open(self, request: urllib.request.Request) -> Any:
        return self._open(http.client.HTTPSConnection, request)

    http_request = urllib.request.AbstractHTTPHandler.do_request_
    https_request = urllib.request.AbstractHTTPHandler.do_request_

    def _open(self, kind: Any, request: urllib.request.Request) -> Any:
        if self.is_over:
            raise TimeoutError

        def connection(*arguments: Any, **options: Any) -> http.client.HTTPConnection:
            self._connections.append(kind(*arguments, **options))
            return self._connections[-1]

        return self.do_open(connection, request)  # pyright: ignore[reportArgumentType]

    def _disconnect(self) -> None:
        for connection in self._connections:
            with suppress(OSError, AttributeError):  # The connection may be closed already.
                connection.sock.shutdown(socket.SHUT_RDWR)


def _opener(deadline: _Deadline, *, redirects: bool) -> urllib.request.OpenerDirector:
    # Only http and https have a handler, so a redirect cannot lead to a local file or to ftp.
    opener = urllib.request.OpenerDirector()
    opener.add_handler(deadline)
    for handler in (
        urllib.request.ProxyHandler,
        *([urllib.request.HTTPRedirectHandler] if redirects else []),
        urllib.request.HTTPErrorProcessor,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.UnknownHandler,
    ):
        opener.add_handler(handler())
    return opener


def _encoded(url: str) -> str:
    """Convert a URL to ASCII as browsers do: percent-encoded, with the host encoded by IDNA.

    Raises:
        ValueError: if the URL is not valid.
    """
    import httpx  # slow to import

    try:
        return str(httpx.URL(url))
    except httpx.InvalidURL as error:
        raise ValueError(error) from error


def _fetch(url: str, limits: MediaLimits, label: str, hosts: AllowedHosts | None) -> bytes:
    deadline = _Deadline(limits.remote_timeout_s)
    parts = bytearray()
    try:
        address = _encoded(url)
        if hosts is not None:
            hosts.check(address, label)
        request = urllib.request.Request(address, headers={"User-Agent": "oscar_mm"})
        with (
            deadline,
            _opener(deadline, redirects=hosts is None).open(
                request, timeout=limits.remote_timeout_s
            ) as answer,
        ):
            if deadline.is_over:
                raise TimeoutError
            # get_content_type() is not used, since it reports a missing or malformed type as text.
            kind = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if kind.startswith(("text/", "application/json")):
                raise InputError(f"{label}: the server returned {kind}, not a media file")
            announced = answer.headers.get("Content-Length", "")
            if announced.isdecimal():
                limits.check_bytes(int(announced), label)
            while chunk := answer.read1(_CHUNK):
                parts += chunk
                limits.check_bytes(len(parts), label)
                if deadline.is_over:
                    raise TimeoutError
            if announced.isdecimal() and len(parts) != int(announced):
                raise InputError(
                    f"{label}: the connection broke after {len(parts):,} of {announced} bytes"
                )
    except InputError:
        raise
    except urllib.error.HTTPError as error:
        raise InputError(f"{label}: the server returned {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError) or deadline.is_over:
            raise InputError(
                f"{label}: no complete response in {limits.remote_timeout_s:g} s; try again or "
                "raise MediaLimits.remote_timeout_s"
            ) from error
        raise InputError(f"{label}: cannot be fetched ({reason})") from error
    return bytes(parts)
