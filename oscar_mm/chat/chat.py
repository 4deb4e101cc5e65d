"""Chat: a conversation that keeps its cache between turns."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.memory import MemoryReport
from oscar_mm.chat.chat_file import save_chat
from oscar_mm.chat.conversation import Conversation, Segment, Turn
from oscar_mm.chat.spill import Spillable
from oscar_mm.chat.turn import all_text, check_ahead, check_turn, next_prompt
from oscar_mm.errors import InputError
from oscar_mm.generation.answer import Answer, AnswerStream
from oscar_mm.generation.family import Message
from oscar_mm.generation.generation import Generation
from oscar_mm.generation.prompt import Prompt
from oscar_mm.generation.sampling import Sampling

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline

_ARGUMENTS = ("prompt", "images", "videos", "audio", "use_audio_in_video")


class Chat:
    """Several questions, one after the other, about whatever has been shown so far::

        with pipe.chat() as chat:
            chat.ask("Compare these.", images=["a.png", "b.png"])
            chat.ask("And this one?", images=["c.png"])

    The cache stays, so a turn costs its own tokens only. Made by ``pipe.chat`` and
    ``pipe.load_chat``; many of one pipeline may be in use at once, from several threads.

    A turn counts when it is complete. An error, or Ctrl-C while the model works, leaves the chat
    as it was before. Who leaves a stream (``break``, ``close``) ends the answer there: what was
    given out is the answer. A stream that was left but is still kept somewhere ends with the next
    call on the chat.

    Of a thinking model's turns only the text stays in the cache, as chat templates have it; a turn
    that is left before any text counts as not asked.

    Args:
        pipe: answers.
        system: system prompt.
        conversation: to go on with; by default a new one.
    """

    def __init__(
        self, pipe: Pipeline, system: str | None = None, conversation: Conversation | None = None
    ) -> None:
        self.pipe, self.system = pipe, system
        self._held = Spillable(pipe, conversation or Conversation.empty(self._new_cache()))
        self._running: weakref.ref[Generator] | None = None
        # Whoever wants both takes this one first, then the pipeline's: see ``_alone``.
        self._calls = threading.RLock()

    def ask(
        self,
        prompt: str,
        images: Any = None,
        videos: Any = None,
        audio: Any = None,
        *,
        use_audio_in_video: bool = False,
        **sampling: Any,
    ) -> Answer:
        """Ask the next question.

        Args:
            prompt: the question.
            images: what this turn shows, as of the pipeline; earlier media stay in sight.
            videos: likewise.
            audio: likewise, where the model hears (Qwen3-Omni).
            use_audio_in_video: hear the sound of video files too.
            sampling: max_new_tokens, temperature, top_p, top_k, repetition_penalty (counts the
                tokens of earlier turns too), seed, stop: as of the pipeline. A stop text is no part
                of the answer, but the model will have written it.

        Returns:
            the answer; its memory is the whole chat's, tokens and times are this turn's.

        Raises:
            InputError: media, text or numbers that cannot be used, or no room in the context.
        """
        with self._calls:
            stream = self._stream(
                prompt, (images, videos, audio, use_audio_in_video), sampling, keep_part=False
            )
            for _ in stream:
                pass
            return stream.result

    def stream(
        self,
        prompt: str,
        images: Any = None,
        videos: Any = None,
        audio: Any = None,
        *,
        use_audio_in_video: bool = False,
        before: Sequence[Message] = (),
        **sampling: Any,
    ) -> AnswerStream:
        """As ``ask``, but an iterator of pieces of text with the answer as ``result``.

        ``with_reasoning`` of it gives the pieces of a thinking model's reasoning too.

        Args:
            before: what else was said since the last answer, before the question; its media are
                the first ones of ``images`` and ``audio``.
        """
        with self._calls:
            media = (images, videos, audio, use_audio_in_video)
            return self._stream(prompt, media, sampling, before, keep_part=True)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What was said, in all complete turns."""
        return self._held.conversation.turns

    @property
    def segments(self) -> list[Segment]:
        """Turn by turn its text and its media, with their tokens and bytes."""
        with self.pipe.lock:
            return self._held.without_reasoning().segments()

    @property
    def memory(self) -> MemoryReport:
        """Bytes that the chat holds; those shared with forks are in the reports of all of them."""
        with self.pipe.lock:
            cache = self._held.without_reasoning().kept
            return (cache if cache is not None else self._new_cache()).memory()

    @property
    def so_far(self) -> Answer | None:
        """The answer that is being written, as far as it goes; None before its first token."""
        with self.pipe.lock:
            running = self._held.answering
            return running.answer() if running and running.written.token_ids else None

    def forget(self, index: int) -> None:
        """Drop an image, video or recording: its pages are free at once, later turns go on.

        What was said about it stays, and so do the positions of what came after. A second time
        does nothing.

        Args:
            index: of a segment.

        Raises:
            InputError: no such segment, or one of text.
        """
        with self._alone() as held:
            places = held.places()
            if type(index) is not int or not 0 <= index < len(places):
                known = f"0 to {len(places) - 1}" if places else "none yet"
                raise InputError(f"forget({index!r}): no such segment; there are {known}")
            turn, medium = places[index]
            if medium is None:
                raise InputError(
                    f"forget({index}): the segment is text; images, videos and recordings can be "
                    "forgotten, and undo() takes back the last turn"
                )
            if held.turns[turn].forgotten[medium]:
                return
            span = held.turns[turn].media[medium]
            cache = held.cache.fork()
            cache.forget(span.start, span.stop)
            self._held.replace(held.without_medium(cache, turn, medium))
            self.pipe.store.trim()

    def undo(self) -> None:
        """Take back the last turn, one more with every call.

        What its tokens had pushed out of the 16-bit window stays packed, so with a policy of few
        bits the next answer may differ a little from one where the turn never was.

        Raises:
            InputError: there is no turn.
        """
        with self._alone() as held:
            if not held.turns:
                raise InputError("undo: nothing was asked yet")
            if len(held.turns) == 1:
                # A new cache: the first prompt decides on the balancing.
                self._held.replace(Conversation.empty(self._new_cache()))
            else:
                cache = held.cache.fork()
                cache.crop(held.turns[-1].start - held.tokens)
                self._held.replace(held.without_last_turn(cache))

    def fork(self) -> Chat:
        """A second chat with the same past, over the same pages; both go on by themselves."""
        with self._alone() as held:
            conversation = Conversation(
                held.cache.fork(), held.token_ids, held.next_position, held.pending, held.turns
            )
            return Chat(self.pipe, self.system, conversation)

    def save(self, path: str | Path) -> None:
        """Write the chat to one safetensors file, for ``pipe.load_chat``.

        With ``tp_plan`` each rank writes its heads: ``chat.0-of-2.safetensors`` and so on.

        Raises:
            InputError: the file cannot be written; an old one stays.
        """
        with self._alone() as held:
            save_chat(self.pipe.store.ranks.path(path), held, self.system, self.pipe.fingerprint)

    def close(self) -> None:
        """Give up everything; nothing can be asked any more. A second time does nothing."""
        with self._calls, self.pipe.lock:
            if self._held.now is None:
                return
            self._end_stream()
            self._held.give_up()
            # To the device, where that is worth moving what others hold.
            left = self.pipe.store.memory()
            if left.free_bytes > left.used_bytes // 4:
                self.pipe.store.trim()

    def __enter__(self) -> Chat:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    @contextmanager
    def _alone(self) -> Iterator[Conversation]:
        """Nobody else uses the chat or its store; no stream is open any more."""
        with self._calls, self.pipe.lock:
            self._end_stream()
            yield self._held.at_hand()

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
        asked: str,
        media: tuple,
        options: dict[str, Any],
        before: Sequence[Message] = (),
        *,
        keep_part: bool,
    ) -> AnswerStream:
        start = time.perf_counter()
        check_turn(self.pipe, asked, self.system, before, media[:3])
        with self._calls, self.pipe.lock:
            self._end_stream()
            system = None if self.turns else self.system
        sampling = self.pipe.sampling(options, _ARGUMENTS)
        sources: dict[str, Any]
        sources = dict(zip(("images", "videos", "audio", "sound"), media, strict=True))
        # Media are read without the pipeline's lock: others answer meanwhile, and this chat may be
        # written to disk. So what it holds is looked at anew each time, under the lock.
        outlined, texts = self.pipe.outline(sources), all_text(asked, before)
        with self._alone() as held:
            check_ahead(self.pipe, held, texts, system, outlined, sampling.max_new_tokens)
        shown = self.pipe.read_media(**sources)
        with self._alone() as held:
            prompt = next_prompt(
                self.pipe, held, asked, system, shown, sampling.max_new_tokens, before
            )
            pieces = self._answer(asked, prompt, sampling, start, keep_part)
            self._running = weakref.ref(pieces)
            return AnswerStream(pieces)

    def _answer(
        self, asked: str, prompt: Prompt, sampling: Sampling, start: float, keep_part: bool
    ) -> Generator[str | Answer, None, None]:
        """Pieces of the answer, then the answer; the turn counts from then on."""

        def after(ended: str) -> Conversation:
            written = generation.written
            said = written.text, written.token_ids, ended, written.reasoned
            return before.answered(generation.cache, prompt, asked, *said)

        with self.pipe.lock:
            before = self._held.at_hand()
            cache = before.cache.fork()
            generation = Generation(
                self.pipe, prompt, cache, sampling, start, history=before.token_ids
            )
            # Within the lock: from here on the chat stays where it is.
            self._held.answering = generation
        try:
            yield from generation
            answer = generation.answer()
            self._held.now = after(answer.finish_reason)
        except GeneratorExit:
            # This may be the garbage collector, in any thread: nothing here touches the store.
            if keep_part and generation.written.text:
                self._held.now = after("interrupted")
            raise
        except BaseException:
            # At once: who keeps the traceback would keep its pages.
            with self.pipe.lock:
                generation.cache.close()
            raise
        finally:
            self._held.answering = None
        with self.pipe.lock:
            before.cache.close()
            self._held.without_reasoning()
            self._held.settle()
        yield replace(answer, memory=self.memory)

    def _new_cache(self) -> OscarCache:
        return OscarCache(self.pipe.policy, store=self.pipe.store)
