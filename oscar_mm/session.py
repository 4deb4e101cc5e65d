"""Chat: a conversation that keeps its cache between turns."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from oscar_mm.answer import Answer, AnswerStream
from oscar_mm.cache.cache import OscarCache
from oscar_mm.conversation import Conversation, Segment, Turn
from oscar_mm.decoding import Prompt
from oscar_mm.errors import InputError
from oscar_mm.generation import Generation
from oscar_mm.memory import MemoryReport
from oscar_mm.modality import Modality, token_modalities
from oscar_mm.sampling import Sampling
from oscar_mm.saved_chat import save_chat

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

    Args:
        pipe: answers.
        system: system prompt.
        conversation: to go on with; by default a new one.
    """

    def __init__(
        self, pipe: Pipeline, system: str | None = None, conversation: Conversation | None = None
    ) -> None:
        self.pipe, self.system = pipe, system
        self._held: Conversation | None = conversation or Conversation.empty(self._new_cache())
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
                tokens of earlier turns too), seed, stop: see ``oscar_mm.sampling.Sampling``. A
                stop text is no part of the answer, but the model will have written it.

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
        **sampling: Any,
    ) -> AnswerStream:
        """As ``ask``, but an iterator of pieces of text with the answer as ``result``."""
        with self._calls:
            media = (images, videos, audio, use_audio_in_video)
            return self._stream(prompt, media, sampling, keep_part=True)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What was said, in all complete turns."""
        return self._conversation.turns

    @property
    def segments(self) -> list[Segment]:
        """Turn by turn its text and its media, with their tokens and bytes."""
        with self.pipe.lock:
            return self._conversation.segments()

    @property
    def memory(self) -> MemoryReport:
        """Bytes that the chat holds; those shared with forks are in the reports of all of them."""
        with self.pipe.lock:
            held = self._conversation.cache
            return (held if held is not None else self._new_cache()).memory()

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
            self._held = held.without_medium(cache, turn, medium)
            held.cache.close()
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
                self._held = Conversation.empty(self._new_cache())
            else:
                cache = held.cache.fork()
                cache.crop(held.turns[-1].start - held.tokens)
                self._held = held.without_last_turn(cache)
            held.cache.close()

    def fork(self) -> Chat:
        """A second chat with the same past, over the same pages; both go on by themselves."""
        with self._alone() as held:
            conversation = Conversation(
                held.cache.fork(), held.token_ids, held.next_position, held.pending, held.turns
            )
            return Chat(self.pipe, self.system, conversation)

    def save(self, path: str | Path) -> None:
        """Write the chat to one safetensors file, for ``pipe.load_chat``.

        Raises:
            InputError: the file cannot be written; an old one stays.
        """
        with self._alone() as held:
            save_chat(path, held, self.system, self.pipe.fingerprint)

    def close(self) -> None:
        """Give up everything; nothing can be asked any more. A second time does nothing."""
        with self._calls, self.pipe.lock:
            if self._held is None:
                return
            self._end_stream()
            held, self._held = self._held, None
            if held.cache is not None:
                held.cache.close()
            self.pipe.store.trim()

    def __enter__(self) -> Chat:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    @property
    def _conversation(self) -> Conversation:
        if self._held is None:
            raise RuntimeError("the chat is closed")
        return self._held

    @contextmanager
    def _alone(self) -> Iterator[Conversation]:
        """Nobody else uses the chat or its store; no stream is open any more."""
        with self._calls, self.pipe.lock:
            self._end_stream()
            yield self._conversation

    def _end_stream(self) -> None:
        running = self._running and self._running()
        if running is None:
            return
        try:
            running.close()
        except ValueError:
            raise RuntimeError("the chat is answering in another thread: wait for it") from None

    def _stream(
        self, asked: str, media: tuple, options: dict[str, Any], *, keep_part: bool
    ) -> AnswerStream:
        start = time.perf_counter()
        with self._alone() as held:
            system = None if held.turns else self.system
        sampling = self.pipe.sampling(options, _ARGUMENTS)
        self.pipe.check_texts(asked, system)
        *sources, sound = media
        shown = self.pipe.read_media(*sources, sound=sound)
        with self._alone() as held:
            messages = self.pipe.family.messages(asked, system, shown)
            if held.turns:
                least = sum(map(self.pipe.family.least_tokens, shown))
                self._check_room(held, least, sampling.max_new_tokens)
                prompt = self.pipe.family.continuation(
                    messages, shown, held.tokens, held.next_position, self._pending(held)
                )
                self._check_positions(prompt, sampling.max_new_tokens)
                self._check_room(held, prompt.tokens, sampling.max_new_tokens)
            else:
                self.pipe.check_media(shown)
                prompt = self.pipe.family.prompt(messages, shown)
                self.pipe.check_length(prompt, sampling.max_new_tokens)
            pieces = self._answer(asked, prompt, sampling, start, keep_part)
            self._running = weakref.ref(pieces)
            return AnswerStream(pieces)

    def _pending(self, held: Conversation) -> list[int]:
        """The end of the last answer that is not in the cache yet.

        Without placeholders of media: a model should not write them, but if it does, they must not
        be taken for media of the next turn.
        """
        ids = torch.tensor([held.pending], dtype=torch.long)
        return ids[token_modalities(ids, config=self.pipe.model.config) == Modality.TEXT].tolist()

    def _check_room(self, held: Conversation, new: int, answer: int) -> None:
        """Refuse a later turn that does not fit the context; ``new`` tokens are known of so far."""
        limit = self.pipe.max_context
        if held.stored + new + answer <= limit:
            return
        media = [one for one in held.segments() if one.modality and one.tokens]
        largest = sorted(media, key=lambda one: -one.tokens)[:3]
        frees = [f"forget({one.index}) frees {one.tokens} ({one.label})" for one in largest]
        raise InputError(
            f"{held.stored} tokens are held, the turn has {new} and max_new_tokens is {answer}, "
            f"together over the context of {limit}: {', '.join([*frees, 'undo()'])}, a shorter "
            "turn or a new chat makes room"
        )

    def _check_positions(self, prompt: Prompt, answer: int) -> None:
        """Positions go on where media were forgotten, and end where the model's do."""
        longest = self.pipe.model.config.get_text_config().max_position_embeddings
        if int(prompt.next_position) + answer > longest:
            raise InputError(
                f"the turn would come to position {int(prompt.next_position)} and max_new_tokens "
                f"is {answer}, but the model ends at {longest}: undo() takes back turns, forget() "
                "does not help; else begin a new chat"
            )

    def _answer(
        self, asked: str, prompt: Prompt, sampling: Sampling, start: float, keep_part: bool
    ) -> Generator[str | Answer, None, None]:
        """Pieces of the answer, then the answer; the turn counts from then on."""
        before = self._conversation
        with self.pipe.lock:
            cache = before.cache.fork()
        generation = Generation(self.pipe, prompt, cache, sampling, start, history=before.token_ids)
        written = generation.written

        def after(ended: str) -> Conversation:
            said = written.text, written.token_ids
            return before.answered(generation.cache, prompt, asked, *said, ended)

        try:
            yield from generation
            answer = generation.answer()
        except GeneratorExit:
            # This may be the garbage collector, in any thread: nothing here touches the store.
            if keep_part and written.text:
                self._held = after("interrupted")
            raise
        except BaseException:
            # At once: who keeps the traceback would keep its pages.
            with self.pipe.lock:
                generation.cache.close()
            raise
        self._held = after(answer.finish_reason)
        with self.pipe.lock:
            before.cache.close()
        yield replace(answer, memory=self.memory)

    def _new_cache(self) -> OscarCache:
        return OscarCache(self.pipe.policy, store=self.pipe.store)
