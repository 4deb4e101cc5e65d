"""AnswerGroups: all answers that decode, in batches which they join and leave between steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from oscar_mm.cache.batch_view import BatchView
from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.store import PageStore
from oscar_mm.fast_decode.decoder import sees_all
from oscar_mm.generation.decode_batch import DecodeBatch
from oscar_mm.generation.family import Family
from oscar_mm.generation.generation import Generation
from oscar_mm.ops.pack import NOT_STORABLE
from oscar_mm.ranks import Ranks

_READING = 4.0
"""How many times as long prompts are read as answers make steps, where for each answer another
request waits."""
_MOST_READING = 8.0
"""How many times as long prompts are read as answers make steps, at most."""


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
        """One more token of each answer; ``drop_ended`` comes before."""
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


class AnswerGroups:
    """All answers that decode: in one batch, or in batches of their own; used under the lock of
    their store.

    Args:
        family: the model, and what is special about it.
        store: of the caches of all answers.
        wake: called after each step between the layers of a prompt.
        waiting: how many requests wait to be read, and not for room.

    Attributes:
        stepping: whether a step is being made.
        freed: set when answers were let go of; the user resets it.
    """

    def __init__(
        self,
        family: Family,
        store: PageStore,
        wake: Callable[[], None],
        waiting: Callable[[], int],
    ) -> None:
        self.family, self._store, self._wake, self._waiting = family, store, wake, waiting
        self.stepping = self.freed = False
        self._shared: AnswerGroup | None = None
        self._alone: list[AnswerGroup] = []
        self._step_end = self._step_seconds = 0.0

    @property
    def live(self) -> list[Generation]:
        """The answers that decode."""
        return [answer for group in self._groups for answer in group.live]

    def joins(self, answer: Generation) -> bool:
        """Whether an answer may be a row of a batch with others."""
        return not answer.sampling.deterministic and sees_all(self.family.model)

    def join(self, answer: Generation, *, alike: bool) -> None:
        """Decode an answer, whose prompt and first token are there.

        Args:
            answer: that goes on.
            alike: whether the caches of all answers are balanced alike.
        """
        if self._shared is not None and self._shared.failed:
            self.forget_batch()
        if self.joins(answer):
            if self._shared is None:
                view = BatchView(self._store, alike=alike)
                self._shared = AnswerGroup(self._batch(answer, view), view)
            view = self._shared.view
            if view is not None and view.can_take(answer.cache):
                self._shared.join(answer)
                return
        self._alone.append(AnswerGroup(self._batch(answer, answer.cache), None))
        self._alone[-1].join(answer)

    def forget_batch(self) -> None:
        """Decode the answers that join next in a new batch."""
        if self._shared is not None:
            self._alone.append(self._shared)
            self._shared = None

    def step(self) -> None:
        """One more token of each answer."""
        start = time.perf_counter()
        self.stepping = True
        try:
            for group in self._groups:
                self.settle_ended()
                group.step()
        finally:
            self.stepping = False
            self._step_end = time.perf_counter()
            self._step_seconds = self._step_end - start

    def settle_ended(self) -> None:
        """Let go of answers that have ended, and of what they hold."""
        for answer in self.drop_ended():
            answer.settle()

    def drop_ended(self) -> list[Generation]:
        """Let go of answers that have ended."""
        ended = [answer for group in self._groups for answer in group.drop_ended()]
        self.freed |= bool(ended)
        self._alone = [group for group in self._alone if group.live]
        if self._shared is not None and self._shared.failed:
            self._shared = None
        return ended

    @contextmanager
    def steps_between_layers(self, cache: OscarCache, prompts: int) -> Iterator[None]:
        """Inside, whenever a layer of the decoder is done and answers have waited for as long as
        their last step took, they make steps for as long as they have waited.

        Where for four answers more than one further request waits, reading gets as many times as
        much of the time: a step of few rows takes nearly as long as one of many.

        Args:
            cache: that prompts are read into.
            prompts: how many are read.
        """
        if not self.live or Ranks.of(self.family.model).count > 1:
            yield
            return
        device = self.family.device
        launched: list[torch.cuda.Event] = []

        def between(*_: object) -> None:
            if self.stepping:
                return
            if device.type == "cuda":
                # The host is one layer ahead, and no more, so that its clock tells the truth.
                launched.append(torch.cuda.Event())
                launched[-1].record(torch.cuda.current_stream(device))
                if len(launched) > 1:
                    launched.pop(0).synchronize()
            now = time.perf_counter()
            if (waited := now - self._step_end) < self._step_seconds:
                return
            others = self._waiting() + prompts - 1
            share = min(max(_READING * others / max(len(self.live), 1), 1.0), _MOST_READING)
            if waited < self._step_seconds * share:
                return
            if launched:
                # Else the first step would wait for the layer, and that would be taken for its own.
                launched.pop().synchronize()
                now = time.perf_counter()
                waited = now - self._step_end
            with cache.paused():
                while self.live and time.perf_counter() < now + waited / share:
                    self.step()
                    self._wake()

        layers = self.family.model.get_decoder().layers
        hooks = [layer.register_forward_hook(between) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def _groups(self) -> list[AnswerGroup]:
        return [*([] if self._shared is None else [self._shared]), *self._alone]

    def _batch(self, answer: Generation, cache: OscarCache) -> DecodeBatch:
        positions = answer.prompt.positions
        return DecodeBatch(self.family.model, cache, positions.shape[:-2], positions.device)
