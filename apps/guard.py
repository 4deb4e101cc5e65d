"""Guard: middleware that refuses requests which a browser sends for web pages of other sites."""

from __future__ import annotations

import ipaddress

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_LOOPBACK_NAMES = ("localhost",)
_FOREIGN_SITES = ("cross-site", "same-site")
"""Values of the Sec-Fetch-Site header in requests from pages of other origins."""


def is_loopback(host: str) -> bool:
    """Return whether a host name or address, without a port, is a loopback address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() in _LOOPBACK_NAMES


class Guard:
    """Middleware that protects a server without an API key from web pages of other sites.

    Any web page can make a browser send requests, even to a server that only this machine can
    reach. The guard refuses:

    - requests with other host names in ``Host`` if the server listens only on loopback, because an
      attacker can make a site's name resolve to this machine (DNS rebinding), and the browser then
      treats the server as part of that site;
    - requests from pages of other origins, according to ``Origin`` and ``Sec-Fetch-Site``. Links to
      this server's pages still work, because the other site cannot read the response;
    - bodies other than JSON, because browsers send them across origins without a CORS preflight.

    Args:
        app: application to protect.
        host: address on which the server listens.
        uploads: suffixes of paths that accept files as multipart/form-data.
        origins: origins of the web pages that are allowed to use the server.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        uploads: tuple[str, ...] = (),
        origins: tuple[str, ...] = (),
    ) -> None:
        self.app, self.uploads, self.origins = app, uploads, origins
        self.loopback = is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request that another site may have caused, or pass it on."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is None:
            await self.app(scope, receive, send)
            return
        status, message = refusal
        scope.setdefault("state", {})["refusal"] = message  # For the access log.
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": message})
            return
        await _refusal(status, message)(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self.loopback and not is_loopback(_without_port(host)):
            return 421, "only this machine may use this server: use the host 127.0.0.1 or localhost"
        method = scope.get("method", "GET")
        follows_link = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
        allowed = headers.get("origin") in self.origins
        if not (follows_link or allowed) and _is_foreign(headers, host):
            return 403, "web pages of other sites may not use this server"
        if method == "POST" and not self._carries_json(scope["path"], headers):
            return 415, "Content-Type must be application/json"
        return None

    def _carries_json(self, path: str, headers: Headers) -> bool:
        if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
            return True
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        return kind == "application/json" or (
            kind == "multipart/form-data" and path.endswith(self.uploads)
        )


class OneLength:
    """Middleware that refuses requests with both Content-Length and Transfer-Encoding.

    A proxy and this server might disagree about where such a request ends and the next request
    starts (request smuggling).

    Args:
        app: application to protect.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request with both headers and close its connection, or pass the request on."""
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        if not ("content-length" in headers and "transfer-encoding" in headers):
            await self.app(scope, receive, send)
            return
        message = "a request must not have both Content-Length and Transfer-Encoding"
        scope.setdefault("state", {})["refusal"] = message
        await _refusal(400, message, {"Connection": "close"})(scope, receive, send)


def _refusal(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status, headers)


def _is_foreign(headers: Headers, host: str) -> bool:
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        return True
    return headers.get("sec-fetch-site") in _FOREIGN_SITES


def _without_port(host: str) -> str:
    """Return the host of a Host header without its port, such as ``[::1]`` for ``[::1]:80``."""
    name, colon, port = host.rpartition(":")
    return name if colon and (port.isdecimal() or not port) else host
