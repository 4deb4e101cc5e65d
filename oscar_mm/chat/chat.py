"""Chat: a conversation that keeps its cache between turns."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.checked_file import write_checked
from oscar_mm.cache.memory import MemoryReport
from oscar_mm.chat.chat_file import SpillableConversation, chat_content
from oscar_mm.chat.conversation import (
    ChatEngine,
    Conversation,
    Segment,
    Turn,
    longest_answer,
    next_prompt,
    past_of,
)
from oscar_mm.chat.history import PastTurn, history_prompt, prefill_groups
from oscar_mm.engine.answer import Answer, AnswerStream
from oscar_mm.engine.message import (
    Message,
    media_of,
    user_message,
    with_spans,
    with_system,
)
from oscar_mm.engine.message_lists import asked_from
from oscar_mm.engine.prompt import Prompt
from oscar_mm.engine.request import PrefillRequest, Request
from oscar_mm.engine.request_options import QuestionOptions, split_media
from oscar_mm.engine.sampling import Sampling
from oscar_mm.errors import Cancelled, InputError
from oscar_mm.media.media import Media
from oscar_mm.media.part import media_parts
from oscar_mm.tool_parsers.offer import ToolOffer
from oscar_mm.tool_parsers.parser import Piece

_ARGUMENTS = "prompt", "images", "videos", "audio", "parts", "messages", "use_audio_in_video"


class Chat:
    """Several questions, one after the other, about all media that were shown so far::

        with pipe.chat() as chat:
            chat.ask("Compare these.", images=["a.png", "b.png"])
            chat.ask("And this one?", images=["c.png"])

    The cache stays, so a turn costs its own tokens only. Made by ``pipe.chat`` and
    ``pipe.load_chat``; many of one pipeline may be in use at once, from several threads.

    A turn counts when it is complete. An error, or Ctrl-C while the model works, leaves the chat
    as it was before. Leaving a stream (``break``, ``close``) ends the answer there: its pieces so
    far are the answer. A stream that was left but is still referenced ends with the next call on
    the chat.

    The cache keeps the text of a thinking model's turns without the reasoning, as chat templates
    do; a turn that is left before any text does not count.

    Args:
        pipe: pipeline that answers.
        system: system prompt.
        conversation: to continue; by default a new one.
        cache_salt: as of ``pipe.chat``.
        tools: that the model may call; the first turn names them.
    """

    def __init__(
        self,
        pipe: ChatEngine,
        system: str | None = None,
        conversation: Conversation | None = None,
        cache_salt: str = "",
        tools: ToolOffer | None = None,
    ) -> None:
        self.pipe, self.system, self.cache_salt, self.tools = pipe, system, cache_salt, tools
        self._spillable = SpillableConversation(
            pipe, conversation or Conversation.empty(self._new_cache())
        )
        self._running: weakref.ref[Generator] | None = None
        self._cancelled = self._stopped = False
        self._taker: threading.Thread | None = None
        """Thread that reads the pieces of the latest asynchronous stream."""
        # Taken before the pipeline's lock where both are needed, see ``_alone``.
        self._calls = threading.RLock()

    def ask(
        self,
        prompt: str = "",
        images: Any = None,
        videos: Any = None,
        audio: Any = None,
        *,
        parts: Sequence[Any] | None = None,
        messages: Sequence[Any] | None = None,
        use_audio_in_video: bool = False,
        **options: Unpack[QuestionOptions],
    ) -> Answer:
        """Ask the next question.

        Args:
            prompt: the question.
            images, videos: what this turn shows, as of the pipeline; earlier media stay in sight.
            audio: recordings, where the model hears (Qwen3-Omni).
            parts: the whole question instead, as texts and media in their order, see
                ``oscar_mm.engine.message_lists.parts_from``.
            messages: all messages since the last answer instead, of which a user's or a tool's is
                the last, see ``oscar_mm.engine.message_lists.messages_from``.
            use_audio_in_video: hear the sound of video files too.
            options: see ``oscar_mm.engine.request_options.QuestionOptions``.

        Returns:
            the answer; its memory is the whole chat's, tokens and times are this turn's.

        Raises:
            InputError: media, text or numbers that cannot be used; as ``RequestTooLarge`` a turn
                that is too long for the context, the budget or the GPU.
        """
        media, sound = (images, videos, audio), use_audio_in_video
        sampling, how = split_media(options, self.pipe.family)
        asked = asked_from(prompt, media, parts, messages, sound=sound, options=how)
        with self._calls:
            return self._stream(asked, sampling, keep_part=False, tools=self.tools).complete()

    def stream(
        self,
        prompt: str = "",
        images: Any = None,
        videos: Any = None,
        audio: Any = None,
        *,
        parts: Sequence[Any] | None = None,
        messages: Sequence[Any] | None = None,
        use_audio_in_video: bool = False,
        cut_to_fit: bool = False,
        tools: ToolOffer | None = None,
        **options: Unpack[QuestionOptions],
    ) -> AnswerStream:
        """Ask the next question; an iterator of pieces of text with the answer as ``result``.

        Its ``with_reasoning`` gives the pieces of a thinking model's reasoning too.

        Args:
            prompt, images, videos, audio, parts, messages, use_audio_in_video, options: as of
                ``ask``.
            cut_to_fit: lower ``max_new_tokens`` to what context, budget and memory have; else a
                turn is refused whose longest answer does not fit.
            tools: those of the chat with another choice of what must be called, for this turn.

        Raises:
            InputError: as of ``ask``.
        """
        media, sound = (images, videos, audio), use_audio_in_video
        sampling, of_media = split_media(options, self.pipe.family)
        asked = asked_from(prompt, media, parts, messages, sound=sound, options=of_media)
        with self._calls:
            how = {"keep_part": True, "cut_to_fit": cut_to_fit}
            return self._stream(asked, sampling, tools=tools or self.tools, **how)

    def tell(
        self, prompt: str, answer: str, images: Any = None, videos: Any = None, audio: Any = None
    ) -> None:
        """Add a turn that took place elsewhere: question and answer are read, not generated.

        Args:
            prompt: the question.
            answer: what was answered; may be empty.
            images, videos, audio: as of ``ask``.

        Raises:
            InputError: media or text that cannot be used; as ``RequestTooLarge`` a turn that is too
                long.
        """
        media = media_parts(images, videos, audio)
        said = Message("assistant", (answer,), "answer")
        self.tell_all([PastTurn([user_message(prompt, media)], said)])

    def tell_all(self, turns: Iterable[PastTurn]) -> None:
        """Add turns that took place elsewhere; short ones without media are read together.

        Raises:
            InputError: as of ``tell``; the turns that were read before count.
        """
        turns = list(turns)
        for turn in turns:
            if not isinstance(turn, PastTurn):
                raise InputError(f"turns: must be a list of PastTurns, not {type(turn).__name__}")
        if len(turns) > 1:  # Of one its texts are told apart.
            characters = sum(turn.characters for turn in turns)
            self.pipe.admission.check_characters("the turns", characters)
        for run in prefill_groups(turns):
            self._tell(run)

    def _tell(self, turns: Sequence[PastTurn]) -> None:
        """Add turns, which are read in one pass."""
        pipe = self.pipe
        for turn in turns:
            pipe.admission.check_messages(with_system(self.system, turn.messages))
            pipe.admission.check_message(turn.answer)
        tokenizer = pipe.family.processor.tokenizer
        said = [pipe.family.answer_text(turn.answer) for turn in turns]
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in said]
        after: Conversation | None = None
        shown: list[Media] = []
        for turn, answer in zip(turns, ids, strict=True):
            # One turn after the other: a request with memory must not wait for more.
            with self._shown(turn.messages, len(answer)) as media:
                shown.append(media)

        def prepare(then: Conversation) -> Prompt:
            nonlocal after
            prompt, after = history_prompt(
                *(pipe, then, turns, self.system, shown, ids), self.tools
            )
            return prompt

        with self._calls:
            with self._next_turn(prepare, 0) as (now, prompt):
                read = prompt.to(pipe.family.device)
                reading = PrefillRequest(pipe.engine, read, now.cache.fork())
                # Within the lock: from here on the chat stays where it is.
                self._spillable.answering = reading
            self._read(reading)
            with pipe.lock.briefly():
                assert after is not None
                self._spillable.replace(replace(after, kv=reading.cache))
                self._spillable.answering = None

    def _read(self, reading: PrefillRequest) -> None:
        """Read what was told; others answer meanwhile.

        Raises:
            Cancelled: nobody waits for the chat any more.
        """
        if self._cancelled:
            reading.cancel()
        try:
            for _ in reading:
                pass
            if reading.cancelled:
                raise Cancelled("the turn was cancelled before it was read")
        except BaseException:
            with self.pipe.lock.briefly():
                reading.cache.close()
                self._spillable.answering = None
            raise

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All complete turns, from the first."""
        return self._spillable.conversation.turns

    @property
    def segments(self) -> list[Segment]:
        """Turn by turn its text and its media, with their tokens and bytes."""
        with self.pipe.lock.briefly():
            return self._spillable.drop_reasoning().segments()

    @property
    def memory(self) -> MemoryReport:
        """Bytes that the chat holds; bytes that forks share are in the reports of all of them."""
        with self.pipe.lock.briefly():
            cache = self._spillable.drop_reasoning().kv
            return (cache if cache is not None else self._new_cache()).memory()

    @property
    def so_far(self) -> Answer | None:
        """The answer that is being written, so far; None before its first token."""
        with self.pipe.lock.briefly():
            running = self._spillable.answering
            return running.answer() if running and running.written.token_ids else None

    @property
    def answering(self) -> Request | None:
        """The answer that is being written just now; its pieces may be taken as they come.

        Who cancels it ends the stream; before the first word that raises ``Cancelled`` there.
        """
        return self._spillable.answering

    def forget(self, index: int) -> None:
        """Drop an image, video or recording: its pages are free at once, later turns go on.

        Questions and answers about it stay, and later tokens keep their positions. A second call
        does nothing.

        Args:
            index: of a segment.

        Raises:
            InputError: no such segment, or one of text.
        """
        with self._alone() as now:
            places = now.places()
            if type(index) is not int or not 0 <= index < len(places):
                known = f"0 to {len(places) - 1}" if places else "none yet"
                raise InputError(f"forget({index!r}): no such segment; there are {known}")
            turn, medium = places[index]
            if medium is None:
                raise InputError(
                    f"forget({index}): the segment is text; images, videos and recordings can be "
                    "forgotten, and undo() takes back the last turn"
                )
            if now.turns[turn].forgotten[medium]:
                return
            span = now.turns[turn].media[medium]
            cache = now.cache.fork()
            cache.forget(span.start, span.stop)
            self._spillable.replace(now.without_medium(cache, turn, medium))
            self.pipe.store.trim()

    def undo(self) -> None:
        """Take back the last turn, one more with every call.

        Tokens that the turn had pushed out of the 16-bit window stay packed, so with a policy of
        few bits the next answer may differ a little from that of a chat without the turn.

        Raises:
            InputError: there is no turn.
        """
        with self._alone() as now:
            if not now.turns:
                raise InputError("undo: nothing was asked yet")
            if len(now.turns) == 1:
                # A new cache: a chat of an earlier version may be balanced by its first prompt.
                self._spillable.replace(Conversation.empty(self._new_cache()))
            else:
                cache = now.cache.fork()
                cache.crop(now.turns[-1].start - now.tokens)
                self._spillable.replace(now.without_last_turn(cache))

    def fork(self) -> Chat:
        """A second chat with the same past, over the same pages; both go on by themselves."""
        with self._alone() as now:
            conversation = Conversation(
                now.cache.fork(), now.token_ids, now.next_position, now.pending, now.turns
            )
            return Chat(self.pipe, self.system, conversation, self.cache_salt, self.tools)

    def save(self, path: str | Path) -> None:
        """Write the chat to one safetensors file, for ``pipe.load_chat``; others answer meanwhile.

        With ``tp_plan`` each rank writes its heads: ``chat.0-of-2.safetensors`` and so on.

        Raises:
            InputError: the file cannot be written; an old one stays.
        """
        path = self.pipe.store.ranks.path(path)
        with self._calls:
            with self._alone() as now:
                parts = now, self.system, self.pipe.fingerprint, self.tools
                content = chat_content(path, *parts)
            write_checked(path, *content)

    def cancel(self) -> None:
        """End the turn that is being read or written, and each later one: nobody waits for the chat
        any more. From any thread; ``close`` it after.

        A turn without a word raises ``Cancelled`` in the thread that waits for it.
        """
        self._cancelled = True
        self.stop()

    def stop(self) -> None:
        """End the answer that is being written, or its prompt, as ``cancel`` does; no later one."""
        self._stopped = True
        if (answering := self.answering) is not None:
            answering.cancel()

    def close(self) -> None:
        """Give up all pages; the chat answers no more. A second call does nothing."""
        with self._calls:
            self._wait_for_left()
            with self.pipe.lock.briefly():
                if self._spillable.closed:
                    return
                self._end_stream()
                self._spillable.close()
                self.pipe.store.trim_surplus()

    def __enter__(self) -> Chat:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    @contextmanager
    def _alone(self) -> Iterator[Conversation]:
        """Inside, nobody else uses the chat or its store, and no stream is open."""
        with self._calls:
            self._wait_for_left()
            with self.pipe.engine.wait_for_memory(self._load) as now:
                yield now

    def _load(self) -> Conversation:
        self._end_stream()
        return self._spillable.load()

    @contextmanager
    def _next_turn(
        self, prepare: Callable[[Conversation], Prompt], most: int
    ) -> Iterator[tuple[Conversation, Prompt]]:
        """Inside, as of ``_alone``: the conversation, and what it goes on with, which fits with
        ``most`` tokens after it.

        Others answer while ``prepare`` makes that of the conversation.
        """
        pipe = self.pipe
        with self._calls:
            while True:
                then = self._spillable.conversation
                prompt = prepare(then)
                with pipe.engine.wait_for_memory(self._load) as now:
                    if now.turns is not then.turns:
                        continue  # A stream that was left has become a turn.
                    pipe.admission.check_prompt(prompt, most, past_of(now))
                    yield now, prompt
                    return

    def _wait_for_left(self) -> None:
        """Wait for the thread of a stream that a coroutine has left: it still needs the locks."""
        taker = self._taker
        if taker is not None and self._stopped and taker is not threading.current_thread():
            taker.join()

    def _end_stream(self) -> None:
        running = self._running and self._running()
        if running is None:
            return
        try:
            running.close()
        except ValueError:
            raise RuntimeError("the chat is answering in another thread: wait for it") from None

    def _stream(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any],
        *,
        keep_part: bool,
        tools: ToolOffer | None,
        cut_to_fit: bool = False,
    ) -> AnswerStream:
        start = time.perf_counter()
        pipe = self.pipe
        self._wait_for_left()
        self._stopped = False
        pipe.admission.check_messages(with_system(self.system, messages))
        if self._running is not None:
            with self._calls, pipe.lock.briefly():
                self._end_stream()
        sampling = pipe.sampling(pipe.family.with_calls(options, tools), _ARGUMENTS)
        most = 1 if cut_to_fit else sampling.max_new_tokens
        decoding = ExitStack()

        def prepare(then: Conversation) -> Prompt:
            turn = with_system(None if then.turns else self.system, messages)
            prompt = next_prompt(pipe, then, turn, shown, most, tools)
            decoding.close()
            return replace(prompt, salt=self.cache_salt)

        with decoding:
            shown = decoding.enter_context(self._shown(messages, most))
            with self._next_turn(prepare, most) as (now, prompt):
                if cut_to_fit:
                    most = longest_answer(pipe, now, prompt, sampling.max_new_tokens)
                    sampling = replace(sampling, max_new_tokens=most)
                asked = with_spans(messages, prompt.media)
                pieces = self._answer(asked, prompt, sampling, start, tools, keep_part)
                self._running = weakref.ref(pieces)
                return AnswerStream(pieces, self.stop, partial(setattr, self, "_taker"))

    def _shown(self, messages: Sequence[Message], most: int) -> AbstractContextManager[Media]:
        """Decode the media of a turn that has room by their sizes; inside, their memory counts.

        They are read without the pipeline's lock: others answer meanwhile, and this chat may go to
        disk. So its cache is looked at anew each time, under the lock.
        """

        def fits(sizes: Media) -> None:
            with self._alone() as now:
                turn = with_system(None if now.turns else self.system, messages)
                self.pipe.admission.check_outline(turn, sizes, most, past_of(now))

        reader = self.pipe.media_reader
        return reader.reading(media_of(messages), fits=fits, cancelled=lambda: self._cancelled)

    def _answer(
        self,
        asked: tuple[Message, ...],
        prompt: Prompt,
        sampling: Sampling,
        start: float,
        tools: ToolOffer | None,
        keep_part: bool,
    ) -> Generator[Piece | Answer, None, None]:
        """Pieces of the answer, then the answer; the turn counts from then on."""

        def after(finish_reason: str) -> Conversation:
            written, cache = running_request.written, running_request.cache
            stored = cache.get_seq_length() - before.tokens - prompt.tokens
            said = Message("assistant", (written.text,), "answer", written.tool_calls)
            answer = said, written.token_ids, finish_reason, stored, written.reasoning_span
            return before.with_turn(cache, prompt, asked, *answer)

        with self.pipe.engine.wait_for_memory(self._spillable.load) as before:
            cache = before.cache.fork()
            running_request = Request(
                *(self.pipe.engine, prompt.to(self.pipe.family.device), cache, sampling, start),
                history=before.token_ids,
                keeps_cache=True,
                tools=tools,
            )
            # Within the lock: from here on the chat stays where it is.
            self._spillable.answering = running_request
        if self._cancelled or self._stopped:
            running_request.cancel()
        with ExitStack() as locked:
            try:
                yield from running_request
                # Once for all that follows: each time waits for a step of the others.
                locked.enter_context(self.pipe.lock.briefly())
                if running_request.cancelled and not running_request.written.says:
                    raise Cancelled("the answer was cancelled before its first word")
                answer = running_request.answer()
                reason = "interrupted" if running_request.cancelled else answer.finish_reason
                self._spillable.conversation = after(reason)
            except GeneratorExit:
                # This may be the garbage collector, in any thread: nothing here touches the store.
                if keep_part and running_request.written.says:
                    self._spillable.conversation = after("interrupted")
                raise
            except BaseException:
                # At once: a traceback that is kept would keep the pages.
                with self.pipe.lock:
                    running_request.cache.close()
                raise
            finally:
                self._spillable.answering = None
            before.cache.close()
            self._spillable.drop_reasoning().cache.shrink()
            self._spillable.settle()
            answer = replace(answer, memory=self.memory)
        yield answer

    def _new_cache(self) -> OscarCache:
        return OscarCache(self.pipe.policy, store=self.pipe.store)
