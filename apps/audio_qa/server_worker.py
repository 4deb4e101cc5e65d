"""ServerWorker: answer rows with a running OpenAI server, or a vLLM server that it starts."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import secrets
import sys
import threading
import time
import wave
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
from anyio.from_thread import start_blocking_portal
from PIL import Image

from oscar_mm.apps.audio_qa.chat_client import ChatClient, ServerLost
from oscar_mm.apps.audio_qa.engine import AnswerSettings, WorkerSettings, resident_peak
from oscar_mm.apps.audio_qa.results import Result, error_line, error_result, reply_result
from oscar_mm.apps.audio_qa.rows import Row, is_correct
from oscar_mm.apps.serve.vllm_server import check_installed, vllm_arguments, vllm_command
from oscar_mm.apps.server_process import OwnedServer, bind, url
from oscar_mm.errors import InputError
from oscar_mm.media import MediaLimits
from oscar_mm.media.headers import opened_image
from oscar_mm.media.media import MediaReader
from oscar_mm.media.part import media_parts
from oscar_mm.media.resample import RATE, Audio
from oscar_mm.media.source import describe, read_bytes

_READERS = 4
"""Number of threads that decode recordings."""
_MAX_BYTES = 512 << 20
"""Maximum bytes of base64 media in open requests, not counting media of the next groups."""
_HOST = "127.0.0.1"
_LONGEST_START_S = 3600.0
"""Maximum time for a server to download and load its model, in seconds."""
_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a worker that uses a running server.

    Attributes:
        url: URL of the server, with or without the path "/v1".
        settings: settings for the answers; ``policy`` is None if the server chooses it.
        model: name of the server's model; None if it has only one.
        concurrency: maximum number of concurrent requests.
        api_key: API key for the server, or None.
        allow_remote: whether to fetch media given as http(s) URLs.
        limits: limits on media.

    Raises:
        InputError: if ``url`` or ``concurrency`` cannot be used.
    """

    url: str
    settings: AnswerSettings
    model: str | None = None
    concurrency: int = 32
    api_key: str | None = field(default=None, repr=False)
    allow_remote: bool = False
    limits: MediaLimits = field(default_factory=MediaLimits)

    def __post_init__(self) -> None:
        if type(self.concurrency) is not int or self.concurrency < 1:
            raise InputError(
                f"concurrency={self.concurrency!r}: must be a whole number, at least 1"
            )
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        except ValueError:
            usable = False
        if not usable:
            raise InputError(f"--server {self.url}: must be a URL such as http://127.0.0.1:8000/v1")

    @property
    def endpoint(self) -> str:
        """Base URL of the API, to which the API's paths are appended."""
        address = self.url.rstrip("/")
        return address if urlsplit(address).path else f"{address}/v1"

    @property
    def uses_gpu(self) -> bool:
        """True if a worker uses a GPU itself."""
        return False

    def start(self) -> ServerWorker:
        """Return a worker that sends rows to the server."""
        return ServerWorker(self)


@dataclass(frozen=True)
class VllmSettings:
    """Settings of a worker that starts its own vLLM server.

    Attributes:
        model: name of a bundled model, folder or hub id.
        policy: name of the preset for vLLM's KV cache, optionally with changes.
        settings: settings for the answers.
        concurrency: maximum number of concurrent requests.
        kv_budget: KV cache size in bytes; None for all memory available to vLLM.
        allow_remote: whether to fetch media given as http(s) URLs; the server gets their bytes.
        limits: limits on media.

    Raises:
        InputError: if vLLM does not support the policy, the model does not exist, or
            ``concurrency`` cannot be used.
    """

    model: str
    policy: str
    settings: AnswerSettings
    concurrency: int = 32
    kv_budget: int | None = None
    allow_remote: bool = False
    limits: MediaLimits = field(default_factory=MediaLimits)

    uses_gpu = True
    """True, because a worker uses a GPU whenever there is one."""

    def __post_init__(self) -> None:
        self._arguments(port=0)
        self._server_settings(port=0, key="")

    def start(self) -> ServerWorker:
        """Start a server on a free port, and return a worker that owns it.

        Raises:
            InputError: if vLLM is missing, or if its server exits or does not answer within an
                hour.
        """
        check_installed()
        [sock] = bind(_HOST, 0)
        with sock:
            port = sock.getsockname()[1]
        plan = self._server_settings(port, secrets.token_urlsafe())
        command = vllm_command(self._arguments(port), plan.api_key)
        print(f"oscar-mm: starting vLLM's server with {self.model}", file=sys.stderr)
        server = OwnedServer("vLLM's server", *command)
        try:
            with httpx.Client(
                headers={"Authorization": f"Bearer {plan.api_key}"},
                timeout=_TIMEOUT_S,
                trust_env=False,
            ) as client:
                server.wait_until(lambda: _answers(client, plan.endpoint), _LONGEST_START_S)
            return ServerWorker(plan, server)
        except BaseException:
            server.close()
            raise

    def _arguments(self, port: int) -> list[str]:
        options = {
            "max_context": "auto",  # the model's limit, or less if there is little KV memory
            **({} if self.kv_budget is None else {"kv_budget": self.kv_budget}),
            **({} if self.settings.dtype is None else {"dtype": self.settings.dtype}),
        }
        return vllm_arguments(self.model, self.policy, _HOST, port, options, has_key=True)

    def _server_settings(self, port: int, key: str) -> ServerSettings:
        return ServerSettings(
            url(_HOST, port),
            self.settings,
            self.model,
            self.concurrency,
            key,
            self.allow_remote,
            self.limits,
        )


def _answers(client: httpx.Client, endpoint: str) -> bool:
    try:
        return client.get(f"{endpoint}/models").is_success
    except httpx.TransportError:
        return False


Plan = WorkerSettings | ServerSettings | VllmSettings
"""Settings of a worker, of any kind."""


class ServerWorker:
    """Worker that sends rows to a server, with the same interface as ``Worker``.

    Several threads can call ``run`` at once, each with up to ``plan.concurrency`` open requests.

    Args:
        plan: settings of the worker.
        owned: the server, if it was started for this worker.

    Attributes:
        model: name of the server's model.
        fingerprint: everything that determines the answers, as far as the server reports it.
        audio_seconds: total length of the recordings sent so far, in seconds; each counts once.
        kv_bytes: 0, because a server does not report the size of its KV cache.

    Raises:
        InputError: if the server cannot be reached, or does not have the model.
    """

    kv_bytes = 0

    def __init__(self, plan: ServerSettings, owned: OwnedServer | None = None) -> None:
        self.plan, self._owned = plan, owned
        with start_blocking_portal() as portal:
            self.model = portal.call(self._find_model)
        self.fingerprint = plan.settings.fingerprint(self.model)
        self._media = MediaReader(plan.limits, plan.allow_remote)
        self._begun, self.audio_seconds = time.process_time(), 0.0
        self._counting = threading.Lock()

    def run(self, groups: Iterable[list[Row]]) -> Iterator[Result]:
        """Answer groups of rows about the same media; yield results as they are ready.

        Raises:
            ServerLost: if the server no longer answers; the remaining rows get no result.
        """
        ready: SimpleQueue[Result | None] = SimpleQueue()
        since = time.perf_counter()
        # Requests run in the event loop of another thread, because the caller may have a running
        # loop, and so that requests continue while the caller writes. Leaving the block cancels
        # them.
        with start_blocking_portal() as portal:
            asked = portal.start_task_soon(self._ask_all, groups, ready)
            while (result := ready.get()) is not None:
                before, since = since, time.perf_counter()
                yield result | {"seconds": round(since - before, 4)}
            try:
                asked.result()
            except ServerLost as error:
                raise ServerLost(f"{error}{self.close()}") from None

    def heard(self, seconds: float) -> None:
        """Add the length of recordings that were sent, in seconds, to ``audio_seconds``."""
        with self._counting:
            self.audio_seconds += seconds

    def close(self) -> str:
        """Stop the worker's own server, and return an excerpt of its log for an error message."""
        return "" if self._owned is None else self._owned.close()

    @property
    def report(self) -> dict[str, Any]:
        """Return the current values of the ``Work`` fields that only this worker knows."""
        return {
            "cpu_seconds": time.process_time() - self._begun,
            "audio_seconds": self.audio_seconds,
            "kv_peak_bytes": self.kv_bytes,
            "process_peak_bytes": resident_peak(),
        }

    def _client(self) -> ChatClient:
        plan = self.plan
        return ChatClient(plan.endpoint, plan.api_key, plan.concurrency)

    async def _find_model(self) -> str:
        async with self._client() as client:
            return await client.model(self.plan.model)

    async def _ask_all(
        self, groups: Iterable[list[Row]], ready: SimpleQueue[Result | None]
    ) -> None:
        try:
            async with self._client() as client:
                await _Requests(self, client, ready).send(groups)
        finally:
            ready.put(None)

    def shown(self, rows: list[Row]) -> _Shown:
        """Return the media of a group as message parts.

        Raises:
            InputError: if a media item cannot be read or cannot be sent to a server.
        """
        row = next((row for row in rows if not row.error), Row("", ""))
        if row.videos:
            raise InputError("a server accepts recordings and images, not videos")
        limits = self.plan.limits
        limits.check_count(len(row.images) + len(row.audio))
        parts = [
            _image_part(source, self._media, f"images[{index}]")
            for index, source in enumerate(row.images)
        ]
        recordings, seconds = self._media.read(media_parts(audio=list(row.audio))), 0.0
        for recording, label in zip(recordings.audio, recordings.labels, strict=True):
            sound = wav(recording)
            limits.check_bytes(len(sound), label)
            seconds += recording.seconds
            parts.append(_part("input_audio", {"format": "wav"}, "data", b"", sound))
        return _Shown(b"".join(parts), seconds)


@dataclass
class _Shown:
    """Media of a group as message parts.

    Attributes:
        parts: JSON of the parts, each followed by a comma.
        seconds: total length of the recordings, in seconds.
        open_rows: number of rows of the group that have no result yet.
    """

    parts: bytes
    seconds: float
    open_rows: int = 0


class _Requests:
    """Requests of a run; use it only in an event loop."""

    def __init__(
        self, worker: ServerWorker, client: ChatClient, ready: SimpleQueue[Result | None]
    ) -> None:
        self._worker, self._client, self._ready = worker, client, ready
        self._slots = asyncio.Semaphore(worker.plan.concurrency)
        self._bytes, self._freed = 0, asyncio.Event()

    async def send(self, groups: Iterable[list[Row]]) -> None:
        """Send the requests of all rows.

        Raises:
            ServerLost: if the server no longer answers.
        """
        reading: deque[tuple[list[Row], asyncio.Future[_Shown]]] = deque()
        loop = asyncio.get_running_loop()
        try:
            with ThreadPoolExecutor(_READERS) as readers:
                async with asyncio.TaskGroup() as tasks:
                    for group in groups:
                        shown = loop.run_in_executor(readers, self._worker.shown, group)
                        reading.append((group, shown))
                        if len(reading) > _READERS:
                            await self._begin(tasks, *reading.popleft())
                    while reading:
                        await self._begin(tasks, *reading.popleft())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _begin(
        self, tasks: asyncio.TaskGroup, rows: list[Row], reading: asyncio.Future[_Shown]
    ) -> None:
        """Start the requests of a group.

        Wait for memory for the group's media, then start the request of each row as soon as fewer
        than the maximum number of requests are open.
        """
        for row in rows:
            if row.error:
                self._ready.put(error_result(row, row.error))
        rows = [row for row in rows if not row.error]
        try:
            shown = await reading
        except Exception as error:  # Libraries may raise any exception on a damaged file.
            for row in rows:
                self._ready.put(error_result(row, error_line(error)))
            return
        while self._bytes and self._bytes + len(shown.parts) > _MAX_BYTES:
            self._freed.clear()
            await self._freed.wait()
        self._bytes += len(shown.parts)
        self._worker.heard(shown.seconds)
        shown.open_rows = len(rows)
        for row in rows:
            await self._slots.acquire()
            tasks.create_task(self._ask(row, shown))

    async def _ask(self, row: Row, shown: _Shown) -> None:
        try:
            try:
                reply = await self._client.complete(self._body(row, shown))
                self._ready.put(reply_result(row, reply.text, reply.finish_reason, reply.tokens))
            except ServerLost:
                raise
            except Exception as error:
                self._ready.put(error_result(row, error_line(error)))
        finally:
            self._slots.release()
            shown.open_rows -= 1
            if not shown.open_rows:
                self._bytes -= len(shown.parts)
                self._freed.set()

    def _body(self, row: Row, shown: _Shown) -> list[bytes]:
        """Return the JSON of a request in three parts, without copying the media.

        Raises:
            InputError: if there are too many choices, or no choice matches the row's answer.
        """
        settings = self._worker.plan.settings
        text, _ = settings.prompt(row.question, row.choices)
        is_correct(row, "", 0 if row.choices else None)
        system = [] if settings.system is None else [{"role": "system", "content": settings.system}]
        body = {
            "model": self._worker.model,
            "temperature": 0,
            "max_tokens": settings.max_new_tokens,
            "messages": [*system, {"role": "user", "content": [{"type": "text", "text": text}]}],
        }
        before, content, after = json.dumps(body).encode().rpartition(b'[{"type": "text"')
        return [before + content[:1], shown.parts, content[1:] + after]


def wav(recording: Audio) -> bytes:
    """Encode a recording as a 16-bit WAV file, which is lossless for 16-bit sources at 16 kHz."""
    samples = np.rint(recording.samples * 2**15).clip(-(2**15), 2**15 - 1).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, RATE, len(samples), "NONE", ""))
        writer.writeframesraw(samples.tobytes())
    return file.getvalue()


def _image_part(source: str, media: MediaReader, place: str) -> bytes:
    """Return the message part for an image file, without re-encoding the image.

    Raises:
        InputError: if the file cannot be read, or is not an image.
    """
    name = describe(source, place)
    data = read_bytes(source, allow_remote=media.allow_remote, limits=media.limits, label=name)
    try:
        with opened_image(io.BytesIO(data)) as image:
            kind = Image.MIME[image.format or ""]
    except Exception:  # Parsers may raise any exception on untrusted bytes.
        raise InputError(f"{name} is not a readable image; save it as PNG, JPEG or WebP") from None
    return _part("image_url", {}, "url", f"data:{kind};base64,".encode(), data)


def _part(kind: str, fields: dict[str, str], name: str, before: bytes, data: bytes) -> bytes:
    """Return the JSON of a message part, followed by a comma.

    Args:
        kind: type of the part, which is also the name of the object with its content.
        fields: other fields of that object.
        name: name of the field whose value is ``before``, followed by ``data`` in base64.
        before: beginning of the value.
        data: bytes to encode.
    """
    part = json.dumps({"type": kind, kind: {**fields, name: "?"}}).encode()
    start, _, end = part.rpartition(b"?")
    return b"".join([start, before, base64.b64encode(data), end, b","])
