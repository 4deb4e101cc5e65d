"""Visitor: one person's conversation, what is shown of it, and what may be done with it."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscar_mm.apps.demo.exchange import NOTES, Exchange
from oscar_mm.apps.demo.settings import Settings
from oscar_mm.apps.demo.side import Side
from oscar_mm.apps.demo.thumbnails import thumbnails
from oscar_mm.apps.demo.uploads import MAX_NEW_TOKENS, by_kind, checked_text, uploaded
from oscar_mm.errors import InputError
from oscar_mm.policy import KVPolicy

if TYPE_CHECKING:
    from oscar_mm.apps.demo.hall import Hall
    from oscar_mm.inspect.inspection import Inspection
    from oscar_mm.pipelines.pipeline import Pipeline

_PATIENCE_S = 60
_SIXTEEN_BIT = KVPolicy.preset("bf16")
_log = logging.getLogger(__name__)


class Visitor:
    """A visitor; its methods may be called from several threads.

    Args:
        hall: where it is.

    Attributes:
        settings: of the conversation.
        side: the conversation.
        other: the same over a 16-bit cache, or None.
        exchanges: what is shown of it.
        writing: the one whose answer is being written, or None.
        seen: ``time.monotonic()`` when the visitor last did something.
    """

    def __init__(self, hall: Hall) -> None:
        self.hall, self.seen = hall, time.monotonic()
        self._turn, self._stop, self._closed = threading.Lock(), threading.Event(), False
        self._begin(hall.settings)

    def _begin(self, settings: Settings) -> None:
        side = self._new_side(settings.policy, settings)
        self.other = self._new_side(_SIXTEEN_BIT, settings) if settings.compare else None
        self.side, self.settings = side, settings
        self.exchanges: list[Exchange] = []
        self.writing: Exchange | None = None

    def _new_side(self, policy: KVPolicy, settings: Settings) -> Side:
        return Side(self.hall.pipeline(policy).chat(settings.system))

    @property
    def turns(self) -> list[Exchange]:
        """Exchanges that are turns of the chat."""
        return [one for one in self.exchanges if one.counts]

    @property
    def converses(self) -> bool:
        """Whether something was asked and answered, or is just now."""
        return self._turn.locked() or bool(self.turns)

    def ask(self, text: str, files: Sequence[str | Path], **options: Any) -> Iterator[None]:
        """Ask a question; goes on as the answer does, with ``exchanges`` brought up to date.

        Whatever is wrong with the question ends up in the exchange, and the conversation goes on.

        Args:
            text: the question.
            files: what it shows.
            options: max_new_tokens, temperature.

        Raises:
            InputError: an answer is being written.
        """
        if not self._turn.acquire(blocking=False):
            raise InputError("an answer is being written: wait for it, or stop it")
        try:
            if self._closed:
                raise InputError("this conversation has ended: reload the page")
            self._stop.clear()
            exchange = Exchange(text, options={"seed": secrets.randbits(31), **options})
            self.exchanges.append(exchange)
            self.writing = exchange
            yield from self._answered(exchange, files)
        finally:
            self.writing = None
            if self._closed:
                self._close_chats()
            self._turn.release()

    def _answered(self, exchange: Exchange, files: Sequence[str | Path]) -> Iterator[None]:
        try:
            exchange.question = checked_text("message", exchange.question)
            # A chat takes pictures alone for a question; here somebody forgot to type it.
            self.hall.pipe.check_text("prompt", exchange.question)
            self._check_length(exchange.options.get("max_new_tokens"))
            exchange.media = by_kind(files, self.hall.folders)
            exchange.shown = thumbnails(exchange.media, self.hall.pipe.limits)
            yield
            before = len(self.side.chat.turns)
            try:
                with closing(self._answers(self.side, exchange)) as answers:
                    for exchange.answer in answers:
                        exchange.reasoning = self.side.reasoning
                        yield
            finally:
                exchange.counts = len(self.side.chat.turns) > before
            if not exchange.counts:
                raise InputError("stopped before the first word: the conversation is as before")
            exchange.note = NOTES.get(self.side.finish_reason, "")
            if not exchange.answer:
                exchange.note = "the model ended without a word"
            self.writing = None
            yield
            if self.other is not None:
                self._stop.clear()
                yield from self._compared(self.other, exchange)
        except InputError as error:
            exchange.error = str(error)
        except Exception as error:
            _log.exception("an answer failed")
            exchange.error = f"the server failed ({type(error).__name__}); try again"

    def _check_length(self, tokens: Any) -> None:
        most = self.hall.pipe.longest_answer(MAX_NEW_TOKENS)
        if isinstance(tokens, int) and tokens > most:
            raise InputError(f"an answer of {tokens:,} tokens is over the {most:,} of here")

    def _answers(self, side: Side, exchange: Exchange) -> Generator[str]:
        return side.answer(exchange.question, exchange.media, exchange.options, self._stop)

    def _compared(self, side: Side, exchange: Exchange) -> Iterator[None]:
        """The answer of the 16-bit cache; without a whole one the comparison ends."""
        whole = False
        try:
            with closing(self._answers(side, exchange)) as answers:
                for exchange.other in answers:
                    yield
            whole = not self._stop.is_set()
        finally:
            if not whole:
                self._give_up_other()

    def compare(self) -> Iterator[None]:
        """Answer all questions over a 16-bit cache too, from now on as well.

        Raises:
            InputError: files of a loaded conversation are not there.
        """
        with self._alone():
            if self.other is not None:
                return
            if self._lacks_files:
                raise InputError("a loaded conversation is without its media: begin a new one")
            self.other = self._new_side(_SIXTEEN_BIT, self.settings)
            self.settings = replace(self.settings, compare=True)
            forgotten = [one.index for one in self.side.segments if one.forgotten]
            for exchange in self.turns:
                yield from self._compared(self.other, exchange)
                if self.other is None:
                    return
            for index in forgotten:
                self.other.forget(index)
            yield

    def stop_comparing(self) -> None:
        """No 16-bit cache any more."""
        with self._alone():
            self._give_up_other()

    def _give_up_other(self) -> None:
        if self.other is not None:
            self.other.chat.close()
        self.other, self.settings = None, replace(self.settings, compare=False)
        for exchange in self.exchanges:
            exchange.other = None

    def tell(self, error: Exception) -> None:
        """Show why something was refused."""
        self.exchanges.append(Exchange("", error=str(error)))

    @property
    def stopped(self) -> bool:
        """Whether the latest answer was ended by ``stop``."""
        return self._stop.is_set() or self.side.finish_reason == "interrupted"

    def stop(self) -> None:
        """End the answer that is being written; what is there counts."""
        self._stop.set()

    def begin(self, settings: Settings | None = None) -> None:
        """A new conversation."""
        with self._alone():
            old = self._sides
            self._begin(settings or self.settings)
            for side in old:
                side.chat.close()

    def undo(self) -> None:
        """Take back the last question, or the last message that could not be answered."""
        with self._alone():
            if not self.exchanges:
                raise InputError("there is nothing to take back")
            if self.exchanges[-1].counts:
                for side in self._sides:
                    side.undo()
            self.exchanges.pop()

    def forget(self, index: int) -> None:
        """Free the memory of a segment: an image, a video or a recording."""
        with self._alone():
            for side in self._sides:
                side.forget(index)

    def save(self, path: Path) -> None:
        """Write the conversation to a file."""
        with self._alone():
            if not self.side.chat.turns:
                raise InputError("there is nothing to save yet")
            self.side.chat.save(path)

    def load(self, path: str | Path) -> None:
        """Go on with a saved conversation in place of this one."""
        with self._alone():
            chat = self._pipe.load_chat(uploaded(path, self.hall.folders))
            self._close_chats()
            self.side, self.other = Side(chat), None
            self.settings = replace(self.settings, system=chat.system, compare=False)
            self.exchanges = [Exchange.loaded(turn) for turn in chat.turns]

    def inspection(self) -> Inspection:
        """What quantization does to the keys and values of this conversation's media."""
        from oscar_mm.inspect.inspection import inspect_prompt

        with self._alone():
            if not self.turns or self._lacks_files:
                raise InputError("ask a question with media first")
            pipe, last = self._pipe, self.turns[-1]
            media: dict[str, Any] = {
                kind: [p for one in self.turns for p in one.media[kind]] for kind in last.media
            }
            prompt = pipe.read_request(last.question, media, self.settings.system)
            with pipe.lock:
                return inspect_prompt(pipe.model, prompt)

    def close(self) -> None:
        """The visitor has left: nothing is held any more, at the latest when an answer ends."""
        self._closed = True
        self._stop.set()
        if self._turn.acquire(timeout=_PATIENCE_S):
            self._close_chats()
            self._turn.release()

    @property
    def _lacks_files(self) -> bool:
        """Whether media were shown whose files are not here: those of a loaded conversation."""
        return any(shown.path is None for one in self.exchanges for shown in one.shown)

    @property
    def _sides(self) -> list[Side]:
        return [side for side in (self.side, self.other) if side is not None]

    @property
    def _pipe(self) -> Pipeline:
        """The pipeline of the conversation."""
        return self.hall.pipeline(self.side.chat.pipe.policy)

    def _close_chats(self) -> None:
        for side in self._sides:
            side.chat.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No answer is being written; one that was ends first."""
        self._stop.set()
        if not self._turn.acquire(timeout=_PATIENCE_S):
            raise InputError("the model is still reading: try again in a moment")
        try:
            if self._closed:
                raise InputError("this conversation has ended: reload the page")
            self._stop.clear()
            yield
        finally:
            self._turn.release()
