"""AnswerGroup: answers that decode in one batch, which they join and leave between steps."""

from __future__ import annotations

from oscar_mm.cache.batch_view import BatchView
from oscar_mm.generation.decode_batch import DecodeBatch
from oscar_mm.generation.generation import Generation
from oscar_mm.ops.pack import NOT_STORABLE


class AnswerGroup:
    """Answers that decode in one batch.

    Args:
        batch: decodes them.
        view: the batch's cache where answers come and go; None for a single answer, which the
            batch decodes on its own cache.
    """

    def __init__(self, batch: DecodeBatch, view: BatchView | None) -> None:
        self.batch, self.view = batch, view
        self.failed = False
        self._seats: list[Generation | None] = []
        self._joining: list[Generation] = []

    @property
    def live(self) -> list[Generation]:
        """The answers that go on."""
        seated = [answer for answer in self._seats if answer is not None]
        return [answer for answer in (*seated, *self._joining) if not answer.ended]

    def join(self, answer: Generation) -> None:
        """Decode an answer too, whose prompt and first token are there."""
        self._joining.append(answer)

    def step(self) -> None:
        """One more token of each answer."""
        for answer in self.drop_ended():
            answer.settle()
        live = self.live
        if not live:
            return
        try:
            self._seat(live)
            self.batch.step()
            view = self.view
            if view is not None and view.take_bad() and not any(answer.error for answer in live):
                raise FloatingPointError(NOT_STORABLE)
        except BaseException as error:
            self.failed = True
            for answer in live:
                answer.fail(error)
            if not isinstance(error, Exception):
                raise

    def drop_ended(self) -> list[Generation]:
        """Let go of answers that have ended."""
        ended = [x for x in (*self._seats, *self._joining) if x is not None and x.ended]
        self._joining = [answer for answer in self._joining if not answer.ended]
        for place, answer in enumerate(self._seats):
            if answer is not None and answer.ended:
                self._seats[place] = self.batch.rows[place] = None
                if self.view is not None:
                    self.view.vacate(place)
        return ended

    def _seat(self, live: list[Generation]) -> None:
        """Give each answer a row; those that have one keep it, unless answers join or the batch is
        too large by now."""
        size = 1 if self.view is None else self.batch.size_for(len(live))
        if not self._joining and size == len(self._seats):
            return
        self._seats, self._joining = [*live, *[None] * (size - len(live))], []
        if self.view is not None:
            self.view.seat([None if x is None else x.cache for x in self._seats])
        self.batch.seat(self._seats)
