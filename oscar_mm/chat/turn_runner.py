"""Runs the turns of a conversation: prefill, answer, record."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from inspect import GEN_CLOSED, GEN_SUSPENDED, getgeneratorstate
from typing import Any, NamedTuple, TypeVar, Unpack

import torch

from oscar_mm.admission.admission import Past
from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.memory import MemoryReport
from oscar_mm.chat.chat_file import SpillableConversation
from oscar_mm.chat.conversation import (
    ChatEngine,
    Conversation,
    longest_answer,
    next_prompt,
    past_of,
)
from oscar_mm.chat.history import PastTurn, history_prompt, marked_before_reasoning
from oscar_mm.chat.open_turn import OpenTurn, plain
from oscar_mm.engine.answer import Answer, AnswerStream, Delivery
from oscar_mm.engine.message import Message, media_of, with_spans, with_system
from oscar_mm.engine.prompt import Prompt
from oscar_mm.engine.request import PrefillRequest, Request
from oscar_mm.engine.request_options import QuestionOptions, split_media
from oscar_mm.engine.sampling import Sampling
from oscar_mm.engine.speech import NOT_BEGUN, Begun, Speech, Voice, VoiceInputs
from oscar_mm.engine.spoken_request import SpokenRequest
from oscar_mm.errors import Cancelled, InputError, MemoryBusy
from oscar_mm.media.media import Media
from oscar_mm.tool_parsers.offer import ToolOffer
from oscar_mm.tool_parsers.parser import Piece

Result = TypeVar("Result")
_ARGUMENTS = (
    *("prompt", "images", "videos", "audio", "parts", "messages", "use_audio_in_video"),
    *("speak", "speaker"),
)


class TurnRunner:
    """Conversation whose turns run one at a time, between other requests of the pipeline.

    A turn is recorded when it is complete. After an error, or Ctrl-C while the model runs, the
    conversation is as it was before the turn.

    Args and attributes: see ``Chat``.
    """

    def __init__(
        self,
        pipe: ChatEngine,
        system: str | None = None,
        conversation: Conversation | None = None,
        cache_salt: str = "",
        tools: ToolOffer | None = None,
        adapter: str | None = None,
    ) -> None:
        self.pipe, self.system, self.cache_salt, self.tools = pipe, system, cache_salt, tools
        self.adapter = adapter
        self._spillable = SpillableConversation(
            pipe, conversation or Conversation.empty(self._new_cache())
        )
        self.client: tuple[str, ...] = ()
        self._running: weakref.ref[Generator] | None = None
        self._cancelled = self._stopped = False
        self._taker: threading.Thread | None = None
        """Thread that reads the pieces of the latest asynchronous stream."""
        # Acquired before calls to the engine thread, never in that thread; see ``_alone``.
        self._calls = threading.RLock()

    def _tell(self, turns: Sequence[PastTurn]) -> None:
        """Add past turns in one prefill pass."""
        pipe = self.pipe
        for turn in turns:
            pipe.admission.check_messages(with_system(self.system, turn.messages))
            pipe.admission.check_message(turn.answer)
        tokenizer = pipe.family.processor.tokenizer
        said = [pipe.family.answer_text(turn.answer) for turn in turns]
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in said]
        after: Conversation | None = None
        reading: PrefillRequest | None = None
        shown: list[Media] = []
        for turn, answer in zip(turns, ids, strict=True):
            # One turn at a time: waiting for memory while holding some could deadlock.
            with self._shown(turn.messages, len(answer)) as media:
                shown.append(media)

        def prepare(then: Conversation) -> Prompt:
            nonlocal after
            prompt, after = history_prompt(
                *(pipe, then, turns, self.system, shown, ids), self.tools
            )
            return replace(prompt, adapter=self.adapter)

        def begin(now: Conversation, prompt: Prompt) -> PrefillRequest:
            nonlocal reading
            pipe.admission.check_prompt(prompt, 0, past_of(now))
            read = prompt.to(pipe.family.device)
            reading = PrefillRequest(pipe.engine, read, now.forked_cache())
            reading.client = self.client
            self._spillable.answering = reading  # From here on the chat cannot be spilled.
            return reading

        def end() -> None:
            assert after is not None and reading is not None
            self._spillable.replace(replace(after, kv=reading.cache))
            self._spillable.answering = None

        with self._calls:
            try:
                self._read(self._next_turn(prepare, begin))
                pipe.engine.call(end)
            finally:
                pipe.engine.call(lambda: self._drop(reading))

    def _read(self, reading: PrefillRequest) -> None:
        """Prefill past turns while other requests continue to run.

        Raises:
            Cancelled: if the chat was cancelled.
        """
        if self._cancelled:
            reading.cancel()
        for _ in reading:
            pass
        if reading.cancelled:
            raise Cancelled("the chat was cancelled before the past turns were prefilled")

    def _drop(self, request: Request | None) -> None:
        """Release the pages of a request that has started but has not become a turn."""
        if request is not None and request is self._spillable.answering:
            self._spillable.answering = None
            request.cache.close()
            if request.voice is not None and request.voice.cache is not None:
                request.voice.cache.close()

    @property
    def memory(self) -> MemoryReport:
        """Memory report of the chat; bytes that forks share appear in the report of each fork."""
        return self.memory_with(None)

    def memory_with(self, turn: OpenTurn | None) -> MemoryReport:
        """Return the memory report of the chat, including what was read of an open turn."""

        def measure() -> MemoryReport:
            now = self._spillable.drop_reasoning()
            cache = now.kv if turn is None or turn.cache is None else turn.cache
            found = (cache if cache is not None else self._new_cache()).memory()
            heard = now.heard.cache
            return found if heard is None else found.with_speech(heard.memory())

        return self.pipe.engine.call(measure)

    @property
    def answering(self) -> Request | None:
        """The running request, whose chunks may be read as they arrive; None if none is running.

        If the request is cancelled, the stream ends; before its first chunk, it raises
        ``Cancelled``.
        """
        return self._spillable.answering

    def cancel(self) -> None:
        """End the current turn and let any later turn end at once; then call ``close``.

        Any thread may call this. If the turn has no text yet, the thread that waits for the turn
        gets ``Cancelled``.
        """
        self._cancelled = True
        self.stop()

    def stop(self) -> None:
        """End the current answer or its prefill like ``cancel``, but allow later turns."""
        self._stopped = True
        if (answering := self.answering) is not None:
            answering.cancel()

    def _alone(self, use: Callable[[Conversation], Result]) -> Result:
        """Load the conversation's cache into the store, call ``use`` and return its result.

        ``use`` runs in the engine thread, after any open stream has been ended.
        """
        with self._calls:
            self._wait_for_left()
            return self.pipe.engine.call_with_memory(lambda: use(self._load()), self.client)

    def _load(self) -> Conversation:
        self._end_stream()
        return self._spillable.load()

    def _next_turn(
        self,
        prepare: Callable[[Conversation], Prompt],
        begin: Callable[[Conversation, Prompt], Result],
        *,
        only_checks: bool = False,
    ) -> Result:
        """Prepare the next prompt and return the result of ``begin``.

        Args:
            prepare: function that builds the prompt from the conversation; runs in the calling
                thread, so that other requests can run meanwhile.
            begin: function of the conversation and the prompt that checks that the prompt fits;
                runs in the engine thread and must not return None.
            only_checks: whether ``begin`` needs the engine thread only for the cache of earlier
                turns; before a first turn, it then runs in the calling thread unless it has to
                wait for memory.
        """

        def check(then: Conversation, prompt: Prompt) -> Result | None:
            now = self._load()
            if now.turns is not then.turns:
                return None  # A stream that was left became a turn meanwhile.
            return begin(now, prompt)

        with self._calls:
            result = None
            while result is None:
                then = self._spillable.conversation
                prompt = prepare(then)
                if only_checks and not then.turns:
                    with suppress(MemoryBusy):
                        return begin(then, prompt)
                check_now = partial(check, then, prompt)
                result = self.pipe.engine.call_with_memory(check_now, self.client)
            return result

    @property
    def is_streaming(self) -> bool:
        """Whether a stream was begun that has not ended."""
        running = self._running and self._running()
        if running is None or (state := getgeneratorstate(running)) == GEN_CLOSED:
            return False
        return state != GEN_SUSPENDED or self.answering is not None

    def end_stream(self) -> None:
        """End an open stream, as the next question does.

        Raises:
            RuntimeError: if another thread is reading the stream.
        """
        with self._calls:
            self._wait_for_left()
            self.pipe.engine.call(self._end_stream)

    def _past(self, now: Conversation, turn: OpenTurn | None) -> Past | None:
        """Return the past of a turn, of which a part may have been read; None if there is none.

        Before a first turn, any thread may call this: the cache is not used.
        """
        if turn is None or turn.cache is None:
            return past_of(now) if now.turns else None
        past = past_of(now)
        return replace(past, cache=turn.cache, tokens=past.tokens + turn.tokens)

    @staticmethod
    def _check_past(now: Conversation, turn: OpenTurn | None) -> None:
        """Refuse a turn whose beginning was read after other turns.

        Raises:
            InputError: if turns were added, removed or changed since then.
        """
        if turn is not None and turn.cache is not None and now.turns is not turn.past:
            raise InputError(
                "listen: other turns were added to the chat, or removed, since its recording "
                "began: call listen() again"
            )

    def read_open_turn(self, turn: OpenTurn) -> None:
        """Read what is certain of a question, while other requests run; not during an answer.

        Raises:
            InputError: see ``ask``; the turn is as before then.
        """
        pipe, family = self.pipe, self.pipe.family
        reading: PrefillRequest | None = None
        read: Prompt | None = None
        messages = turn.asked("")

        def prepare(then: Conversation) -> Prompt:
            nonlocal read
            self._check_past(then, turn)
            asked = with_system(None if then.turns else self.system, messages)
            prompt = next_prompt(pipe, then, asked, media, 1, self.tools)
            parts = turn.parts(family, prompt)
            certain = parts[: max(i for i, part in enumerate(parts) if part.media) + 1]
            read = plain(family, certain)
            return replace(turn.unread(family, certain), adapter=self.adapter)

        def begin(now: Conversation, prompt: Prompt) -> PrefillRequest:
            nonlocal reading
            pipe.admission.check_prompt(prompt, 1, self._past(now, turn))
            talker = family.talker if turn.keeps_states else None
            states = None if talker is None else talker.states(prompt)
            cache = now.forked_cache() if turn.cache is None else turn.cache.fork()
            reading = PrefillRequest(pipe.engine, prompt.to(family.device), cache, states)
            reading.client, turn.past = self.client, now.turns
            self._spillable.answering = reading
            return reading

        def end() -> None:
            assert reading is not None and read is not None
            turn.took(reading.cache, read, () if reading.states is None else reading.states.kept)
            self._spillable.answering = None

        with self._calls:
            try:
                with self._shown(messages, 1) as media:
                    self._read(self._next_turn(prepare, begin))
                pipe.engine.call(end)
            finally:
                pipe.engine.call(lambda: self._drop(reading))

    def ask_open_turn(
        self,
        turn: OpenTurn,
        speaker: str | None,
        tools: ToolOffer | None = None,
        **options: Unpack[QuestionOptions],
    ) -> AnswerStream:
        """Stream the answer to a question whose beginning may be in the cache; see ``stream``.

        Args:
            turn: the question.
            speaker: voice of the answer; None for an answer in text.
            tools, options: see ``Chat.stream``.
        """
        sampling, _ = split_media(options, self.pipe.family)
        with self._calls:
            how: dict[str, Any] = {"keep_part": True, "cut_to_fit": True}
            how |= {"speak": speaker is not None, "speaker": speaker}
            return self._stream(
                turn.messages, sampling, tools=tools or self.tools, turn=turn, **how
            )

    def _wait_for_left(self) -> None:
        """Wait for the thread of a stream that a coroutine has left, since that thread still uses
        the chat."""
        taker = self._taker
        if taker is not None and self._stopped and taker is not threading.current_thread():
            taker.join()

    def _end_stream(self) -> None:
        """End an open stream; runs in the engine thread, so that no step changes the answer.

        Raises:
            RuntimeError: if another thread is reading the stream.
        """
        running = self._running and self._running()
        if running is None:
            return
        try:
            running.close()
        except ValueError:
            raise RuntimeError(
                "the chat is answering in another thread: wait until that answer is complete"
            ) from None

    def _stream(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any],
        *,
        keep_part: bool,
        tools: ToolOffer | None,
        cut_to_fit: bool = False,
        speak: bool = False,
        speaker: str | None = None,
        turn: OpenTurn | None = None,
    ) -> AnswerStream:
        start = time.perf_counter()
        pipe = self.pipe
        self._wait_for_left()
        self._stopped = False
        pipe.admission.check_messages(with_system(self.system, messages))
        if self._running is not None:
            with self._calls:
                pipe.engine.call(self._end_stream)
        sampling = pipe.sampling(pipe.family.with_calls(options, tools), _ARGUMENTS)
        speaker = self._speaker(speaker, sampling, tools, speak=speak)
        max_new_tokens = 1 if cut_to_fit else sampling.max_new_tokens
        decoding = ExitStack()
        whole: Prompt | None = None

        def prepare(then: Conversation) -> Prompt:
            nonlocal whole
            if speak or (turn is not None and turn.keeps_states):
                then.missed()
            self._check_past(then, turn)
            asked = with_system(None if then.turns else self.system, messages)
            prompt = next_prompt(pipe, then, asked, shown, max_new_tokens, tools)
            decoding.close()
            if turn is not None:
                parts = turn.parts(pipe.family, prompt)
                whole = turn.whole(pipe.family, parts)
                prompt = turn.unread(pipe.family, parts)
            found = replace(prompt, salt=self.cache_salt, adapter=self.adapter)
            return marked_before_reasoning(found, pipe.family)

        def fitted(now: Conversation, prompt: Prompt) -> tuple[Prompt, Sampling]:
            past = self._past(now, turn)
            if not cut_to_fit:
                pipe.admission.check_prompt(prompt, max_new_tokens, past)
                return prompt, sampling
            longest = longest_answer(pipe, past, prompt, sampling.max_new_tokens)
            return prompt, replace(sampling, max_new_tokens=longest)

        with decoding:
            shown = decoding.enter_context(self._shown(messages, max_new_tokens))
            prompt, sampling = self._next_turn(prepare, fitted, only_checks=turn is None)
            asked = _Asked(messages, prompt, prompt if whole is None else whole, turn, speaker)
            delivery = Delivery()
            pieces = self._answer(asked, sampling, start, tools, keep_part, delivery)
            self._running = weakref.ref(pieces)
            return AnswerStream(pieces, self.stop, partial(setattr, self, "_taker"), delivery)

    def _shown(
        self, messages: Sequence[Message], max_new_tokens: int
    ) -> AbstractContextManager[Media]:
        """Return a context manager that decodes a turn's media, if they fit, and reserves memory.

        Media are decoded in the calling thread while other requests run, and this chat may be
        spilled meanwhile. So each check looks the cache up again, in the engine thread.
        """

        def fits(sizes: Media) -> None:
            def check(now: Conversation) -> None:
                turn = with_system(None if now.turns else self.system, messages)
                self.pipe.admission.check_outline(turn, sizes, max_new_tokens, past_of(now))

            self._alone(check)

        reader = self.pipe.media_reader
        return reader.reading(media_of(messages), fits=fits, cancelled=lambda: self._cancelled)

    def _speaker(
        self,
        speaker: str | None,
        sampling: Sampling | None = None,
        tools: ToolOffer | None = None,
        *,
        speak: bool,
    ) -> str | None:
        """Return the voice of an answer; None for an answer in text.

        Raises:
            InputError: if the model cannot speak, or not so, or if nothing is to be spoken.
        """
        if speak:
            return self.pipe.check_speech(speaker, sampling, tools)
        if speaker is not None:
            raise InputError("speaker requires speak=True")
        return None

    def _voice(self, asked: _Asked, before: Conversation, sampling: Sampling) -> Voice | None:
        """Return the voice whose talker hears a question; None if none does."""
        talker, turn = self.pipe.family.talker, asked.turn
        hears = asked.speaker is not None or (turn is not None and turn.keeps_states)
        if talker is None or not hears:
            return None
        speaker = asked.speaker or talker.speakers[0]
        begun = NOT_BEGUN if turn is None else Begun(turn.tokens, tuple(turn.states))
        past = before.heard, before.missed()
        return talker.voice(VoiceInputs(asked.whole, speaker, sampling.seed, *past, begun))

    def _request(
        self, asked: _Asked, before: Conversation, voice: Voice | None, *more: Any, **how: Any
    ) -> Request:
        """Return the request of a turn after a conversation.

        Args:
            asked: the question.
            before: the conversation, with its cache.
            voice: see ``_voice``.
            more, how: further arguments of ``Request``, after the cache.
        """
        family, turn = self.pipe.family, asked.turn
        talker = family.talker
        self._check_past(before, turn)
        history = [before.token_ids] if before.tokens else []
        if turn is not None and turn.cache is not None and turn.read is not None:
            cache = turn.cache.fork()
            history.append(turn.read.inputs["input_ids"])
        else:
            cache = before.forked_cache()
        first = self.pipe.engine, asked.unread.to(family.device), cache, *more
        how["history"] = torch.cat(history, dim=1) if history else None
        if voice is None or talker is None:
            return Request(*first, **how)
        if asked.speaker is None:
            return Request(*first, states=voice.missing_states, **how)
        return SpokenRequest(*first, talker=talker, voice=voice, **how)

    def _answer(
        self,
        asked: _Asked,
        sampling: Sampling,
        start: float,
        tools: ToolOffer | None,
        keep_part: bool,
        delivery: Delivery,
    ) -> Generator[Piece | Speech | Answer, None, None]:
        """Yield the pieces of the answer, then record the turn and yield the answer."""

        def after(finish_reason: str) -> Conversation:
            written, cache = running_request.written, running_request.cache
            stored = cache.kv_manager.stored_length - before.tokens - prompt.tokens
            said = Message("assistant", (written.text,), "answer", written.tool_calls)
            answer = said, written.token_ids, finish_reason, stored, written.reasoning_span
            messages = with_spans(asked.messages, prompt.media)
            return before.with_turn(cache, prompt, messages, *answer, voice)

        def begin() -> tuple[Conversation, Request]:
            nonlocal begun, voice
            before = self._spillable.load()
            how: dict[str, Any] = {"keeps_cache": True, "tools": tools, "delivery": delivery}
            voice = self._voice(asked, before, sampling)
            begun = running_request = self._request(asked, before, voice, sampling, start, **how)
            running_request.client = self.client
            self._spillable.answering = running_request  # From here on the chat cannot be spilled.
            if not (self._cancelled or self._stopped):
                self.pipe.engine.submit(running_request)  # so that the next step includes it
            return before, running_request

        def end() -> MemoryReport:
            if voice is not None:
                voice.settle()
            interrupted = running_request.cancelled
            reason = "interrupted" if interrupted else running_request.written.finish_reason
            self._spillable.conversation = after(reason)
            self._spillable.answering = None
            before.cache.close()
            if before.heard.cache is not self._spillable.conversation.heard.cache:
                before.heard.close()
            self._spillable.drop_reasoning().cache.shrink()
            self._spillable.settle()
            if asked.turn is not None:
                asked.turn.answered = True
                asked.turn.close()
            return self.memory

        begun: Request | None = None
        voice: Voice | None = None
        prompt = asked.whole
        try:
            before, running_request = self.pipe.engine.call_with_memory(begin, self.client)
            if self._cancelled or self._stopped:
                running_request.cancel()
            yield ""  # For ``AnswerStream.begin``.
            yield from running_request
            if running_request.cancelled and not running_request.written.says:
                raise Cancelled("the answer was cancelled before its first text")
            memory = self.pipe.engine.call(end)
            answer = replace(running_request.answer(memory), prompt_tokens=prompt.tokens)
        except GeneratorExit:
            # The garbage collector may run this in any thread, so the store is not accessed.
            running_request.cancel()
            if keep_part and running_request.written.says:
                self._spillable.conversation = after("interrupted")
                if asked.turn is not None:
                    asked.turn.answered, asked.turn.cache = True, None
            self._spillable.answering = None
            raise
        except BaseException:
            # Release the pages at once: a stored traceback would keep them alive.
            self.pipe.engine.call(lambda: self._drop(begun))
            raise
        yield answer

    def _new_cache(self) -> OscarCache:
        return OscarCache(self.pipe.policy, store=self.pipe.store)


class _Asked(NamedTuple):
    """A question with its prompt.

    Attributes:
        messages: messages of the question, with the sources of their media.
        unread: the part of the prompt that is not in a cache.
        whole: the whole prompt; where ``unread`` is a part of it, without the inputs of media.
        turn: the open turn whose beginning is in its cache; None if nothing was read.
        speaker: voice of the answer; None for an answer in text.
    """

    messages: Sequence[Message]
    unread: Prompt
    whole: Prompt
    turn: OpenTurn | None
    speaker: str | None
