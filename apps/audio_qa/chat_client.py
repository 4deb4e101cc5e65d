"""ChatClient: request chat completions from an OpenAI server, and retry transient failures."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import httpx

from oscar_mm.errors import InputError

TRIES = 8
"""Maximum number of failed tries of a request; replies that the server is busy do not count."""
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_PATIENCE_S = 900.0
"""Time after which a failed request is no longer retried, in seconds."""
_TIMEOUT = httpx.Timeout(600.0, connect=10.0, pool=None)
_PASSING = frozenset({408, 409, 425, 429})
"""HTTP status codes of transient failures, in addition to all 5xx codes."""
_PIECE = 1 << 20
"""Bytes of a body to pass to the connection at a time; kept small because the connection copies
pending bytes."""
_LONGEST_MESSAGE = 500


class ServerLost(InputError):
    """Error raised when the server cannot be reached or refuses the API key."""


@dataclass(frozen=True)
class Reply:
    """Chat completion returned by a server.

    Attributes:
        text: content of the message.
        finish_reason: reason why the answer ended: "stop", "length", ...
        tokens: total number of tokens of prompt and answer; 0 if the server does not report it.
    """

    text: str
    finish_reason: str
    tokens: int


class ChatClient:
    """Client of an OpenAI server; use it in an ``async with`` statement.

    Args:
        url: base URL to which the API's paths are appended, such as "http://127.0.0.1:8000/v1".
        api_key: API key for the server, or None.
        connections: maximum number of concurrent requests.
    """

    def __init__(self, url: str, api_key: str | None = None, connections: int = 1) -> None:
        self.url = url
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=None if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=_TIMEOUT,
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            mounts={"all://127.0.0.1": None},  # never through a proxy
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def model(self, wanted: str | None) -> str:
        """Return the name of the server's model to use.

        Args:
            wanted: name given by the user; None selects the server's only model.

        Raises:
            InputError: if the server cannot be reached, refuses the request, does not have the
                model, or has several models although ``wanted`` is None.
        """
        try:
            response = await self._http.get("models")
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise ServerLost(f"{self.url}: cannot be reached ({_described(error)})") from None
        if response.status_code == httpx.codes.NOT_FOUND and wanted is not None:
            return wanted  # Some servers do not list their models.
        if response.is_error:
            raise ServerLost(f"{self.url}: {_refusal(response)}")
        try:
            names = [str(entry["id"]) for entry in response.json()["data"]]
        except (ValueError, LookupError, TypeError):
            raise InputError(
                f"{self.url}: not an OpenAI-compatible server, because its response to /models is "
                "not a list of models"
            ) from None
        if wanted is None and len(names) == 1:
            return names[0]
        if wanted not in names:
            which = "--model must name one" if wanted is None else f"--model {wanted} is not one"
            raise InputError(f"{self.url}: {which} of {', '.join(names) or 'no models at all'}")
        return wanted

    async def complete(self, body: Sequence[bytes]) -> Reply:
        """Send a request, with a limited number of retries, and return the reply.

        Args:
            body: parts of the JSON body, which are separate so that requests can share parts.

        Raises:
            InputError: if the server refuses the request, or all tries fail.
            ServerLost: if the server no longer answers, or refuses the key.
        """
        start, problem, failures = time.monotonic(), "", 0
        for attempt in itertools.count():
            pause, busy = 0.0, False
            try:
                response = await self._post(body)
            except httpx.TransportError as error:
                problem = f"the connection failed ({_described(error)})"
            else:
                if response.is_success:
                    return _reply(response)
                problem, status = _refusal(response), response.status_code
                if status == httpx.codes.UNAUTHORIZED:
                    raise ServerLost(f"{self.url}: {problem}")
                if status < 500 and status not in _PASSING:
                    raise InputError(problem)
                pause = _retry_after(response)
                busy = status == httpx.codes.TOO_MANY_REQUESTS
            failures += not busy
            seconds = time.monotonic() - start
            if failures == TRIES or seconds > _PATIENCE_S:
                break
            backoff = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(attempt, TRIES))
            await asyncio.sleep(max(pause, backoff * random.uniform(0.5, 1.0)))
        if not await self._answers():
            raise ServerLost(f"{self.url}: stopped responding: {problem}")
        raise InputError(f"{problem}; tried {attempt + 1} times in {seconds:.0f} s")

    async def _post(self, body: Sequence[bytes]) -> httpx.Response:
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(sum(map(len, body))),
        }
        return await self._http.post("chat/completions", content=_pieces(body), headers=headers)

    async def _answers(self) -> bool:
        """Return whether the server answers any request."""
        try:
            return (await self._http.get("models")).status_code < 500
        except httpx.TransportError:
            return False


async def _pieces(body: Sequence[bytes]) -> AsyncIterator[bytes]:
    for part in body:
        for start in range(0, len(part), _PIECE):
            yield part[start : start + _PIECE]


def _reply(response: httpx.Response) -> Reply:
    try:
        content = response.json()
        choice = content["choices"][0]
        usage = content.get("usage") or {}
        return Reply(
            text=str(choice["message"].get("content") or ""),
            finish_reason=str(choice.get("finish_reason") or "stop"),
            tokens=sum(int(usage.get(f"{kind}_tokens") or 0) for kind in ("prompt", "completion")),
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        raise InputError("the server's response is not a chat completion; check its log") from None


def _refusal(response: httpx.Response) -> str:
    """Describe an error response in one line."""
    try:
        content: Any = response.json()
        about = content.get("error", content)
        message = about if isinstance(about, str) else about["message"]
    except (ValueError, LookupError, TypeError, AttributeError):
        message = response.text or response.reason_phrase
    line = " ".join(str(message).split())[:_LONGEST_MESSAGE]
    return f"the server answered {response.status_code}: {line}"


def _retry_after(response: httpx.Response) -> float:
    """Return how many seconds the server asks to wait, up to a limit; 0 if it does not say."""
    try:
        return min(_LONGEST_PAUSE_S, max(0.0, float(response.headers.get("Retry-After", 0))))
    except ValueError:  # a date
        return 0.0


def _described(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
