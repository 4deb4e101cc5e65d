"""EventStream: streams the answers to a request as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

from anyio.to_thread import run_sync
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from oscar_mm.apps.connections import STREAM_HEADERS
from oscar_mm.apps.serve.access_log import note_answer, note_refusal
from oscar_mm.apps.serve.answer_set import AnswerSet, Choice, merged
from oscar_mm.apps.serve.refusals import ClientGone, Refusal
from oscar_mm.apps.serve.running_answer import RunningAnswer
from oscar_mm.engine.logprobs import TokenLogprob
from oscar_mm.engine.speech import Speech
from oscar_mm.tool_parsers.parser import Piece

TRY_SEND = "oscar_mm.try_send"
"""ASGI extension: a function that sends a part of the body unless it would have to wait.

Its argument is a function that returns the part, in bytes. It returns whether the part was sent; if
not, it has not called its argument.
"""


class AnswerFormat(Protocol):
    """Formats the answers to a request for an API: as one body, or as server-sent events."""

    def whole(
        self, choices: Sequence[Choice], usage: Mapping[str, Any], /
    ) -> dict[str, Any] | str | Response:
        """Return a response that is not streamed, or only its body: JSON or plain text."""
        ...

    def begin(self, index: int, /) -> Iterator[str | bytes]:
        """Yield the events before the first piece of an answer."""
        ...

    def piece(
        self, index: int, piece: Piece, logprobs: Sequence[TokenLogprob] | None, /
    ) -> Iterator[str]:
        """Yield the events for a piece of an answer that is not speech."""
        ...

    def end(self, index: int, choice: Choice, /) -> Iterator[str | bytes]:
        """Yield the events after the last piece of an answer."""
        ...

    def close(self, usage: Mapping[str, Any], /) -> Iterator[str | bytes]:
        """Yield the events after all answers."""
        ...

    def failed(self, refusal: Refusal, /) -> Iterator[str | bytes]:
        """Yield the events for answers that cannot be completed."""
        ...

    def last(self) -> Iterator[str | bytes]:
        """Yield the final events, after the answers' slots have been freed."""
        ...


def _media_type(written: AnswerFormat) -> str:
    """Return the media type of a stream: its format's own, or that of server-sent events."""
    return getattr(written, "media_type", "text/event-stream")


@runtime_checkable
class SpokenAnswerFormat(AnswerFormat, Protocol):
    """Formats answers that may also be spoken."""

    def speech(self, index: int, speech: Speech, /) -> Iterator[str | bytes]:
        """Yield the events for a piece of speech."""
        ...


class EventStream(StreamingResponse):
    """Response that streams answers as server-sent events.

    The answers end when the stream ends, even if the stream never starts.

    Args:
        answers: answers that have started.
        written: formats the events of the answers.
        scope: ASGI scope of the request; its access-log line says how the stream ended.
    """

    def __init__(self, answers: AnswerSet, written: AnswerFormat, scope: Scope) -> None:
        note_refusal(scope, str(ClientGone()))  # Applies unless the stream ends differently.
        events = _events(answers, written, scope)
        super().__init__(events, headers=STREAM_HEADERS, media_type=_media_type(written))
        self._answers, self._written = answers, written

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, then end the answers."""
        answer, *others = self._answers.answers
        try_send = scope.get("extensions", {}).get(TRY_SEND)
        if try_send is not None and not others and answer.request.spoken is None:
            answer.try_send = partial(_try_send, try_send, self._written, answer)
        try:
            await super().__call__(scope, receive, send)
        finally:
            # The function refers to the answer: in this cycle, the answer and its chat would be
            # freed only by the garbage collector.
            answer.try_send = None
            self._answers.end()


def _try_send(
    try_send: Callable[[Callable[[], bytes]], bool], written: AnswerFormat, answer: RunningAnswer
) -> bool:
    """Send the events for pieces of the only answer; see ``RunningAnswer.try_send``."""

    def part() -> bytes:
        events: list[str] = []
        # Neither speech nor the complete answer: the task of the stream sends those.
        for piece in cast("Iterator[Piece]", answer.buffered()):
            events += written.piece(0, piece, answer.take_logprobs())
        return "".join(events).encode()

    return try_send(part)


async def _events(
    answers: AnswerSet, written: AnswerFormat, scope: Scope
) -> AsyncIterator[str | bytes]:
    streams = [_events_of(x, written, index) for index, x in enumerate(answers.answers)]
    try:
        async for event in streams[0] if len(streams) == 1 else merged(streams):
            yield event
        note_answer(scope, answers.usage)
        for event in written.close(answers.usage):
            yield event
        await asyncio.shield(answers.end())
        for event in written.last():
            yield event
    except Refusal as error:
        # The status has already been sent, because the answer has started.
        note_refusal(scope, str(error))
        answers.queue.metrics.requests.labels(str(error.status)).inc()
        for event in written.failed(error):
            yield event


async def _events_of(
    answer: RunningAnswer, written: AnswerFormat, index: int
) -> AsyncIterator[str | bytes]:
    """Yield the events of one answer."""
    for event in written.begin(index):
        yield event
    async for piece in answer.pieces():
        if not isinstance(piece, Speech):
            events = written.piece(index, piece, answer.take_logprobs())
        else:
            assert isinstance(written, SpokenAnswerFormat)
            # Encoding a piece takes up to 10 ms.
            events = await run_sync(list, written.speech(index, piece))
        for event in events:
            yield event
    for event in written.end(index, Choice(answer.completed, answer.take_logprobs())):
        yield event
