"""From what a user names (a path, a data URI, an address) to bytes, with bounds."""

from __future__ import annotations

import base64
import binascii
import http.client
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TypeGuard

from oscar_mm.errors import InputError
from oscar_mm.media.limits import MediaLimits

SUFFIXES = {
    "images": (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tiff"),
    "videos": (".mp4", ".m4v", ".webm", ".mkv", ".mov", ".avi"),
    "audio": (".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".m4a", ".aac"),
}
KIND = {suffix: kind for kind, suffixes in SUFFIXES.items() for suffix in suffixes}


_CHUNK = 64 * 1024
# Two letters or more before "://", so that a Windows drive is a path.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


class NamedBytes(bytes):
    """Encoded bytes that are named in messages.

    Attributes:
        name: what their sender calls them.
    """

    name: str

    def __new__(cls, data: bytes, name: str) -> NamedBytes:
        """A copy of ``data``."""
        made = super().__new__(cls, data)
        made.name = name
        return made


def describe(source: object, argument: str) -> str:
    """Name a source in an error message: a path, address or name as given, else ``argument``."""
    if isinstance(source, NamedBytes):
        return source.name
    if isinstance(source, Path):
        return str(source)
    if isinstance(source, str):
        if source[:5].lower() == "data:":
            return f"{argument} (data URI)"
        return source if len(source) <= 200 else f"{source[:197]}..."
    return argument


def is_address(source: object) -> TypeGuard[str]:
    """Whether a source is a ``data:`` URI or an http(s) address, which ``read_bytes`` reads."""
    if not isinstance(source, str):
        return False
    scheme = _SCHEME.match(source)
    return source[:5].lower() == "data:" or bool(scheme and scheme[1].lower() in ("http", "https"))


def existing_file(source: str | Path, label: str) -> Path:
    """The path of a file which is there and not empty.

    Raises:
        InputError: an address instead of a path, a missing file, a folder, an empty file.
    """
    if isinstance(source, str) and (scheme := _SCHEME.match(source)):
        if scheme[1].lower() == "file":
            raise InputError(f"{label}: file:// addresses are not read; pass the path itself")
        raise InputError(f"{label}: is an address, not a path; download the file first")
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


def read_bytes(source: str | Path, *, allow_remote: bool, limits: MediaLimits, label: str) -> bytes:
    """Encoded bytes of a path, a ``data:`` URI or, with ``allow_remote``, an http(s) address.

    No address is filtered by where it points: a server that takes addresses from strangers must
    keep them off its own network itself.

    Raises:
        InputError: nothing there, not allowed, or more than ``limits.max_file_bytes``.
    """
    if isinstance(source, str):
        if source[:5].lower() == "data:":
            return _data_uri(source, limits, label)
        scheme = _SCHEME.match(source)
        if scheme and scheme[1].lower() in ("http", "https"):
            if not allow_remote:
                raise InputError(
                    f"{label}: remote media are off; pass allow_remote=True (--allow-remote) or "
                    "download the file"
                )
            return _fetch(source, limits, label)
    path = existing_file(source, label)
    limits.check_bytes(path.stat().st_size, label)
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{label}: cannot be read ({error.strerror})") from error


def _data_uri(uri: str, limits: MediaLimits, label: str) -> bytes:
    header, comma, body = uri.partition(",")
    if not comma:
        raise InputError(f"{label}: has no comma; the form is data:image/png;base64,...")
    limits.check_bytes(len(body) * 3 // 4, label)
    if not header.lower().endswith(";base64"):
        return urllib.parse.unquote_to_bytes(body)
    try:
        return base64.b64decode(urllib.parse.unquote_to_bytes(body), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"{label}: the base64 text is damaged ({error})") from error


def _opener() -> urllib.request.OpenerDirector:
    # Only http and https have a handler, so that no redirect can lead to a local file or to ftp.
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.UnknownHandler,
    ):
        opener.add_handler(handler())
    return opener


def _fetch(url: str, limits: MediaLimits, label: str) -> bytes:
    deadline = time.monotonic() + limits.remote_timeout_s
    parts = bytearray()
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "oscar_mm"})
        with _opener().open(request, timeout=limits.remote_timeout_s) as answer:
            kind = answer.headers.get_content_type()
            if kind.startswith(("text/", "application/json")):
                raise InputError(f"{label}: the server answered {kind}, not a media file")
            announced = answer.headers.get("Content-Length", "")
            if announced.isdecimal():
                limits.check_bytes(int(announced), label)
            while chunk := answer.read1(_CHUNK):
                parts += chunk
                limits.check_bytes(len(parts), label)
                if time.monotonic() > deadline:
                    raise TimeoutError
            if announced.isdecimal() and len(parts) != int(announced):
                raise InputError(
                    f"{label}: the connection broke after {len(parts):,} of {announced} bytes"
                )
    except InputError:
        raise
    except urllib.error.HTTPError as error:
        raise InputError(f"{label}: the server answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            raise InputError(
                f"{label}: no full answer in {limits.remote_timeout_s:g} s; try again or raise "
                "MediaLimits.remote_timeout_s"
            ) from error
        raise InputError(f"{label}: cannot be fetched ({reason})") from error
    return bytes(parts)
