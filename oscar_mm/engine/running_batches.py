"""RunningBatches: the requests that decode, in batches that they join and leave between steps."""

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
"""Prefill time per decode time if one other request waits for each running one."""
_MAX_READING = 8.0
"""Maximum prefill time per decode time."""
_MAX_OWED = 3
"""Maximum number of steps whose time decode may catch up later. With a limit of one, decode ran at
0.49 of its normal pace, with three at 0.50."""
_IN_FLIGHT_S = 0.01
"""Seconds of GPU work in prompt layers kept in flight while the host launches a decode step. A
launch takes 3 ms for 64 rows, and twice that next to a server; more would delay the decode step."""
_MAX_IN_FLIGHT = 4
"""Maximum number of prompt layers in flight."""


class DeviceTimer:
    """Point in time at which a device has finished everything launched on it so far."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))
        self._seconds = time.perf_counter()

    @property
    def comes_later(self) -> bool:
        """Whether the device may reach this point after the host does."""
        return self._event is not None

    def wait(self) -> None:
        """Wait until the device has reached this point."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: DeviceTimer) -> float:
        """Return the seconds since an earlier timer; the device must have reached both."""
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        return earlier._event.elapsed_time(self._event) / 1e3


_COUNTED = 9
"""Number of steps over which the step time is estimated."""


class StepTimer:
    """Estimate of a decode step's duration: the lower quartile of the latest steps.

    The first step between two layers takes longer, as the GPU waits while the host prepares it.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[DeviceTimer, DeviceTimer]] = deque(maxlen=_COUNTED)
        self._seconds: deque[float] = deque(maxlen=_COUNTED)

    def note(self, begin: DeviceTimer, end: DeviceTimer) -> None:
        """Record the begin and end of a step; the end may still lie ahead."""
        self._steps.append((begin, end))

    def seconds(self) -> float:
        """Return the seconds per step, 0 before the first one; all recorded steps must be done."""
        self._seconds.extend(end.since(begin) for begin, end in self._steps)
        self._steps.clear()
        return sorted(self._seconds)[len(self._seconds) // 4] if self._seconds else 0.0


class RunningBatch:
    """Requests that decode as one batch.

    Args:
        batch: runs the decode steps.
        view: cache of the batch, whose rows change; None for a single request that decodes on its
            own cache.
    """

    def __init__(self, batch: DecodeRunner, view: BatchView | None) -> None:
        self.batch, self.view = batch, view
        self.failed = False
        self._rows: list[Request | None] = []
        self._pending: list[Request] = []

    @property
    def live(self) -> list[Request]:
        """Requests that have not ended."""
        seated = [request for request in self._rows if request is not None]
        return [request for request in (*seated, *self._pending) if not request.ended]

    def join(self, request: Request) -> None:
        """Add a prefilled request, whose first token has been sampled, at the next step."""
        self._pending.append(request)

    def finish_early(self) -> None:
        """Commit an already launched step before the batch changes; otherwise its work is lost.

        If the step fails, requests that are about to join are not affected.
        """
        seated = [request for request in self._rows if request is not None and not request.ended]
        changes = bool(self._pending) or self._size(self.live) != len(self._rows)
        if seated and changes and self.batch.is_ahead:
            self._run(lambda: self.batch.step(ahead=False), seated)

    def step(self) -> None:
        """Decode one token per request, unless a step has failed. Call ``drop_ended`` first."""
        if not self.failed and (live := self.live):
            self._run(self._step, live)

    def _step(self) -> None:
        self._set_rows(self.live)
        self.batch.step()

    def _run(self, step: Callable[[], None], live: list[Request]) -> None:
        """Run a step for the given requests; if it fails, all of them fail."""
        try:
            step()
            if self.view is not None and self.view.pop_overflow() and not self._tells_whose(live):
                raise FloatingPointError(NOT_STORABLE)
        except BaseException as error:
            self.failed = True
            for request in live:
                request.fail(error)
            if not isinstance(error, Exception):
                raise

    def _tells_whose(self, live: list[Request]) -> bool:
        """Whether the overflow may belong to a finished request.

        A step that was launched early may have processed the final token of a request, or a token
        after which its logits are NaN.
        """
        if not any(request.ended for request in live) and self.batch.is_ahead:
            self.batch.step(ahead=False)
        return any(request.ended for request in live)

    def drop_ended(self) -> list[Request]:
        """Remove and return the ended requests."""
        ended = [x for x in (*self._rows, *self._pending) if x is not None and x.ended]
        self._pending = [request for request in self._pending if not request.ended]
        for place, request in enumerate(self._rows):
            if request is not None and request.ended:
                self._rows[place] = self.batch.rows[place] = None
                if self.view is not None:
                    self.view.clear_row(place)
        return ended

    def _size(self, live: list[Request]) -> int:
        """Return the number of rows in the batch."""
        return 1 if self.view is None else self.batch.size_for(len(live))

    def _set_rows(self, live: list[Request]) -> None:
        """Give each request a row. Rows stay the same unless requests join or the batch shrinks."""
        size = self._size(live)
        if not self._pending and size == len(self._rows):
            return
        self._rows, self._pending = [*live, *[None] * (size - len(live))], []
        if self.view is not None:
            self.view.set_rows([None if x is None else x.cache for x in self._rows])
        self.batch.set_rows(self._rows)


class RunningBatches:
    """All requests that decode: in one shared batch, or in batches of their own.

    Use it under the lock of the store.

    Args:
        family: the model and its special cases.
        store: page store of all requests' caches.
        wake: called after each decode step between the layers of a prompt.
        waiting: returns the number of requests that wait for prefill but not for memory.

    Attributes:
        stepping: whether a decode step is running.
        freed: set when requests are removed; the caller resets it.
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
        """Since when running requests wait for a step: the last step's end, or the first join."""

    @property
    def live(self) -> list[Request]:
        """Requests that decode."""
        return [request for group in self._batches for request in group.live]

    def joins(self, request: Request) -> bool:
        """Whether a request may share a batch with others."""
        return not request.sampling.deterministic and has_full_attention(self.family.model)

    def join(self, request: Request) -> None:
        """Start to decode a prefilled request, whose first token has been sampled."""
        if not self.live:
            self.wait_since = DeviceTimer(self.family.device)
        if self._shared is not None and self._shared.failed:
            self.forget_batch()
        if self.joins(request):
            if self._shared is None:
                view = BatchView(self._store)
                view.sigmas = request.cache.sigmas  # The model's; those of an old chat may differ.
                self._shared = RunningBatch(self._batch(request, view), view)
            view = self._shared.view
            if view is not None and view.can_take(request.cache):
                self._shared.join(request)
                return
        self._alone.append(RunningBatch(self._batch(request, request.cache), None))
        self._alone[-1].join(request)

    def forget_batch(self) -> None:
        """Let later requests decode in a new batch."""
        if self._shared is not None:
            self._alone.append(self._shared)
            self._shared = None

    def step(self) -> None:
        """Decode one token for each request."""
        begin = DeviceTimer(self.family.device)
        self.stepping = True
        try:
            for group in self._batches:
                group.finish_early()
                self.settle_ended()
                group.step()
        finally:
            self.stepping = False
            self.wait_since = DeviceTimer(self.family.device)
            if self.live:  # The last step may have been launched early: its time means nothing.
                self.pace.note(begin, self.wait_since)

    def reading_share(self, others: int = 0) -> float:
        """Return the ratio of prefill time to decode time.

        Args:
            others: number of further prompts in the same prefill pass.
        """
        others += self._waiting()
        return min(max(_READING * others / max(len(self.live), 1), 1.0), _MAX_READING)

    @property
    def fills_pauses(self) -> bool:
        """Whether to run a step between two prompts, so that the GPU does not wait for the host.

        It keeps the GPU busy until the host has launched the layers of the next prompt.
        """
        return self.wait_since.comes_later and self.reading_share() <= 1.0

    @property
    def steps_while_reading(self) -> bool:
        """Whether decode steps run between the layers of prompts.

        Off with tensor parallelism, where all ranks would have to agree on the layer.
        """
        return TPGroup.of(self.family.model).count == 1

    def settle_ended(self) -> None:
        """Remove ended requests and release what they own."""
        for request in self.drop_ended():
            request.settle()

    def drop_ended(self) -> list[Request]:
        """Remove and return ended requests; requests pending in a failed batch join another."""
        ended = [request for group in self._batches for request in group.drop_ended()]
        self.freed |= bool(ended)
        failed = [group for group in self._batches if group.failed]
        self._alone = [group for group in self._alone if group.live and not group.failed]
        if self._shared is not None and self._shared.failed:
            self._shared = None
        for group in failed:
            for request in group.live:
                self.join(request)
        return ended

    def yield_to_waiters(self, cache: OscarCache) -> None:
        """Yield the lock between two prompt layers to threads that start or finish a request.

        Without this they would wait for all layers.
        """
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
        """Interleave decode steps with prompt layers within the block, see ``LayeredPrefill``.

        Args:
            cache: cache that the prompts are written to.
            prompts: prompts of the pass.
            cancelled: returns whether all requests of the prompts were cancelled; prefill stops
                then, if ``steps_while_reading``.

        Raises:
            Cancelled: if ``cancelled`` returned True; the cache can only be reset or closed.
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
    def _batches(self) -> list[RunningBatch]:
        return [*([] if self._shared is None else [self._shared]), *self._alone]

    def _batch(self, request: Request, cache: OscarCache) -> DecodeRunner:
        positions = request.prompt.positions
        return DecodeRunner(self.family.model, cache, positions.shape[:-2], positions.device)


class _Interleave(NamedTuple):
    """Decode steps between two prompt layers.

    Attributes:
        since: end of the previous interleave; prompt layers ran in between.
        begin, end: begin and end of this interleave; the host prepares its first step after
            ``begin``.
        usual: seconds that as many steps take outside of prefill.
    """

    since: DeviceTimer
    begin: DeviceTimer
    end: DeviceTimer
    usual: float

    def owed(self, share: float) -> float:
        """Return the seconds that decode is still due, given the prefill-to-decode ratio."""
        lost = max(self.end.since(self.begin) - self.usual, 0.0)
        return self.begin.since(self.since) + lost - share * self.usual


class LayeredPrefill:
    """Interleaving of prompt layers and decode steps while a thread runs prefill.

    Once prompt layers have run for as long as a decode step takes, decode gets the same time, plus
    the cost of switching. If more than one request waits for every four that decode, prefill gets a
    larger share: a step of few rows takes nearly as long as a step of many.

    Args:
        groups: requests that decode.
        cache: cache that the prompts are written to.
        prompts: prompts of the pass. If they are short and no requests decode, the host waits for
            no layer.
        cancelled: returns whether all requests of the prompts were cancelled.
    """

    def __init__(
        self,
        groups: RunningBatches,
        cache: OscarCache,
        prompts: Sequence[Prompt],
        cancelled: Callable[[], bool] | None,
    ) -> None:
        self._batches, self._cache, self._others = groups, cache, len(prompts) - 1
        self._decodes = bool(groups.live)  # No requests join during the pass.
        self._waits = self._decodes or sum(prompt.tokens for prompt in prompts) > MAX_TOKENS
        self._cancelled, self._thread = cancelled, threading.get_ident()
        self._launched: list[DeviceTimer] = []
        """Ends of layers that the host has not waited for."""
        self._layer_end: DeviceTimer | None = None
        """End of the latest layer that the host has waited for since the last decode steps."""
        self._layer_seconds = math.inf
        begin = groups.wait_since if self._decodes else DeviceTimer(groups.family.device)
        self._turn = _Interleave(begin, begin, begin, 0.0)
        self._owed = 0.0
        """Seconds that decode was still due before the last interleave."""

    def layer_ends(self, *_: object) -> None:
        """Forward hook of the decoder layers: run decode steps if they are due.

        Raises:
            Cancelled: see ``stop_if_cancelled``.
        """
        if self._batches.stepping or threading.get_ident() != self._thread:
            return
        if self._waits:
            self._wait_for_layers()
        self.stop_if_cancelled()
        self._batches.yield_to_waiters(self._cache)
        if self._layer_end is None or not self._decodes:
            return
        step_seconds = self._batches.pace.seconds()
        share = self._batches.reading_share(self._others)
        # Limited: if steps have become slower, prompts must not starve.
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
        # The count is rounded up; the surplus is subtracted from the next interleave.
        self._step(math.ceil(waited / (share * step_seconds)) if step_seconds else 1, step_seconds)

    def stop_if_cancelled(self, *_: object) -> None:
        """Forward hook of the layers of towers; called after decoder layers too.

        Raises:
            Cancelled: if all requests of the prompts were cancelled.
        """
        if threading.get_ident() == self._thread and self._cancelled and self._cancelled():
            raise Cancelled("nobody waits for the answer any more")

    def _step(self, count: int, step_seconds: float) -> None:
        """Run up to ``count`` decode steps, as long as requests decode."""
        begin, made = DeviceTimer(self._batches.family.device), 0
        with self._cache.paused():
            while self._batches.live and made < count:
                self._batches.step()
                self._batches._wake()
                made += 1
        self._turn = _Interleave(
            self._turn.end, begin, self._batches.wait_since, made * step_seconds
        )

    @property
    def _max_in_flight(self) -> int:
        """Number of layers left in flight while the host launches others or a step."""
        count = math.ceil(_IN_FLIGHT_S / max(self._layer_seconds, 1e-6))
        return min(max(count, 1), _MAX_IN_FLIGHT)

    def _wait_for_layers(self) -> None:
        """Wait for the launched layers, except the last few, which stay in flight on a GPU."""
        self._launched.append(DeviceTimer(self._batches.family.device))
        in_flight = self._max_in_flight if self._launched[-1].comes_later else 0
        while len(self._launched) > in_flight:
            before, self._layer_end = self._layer_end or self._turn.end, self._launched.pop(0)
            self._layer_end.wait()
            self._layer_seconds = self._layer_end.since(before)
