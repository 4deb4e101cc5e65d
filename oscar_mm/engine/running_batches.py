"""RunningBatches: all answers that decode, in batches which they join and leave between steps."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from oscar_mm.cache.batch_view import BatchView
from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.page_store import PageStore
from oscar_mm.engine.decode_runner import DecodeRunner
from oscar_mm.engine.family import Family
from oscar_mm.engine.prefill import MAX_TOKENS, layers_of_towers
from oscar_mm.engine.prompt import Prompt
from oscar_mm.engine.request import Request
from oscar_mm.errors import Cancelled
from oscar_mm.fast_decode.decoder import has_full_attention
from oscar_mm.modality import Modality
from oscar_mm.ops.pack import NOT_STORABLE
from oscar_mm.tensor_parallel import TPGroup

_READING = 4.0
"""How many times as long prompts are read as answers make steps, where for each answer another
request waits."""
_MAX_READING = 8.0
"""How many times as long prompts are read as answers make steps, at most."""
_MAX_OWED = 3
"""Steps for whose time answers are made up later, at most. With one of them answers had 0.49 of
their pace, with three 0.50."""
_IN_FLIGHT_S = 0.01
"""Seconds of a GPU for which layers of prompts stay in flight while the host launches a step, which
takes it 3 ms for 64 rows, and twice that beside a server; more would keep the answers waiting."""
_MAX_IN_FLIGHT = 4
"""Most layers of prompts in flight."""


class DeviceTimer:
    """The moment at which a device has done all that was launched on it until now."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))
        self._seconds = time.perf_counter()

    @property
    def comes_later(self) -> bool:
        """Whether the host may be there before."""
        return self._event is not None

    def wait(self) -> None:
        """Return when it has come."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: DeviceTimer) -> float:
        """Seconds from an earlier one; both have come."""
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        return earlier._event.elapsed_time(self._event) / 1e3


_COUNTED = 9
"""Steps that the pace is of."""


class StepTimer:
    """How long a step takes: a quarter of the last ones took less. The first step between two
    layers takes longer, as a GPU waits while the host prepares it."""

    def __init__(self) -> None:
        self._steps: deque[tuple[DeviceTimer, DeviceTimer]] = deque(maxlen=_COUNTED)
        self._seconds: deque[float] = deque(maxlen=_COUNTED)

    def note(self, begin: DeviceTimer, end: DeviceTimer) -> None:
        """Count a step from its begin to its end, which may be still to come."""
        self._steps.append((begin, end))

    def seconds(self) -> float:
        """Seconds that a step takes, 0 before the first one. All steps noted must have ended."""
        self._seconds.extend(end.since(begin) for begin, end in self._steps)
        self._steps.clear()
        return sorted(self._seconds)[len(self._seconds) // 4] if self._seconds else 0.0


class RunningBatch:
    """Answers that decode in one batch.

    Args:
        batch: decodes them.
        view: the batch's cache where answers come and go; None for a single answer, which the
            batch decodes on its own cache.
    """

    def __init__(self, batch: DecodeRunner, view: BatchView | None) -> None:
        self.batch, self.view = batch, view
        self.failed = False
        self._rows: list[Request | None] = []
        self._pending: list[Request] = []

    @property
    def live(self) -> list[Request]:
        """The answers that go on."""
        seated = [answer for answer in self._rows if answer is not None]
        return [answer for answer in (*seated, *self._pending) if not answer.ended]

    def join(self, answer: Request) -> None:
        """Decode an answer too, whose prompt and first token are there."""
        self._pending.append(answer)

    def finish_early(self) -> None:
        """Before rows change, take the tokens of a step that was launched early: else it was for
        nothing. An error of it is not that of answers that join."""
        seated = [answer for answer in self._rows if answer is not None and not answer.ended]
        changes = bool(self._pending) or self._size(self.live) != len(self._rows)
        if seated and changes and self.batch.is_ahead:
            self._run(lambda: self.batch.step(ahead=False), seated)

    def step(self) -> None:
        """One more token of each answer, unless a step has failed; ``drop_ended`` comes before."""
        if not self.failed and (live := self.live):
            self._run(self._step, live)

    def _step(self) -> None:
        self._set_rows(self.live)
        self.batch.step()

    def _run(self, step: Callable[[], None], live: list[Request]) -> None:
        """Make a step for some answers; its error is that of all of them."""
        try:
            step()
            if self.view is not None and self.view.pop_overflow() and not self._tells_whose(live):
                raise FloatingPointError(NOT_STORABLE)
        except BaseException as error:
            self.failed = True
            for answer in live:
                answer.fail(error)
            if not isinstance(error, Exception):
                raise

    def _tells_whose(self, live: list[Request]) -> bool:
        """Whether keys or values that cannot be stored may be those of an answer that has ended.

        A step that was launched early may have read what its answer ends with, or what makes its
        next logits NaN.
        """
        if not any(answer.ended for answer in live) and self.batch.is_ahead:
            self.batch.step(ahead=False)
        return any(answer.ended for answer in live)

    def drop_ended(self) -> list[Request]:
        """Let go of answers that have ended."""
        ended = [x for x in (*self._rows, *self._pending) if x is not None and x.ended]
        self._pending = [answer for answer in self._pending if not answer.ended]
        for place, answer in enumerate(self._rows):
            if answer is not None and answer.ended:
                self._rows[place] = self.batch.rows[place] = None
                if self.view is not None:
                    self.view.clear_row(place)
        return ended

    def _size(self, live: list[Request]) -> int:
        """Rows of the batch."""
        return 1 if self.view is None else self.batch.size_for(len(live))

    def _set_rows(self, live: list[Request]) -> None:
        """Give each answer a row; those that have one keep it, unless answers join or the batch is
        too large by now."""
        size = self._size(live)
        if not self._pending and size == len(self._rows):
            return
        self._rows, self._pending = [*live, *[None] * (size - len(live))], []
        if self.view is not None:
            self.view.set_rows([None if x is None else x.cache for x in self._rows])
        self.batch.set_rows(self._rows)


class RunningBatches:
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
        self._shared: RunningBatch | None = None
        self._alone: list[RunningBatch] = []
        self.pace = StepTimer()
        self.wait_since = DeviceTimer(family.device)
        """Since when answers wait for a step: the end of the last one, or when the first came."""

    @property
    def live(self) -> list[Request]:
        """The answers that decode."""
        return [answer for group in self._groups for answer in group.live]

    def joins(self, answer: Request) -> bool:
        """Whether an answer may be a row of a batch with others."""
        return not answer.sampling.deterministic and has_full_attention(self.family.model)

    def join(self, answer: Request) -> None:
        """Decode an answer, whose prompt and first token are there."""
        if not self.live:
            self.wait_since = DeviceTimer(self.family.device)
        if self._shared is not None and self._shared.failed:
            self.forget_batch()
        if self.joins(answer):
            if self._shared is None:
                view = BatchView(self._store)
                view.sigmas = answer.cache.sigmas  # The model's: an old chat has others.
                self._shared = RunningBatch(self._batch(answer, view), view)
            view = self._shared.view
            if view is not None and view.can_take(answer.cache):
                self._shared.join(answer)
                return
        self._alone.append(RunningBatch(self._batch(answer, answer.cache), None))
        self._alone[-1].join(answer)

    def forget_batch(self) -> None:
        """Decode the answers that join next in a new batch."""
        if self._shared is not None:
            self._alone.append(self._shared)
            self._shared = None

    def step(self) -> None:
        """One more token of each answer."""
        begin = DeviceTimer(self.family.device)
        self.stepping = True
        try:
            for group in self._groups:
                group.finish_early()
                self.settle_ended()
                group.step()
        finally:
            self.stepping = False
            self.wait_since = DeviceTimer(self.family.device)
            if self.live:  # The last step of all may have been launched early: then this took none.
                self.pace.note(begin, self.wait_since)

    def reading_share(self, others: int = 0) -> float:
        """How many times as long prompts are read as answers make steps.

        Args:
            others: prompts that are read, but for one of them.
        """
        others += self._waiting()
        return min(max(_READING * others / max(len(self.live), 1), 1.0), _MAX_READING)

    @property
    def fills_pauses(self) -> bool:
        """Whether a step between two prompts is worth it: it keeps a device busy, if that is not
        the host itself, until the layers of the next prompt are there."""
        return self.wait_since.comes_later and self.reading_share() <= 1.0

    @property
    def steps_while_reading(self) -> bool:
        """Whether answers make steps between the layers of prompts: not where the model is divided
        among ranks, which would have to agree on the layer."""
        return TPGroup.of(self.family.model).count == 1

    def settle_ended(self) -> None:
        """Let go of answers that have ended, and of what they hold."""
        for answer in self.drop_ended():
            answer.settle()

    def drop_ended(self) -> list[Request]:
        """Let go of answers that have ended; what was to join a batch that failed joins another."""
        ended = [answer for group in self._groups for answer in group.drop_ended()]
        self.freed |= bool(ended)
        failed = [group for group in self._groups if group.failed]
        self._alone = [group for group in self._alone if group.live and not group.failed]
        if self._shared is not None and self._shared.failed:
            self._shared = None
        for group in failed:
            for answer in group.live:
                self.join(answer)
        return ended

    def yield_to_waiters(self, cache: OscarCache) -> None:
        """Between two layers that read into a cache: who begins an answer, or takes one that has
        ended, need not wait for all layers."""
        if self._store.lock.is_wanted_briefly:
            self.settle_ended()
            with cache.paused():
                self._store.lock.let_in()

    @contextmanager
    def layered_prefill(
        self,
        cache: OscarCache,
        prompts: Sequence[Prompt],
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[None]:
        """Inside, the answers take turns with the layers of prompts, see ``LayeredPrefill``.

        Args:
            cache: that prompts are read into.
            prompts: what is read.
            cancelled: whether nobody waits for the prompts any more; reading ends then, if
                ``steps_while_reading``.

        Raises:
            Cancelled: nobody waits; the cache can only be reset or closed.
        """
        model = self.family.model
        if not (self.live or cancelled) or not self.steps_while_reading:
            yield
            return
        turns = LayeredPrefill(self, cache, prompts, cancelled)
        layers = model.get_decoder().layers
        hooks = [layer.register_forward_hook(turns.layer_ends) for layer in layers]
        if cancelled and any(bool((x.modalities > Modality.TEXT).any()) for x in prompts):
            towers = layers_of_towers(model)
            hooks += [layer.register_forward_hook(turns.stop_if_cancelled) for layer in towers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def _groups(self) -> list[RunningBatch]:
        return [*([] if self._shared is None else [self._shared]), *self._alone]

    def _batch(self, answer: Request, cache: OscarCache) -> DecodeRunner:
        positions = answer.prompt.positions
        return DecodeRunner(self.family.model, cache, positions.shape[:-2], positions.device)


class _Interleave(NamedTuple):
    """Steps between two layers.

    Attributes:
        since: the end of the turn before; layers came between.
        begin, end: of the turn; the host prepares the first step after its begin.
        usual: seconds that its steps take elsewhere.
    """

    since: DeviceTimer
    begin: DeviceTimer
    end: DeviceTimer
    usual: float

    def owed(self, share: float) -> float:
        """Seconds that answers have waited, and were not made steps for: ``share`` of a step's."""
        lost = max(self.end.since(self.begin) - self.usual, 0.0)
        return self.begin.since(self.since) + lost - share * self.usual


class LayeredPrefill:
    """Turns of the layers of prompts and the steps of answers, while a thread reads prompts.

    Whenever a layer of the decoder is done and answers have waited for as long as a step takes,
    they make steps for as long as they have waited, with what the turns between cost. Where for
    four answers more than one further request waits, reading gets as many times as much of the
    time: a step of few rows takes nearly as long as one of many.

    Args:
        groups: the answers.
        cache: that prompts are read into.
        prompts: what is read. Where that is short and no answers run, the host waits for no layer.
        cancelled: whether nobody waits for the prompts any more.
    """

    def __init__(
        self,
        groups: RunningBatches,
        cache: OscarCache,
        prompts: Sequence[Prompt],
        cancelled: Callable[[], bool] | None,
    ) -> None:
        self._groups, self._cache, self._others = groups, cache, len(prompts) - 1
        self._decodes = bool(groups.live)  # No answers join meanwhile.
        self._waits = self._decodes or sum(prompt.tokens for prompt in prompts) > MAX_TOKENS
        self._cancelled, self._thread = cancelled, threading.get_ident()
        self._launched: list[DeviceTimer] = []
        """The ends of layers that the host has not waited for."""
        self._layer_end: DeviceTimer | None = None
        """End of the latest layer that the host has waited for since the last steps."""
        self._layer_seconds = math.inf
        begin = groups.wait_since if self._decodes else DeviceTimer(groups.family.device)
        self._turn = _Interleave(begin, begin, begin, 0.0)
        self._owed = 0.0
        """Seconds that answers had waited before the last turn, and were not made steps for."""

    def layer_ends(self, *_: object) -> None:
        """Called where the host has launched a layer of the decoder; raises ``Cancelled``."""
        if self._groups.stepping or threading.get_ident() != self._thread:
            return
        if self._waits:
            self._wait_for_layers()
        self.stop_if_cancelled()
        self._groups.yield_to_waiters(self._cache)
        if self._layer_end is None or not self._decodes:
            return
        step_seconds = self._groups.pace.seconds()
        share = self._groups.reading_share(self._others)
        # No more than for a few steps: those that have become slower must not keep prompts waiting.
        owed = min(self._owed + self._turn.owed(share), _MAX_OWED * share * step_seconds)
        waited = owed + self._layer_end.since(self._turn.end)
        if waited < share * step_seconds:
            return
        if self._launched and self._max_in_flight > 1:
            waited += len(self._launched) * self._layer_seconds
        elif self._launched:
            self._launched[-1].wait()
            waited = owed + self._launched[-1].since(self._turn.end)
        self._launched.clear()
        self._layer_end, self._owed = None, owed
        # A step that they are not owed yet is taken off the next turn.
        self._step(math.ceil(waited / (share * step_seconds)) if step_seconds else 1, step_seconds)

    def stop_if_cancelled(self, *_: object) -> None:
        """Called where the host has launched a layer of a tower, and of the decoder.

        Raises:
            Cancelled: nobody waits for the prompts any more.
        """
        if threading.get_ident() == self._thread and self._cancelled and self._cancelled():
            raise Cancelled("nobody waits for the answer any more")

    def _step(self, count: int, step_seconds: float) -> None:
        """Make so many steps, as long as answers are there to make them."""
        begin, made = DeviceTimer(self._groups.family.device), 0
        with self._cache.paused():
            while self._groups.live and made < count:
                self._groups.step()
                self._groups._wake()
                made += 1
        self._turn = _Interleave(
            self._turn.end, begin, self._groups.wait_since, made * step_seconds
        )

    @property
    def _max_in_flight(self) -> int:
        """How many layers are in flight while the host launches others or a step."""
        count = math.ceil(_IN_FLIGHT_S / max(self._layer_seconds, 1e-6))
        return min(max(count, 1), _MAX_IN_FLIGHT)

    def _wait_for_layers(self) -> None:
        """Wait for layers that were launched, but for the last ones where they come later."""
        self._launched.append(DeviceTimer(self._groups.family.device))
        in_flight = self._max_in_flight if self._launched[-1].comes_later else 0
        while len(self._launched) > in_flight:
            before, self._layer_end = self._layer_end or self._turn.end, self._launched.pop(0)
            self._layer_end.wait()
            self._layer_seconds = self._layer_end.since(before)
