"""Session: a visitor's conversation with its settings and operations."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscar_mm.apps.demo.conversation_list import MAX_TITLE, Summary, title_of
from oscar_mm.apps.demo.live_question import LiveQuestion
from oscar_mm.apps.demo.live_speech import LiveSpeech
from oscar_mm.apps.demo.measured_chat import MeasuredChat
from oscar_mm.apps.demo.media_hint import media_hint
from oscar_mm.apps.demo.transcript import NOTES, Exchange, load_previews
from oscar_mm.apps.demo.visitor_input import (
    MAX_FILES,
    MAX_NEW_TOKENS,
    SessionSettings,
    bounded_text,
    files_by_kind,
    upload_path,
)
from oscar_mm.errors import InputError
from oscar_mm.policy import KVPolicy

if TYPE_CHECKING:
    from oscar_mm.apps.demo.hands_free import Ears
    from oscar_mm.apps.demo.sessions import Sessions
    from oscar_mm.inspect.inspection import Inspection
    from oscar_mm.pipelines.pipeline import Pipeline

_PATIENCE_S = 60
_MAX_REFUSED, _SHOWN_CHARACTERS = 20, 4000
"""Maximum number of refused messages in the transcript, and of characters in each message."""
_MUTE = (
    "Not spoken, because earlier media were answered only in text: start a new chat to hear answers"
)
"""Hint where the talker has not read the media of an earlier turn."""
_SIXTEEN_BIT = KVPolicy.preset("bf16")
_log = logging.getLogger(__name__)


class Session:
    """A visitor's conversation; several threads can call its methods.

    Args:
        sessions: all sessions of the page.
        settings: settings of the conversation; by default those of the page.

    Attributes:
        id: unguessable id of the session in the page's URL.
        settings: settings of the conversation.
        conversation: the chat with the packed cache.
        baseline: the same chat with a 16-bit cache; None if there is no comparison.
        exchanges: questions and answers to show in the transcript.
        active: exchange whose answer is being generated, or None.
        baseline_exchange: exchange that is being answered with the 16-bit cache, or None.
        name: title that the visitor gave the conversation, or "".
        ears: what hears the visitor hands-free; None before it is first used.
        aloud: speech of the latest answer to a recording of the visitor; None before the first.
        last_active: ``time.monotonic()`` of the visitor's last action.
        changed_by: session hash of the browser that changed the conversation last, or "".
        is_unsaved: whether the conversation has changed since it was written to, or read from, the
            conversation folder.
    """

    def __init__(self, sessions: Sessions, settings: SessionSettings | None = None) -> None:
        self.id, self.sessions, self.last_active = (
            secrets.token_urlsafe(24),
            sessions,
            time.monotonic(),
        )
        self._turn, self._stop, self._closed = threading.Lock(), threading.Event(), False
        # Acquired before ``_turn``, so that questions wait while the conversation is being written.
        self._writing, self.is_unsaved = threading.Lock(), False
        self.name = self.changed_by = ""
        self.ears: Ears | None = None
        self.aloud: LiveSpeech | None = None
        self._begin(settings or sessions.settings)

    def _begin(self, settings: SessionSettings) -> None:
        conversation = self._new_chat(settings.policy, settings)
        self.baseline = self._new_chat(_SIXTEEN_BIT, settings) if settings.compare else None
        self.conversation, self.settings = conversation, settings
        self.exchanges: list[Exchange] = []
        self.active: Exchange | None = None
        self.baseline_exchange: Exchange | None = None

    def _new_chat(self, policy: KVPolicy, settings: SessionSettings) -> MeasuredChat:
        return MeasuredChat(self.sessions.pipeline(policy).chat(settings.system))

    @property
    def turns(self) -> list[Exchange]:
        """Exchanges that count as turns of the chat."""
        return [exchange for exchange in self.exchanges if exchange.counts]

    @property
    def converses(self) -> bool:
        """Whether any question has been answered or is being answered."""
        return self._turn.locked() or bool(self.turns)

    @property
    def has_ended(self) -> bool:
        """Whether the conversation was deleted, or closed to make room for others."""
        return self._closed

    @property
    def is_answering(self) -> bool:
        """Whether an answer is being generated."""
        return self.active is not None or self.baseline_exchange is not None

    @property
    def summary(self) -> Summary:
        """Title, media and size of the conversation."""
        turns = self.turns
        media = Counter(preview.kind for turn in turns for preview in turn.previews)
        first = turns[0].question if turns else ""
        return Summary(self.id, self.name or title_of(first), dict(media), self.used_bytes)

    @property
    def said(self) -> list[str]:
        """Questions and answers of the conversation."""
        return [text for turn in self.turns for text in (turn.question, turn.answer)]

    @property
    def used_bytes(self) -> int:
        """Size in bytes of the keys and values at the latest measurement."""
        return sum(chat.curve.last.used_bytes for chat in self._chats)

    def ask(
        self,
        text: str,
        files: Sequence[str | Path],
        *,
        is_talk: bool = False,
        live: LiveQuestion | None = None,
        **options: Any,
    ) -> Iterator[None]:
        """Ask a question, as a generator; each step updates ``exchanges`` with the answer so far.

        An error in the question is stored in the exchange, and the conversation remains usable.

        Args:
            text: text of the question.
            files: paths of the question's media.
            is_talk: whether the question is a recording of the visitor, which needs no text; the
                answer is then spoken if possible.
            live: the question, if the conversation has read it while it was spoken.
            options: options for the answer: max_new_tokens and temperature.

        Raises:
            InputError: if another answer is running.
        """
        with self._writing:
            if not self._turn.acquire(blocking=False):
                raise InputError(
                    "an answer is still being generated: wait for the answer, or stop it"
                )
        try:
            if self._closed:
                raise InputError("this conversation has ended: reload the page")
            self._stop.clear()
            seed = secrets.randbits(31)
            shown = text[:_SHOWN_CHARACTERS], list(files[:MAX_FILES])
            exchange = Exchange(*shown, options={"seed": seed, **options}, is_talk=is_talk)
            self._show(exchange)
            self.active = exchange
            self.sessions.tell_others(self)
            aloud = LiveSpeech()
            if is_talk:
                self.aloud, exchange.speech = aloud, aloud.key
            try:
                yield from self._answer(exchange, text, files, live)
            finally:
                aloud.end(exchange.answer)
        finally:
            self.active = None
            self._release()

    def _answer(
        self,
        exchange: Exchange,
        text: str,
        files: Sequence[str | Path],
        live: LiveQuestion | None,
    ) -> Iterator[None]:
        try:
            exchange.question = bounded_text("message", text)
            # A chat accepts pictures without text, but the visitor probably forgot to ask.
            if not exchange.is_talk:
                self.sessions.pipe.check_text("message", exchange.question)
            self._check_length(exchange.options.get("max_new_tokens"))
            exchange.media = files_by_kind(files, self.sessions.folders)
            exchange.previews = load_previews(exchange.media, self.sessions.pipe.limits)
            exchange.place_previews()
            yield
            before = len(self.conversation.chat.turns)
            try:
                with closing(self._texts(self.conversation, exchange, live)) as texts:
                    for exchange.answer in texts:
                        exchange.reasoning = self.conversation.reasoning
                        yield
            finally:
                exchange.counts = len(self.conversation.chat.turns) > before
                if exchange.counts:
                    self.is_unsaved = True
                    self._note_end(exchange)
            if not exchange.counts:
                raise InputError("stopped before the first word: the conversation is unchanged")
            self.active = None
            yield
            if self.baseline is not None:
                self._stop.clear()
                yield from self._answer_baseline(self.baseline, exchange)
        except InputError as error:
            exchange.error = str(error)
            exchange.question = exchange.question[:_SHOWN_CHARACTERS]
        except Exception as error:
            _log.exception("an answer failed")
            exchange.error = f"the server failed ({type(error).__name__}); try again"

    def _note_end(self, exchange: Exchange) -> None:
        turn = self.conversation.chat.turns[-1]
        self.sessions.previews.add(turn.media, [preview.html for preview in exchange.previews])
        exchange.answer = turn.answer
        exchange.note = NOTES.get(self.conversation.finish_reason, "")
        if not exchange.answer:
            exchange.note = "the answer is empty"
        hints = (
            media_hint(exchange.question, self.conversation.segments),
            self.sessions.card.hint(exchange.question),
            _MUTE if exchange.is_mute else "",
        )
        exchange.hint = ". ".join(filter(None, hints))

    def _check_length(self, tokens: Any) -> None:
        longest = self.sessions.pipe.longest_answer(MAX_NEW_TOKENS)
        if isinstance(tokens, int) and tokens > longest:
            raise InputError(
                f"a limit of {tokens:,} tokens per answer exceeds the maximum of {longest:,}"
            )

    def _texts(
        self, chat: MeasuredChat, exchange: Exchange, live: LiveQuestion | None = None
    ) -> Generator[str]:
        # The answer with a 16-bit cache is only read.
        is_spoken = exchange.is_talk and chat is self.conversation
        speaks = is_spoken and chat.chat.can_speak
        if is_spoken and not speaks and chat.chat.pipe.family.talker is not None:
            exchange.is_mute = True
        options = exchange.options | ({"speak": True} if speaks else {})
        asked = exchange.question, exchange.media, options, self._stop, _placed(exchange)
        return chat.answer(*asked, self.aloud if speaks else None, live)

    def _answer_baseline(self, chat: MeasuredChat, exchange: Exchange) -> Iterator[None]:
        """Answer with the 16-bit cache as well; end the comparison if this answer is incomplete."""
        complete, self.baseline_exchange = False, exchange
        self.sessions.tell_others(self)
        try:
            with closing(self._texts(chat, exchange)) as texts:
                for exchange.baseline in texts:
                    yield
            complete = not self._stop.is_set()
        finally:
            self.baseline_exchange = None
            if not complete:
                self._drop_baseline()

    def compare(self) -> Iterator[None]:
        """Start answering all earlier and later questions with a 16-bit cache too.

        Raises:
            InputError: if the conversation was loaded, so its media files are missing.
        """
        with self._exclusive():
            if self.baseline is not None:
                return
            if self._lacks_media:
                raise InputError(
                    "a loaded conversation lacks its media files: start a new one to compare"
                )
            self.baseline = self._new_chat(_SIXTEEN_BIT, self.settings)
            self.settings = replace(self.settings, compare=True)
            segments = self.conversation.segments
            forgotten = [segment.index for segment in segments if segment.forgotten]
            for exchange in self.turns:
                yield from self._answer_baseline(self.baseline, exchange)
                if self.baseline is None:
                    return
            for index in forgotten:
                self.baseline.forget(index)
            yield

    def stop_comparing(self) -> None:
        """End the comparison and drop the 16-bit cache."""
        with self._exclusive():
            self._drop_baseline()

    def _drop_baseline(self) -> None:
        if self.baseline is not None:
            self.baseline.chat.close()
        self.baseline, self.settings = None, replace(self.settings, compare=False)
        for exchange in self.exchanges:
            exchange.baseline = None

    def show_error(self, error: Exception) -> None:
        """Show an error in the transcript."""
        self._show(Exchange("", error=str(error)))

    def _show(self, exchange: Exchange) -> None:
        """Add an exchange to the transcript; drop the oldest refused one if there are too many."""
        refused = [old for old in self.exchanges if not old.counts]
        for old in refused[: len(refused) - _MAX_REFUSED]:
            self.exchanges.remove(old)
        self.exchanges.append(exchange)

    @property
    def stopped(self) -> bool:
        """Whether ``stop`` ended the latest answer."""
        return self._stop.is_set() or self.conversation.finish_reason == "interrupted"

    def stop(self) -> None:
        """Stop the running answer or the processing of its prompt; keep the text so far."""
        self._stop.set()
        for chat in self._chats:
            chat.chat.stop()

    def begin_question(self, name: str) -> LiveQuestion:
        """Begin to read a question that the visitor speaks, given the name of its recording."""
        return LiveQuestion(self.conversation, name)

    def read_heard(self) -> bool:
        """Read what the visitor has said so far, unless an answer is running; return whether the
        memory has grown."""
        live = None if self.ears is None else self.ears.live
        if live is None or self._turn.locked():
            return False
        with self.unchanging(0) as still:
            return still and live.read()

    def stop_listening(self) -> None:
        """Forget what the visitor is saying."""
        if self.ears is not None:
            self.ears.forget()

    def keep_heard(self, key: str, seconds: float) -> None:
        """Remove what the visitor has not heard of the last answer, whose speech was silenced.

        Args:
            key: key of the speech; that of another answer than the last is ignored.
            seconds: seconds of the speech that were heard.
        """
        with self.unchanging(_PATIENCE_S) as still:
            last, aloud = self.exchanges[-1] if self.exchanges else None, self.aloud
            if not still or last is None or aloud is None or not last.counts:
                return
            if not key == aloud.key == last.speech:
                return
            self.conversation.keep_heard(aloud, seconds)
            self._note_end(last)
            self.is_unsaved = True
        self.sessions.tell_others(self)
        self.sessions.save_later(self)

    def wait_for_the_end(self) -> None:
        """Wait until no answer is running, for a bounded time."""
        if self._turn.acquire(timeout=_PATIENCE_S):
            self._turn.release()

    def begin(self, settings: SessionSettings | None = None) -> None:
        """Begin a new conversation."""
        with self._change():
            old = self._chats
            self._begin(settings or self.settings)
            for chat in old:
                chat.chat.close()

    def undo(self, key: str | None = None) -> None:
        """Undo a question and all later ones; a message that was refused is only removed.

        Args:
            key: key of the question's exchange; by default the last one.

        Raises:
            InputError: if there is no such question, or the chat cannot undo so many.
        """
        with self._change():
            self._cut(self._place(key))

    def take_back(self, key: str | None = None) -> tuple[str, list[str | Path]]:
        """Undo a question and all later ones, and return its text and files, so that it can be
        asked again.

        Args:
            key: key of the question's exchange; by default the last one.

        Raises:
            InputError: if there is no such question, or its files are missing.
        """
        with self._change():
            place = self._place(key)
            taken = self.exchanges[place]
            if taken.lacks_files:
                raise InputError(
                    "the files of a loaded question are missing: upload the files again"
                )
            self._cut(place)
            return taken.question, taken.files

    def _place(self, key: str | None) -> int:
        """Return the index of the exchange with this key; by default that of the last one."""
        if key is None and not self.exchanges:
            raise InputError("there is nothing to undo")
        keys = [exchange.key for exchange in self.exchanges]
        if key is not None and key not in keys:
            raise InputError("this question is gone: it was removed or asked again")
        return len(keys) - 1 if key is None else keys.index(key)

    def _cut(self, place: int) -> None:
        """Remove the exchanges from this index on."""
        if turns := sum(exchange.counts for exchange in self.exchanges[place:]):
            for chat in self._chats:
                chat.undo(turns)
        del self.exchanges[place:]

    def fork(self, key: str | None = None) -> Session:
        """Copy the conversation into a new session; copy and original continue independently.

        Args:
            key: key of the last exchange to copy; by default all are copied.

        Raises:
            InputError: if there is no such exchange, or the chat cannot undo the later ones.
        """
        with self._exclusive():
            end = len(self.exchanges) if key is None else self._place(key) + 1
            fork = Session(self.sessions)
            fork._close_chats()
            fork.conversation, fork.settings = self.conversation.fork(), self.settings
            fork.baseline = self.baseline.fork() if self.baseline is not None else None
            fork.exchanges = [replace(exchange) for exchange in self.exchanges]
            fork.name = f"Copy of {self.summary.title}"[:MAX_TITLE]
            fork.is_unsaved = True
            try:
                fork._cut(end)
            except BaseException:
                fork.close()
                raise
            return fork

    def forget(self, index: int) -> None:
        """Free the memory of the segment with this index: an image, a video or a recording."""
        with self._change():
            for chat in self._chats:
                chat.forget(index)

    def save(self, path: Path) -> None:
        """Write the conversation to a file."""
        with self._exclusive():
            if not self.conversation.chat.turns:
                raise InputError("there is nothing to save yet")
            self.conversation.chat.save(path)

    def load(self, path: str | Path) -> None:
        """Replace this conversation with a saved conversation that the visitor has uploaded."""
        self.restore(upload_path(path, self.sessions.folders))

    def restore(self, path: Path, previews: Sequence[str] | None = None) -> None:
        """Replace this conversation with a saved conversation.

        Args:
            path: path of the saved conversation.
            previews: trusted HTML previews of the conversation's first media, in order; any other
                media use previews that were shown recently, if there are any.
        """
        with self._change():
            chat, store = self._pipe.load_chat(path), self.sessions.previews
            self._close_chats()
            self.conversation, self.baseline = MeasuredChat(chat), None
            self.settings = replace(self.settings, system=chat.system, compare=False)
            if previews is not None:
                media = [span for turn in chat.turns for span in turn.media]
                store.add(media[: len(previews)], previews[: len(media)])
            self.exchanges = [
                Exchange.loaded(turn, [store.preview(span) for span in turn.media])
                for turn in chat.turns
            ]
            for exchange in self.exchanges:
                exchange.hint = self.sessions.card.hint(exchange.question)

    def inspection(self) -> Inspection:
        """Measure how quantization affects the keys and values of this conversation's media."""
        from oscar_mm.engine.message import first_turn
        from oscar_mm.inspect.inspection import inspect_prompt
        from oscar_mm.media.part import media_parts

        with self._exclusive():
            if not self.turns or self._lacks_media:
                raise InputError("ask a question with media first")
            pipe, last = self._pipe, self.turns[-1]
            files: dict[str, Any] = {
                kind: [path for turn in self.turns for path in turn.media[kind]]
                for kind in last.media
            }
            asked = first_turn(last.question, media_parts(**files), self.settings.system)
            prompt = pipe.read_request(asked)
            inspect = partial(inspect_prompt, pipe.model, prompt)
            return pipe.engine.call(inspect, runs_model=True)

    def close(self) -> None:
        """Free the conversation once no answer is running and no write to disk is in progress."""
        self._closed = True
        self.stop()
        self.stop_listening()
        if self._turn.acquire(timeout=_PATIENCE_S):
            self._close_chats()
            self._turn.release()

    @property
    def _pipe(self) -> Pipeline:
        """Pipeline of the conversation."""
        return self.sessions.pipeline(self.conversation.chat.pipe.policy)

    @property
    def _lacks_media(self) -> bool:
        """Whether media files are missing, as in a loaded conversation."""
        return any(exchange.lacks_files for exchange in self.exchanges)

    @property
    def _chats(self) -> list[MeasuredChat]:
        return [chat for chat in (self.conversation, self.baseline) if chat is not None]

    def _close_chats(self) -> None:
        for chat in self._chats:
            chat.chat.close()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Stop the running answer, then prevent new answers within the block."""
        self.stop()
        if not self._turn.acquire(timeout=_PATIENCE_S):
            why = "being written to disk" if self._writing.locked() else "being read by the model"
            raise InputError(f"this conversation is still {why}: try again in a moment")
        try:
            if self._closed:
                raise InputError("this conversation has ended: reload the page")
            self._stop.clear()
            yield
        finally:
            self._release()

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Prevent other changes to the conversation within the block, and mark it as unsaved."""
        with self._exclusive():
            self.is_unsaved = True
            yield

    def _release(self) -> None:
        """Allow other changes to the conversation, and write any changes in the background."""
        self._free_turn()
        self.sessions.tell_others(self)
        if self.is_unsaved and not self._closed:
            self.sessions.save_later(self)

    def _free_turn(self) -> None:
        if self._closed:
            self._close_chats()
        self._turn.release()

    @contextmanager
    def unchanging(self, patience: float) -> Iterator[bool]:
        """Prevent changes to the conversation within the block; new questions wait.

        Args:
            patience: maximum seconds to wait for a running answer.

        Yields:
            True if nothing can change; False if an answer is still running after ``patience``
            seconds, or the conversation has ended.
        """
        with self._writing:
            if not self._turn.acquire(timeout=patience):
                yield False
                return
            try:
                yield not self._closed
            finally:
                self._free_turn()


def _placed(exchange: Exchange) -> list[Any]:
    """Return the parts of a question that places its media, for ``Chat.stream``; else none."""
    kinds = {"picture": "image", "video": "video", "clip": "audio"}
    return [
        part if isinstance(part, str) else {"type": kinds[part.kind], kinds[part.kind]: part.path}
        for part in exchange.parts
    ]
