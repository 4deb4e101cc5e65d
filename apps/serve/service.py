"""Service: the request handling of `oscar-mm serve`; ``server`` defines the routes."""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

from anyio.to_thread import run_sync
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.requests import ClientDisconnect, HTTPConnection

from oscar_mm.apps.serve.access_log import note_answer
from oscar_mm.apps.serve.answer_set import AnswerSet
from oscar_mm.apps.serve.chat_writer import ChatWriter
from oscar_mm.apps.serve.clients import client_of
from oscar_mm.apps.serve.completion_writer import CompletionWriter
from oscar_mm.apps.serve.completions_body import CompletionBody
from oscar_mm.apps.serve.conversations import Conversations
from oscar_mm.apps.serve.event_stream import AnswerFormat, EventStream
from oscar_mm.apps.serve.kept_responses import KeptResponse, KeptResponses
from oscar_mm.apps.serve.known_media import KnownMedia
from oscar_mm.apps.serve.media_parts import MediaSource
from oscar_mm.apps.serve.message_writer import MessageWriter
from oscar_mm.apps.serve.messages_body import MessagesBody, Place
from oscar_mm.apps.serve.messages_body import renamed as as_in_messages
from oscar_mm.apps.serve.metrics import Metrics
from oscar_mm.apps.serve.piece_sender import PieceSender
from oscar_mm.apps.serve.protocol import (
    ApiRequest,
    Body,
    FieldError,
    check_media_options,
    checked,
    parsed,
    read_request,
)
from oscar_mm.apps.serve.refusals import (
    ClientGone,
    Refusal,
    as_refusals,
    busy,
    stopping,
)
from oscar_mm.apps.serve.request_queue import RequestQueue
from oscar_mm.apps.serve.response_writer import ResponseWriter
from oscar_mm.apps.serve.responses_body import (
    ResponsesBody,
    renamed,
    unknown_response,
    with_referenced,
)
from oscar_mm.apps.serve.speech_body import SpeechBody, SpeechWriter
from oscar_mm.apps.serve.spoken import (
    GivenAudio,
    KeptTranscripts,
    SpokenChoice,
    SpokenFormat,
    checked_speaker,
)
from oscar_mm.apps.serve.tokenizing import (
    DetokenizeBody,
    TokenizeBody,
    conversation_ids,
    text_ids,
)
from oscar_mm.apps.serve.tools import offer_of
from oscar_mm.apps.serve.transcription_writer import TranscriptionWriter
from oscar_mm.apps.serve.transcriptions_body import read_form
from oscar_mm.apps.serve.transcriptions_body import renamed as as_in_form
from oscar_mm.media.source import AllowedHosts

ParsedRequest = Body | list[ApiRequest]
"""A parsed request: a conversation, or a list of prompts."""
KEY_PROTOCOL = "openai-insecure-api-key."
"""Beginning of the WebSocket subprotocol with which web pages send their key, as with OpenAI."""
_MIN_DEFAULT_ANSWER = 1024
"""Minimum default answer length, in tokens, however many requests share the memory.

Thinking models get more."""
_READERS = 2
"""Number of threads that parse requests."""
_BODIES = 8
"""Maximum total size of all request bodies in memory, in multiples of the maximum request size."""
_CLOSING_S = 5.0
"""Maximum seconds to wait until answers that were cut short are closed."""


@dataclass(frozen=True)
class ServerLimits:
    """Limits on requests and answers.

    Attributes:
        api_key: bearer token that clients must send; None if clients need no key.
        max_request_bytes: maximum size of a request body, including base64 media.
        max_new_tokens: maximum tokens of an answer, and the default for clients that set no length.
            If None, an answer can be as long as context and memory allow, and the default is an
            equal share of the memory among ``running`` answers, but at least 1,024.
        running: maximum number of running answers, which are decoded as one batch.
        waiting: maximum number of requests in the queue; beyond it, one gets status 429.
        queue_s: maximum seconds that a request waits in the queue; None for no limit.
        trusted_proxies: addresses and networks of proxies whose X-Forwarded-For header says who
            the client is.
        conversations: maximum number of stored chats, which later requests can continue, and of
            realtime sessions to which clients can return.
        idle: maximum number of connections besides those of running and queued requests.
        head_s: maximum seconds to receive a request's head.
        body_s: maximum seconds to receive a request's body.
        memory_wait_s: maximum seconds that a request waits for memory that other answers use.
        grace_s: maximum seconds to let answers finish when the server stops.
        realtime: maximum number of realtime sessions.
        realtime_s: maximum seconds of a realtime session.
        realtime_idle_s: maximum seconds in which the client of a session sends nothing.
        realtime_kept_s: seconds in which the client of a session can return to it.
        media_hosts: hosts from which media may be fetched if the pipeline allows remote media; None
            for all hosts.
        ignore_tools: whether tools that the chat template does not support are left out of a
            request that does not require a call; otherwise the request is refused.
    """

    api_key: str | None = None
    max_request_bytes: int = 64 << 20
    max_new_tokens: int | None = None
    running: int = 64
    waiting: int = 64
    queue_s: float | None = 60.0
    trusted_proxies: tuple[str, ...] = ()
    conversations: int = 64
    idle: int = 128
    head_s: float = 10.0
    body_s: float = 60.0
    memory_wait_s: float = 30.0
    grace_s: float = 10.0
    realtime: int = 16
    realtime_s: float = 3600.0
    realtime_idle_s: float = 600.0
    realtime_kept_s: float = 3600.0
    media_hosts: AllowedHosts | None = None
    ignore_tools: bool = False


class Service:
    """Reads and answers requests.

    Args:
        conversations: stored chats, which generate the answers.
        metrics: metrics to update.
        limits: limits on requests and answers.
        names: names by which clients may request the model.

    Attributes:
        name: first of the names, used in answers to requests that do not name a model.
        hurry: event that ends the grace period of running answers.
        queue: request queue, which also limits the running answers.
        responses: stored responses, which later requests can continue.
        transcripts: transcripts of spoken answers, to which later requests can refer.
        known_media: stored media that clients can reuse by uuid.
    """

    def __init__(
        self,
        conversations: Conversations,
        metrics: Metrics,
        limits: ServerLimits,
        names: Sequence[str],
    ) -> None:
        self.conversations, self.metrics = conversations, metrics
        self.limits, self.names, self.name = limits, names, names[0]
        self.hurry = asyncio.Event()
        self.queue = RequestQueue(limits.running, limits.waiting, metrics, limits.queue_s)
        self.responses, self.transcripts = KeptResponses(), KeptTranscripts()
        self.known_media = KnownMedia()
        self._body_bytes = Counter[str]()
        """Size of all request bodies in memory, by the address of their clients."""
        # ``run_in_executor`` takes the event loop half the time of anyio's ``run_sync``.
        self._readers = ThreadPoolExecutor(_READERS, "readers")
        # A separate pool: these requests may decode media, and parsing must not wait for that.
        self._converters = ThreadPoolExecutor(_READERS, "converters")

    @property
    def media_source(self) -> MediaSource:
        """Allowed sources of media in requests, and limits on them."""
        pipe, limits = self.conversations.pipe, self.limits
        remote_bytes = limits.max_request_bytes if pipe.allow_remote else 0
        return MediaSource(pipe.limits, remote_bytes, limits.media_hosts, self.known_media)

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Serve requests within the block, and send new pieces of answers after steps."""
        sender = PieceSender(self.queue.watchers, self.queue.first_piece_watchers)
        try:
            with self.conversations.pipe.engine.keep_stepping(sender.after_step):
                yield
        finally:
            sender.close()

    def authorize(self, http: HTTPConnection) -> None:
        """Raise Refusal if the request does not contain the API key."""
        if self.limits.api_key is None:
            return
        given = http.headers.get("authorization", "").removeprefix("Bearer ")
        given = given or http.headers.get("x-api-key", "")  # from Anthropic's clients
        for protocol in http.scope.get("subprotocols", ()):  # from web pages
            if protocol.startswith(KEY_PROTOCOL):
                given = given or protocol.removeprefix(KEY_PROTOCOL)
        if not hmac.compare_digest(given.encode(), self.limits.api_key.encode()):
            raise Refusal(401, "a valid API key is needed", "authentication_error")

    def check_model(self, name: str | None) -> None:
        """Raise Refusal if the requested model is not the served one; None is accepted."""
        if name and name not in self.names:
            known = ", ".join(f"`{one}`" for one in self.names)
            message = f"The model `{name[:200]}` does not exist: this server has {known}."
            raise Refusal(404, message, code="model_not_found", field="model")

    def answering(self, name: str | None) -> str:
        """Return the model name for an answer: the requested name if valid, otherwise the first."""
        return name if name and name in self.names else self.name

    async def complete(self, http: HttpRequest) -> Response:
        """Answer a chat-completions request."""

        def read(data: bytes) -> tuple[Body, AnswerFormat]:
            body = parsed(Body, data)
            reasoning = body.include_reasoning is not False
            how: dict[str, Any] = {"echo": body.echoed, "reasoning": reasoning}
            if (spoken := self._spoken(body)) is not None:
                how["spoken"] = partial(SpokenChoice, spoken, self.transcripts)
            name = self.answering(body.model)
            return body, ChatWriter(name, self._tokenizer, usage=body.has_usage, **how)

        return await self._answer(http, read)

    async def complete_text(self, http: HttpRequest) -> Response:
        """Answer a completions request."""

        def read(data: bytes) -> tuple[list[ApiRequest], AnswerFormat]:
            body, pipe = parsed(CompletionBody, data), self.conversations.pipe
            prompts = body.prompts(pipe, self.limits.running)
            name = self.answering(body.model)
            written = CompletionWriter(body, prompts, name, self._tokenizer)
            return body.requests(prompts), written

        return await self._answer(http, read)

    async def tokenize(self, http: HttpRequest) -> Response:
        """Answer a /tokenize request."""

        def read(data: bytes) -> Response:
            asked = parsed(TokenizeBody, data)
            self.check_model(asked.model)
            pipe = self.conversations.pipe
            if asked.prompt is not None:
                return JSONResponse(asked.answer(pipe, text_ids(pipe, asked)))
            request = self._chat_request(parsed(Body, data))
            return JSONResponse(asked.answer(pipe, conversation_ids(pipe, request)))

        return await self._convert(http, read)

    async def detokenize(self, http: HttpRequest) -> Response:
        """Answer a /detokenize request."""

        def read(data: bytes) -> Response:
            asked = parsed(DetokenizeBody, data)
            self.check_model(asked.model)
            return JSONResponse({"prompt": asked.text(self.conversations.pipe)})

        return await self._convert(http, read)

    async def _convert(self, http: HttpRequest, read: Callable[[bytes], Response]) -> Response:
        """Answer a request without running the model."""
        with self._memory_for_body(http) as add:
            data = await self._body(http, add)
            with as_refusals():
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._converters, read, data)

    @property
    def _tokenizer(self) -> Any:
        return self.conversations.pipe.processor.tokenizer

    async def respond(self, http: HttpRequest) -> Response:
        """Answer a request of the Responses API."""

        def read(data: bytes) -> tuple[Body, AnswerFormat]:
            asked = parsed(ResponsesBody, data)
            past, size = self._past(asked.previous_response_id)
            asked.input = with_referenced(asked.input, self.responses.item)
            fields = asked.chat_body(past)
            places[:] = asked.places(len(past))
            messages = fields["messages"][bool(asked.instructions) :]

            def keep(response: dict[str, Any], answer: dict[str, Any]) -> None:
                self.responses.add(KeptResponse(response, [*messages, answer], size + len(data)))

            kept = None if asked.store is False else keep
            body = checked(fields)
            name = self.answering(body.model)
            thinks = self.conversations.pipe.family.think_tokens
            return body, ResponseWriter(asked, name, self._tokenizer, thinks, kept)

        places: list[str] = []
        try:
            return await self._answer(http, read)
        except Refusal as refusal:
            raise renamed(refusal, places) from None

    async def message(self, http: HttpRequest) -> Response:
        """Answer a request of Anthropic's Messages API."""

        def read(data: bytes) -> tuple[Body, AnswerFormat]:
            fields, places[:] = parsed(MessagesBody, data).chat_body()
            body = checked(fields)
            return body, MessageWriter(self.answering(body.model))

        places: list[Place] = []
        try:
            return await self._answer(http, read)
        except Refusal as refusal:
            raise as_in_messages(refusal, places) from None

    async def count_message(self, http: HttpRequest) -> Response:
        """Answer a count_tokens request of Anthropic's Messages API."""

        def read(data: bytes) -> Response:
            fields, places[:] = parsed(MessagesBody, data).chat_body()
            body = checked(fields)
            self.check_model(body.model)
            ids = conversation_ids(self.conversations.pipe, self._chat_request(body))
            return JSONResponse({"input_tokens": len(ids)})

        places: list[Place] = []
        try:
            return await self._convert(http, read)
        except Refusal as refusal:
            raise as_in_messages(refusal, places) from None

    async def transcribe(self, http: HttpRequest, *, translate: bool = False) -> Response:
        """Answer a request of OpenAI's audio API."""
        kind = http.headers.get("content-type", "")

        def read(data: bytes) -> tuple[Body, AnswerFormat]:
            form = read_form(data, kind)
            written = TranscriptionWriter(plain=form.response_format == "text")
            return checked(form.chat_body(translate=translate)), written

        try:
            return await self._answer(http, read)
        except Refusal as refusal:
            raise as_in_form(refusal) from None

    async def speak(self, http: HttpRequest) -> Response:
        """Answer a request of OpenAI's speech API."""

        def read(data: bytes) -> tuple[list[ApiRequest], AnswerFormat]:
            body = parsed(SpeechBody, data)
            return [body.request(self.conversations.pipe)], SpeechWriter(body)

        return await self._answer(http, read)

    def _past(self, previous: str | None) -> tuple[Sequence[dict[str, Any]], int]:
        """Return the messages up to a stored response, and the bytes of their requests."""
        if previous is None:
            return (), 0
        if (kept := self.responses.get(previous)) is None:
            raise unknown_response(previous, "previous_response_id")
        return kept.messages, kept.size

    async def _answer(
        self, http: HttpRequest, read: Callable[[bytes], tuple[ParsedRequest, AnswerFormat]]
    ) -> Response:
        """Read a request, wait for a free slot, then answer with one body or a stream."""
        arrival = perf_counter()
        with self._memory_for_body(http) as add:
            requests, written = await self._requests(await self._body(http, add), read)
            gone = asyncio.ensure_future(_disconnect(http))
            client = client_of(http.client, requests[0].user)
            try:
                count = sum(request.count for request in requests)
                slots = await self.queue.take(client, gone, count)
            except BaseException:
                gone.cancel()
                raise
        answers = AnswerSet(self.queue, slots, self.conversations, requests, gone, arrival)
        try:
            await answers.begin(self.limits.memory_wait_s)
            if requests[0].stream:
                # A streaming response detects on its own when its client disconnects.
                answers.outlive_client()
                return EventStream(answers, written, http.scope)
            await answers.complete()
        except BaseException:
            answers.end()
            raise
        finally:
            gone.cancel()
        await asyncio.shield(answers.end())
        note_answer(http.scope, answers.usage)
        how = partial(written.whole, answers.complete_choices(), answers.usage)
        # Encoding speech takes up to seconds.
        whole = how() if requests[0].spoken is None else await run_sync(how)
        if isinstance(whole, Response):
            return whole
        return PlainTextResponse(whole) if isinstance(whole, str) else JSONResponse(whole)

    async def stop(self) -> None:
        """Accept no more requests, and cut off running answers after the grace period."""
        self.queue.stopping.set_result(None)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.hurry.wait(), self.limits.grace_s)
        self.queue.cut.set_result(None)

    async def close(self) -> None:
        """Close all chats; give up if the model does not release the chats in time."""
        closing = [*self.queue.closing, asyncio.ensure_future(run_sync(self.conversations.close))]
        await asyncio.wait(closing, timeout=_CLOSING_S)

    @contextmanager
    def _memory_for_body(self, http: HttpRequest) -> Iterator[Callable[[int], None]]:
        """Count the bytes of a request body toward the limit on all bodies, until the block of the
        ``with`` statement ends.

        Yields:
            a function that counts more bytes, and raises Refusal if the client's bodies take more
            of the limit than all bodies leave free, so that there is room for other clients.
        """
        own, (address, _) = 0, client_of(http.client, "")

        def add(count: int) -> None:
            nonlocal own
            own += count
            self._body_bytes[address] += count
            most = _BODIES * self.limits.max_request_bytes - self._body_bytes.total()
            if self._body_bytes[address] > most:
                raise busy("the server is processing too many large requests", "bodies")

        try:
            yield add
        finally:
            self._body_bytes[address] -= own
            self._body_bytes = +self._body_bytes

    async def _body(self, http: HttpRequest, add: Callable[[int], None]) -> bytes:
        """Read the body of a request; refuse a body that is too large or arrives too slowly."""
        limit, seconds = self.limits.max_request_bytes, self.limits.body_s
        end = self.queue.stopping
        too_large = Refusal(413, f"the request is larger than the limit of {limit:,} bytes")
        announced = http.headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:19]) > limit:
            raise too_large

        async def collect() -> bytes:
            parts, size = [], 0
            async for part in http.stream():
                add(len(part))
                parts.append(part)
                if (size := size + len(part)) > limit:
                    raise too_large
            return b"".join(parts)

        reading = asyncio.ensure_future(collect())
        try:
            await asyncio.wait((reading, end), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
            if end.done():
                raise stopping()
            raise Refusal(408, f"the request did not arrive within {seconds:g} s")
        except ClientDisconnect:
            raise ClientGone from None
        finally:
            reading.cancel()

    async def _requests(
        self, data: bytes, read: Callable[[bytes], tuple[ParsedRequest, AnswerFormat]]
    ) -> tuple[list[ApiRequest], AnswerFormat]:
        """Parse and validate a request, which may have several prompts."""
        with as_refusals():
            loop = asyncio.get_running_loop()
            parsing = loop.run_in_executor(self._readers, self._parse, data, read)
            requests, written = await parsing
        self.check_model(requests[0].model)
        return requests, written

    def _parse(
        self, data: bytes, read: Callable[[bytes], tuple[ParsedRequest, AnswerFormat]]
    ) -> tuple[list[ApiRequest], AnswerFormat]:
        asked, written = read(data)
        return self.requests_of(asked), written

    def requests_of(self, asked: ParsedRequest) -> list[ApiRequest]:
        """Validate a parsed request, bound its answers, and return a request for each prompt.

        Raises:
            InputError: if it is invalid; see ``as_refusals``.
        """
        requests = asked if isinstance(asked, list) else [self._chat_request(asked)]
        if (name := requests[0].model) in self.conversations.pipe.adapters:
            requests = [replace(request, adapter=name) for request in requests]
        for request in requests:
            self.bound_answer(request.sampling)
            if request.n > self.limits.running:
                raise FieldError(f"must be at most {self.limits.running} on this server", "n")
            # Compiling a grammar takes long, so it is done once the request has its slot.
            self.conversations.pipe.sampling(request.sampling | {"grammar": None}, ())
        return requests

    def _chat_request(self, body: Body) -> ApiRequest:
        """Decode and validate a conversation."""
        pipe = self.conversations.pipe
        check_media_options(body, pipe.family)
        template = pipe.family.template(body.template_fields)
        request = read_request(
            body, self.media_source, template, self._spoken(body), self.transcripts
        )
        parallel = body.parallel_tool_calls is not False
        ignore = self.limits.ignore_tools
        offer = offer_of(pipe, body.tools, body.tool_choice, parallel=parallel, ignore_tools=ignore)
        request = replace(request, tools=offer)
        if request.spoken is not None:
            pipe.check_speech(request.spoken.speaker, tools=offer)
        messages = [*request.messages()]
        texts = [text for one in messages for text in (*one.texts, *one.labels)]
        pipe.admission.check_characters("messages", sum(map(len, texts)))
        for message in messages:
            pipe.admission.check_message(message)
        return request

    def _spoken(self, body: Body) -> SpokenFormat | None:
        """Return voice and format of a spoken answer, after checks; None for an answer in text."""
        if not body.speaks:
            return None
        audio, pipe = body.audio or GivenAudio(), self.conversations.pipe
        names = {"field": "audio.voice", "asks": "modalities"}
        speaker = checked_speaker(pipe, audio.voice, **names)
        return SpokenFormat(speaker, audio.format or ("pcm16" if body.stream else "wav"))

    def bound_answer(self, sampling: dict[str, Any]) -> None:
        """Set the maximum answer length, which the chat later lowers to what fits in memory."""
        pipe, limit = self.conversations.pipe, self.limits.max_new_tokens
        asked = sampling.get("max_new_tokens")
        if asked is None:
            asked = limit or self._default_answer()
        sampling["max_new_tokens"] = min(asked, limit or asked, pipe.max_context)

    def _default_answer(self) -> int:
        """Return the default answer length in tokens; memory is reserved for this length."""
        pipe = self.conversations.pipe
        minimum = pipe.longest_answer(_MIN_DEFAULT_ANSWER)
        return max(minimum, pipe.admission.fair_answer(self.limits.running))


async def _disconnect(http: HttpRequest) -> None:
    """Wait until the client disconnects; call this after the body has been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
