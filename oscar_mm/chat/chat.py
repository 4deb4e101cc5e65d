"""Chat: a conversation that keeps its cache between turns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, Unpack

from oscar_mm.cache.checked_file import write_checked
from oscar_mm.cache.states import MARK_BYTES
from oscar_mm.chat.chat_file import chat_content
from oscar_mm.chat.conversation import Conversation, Segment, Turn
from oscar_mm.chat.history import PastTurn, prefill_groups
from oscar_mm.chat.listening import Listening
from oscar_mm.chat.turn_runner import TurnRunner
from oscar_mm.engine.answer import Answer, AnswerStream
from oscar_mm.engine.message import Message, user_message
from oscar_mm.engine.message_lists import asked_from
from oscar_mm.engine.request_options import QuestionOptions, split_media
from oscar_mm.errors import InputError, shown
from oscar_mm.media.part import media_parts
from oscar_mm.media.resample import RATE
from oscar_mm.modality import Modality
from oscar_mm.sizes import format_bytes
from oscar_mm.tool_parsers.offer import ToolOffer

Result = TypeVar("Result")
_GLANCE_S = 0.05
"""Maximum seconds that ``repr`` waits for the engine."""
_TOO_EARLY = (
    "undo: what layers with linear attention or sliding windows stored before this turn is not "
    f"kept any more (a chat keeps the latest {format_bytes(MARK_BYTES)} of states, and the windows "
    "of the latest turns): start a new chat"
)
_CANNOT_SHORTEN = (
    "shorten_answer: this model keeps states, which cannot be cut, or its sliding windows before "
    "the removed tokens are not kept any more: undo the turn instead"
)


class Chat(TurnRunner):
    """Multi-turn conversation in which the model can attend to all media of earlier turns::

        with pipe.chat() as chat:
            chat.ask("Compare these.", images=["a.png", "b.png"])
            chat.ask("And this one?", images=["c.png"])

    The cache is kept between turns, so only the new tokens of a turn are prefilled. Chats are
    created by ``pipe.chat`` and ``pipe.load_chat``; many chats of a pipeline may be used
    concurrently, from several threads.

    A turn is recorded when it is complete. After an error, or Ctrl-C while the model runs, the chat
    is as it was before the turn. If the caller leaves a stream (``break``, ``close``), the answer
    ends there and consists of the chunks so far. A stream that was left but is still referenced
    ends with the next call on the chat.

    For a thinking model, the cache stores the turns without the reasoning, as chat templates do. A
    turn whose stream is left before any text of the answer is not recorded.

    Args:
        pipe: pipeline that runs the chat.
        system: system prompt.
        conversation: conversation to continue; by default, an empty conversation.
        cache_salt: see ``pipe.chat``.
        tools: tools that the model may call; they are part of the first turn's prompt.
        adapter: name of the adapter of all turns; None for the model alone.

    Attributes:
        client: names that identify the client of a server; see ``Request``.
    """

    def __repr__(self) -> str:
        """Describe turns, media, tokens and memory in one line.

        The memory is unknown while the engine is busy.
        """
        try:
            now = self._spillable.conversation
        except (AttributeError, RuntimeError):  # half built or closed
            return f"{type(self).__name__}(closed)"
        media = sum(len(turn.media) - sum(turn.forgotten) for turn in now.turns)
        counts = f"turns={len(now.turns)}, media={media}, tokens={now.stored:,}"
        return f"{type(self).__name__}({counts}, memory={self._shown_memory(now)})"

    def _shown_memory(self, now: Conversation) -> str:
        if (cache := now.kv) is None:
            return "on disk"
        try:
            return format_bytes(self.pipe.engine.call(lambda: cache.held_bytes, timeout=_GLANCE_S))
        except Exception:  # The engine is busy or has ended.
            return "unknown"

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
        speak: bool = False,
        speaker: str | None = None,
        **options: Unpack[QuestionOptions],
    ) -> Answer:
        """Ask the next question.

        Args:
            prompt: the question.
            images, videos: media of this turn, as in the pipeline's call; the model still attends
                to earlier media.
            audio: recordings, if the model supports audio (Qwen3-Omni).
            parts: the full question as texts and media in order, instead of the arguments above;
                see ``oscar_mm.engine.message_lists.parts_from``.
            messages: all messages since the last answer, instead of the arguments above; the last
                message must be from a user or a tool, see
                ``oscar_mm.engine.message_lists.messages_from``.
            use_audio_in_video: whether to also use the audio tracks of video files.
            speak: whether to also speak the answer, in ``answer.speech``; needs a checkpoint with a
                talker, which must have heard the media of all earlier turns: pass it in each turn
                with media.
            speaker: name of one of the checkpoint's voices; by default "Ethan", or the first one.
            options: see ``oscar_mm.engine.request_options.QuestionOptions``.

        Returns:
            The answer. Its memory report covers the entire chat; its tokens and timings cover only
            this turn.

        Raises:
            InputError: if media, text or options are invalid; ``RequestTooLarge`` if the turn does
                not fit into the context, the budget or the GPU's memory.
        """
        media, sound = (images, videos, audio), use_audio_in_video
        sampling, of_media = split_media(options, self.pipe.family)
        asked = asked_from(prompt, media, parts, messages, sound=sound, options=of_media)
        with self._calls:
            how: dict[str, Any] = {"speak": speak, "speaker": speaker, "tools": self.tools}
            return self._stream(asked, sampling, keep_part=False, **how).complete()

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
        speak: bool = False,
        speaker: str | None = None,
        cut_to_fit: bool = False,
        tools: ToolOffer | None = None,
        **options: Unpack[QuestionOptions],
    ) -> AnswerStream:
        """Ask the next question and stream the answer.

        Args:
            prompt, images, videos, audio, parts, messages: see ``ask``.
            use_audio_in_video, speak, speaker, options: see ``ask``.
            cut_to_fit: whether to lower ``max_new_tokens`` to what context, budget and memory
                allow, instead of refusing a turn whose longest possible answer does not fit.
            tools: the chat's tools with a tool choice for this turn; by default, the chat's choice.

        Returns:
            An iterator over chunks of text; at the end, its ``result`` is the answer. Use its
            ``with_reasoning`` to also get the reasoning of a thinking model, and its
            ``with_speech`` to also get the speech.

        Raises:
            InputError: see ``ask``.
        """
        media, sound = (images, videos, audio), use_audio_in_video
        sampling, of_media = split_media(options, self.pipe.family)
        asked = asked_from(prompt, media, parts, messages, sound=sound, options=of_media)
        with self._calls:
            how: dict[str, Any] = {"keep_part": True, "cut_to_fit": cut_to_fit}
            how |= {"speak": speak, "speaker": speaker}
            return self._stream(asked, sampling, tools=tools or self.tools, **how)

    def listen(
        self,
        rate: int = RATE,
        *,
        label: str = "recording",
        speak: bool = False,
        speaker: str | None = None,
    ) -> Listening:
        """Read a recording into the chat while it is being made.

        ::

            with chat.listen() as listening:
                for samples in microphone:
                    listening.hear(samples)
                print(listening.ask("What was decided?"))

        The model reads the recording in blocks of 8 seconds as they are complete, so that a
        question waits for no more than the last 9 seconds. See ``Listening`` for the differences
        from a whole recording.

        Args:
            rate: samples per second, from 1,000 to 1,000,000; other rates than 16,000 are
                resampled.
            label: name of the recording, for segments and errors.
            speak: whether to also speak the answers, see ``ask``.
            speaker: see ``ask``.

        Raises:
            InputError: if the model does not support audio in blocks, or the rate is out of range;
                with ``speak``, see ``ask``.
        """
        speaker = self._speaker(speaker, speak=speak)
        if speaker is not None:
            self._spillable.conversation.missed()
        return Listening(self, rate, label, speaker)

    def tell(
        self, prompt: str, answer: str, images: Any = None, videos: Any = None, audio: Any = None
    ) -> None:
        """Add a past turn to the chat; its question and answer are prefilled, not generated.

        Args:
            prompt: the question.
            answer: the answer; may be empty.
            images, videos, audio: media of the turn, see ``ask``.

        Raises:
            InputError: if media or text are invalid; ``RequestTooLarge`` if the turn is too long.
        """
        media = media_parts(images, videos, audio)
        said = Message("assistant", (answer,), "answer")
        self.tell_all([PastTurn([user_message(prompt, media)], said)])

    def tell_all(self, turns: Iterable[PastTurn]) -> None:
        """Add past turns to the chat; short turns without media are prefilled together.

        Raises:
            InputError: see ``tell``; turns that were prefilled before the error are kept.
        """
        turns = list(turns)
        for turn in turns:
            if not isinstance(turn, PastTurn):
                raise InputError(
                    f"turns: must be a list of PastTurns, not of {type(turn).__name__}"
                )
        if len(turns) > 1:  # A single turn gets a more specific error from ``_tell``.
            characters = sum(turn.characters for turn in turns)
            self.pipe.admission.check_characters("the turns", characters)
        for run in prefill_groups(turns):
            self._tell(run)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All complete turns, oldest first."""
        return self._spillable.conversation.turns

    @property
    def segments(self) -> list[Segment]:
        """Text and media of each turn, with their token counts and sizes in bytes."""
        return self.pipe.engine.call(lambda: self._spillable.drop_reasoning().segments())

    @property
    def so_far(self) -> Answer | None:
        """The running answer up to now; None before its first token."""

        def measure() -> Answer | None:
            running = self._spillable.answering
            return running.answer() if running and running.written.token_ids else None

        return self.pipe.engine.call(measure)

    @property
    def can_speak(self) -> bool:
        """Whether the next answer can be spoken: the model has a talker, which has heard the media
        of all turns."""
        try:
            self._spillable.conversation.missed()
        except InputError:
            return False
        return self.pipe.family.talker is not None

    @property
    def images(self) -> list[Segment]:
        """Segments of the images that are not forgotten, oldest first."""
        return self._media(Modality.IMAGE)

    @property
    def videos(self) -> list[Segment]:
        """Segments of the videos that are not forgotten, oldest first."""
        return self._media(Modality.VIDEO)

    @property
    def audio(self) -> list[Segment]:
        """Segments of the recordings that are not forgotten, oldest first."""
        return self._media(Modality.AUDIO)

    def _media(self, kind: Modality) -> list[Segment]:
        return [one for one in self.segments if one.modality is kind and not one.forgotten]

    def forget(self, segment: int | Segment) -> None:
        """Remove an image, video or recording from the cache and free its pages at once.

        Questions and answers about the media item stay, and later tokens keep their positions.

        Args:
            segment: the media item's segment, such as ``chat.images[2]``, or its index.

        Raises:
            InputError: if there is no such segment, if it is text, if it is already forgotten, or
                if the model keeps states, which cannot forget (Qwen3.5).
        """

        def forget(now: Conversation) -> None:
            turn, medium = now.place_of(segment)
            span = now.turns[turn].media[medium]
            cache, heard = now.cache.fork(), now.heard
            cache.forget(span.start, span.stop)
            talker = self.pipe.family.talker
            if talker is not None and span.stop <= heard.end.tokens:
                part = talker.heard_span(now.token_ids[0], span.start, span.stop)
                heard = heard.without(*part)
            self._spillable.replace(now.without_medium(cache, turn, medium, heard))
            self.pipe.store.trim()

        self._alone(forget)

    def undo(self, turns: int = 1) -> None:
        """Remove the last turn, or several.

        Tokens that the turns had pushed out of the 16-bit window stay packed, so with a low-bit
        policy the next answer may differ slightly from that of a chat that never had the turns.

        Args:
            turns: number of turns, at most those of the chat; all are removed, or none.

        Raises:
            InputError: if ``turns`` is not a positive integer, if the chat has fewer turns, or if a
                model with states (Qwen3.5) no longer has the states from before these turns: a
                chat keeps the latest ``MARK_BYTES`` of states.
        """
        if type(turns) is not int or turns < 1:
            raise InputError(f"undo({shown(turns)}): turns must be an integer from 1 on")

        def undo(now: Conversation) -> None:
            if not now.turns:
                raise InputError("undo: the chat has no turns yet")
            if turns > len(now.turns):
                raise InputError(f"undo({turns}): the chat has only {len(now.turns)} turns")
            start = now.turns[-turns].start
            if now.cache.longest_crop(start) != start:
                raise InputError(_TOO_EARLY)
            if len(now.turns) == turns:
                # A new cache, since a chat saved by an earlier version may have balancing
                # vectors that were computed from its first prompt.
                self._spillable.replace(Conversation.empty(self._new_cache()))
            else:
                cache = now.cache.fork()
                cache.crop(start - now.tokens)
                self._spillable.replace(now.without_last_turns(cache, turns))

        self._alone(undo)

    def shorten_answer(self, count: int) -> None:
        """Remove the last tokens of the last answer, such as those that nobody has heard.

        Args:
            count: number of tokens, at most those of the answer.

        Raises:
            InputError: if there is no answer with so many tokens, if it has reasoning or comes from
                a file, or if the model keeps states (Qwen3.5).
        """

        def cut(now: Conversation) -> None:
            tokens = now.turns[-1].answer_tokens if now.turns else None
            if tokens is None or type(count) is not int or not 0 <= count <= tokens:
                raise InputError(
                    f"shorten_answer({shown(count)}): the last answer has {tokens or 0} tokens "
                    "that can be removed"
                )
            removed = max(0, count - len(now.pending))
            kept = now.cache.get_seq_length() - removed
            if removed and now.cache.longest_crop(kept) != kept:
                raise InputError(_CANNOT_SHORTEN)
            ids = [*now.token_ids[0, now.tokens - (tokens - len(now.pending)) :], *now.pending]
            tokenizer = self.pipe.family.processor.tokenizer
            text = tokenizer.decode(ids[: tokens - count], skip_special_tokens=True)
            cache = now.cache.fork()
            if removed:
                cache.crop(-removed)
            self._spillable.replace(now.with_answer_cut(cache, count, text))

        self._alone(cut)

    def fork(self) -> Chat:
        """Create a second chat that shares the past and its pages; the chats then diverge."""

        def fork(now: Conversation) -> Chat:
            conversation = replace(now, kv=now.cache.fork(), heard=now.heard.forked())
            about = self.cache_salt, self.tools, self.adapter
            return Chat(self.pipe, self.system, conversation, *about)

        return self._alone(fork)

    def save(self, path: str | Path) -> None:
        """Write the chat to a safetensors file, for ``pipe.load_chat``.

        Other requests continue to run meanwhile. With ``tp_plan``, each rank writes its own heads
        to a separate file: ``chat.0-of-2.safetensors`` and so on.

        Raises:
            InputError: if the file cannot be written; an existing file is kept.
        """
        path = self.pipe.store.ranks.path(path)
        parts = self.system, self.pipe.fingerprint_with(self.adapter), self.tools
        with self._calls:
            content = self._alone(lambda now: chat_content(path, now, *parts))
            write_checked(path, *content)

    def close(self) -> None:
        """Release all pages; the chat cannot be used afterwards. A second call has no effect."""
        with self._calls:
            self._wait_for_left()
            self.pipe.engine.call(self._close)

    def _close(self) -> None:
        if not self._spillable.closed:
            self._end_stream()
            self._spillable.close()
            self.pipe.store.trim_surplus(busy=self.pipe.engine.thread.busy)

    def __enter__(self) -> Chat:
        """Return the chat itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the chat."""
        self.close()
