"""RunningAnswer: a server's answer while the model generates it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from itertools import groupby
from time import perf_counter
from typing import cast

from anyio.to_thread import run_sync

from oscar_mm.apps.serve.completed import CompletedAnswer
from oscar_mm.apps.serve.conversations import Conversations
from oscar_mm.apps.serve.fair_queue import Slot, token_cost
from oscar_mm.apps.serve.metrics import AnswerTimes
from oscar_mm.apps.serve.protocol import ApiRequest
from oscar_mm.apps.serve.refusals import ClientGone, as_refusals, stopping
from oscar_mm.apps.serve.request_queue import RequestQueue
from oscar_mm.apps.serve.whole_prompts import WholePrompt
from oscar_mm.chat.chat import Chat
from oscar_mm.engine.logprobs import TokenLogprob
from oscar_mm.engine.request import Request
from oscar_mm.engine.speech import Speech
from oscar_mm.errors import MemoryBusy
from oscar_mm.tool_parsers.calls import ToolCallDelta
from oscar_mm.tool_parsers.parser import Piece, merged


class RunningAnswer:
    """An answer that is being generated, with a buffer of pieces not yet consumed.

    A thread reads the request and submits it to the engine; another thread completes the answer.
    No thread is needed in between: new pieces are collected after steps.

    Args:
        queue: request queue, to which the answer returns its slot.
        slot: the slot.
        conversations: stored chats, one of which generates the answer.
        request: the request.
        gone: future that is done when the client has disconnected.
        arrival: ``perf_counter()`` when the request arrived.

    Attributes:
        try_send: function that sends the ``buffered`` pieces unless the client is slow, and returns
            whether it has; if not, they stay buffered. None if only the task of the stream can send
            pieces.
    """

    def __init__(
        self,
        queue: RequestQueue,
        slot: Slot,
        conversations: Conversations,
        request: ApiRequest,
        gone: asyncio.Future[None],
        arrival: float,
    ) -> None:
        self.queue, self.slot, self.conversations = queue, slot, conversations
        self.request, self.gone = request, gone
        self._completed: CompletedAnswer | None = None
        self._pieces: deque[Piece | Speech | CompletedAnswer] = deque()
        self.try_send: Callable[[], bool] | None = None
        self._changed: asyncio.Future[None] | None = None
        """Future that is done when pieces arrive, the thread ends, or the answer must end."""
        self._steps = conversations.answer_steps(request)
        self._chat: Chat | WholePrompt | None = None
        """The chat or prompt that generates the answer."""
        self._running_request: Request | None = None
        """The running request while the answer needs no thread; otherwise None."""
        self._thread: asyncio.Future[None] | None = None
        self._is_ending = False
        self._end: asyncio.Task[None] | None = None
        self._times = AnswerTimes(queue.metrics, arrival)
        self._known = 0
        """Number of tokens that the chat had before this answer."""
        self._read = 0
        """Number of tokens of earlier turns and of the prompt that were not in a cache."""
        self._logprobs_taken = 0
        """Number of tokens whose log-probabilities ``take_logprobs`` has returned."""
        queue.metrics.running.inc()
        queue.watchers.add(self.collect)
        if request.stream:
            queue.first_piece_watchers.add(self.collect)
        for end in (gone, queue.cut):
            end.add_done_callback(self._wake)

    @property
    def completed(self) -> CompletedAnswer:
        """The complete answer, available once ``pieces`` is exhausted."""
        if self._completed is None:
            raise RuntimeError("the answer is not complete")
        return self._completed

    async def begin(self, memory_wait_s: float) -> None:
        """Start the answer, and wait for memory if necessary and then for the first pieces.

        Args:
            memory_wait_s: maximum seconds to wait for memory.

        Raises:
            Refusal: if the answer cannot start; the message says why.
        """
        deadline = perf_counter() + memory_wait_s
        with as_refusals():
            while True:
                self._start_thread()
                try:
                    return await self._wait()
                except MemoryBusy:
                    self._steps = self.conversations.answer_steps(self.request)
                    left = deadline - perf_counter()
                    if left <= 0 or self._times.count:
                        raise
                    if not await run_sync(self.conversations.give_way):
                        await self.queue.wait_for_memory(self.gone, left)

    async def pieces(self) -> AsyncIterator[Piece | Speech]:
        """Yield text, speech and tool calls, merging adjacent buffered pieces; then set
        ``completed``.

        Raises:
            Refusal: if the answer is aborted; the message says why.
        """
        with as_refusals():
            while self._completed is None:
                await self._wait()
                for piece in self.buffered():
                    if isinstance(piece, CompletedAnswer):
                        self._completed = piece
                    else:
                        yield piece
        self._times.end(self.completed)

    def buffered(self) -> Iterator[Piece | Speech | CompletedAnswer]:
        """Remove and yield the buffered pieces, merging adjacent ones; see ``joined``."""
        return joined(self._pieces)

    def take_logprobs(self) -> list[TokenLogprob] | None:
        """Return the log-probabilities that are new since the last call; None if not requested."""
        if "logprobs" not in self.request.sampling:
            return None
        writing = self._chat and self._chat.answering
        found = self._completed.answer.logprobs if self._completed else writing and writing.logprobs
        fresh = (found or [])[self._logprobs_taken :]
        self._logprobs_taken += len(fresh)
        return fresh

    def end(self) -> asyncio.Task[None]:
        """Close the answer, and free its slot once the model has finished its current step."""
        if self._end is None:
            self._is_ending = True
            self._end = asyncio.ensure_future(self._close())
            self.queue.track_closing(self._end)
        return self._end

    def collect(self) -> bool:
        """Collect the pieces that have arrived, and send them unless the client is slow; if
        generation has ended, complete the answer.

        Returns:
            Whether the task of the stream was woken, to send the pieces.
        """
        running_request = self._running_request
        if running_request is None or self._is_ending:
            return False
        pieces = running_request.take_pieces()
        if not self._times.count:  # Final at the first token: the cache is searched before it.
            self._read = self._tokens_read(running_request)
        self._add(pieces, running_request)
        self.slot.cost = token_cost(self._read, running_request.output_tokens)
        # After ``take_pieces``, which ends the request if the tokenizer fails. Pieces that come
        # later go to the thread.
        is_over = running_request.is_over
        if is_over:
            self._running_request = None
            self._start_thread()
        # The thread may now buffer the complete answer, which only the task can send.
        wakes = bool(self._pieces) and self.request.stream and (is_over or not self._try_send())
        if wakes:
            self._wake()
        return wakes

    def _try_send(self) -> bool:
        """Send the buffered pieces in place of the task of the stream, if it waits for them.

        Waking the task would take longer than everything else that it takes to send a piece.

        Returns:
            Whether the task need not be woken.
        """
        waiting = self._changed
        if self.try_send is None or waiting is None or waiting.done():
            return False
        try:
            return self.try_send()
        except Exception as error:  # Must end this answer only: the caller goes on to others.
            waiting.set_exception(error)
            return True

    def _start_thread(self) -> None:
        self._thread = asyncio.ensure_future(self._write_in_thread())
        self._thread.add_done_callback(self._wake)

    async def _write_in_thread(self) -> None:
        loop = asyncio.get_running_loop()
        self._running_request = await loop.run_in_executor(self.queue.workers, self._write)
        self.collect()

    def _write(self) -> Request | None:
        """Run the answer in a thread until its request is submitted, it ends, or it is cancelled.

        Returns:
            the request that produces the remaining pieces; None if the answer has ended.
        """
        for step in self._steps:
            if isinstance(step, Chat | WholePrompt):
                step.client = self.slot.client
                self._chat, self._known = step, _tokens(step)
            # Only after setting ``_chat``, which ``_end_thread`` cancels.
            if self._is_ending:
                break
            if isinstance(step, Request):
                return step
            if isinstance(step, CompletedAnswer):
                self.slot.cost = token_cost(step.prompt_tokens - step.cached_tokens, step.tokens)
                self._pieces.append(step)
            elif not isinstance(step, Chat | WholePrompt):
                self._add([step], self._chat and self._chat.answering)
        return None

    def _add(self, pieces: Iterable[Piece | Speech], running: Request | None) -> None:
        """Buffer pieces that have just arrived, and record their tokens in the metrics."""
        has_text = False
        for piece in filter(None, pieces):
            self._pieces.append(piece)
            has_text |= not isinstance(piece, Speech)
        if self._pieces and not self._times.count:
            self.queue.first_piece_watchers.discard(self.collect)
        if has_text and running is not None:
            # Includes tokens whose pieces are taken later, but no frames of speech.
            self._times.note(running.text_tokens)

    def _tokens_read(self, running: Request) -> int:
        """Return the tokens of earlier turns and of the prompt that were not in a cache."""
        turns = 0 if self._chat is None else _tokens(self._chat) - self._known
        return turns + running.unread.tokens

    async def _wait(self) -> None:
        """Wait for new pieces if the answer is streamed, otherwise for the complete answer.

        Raises:
            BaseException: the error that the thread raised, or a Refusal.
        """
        while not (self._pieces and self.request.stream):
            if self._thread is not None and self._thread.done() and self._running_request is None:
                self._thread.result()
                return
            if self.queue.cut.done():
                raise stopping()
            if self.gone.done():
                raise ClientGone
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed

    def _wake(self, _: object = None) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def _close(self) -> None:
        queue = self.queue
        for watchers in (queue.watchers, queue.first_piece_watchers):
            watchers.discard(self.collect)
        if self._chat is not None and (running := self._chat.answering) is not None:
            self.slot.cost = token_cost(self._tokens_read(running), running.output_tokens)
        try:
            if self._thread is not None:
                await self._end_thread(self._thread)
            if self._completed is None:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(queue.workers, self._steps.close)
        finally:
            queue.cut.remove_done_callback(self._wake)
            queue.metrics.running.dec()
            queue.release(self.slot)

    async def _end_thread(self, thread: asyncio.Future[None]) -> None:
        """Cancel the answer unless it has ended, and wait until its thread ends."""
        if self._chat is not None and not (thread.done() and self._running_request is None):
            self._chat.cancel()
        # The error of the thread is no longer needed.
        await asyncio.gather(thread, return_exceptions=True)


def _tokens(chat: Chat | WholePrompt) -> int:
    """Return the number of tokens in the turns of a chat."""
    return chat.turns[-1].stop if isinstance(chat, Chat) and chat.turns else 0


def joined(
    pieces: deque[Piece | Speech | CompletedAnswer],
) -> Iterator[Piece | Speech | CompletedAnswer]:
    """Remove and yield all pieces, merging adjacent pieces of reasoning, text or the same call."""
    if len(pieces) == 1:
        yield pieces.popleft()
        return
    taken = [pieces.popleft() for _ in range(len(pieces))]
    for kind, group in groupby(taken, type):
        if issubclass(kind, str):
            yield kind("".join(cast("Iterator[str]", group)))
        elif issubclass(kind, ToolCallDelta):
            yield from merged(cast("Iterator[ToolCallDelta]", group))
        else:
            yield from group
