"""RealtimeResponses: the answers of a realtime session, from a request to its last event."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from anyio.to_thread import run_sync

from oscar_mm.apps.serve.completed import CompletedAnswer
from oscar_mm.apps.serve.fair_queue import Slot, token_cost
from oscar_mm.apps.serve.field_error import FieldError
from oscar_mm.apps.serve.metrics import AnswerTimes
from oscar_mm.apps.serve.realtime_events import (
    RATE,
    ResponseCancel,
    ResponseCreate,
    ResponseFields,
    ToolChoice,
)
from oscar_mm.apps.serve.realtime_items import (
    Entry,
    RealtimeItems,
    call_item,
    message_item,
    new_id,
)
from oscar_mm.apps.serve.realtime_tasks import RealtimeTasks
from oscar_mm.apps.serve.refusals import ClientGone, Refusal, as_refusals
from oscar_mm.apps.serve.responses_body import function_tool, named_choice
from oscar_mm.apps.serve.spoken import pcm16
from oscar_mm.apps.serve.tools import offer_of
from oscar_mm.chat.conversation import ChatEngine
from oscar_mm.engine.answer import Answer, AnswerStream, Reasoning
from oscar_mm.engine.async_pieces import AsyncPieces
from oscar_mm.engine.speech import Speech
from oscar_mm.errors import Cancelled, InputError, MemoryBusy
from oscar_mm.tool_parsers.calls import ToolCallDelta
from oscar_mm.tool_parsers.offer import ToolOffer
from oscar_mm.tool_parsers.parser import Piece

if TYPE_CHECKING:
    from oscar_mm.apps.serve.service import Service


_MAX_TOOLS = 1 << 18
"""Maximum number of characters of a session's tools as JSON."""


@dataclass(eq=False)
class Response:
    """An answer from its request to its last event.

    Attributes:
        fields: settings of this answer.
        speaks: whether it is spoken.
        tools: tools that it may call.
        entry: item of its text and speech.
        cut: future that is done when the answer is to end early.
        done: future that is done after the last event.
        id: id of the response.
        reason: why it is cut, in the API's words.
        asked: items that it answers.
        output: its items so far: perhaps ``entry``, and its calls.
        calls: items of its calls, in order.
        text: the text so far.
        samples: number of samples of speech so far.
    """

    fields: ResponseFields
    speaks: bool
    tools: ToolOffer | None
    entry: Entry
    cut: asyncio.Future[None]
    done: asyncio.Future[None]
    id: str = field(default_factory=lambda: f"resp_{uuid4().hex}")
    reason: str = "client_cancelled"
    asked: list[Entry] = field(default_factory=list)
    output: list[Entry] = field(default_factory=list)
    calls: list[Entry] = field(default_factory=list)
    text: str = ""
    samples: int = 0

    def place(self, entry: Entry) -> dict[str, Any]:
        """Return the fields of events about one of its items."""
        index = self.output.index(entry)
        return {"response_id": self.id, "item_id": entry.id, "output_index": index}


class RealtimeResponses:
    """Answers of one session, one at a time.

    Args:
        service: service of the server.
        client: names that identify the client; see ``Request``.
        tasks: tasks of the session.
        items: items of the session.
        settings: settings of the session, which may change.

    Attributes:
        active: the answer that was asked for and has not ended; None if there is none.
        tools: tools that answers may call, unless they make a choice of their own.
    """

    def __init__(
        self,
        service: Service,
        client: tuple[str, ...],
        tasks: RealtimeTasks,
        items: RealtimeItems,
        settings: dict[str, Any],
    ) -> None:
        self._service, self._client, self._tasks = service, client, tasks
        self._items, self._settings = items, settings
        self.active: Response | None = None
        self.tools: ToolOffer | None = None

    def check_modalities(self, wanted: Sequence[str], field: str) -> None:
        """Refuse speech of a model that does not speak.

        Raises:
            FieldError: if speech is wanted of such a model.
        """
        if "audio" in wanted and self._settings["audio"]["output"].get("voice") is None:
            raise FieldError(
                'this model answers in text only: use ["text"], or serve a checkpoint with a '
                "talker, such as Qwen/Qwen3-Omni-30B-A3B-Instruct",
                field,
            )

    def ask(
        self,
        fields: ResponseFields,
        event: ResponseCreate | None = None,
        tools: ToolOffer | None = None,
    ) -> None:
        """Queue an answer, which begins after all tasks that were queued before.

        Args:
            fields: settings of the answer.
            event: event that asks for it; None if none does.
            tools: see ``offer``; None for those of the session.

        Raises:
            Refusal: if another answer is active.
            FieldError: if a field is wrong.
        """
        if (active := self.active) is not None:
            raise Refusal(
                400,
                f"the response {active.id} is in progress: wait until it is done, or cancel it",
                code="conversation_already_has_active_response",
            )
        wanted = fields.output_modalities or self._settings["output_modalities"]
        self.check_modalities(wanted, "response.output_modalities")
        output = None if fields.audio is None else fields.audio.output
        if output is not None and output.voice is not None:
            raise FieldError(
                "can only be set by session.update: leave it out", "response.audio.output.voice"
            )
        loop = asyncio.get_running_loop()
        entry = Entry(message_item(new_id(), "assistant", [], "in_progress"))
        cut, done = loop.create_future(), loop.create_future()
        offer = self.tools if tools is None else tools
        self.active = Response(fields, "audio" in wanted, offer, entry, cut, done)
        self._tasks.enqueue(partial(self._answer, self.active), event)

    def offer(self, choice: ToolChoice) -> ToolOffer | None:
        """Return the session's tools with the choice of an answer.

        Raises:
            FieldError: if the choice is not supported.
        """
        tools, usual = self._settings["tools"], self._settings["tool_choice"]
        if choice != usual and tools and "none" in (choice, usual):
            raise FieldError(
                'only session.update can change it to or from "none": leave it out',
                "response.tool_choice",
            )
        place, ignore = "response.tool_choice", self._service.limits.ignore_tools
        return realtime_offer(self._items.chat.pipe, tools, choice, place, ignore_tools=ignore)

    def cancel(self, event: ResponseCancel) -> None:
        """End the active answer.

        Raises:
            Refusal: if it is not that of the event.
        """
        if self.active is None or event.response_id not in (None, self.active.id):
            message = "there is no such active response"
            raise Refusal(400, message, code="response_cancel_not_active")
        self.cut("client_cancelled")

    def cut(self, reason: str) -> None:
        """End the active answer, if there is one."""
        response = self.active
        if response is not None and not response.cut.done():
            response.reason = reason
            response.cut.set_result(None)
            self._items.chat.stop()

    async def _answer(self, response: Response) -> None:
        """Begin an answer; another task sends its pieces."""
        if self._tasks.gone.done() and self.active is response:
            self.cut(response.reason)
        self._items.answering, response.asked = response.done, [*self._items.unanswered]
        arrival = perf_counter()
        await self._tasks.send_event(
            "response.created", response=self._fields(response, "in_progress")
        )
        slot: Slot | None = None
        try:
            [slot] = await self._service.queue.take(self._client, response.cut)
            self._service.metrics.running.inc()
            with as_refusals():
                stream, pieces, first = await self._first_piece(response)
        except BaseException as error:
            if slot is not None:
                self._release(slot)
            await self._fail(response, error)
            if not isinstance(error, Refusal):
                raise
            return
        times = AnswerTimes(self._service.metrics, arrival)
        self._tasks.run(self._deliver(response, slot, stream, pieces, first, times))

    async def _first_piece(
        self, response: Response
    ) -> tuple[AnswerStream, AsyncPieces[Piece | Speech], Piece | Speech | None]:
        """Read the question, and return the stream of the answer with its first piece."""
        deadline = perf_counter() + self._service.limits.memory_wait_s
        queue, conversations = self._service.queue, self._service.conversations
        while True:
            try:
                stream = await self._tasks.in_thread(partial(self._stream, response))
                if response.cut.done():
                    self._items.chat.stop()
                pieces = stream.async_spoken_pieces()
                return stream, pieces, await anext(pieces, None)
            except Cancelled:
                raise ClientGone from None
            except MemoryBusy:
                if (left := deadline - perf_counter()) <= 0:
                    raise
                if not await run_sync(conversations.give_way):
                    await queue.wait_for_memory(response.cut, left)

    def _stream(self, response: Response) -> AnswerStream:
        options: dict[str, Any] = {}
        if (longest := self._longest(response)) != "inf":
            options["max_new_tokens"] = longest
        temperature = response.fields.temperature
        temperature = self._settings.get("temperature") if temperature is None else temperature
        if temperature is not None:
            options["temperature"] = temperature
        self._service.bound_answer(options)
        return self._items.stream(options, response.tools, speak=response.speaks)

    def _longest(self, response: Response) -> int | str:
        return response.fields.max_output_tokens or self._settings["max_output_tokens"]

    async def _deliver(
        self,
        response: Response,
        slot: Slot,
        stream: AnswerStream,
        pieces: AsyncPieces[Piece | Speech],
        first: Piece | Speech | None,
        times: AnswerTimes,
    ) -> None:
        """Send the pieces of an answer, then its last events."""
        try:
            with as_refusals():
                if first is not None:
                    await self._send_piece(response, first, times)
                async for piece in pieces:
                    await self._send_piece(response, piece, times)
                await self._finish(response, slot, stream.result, times)
        except Refusal as error:
            await self._fail(response, error)
        finally:
            pieces.close()
            self._release(slot)

    def _release(self, slot: Slot) -> None:
        self._service.metrics.running.dec()
        self._service.queue.release(slot)

    async def _open(self, response: Response, entry: Entry) -> None:
        """Begin an item of an answer."""
        response.output.append(entry)
        place = {"response_id": response.id, "output_index": len(response.output) - 1}
        await self._tasks.send_event("response.output_item.added", item=entry.item, **place)
        await self._items.add(entry, done=False)

    async def _open_message(self, response: Response) -> None:
        """Begin the item of text and speech, unless it has begun."""
        if response.entry in response.output:
            return
        await self._open(response, response.entry)
        kind = "audio" if response.speaks else "text"
        part = {"type": kind, "transcript" if response.speaks else "text": ""}
        await self._send_part_event(response, "response.content_part.added", part=part)

    async def _send_piece(
        self, response: Response, piece: Piece | Speech, times: AnswerTimes
    ) -> None:
        if response.cut.done() or isinstance(piece, Reasoning):
            return
        if isinstance(piece, ToolCallDelta):
            times.note()
            await self._send_call(response, piece)
            return
        await self._open_message(response)
        if isinstance(piece, Speech):
            response.samples += len(piece.samples)
            delta = base64.b64encode(pcm16(piece.samples)).decode()
            await self._send_part_event(response, "response.output_audio.delta", delta=delta)
            return
        times.note()
        response.text += piece
        kind = "audio_transcript" if response.speaks else "text"
        await self._send_part_event(response, f"response.output_{kind}.delta", delta=piece)

    async def _send_call(self, response: Response, piece: ToolCallDelta) -> None:
        if piece.id is not None:
            call = {"call_id": piece.id, "name": piece.name, "arguments": ""}
            response.calls.append(Entry(call_item(new_id()) | call))
            await self._open(response, response.calls[-1])
        entry = response.calls[piece.index]
        if piece.arguments:
            kind, call_id = "response.function_call_arguments.delta", entry.item["call_id"]
            about = response.place(entry) | {"call_id": call_id, "delta": piece.arguments}
            await self._tasks.send_event(kind, **about)

    async def _send_part_event(self, response: Response, kind: str, **fields: Any) -> None:
        place = response.place(response.entry)
        await self._tasks.send_event(kind, **place, content_index=0, **fields)

    async def _finish(
        self, response: Response, slot: Slot, answer: Answer, times: AnswerTimes
    ) -> None:
        """Send the last events of an answer that has become a turn of the chat."""
        entry, turn = response.entry, self._items.chat.turns[-1]
        if not response.output:
            await self._open_message(response)
        self._items.answered(response.asked, response.output)
        entry.tokens = len(answer.token_ids)
        entry.speech_ms = response.samples * 1000 // RATE
        if answer.speech is not None and len(answer.speech):
            entry.frames = answer.speech_tokens * response.samples / len(answer.speech)
        was_cut = response.cut.done()
        entry.is_complete = not was_cut
        completed = CompletedAnswer(answer, turn.start, turn.start + answer.prompt_tokens)
        slot.cost = token_cost(answer.prompt_tokens, completed.tokens)
        times.end(completed)
        status = "incomplete" if answer.finish_reason == "length" else "completed"
        status = "cancelled" if was_cut else status
        for one in response.output:
            one.item["status"] = "completed" if status == "completed" else "incomplete"
        if entry in response.output:
            await self._finish_message(response)
        for one, call in zip(response.calls, answer.tool_calls, strict=False):
            await self._finish_call(response, one, call.arguments)
        await self._end(response, status, usage=_usage(completed))

    async def _finish_message(self, response: Response) -> None:
        entry = response.entry
        text = {"transcript" if response.speaks else "text": response.text}
        kind = "output_audio" if response.speaks else "output_text"
        entry.item["content"] = [{"type": kind, **text}]
        if response.cut.done() and response.speaks:
            # What was not sent was not heard.
            await self._items.shorten(entry, entry.tokens_within(entry.speech_ms))
        if response.speaks:
            await self._send_part_event(response, "response.output_audio.done")
            await self._send_part_event(response, "response.output_audio_transcript.done", **text)
        else:
            await self._send_part_event(response, "response.output_text.done", **text)
        part = {"type": "audio" if response.speaks else "text", **text}
        await self._send_part_event(response, "response.content_part.done", part=part)
        await self._close_item(response, entry)

    async def _finish_call(self, response: Response, entry: Entry, arguments: str) -> None:
        entry.item["arguments"] = arguments
        call = {name: entry.item[name] for name in ("call_id", "name", "arguments")}
        kind = "response.function_call_arguments.done"
        await self._tasks.send_event(kind, **response.place(entry), **call)
        await self._close_item(response, entry)

    async def _close_item(self, response: Response, entry: Entry) -> None:
        """Send the last events of an item."""
        place = {"response_id": response.id, "output_index": response.output.index(entry)}
        await self._tasks.send_event("response.output_item.done", item=entry.item, **place)
        await self._tasks.send_event(
            "conversation.item.done", item=entry.item, previous_item_id=None
        )

    async def _fail(self, response: Response, error: BaseException) -> None:
        """Send the last event of an answer that does not become a turn of the chat."""
        for entry in response.output:
            self._items.drop(entry)
        if response.cut.done() or isinstance(error, asyncio.CancelledError):
            await self._end(response, "cancelled")
            return
        refusal = error if isinstance(error, Refusal) else Refusal(500, "the answer failed")
        self._tasks.count(refusal)
        about = {"type": refusal.kind, "code": refusal.code, "message": str(refusal)}
        await self._end(response, "failed", error=about)

    async def _end(
        self,
        response: Response,
        status: str,
        *,
        usage: dict[str, Any] | None = None,
        error: dict[str, Any] | None = None,
    ) -> None:
        reasons = {"cancelled": response.reason, "incomplete": "max_output_tokens"}
        details = {"type": status, "reason": reasons.get(status), "error": error}
        self.active = self._items.answering = None
        if not response.done.done():
            response.done.set_result(None)
        self._tasks.enqueue(self._items.catch_up)
        details = {name: value for name, value in details.items() if value is not None}
        fields = self._fields(response, status) | {"status_details": details, "usage": usage}
        await self._tasks.send_event("response.done", response=fields)

    def _fields(self, response: Response, status: str) -> dict[str, Any]:
        return {
            "id": response.id,
            "object": "realtime.response",
            "status": status,
            "status_details": None,
            "conversation_id": self._settings["id"].replace("sess_", "conv_", 1),
            "output": [one.item for one in response.output if one.turn is not None],
            "output_modalities": ["audio"] if response.speaks else ["text"],
            "max_output_tokens": self._longest(response),
            "metadata": response.fields.metadata,
            "audio": {"output": self._settings["audio"]["output"]},
            "usage": None,
        }


def realtime_offer(
    pipe: ChatEngine,
    tools: Sequence[dict[str, Any]],
    choice: ToolChoice,
    place: str,
    *,
    ignore_tools: bool,
) -> ToolOffer | None:
    """Return the tools of a session with a tool choice; None if none may be called.

    Args:
        pipe: pipeline that answers.
        tools, choice: as in the API.
        place: field of the API that errors name if they concern all tools together.
        ignore_tools: see ``ServerLimits``.

    Raises:
        FieldError: if they are not supported, or too long.
    """
    if (length := len(json.dumps(tools))) > _MAX_TOOLS:
        raise FieldError(
            f"have {length:,} characters: send at most {_MAX_TOOLS:,}", "session.tools"
        )
    functions = [function_tool(tool, f"session.tools[{at}]") for at, tool in enumerate(tools)]
    try:
        return offer_of(pipe, functions, named_choice(choice), ignore_tools=ignore_tools)
    except InputError as error:
        raise FieldError(str(error), place) from None


def _usage(completed: CompletedAnswer) -> dict[str, Any]:
    answer, read = completed.answer, completed.prompt_tokens
    heard, seen = answer.memory.tokens["audio"], answer.memory.tokens["image"]
    spoken = answer.speech_tokens
    return {
        "total_tokens": read + completed.tokens,
        "input_tokens": read,
        "output_tokens": completed.tokens,
        "input_token_details": {
            "text_tokens": max(0, read - heard - seen),
            "audio_tokens": heard,
            "image_tokens": seen,
            "cached_tokens": completed.cached_tokens,
        },
        "output_token_details": {
            "text_tokens": completed.tokens - spoken,
            "audio_tokens": spoken,
        },
    }
