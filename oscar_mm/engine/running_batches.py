"""RunningBatches: batches of decoding requests, which join and leave between steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from oscar_mm.cache.batch_view import BatchView
from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.page_store import PageStore
from oscar_mm.engine.decode_runner import DecodeRunner
from oscar_mm.engine.device_timer import DeviceTimer, EarlyPass, StepTimer
from oscar_mm.engine.engine_thread import EngineThread
from oscar_mm.engine.family import Family
from oscar_mm.engine.request import Request
from oscar_mm.fast_decode.decoder import decodes_any_rows
from oscar_mm.fast_decode.prompt_scratch import PromptPiece
from oscar_mm.ops.pack import NOT_STORABLE
from oscar_mm.tensor_parallel import TPGroup

_READING = 4.0
"""Ratio of prefill time to decode time if one other request waits for each running request."""
_MAX_READING = 8.0
"""Maximum ratio of prefill time to decode time."""
_KEPT_STEPS = 32
"""Number of steps after the last piece of prompts for which a batch keeps the size that it had
beside prompts. Each change of the size delays a step, which then cannot be launched early."""


class RunningBatch:
    """Requests that decode as one batch.

    Args:
        batch: runner of the decode steps.
        view: cache of the batch, with changing rows; None for a single request that decodes on its
            own cache.
    """

    def __init__(self, batch: DecodeRunner, view: BatchView | None) -> None:
        self.batch, self.view = batch, view
        self.failed = False
        self.kept_steps = 0
        """Number of further steps for which the batch has a size for passes with prompts."""
        self._rows: list[Request | None] = []
        self._pending: list[Request] = []

    @property
    def live(self) -> list[Request]:
        """Requests that have not ended."""
        requests = (*self._rows, *self._pending)
        return [request for request in requests if request is not None and not request.ended]

    @property
    def is_running(self) -> bool:
        """Whether any request has not ended."""
        every = (*self._rows, *self._pending)
        return any(request is not None and not request.ended for request in every)

    def join(self, request: Request) -> None:
        """Add a prefilled request, whose first token has been sampled, from the next step on."""
        self._pending.append(request)

    def finish_early(self) -> bool:
        """Commit an already launched step before the batch changes, so that its work is not lost.

        Requests join at once, and the following step is launched with them, unless the size of the
        batch changes. If the step fails, requests that are about to join are not affected.

        Returns:
            Whether the following step, with the requests that joined, is under way.
        """
        decoding = [request for request in self._rows if request is not None and not request.ended]
        if not decoding or not self.batch.is_ahead:
            return False
        if self._size(self.live) != len(self._rows):
            self._run(lambda: self.batch.step(ahead=False), decoding)
        elif self._pending:
            self._run(lambda: self.batch.step(following=self._fill_rows), decoding)
            return self.batch.is_ahead and not self.failed
        return False

    def step(self) -> None:
        """Decode one token per request, unless a step has failed. Call ``drop_ended`` first."""
        if not self.failed and (live := self.live):
            self._run(self._step, live)

    def _step(self) -> None:
        self._set_rows(self.live)
        self.batch.step()

    def _run(self, step: Callable[[], None], live: list[Request]) -> None:
        """Run a step for the given requests; if it fails, all of them fail."""
        self.kept_steps = max(0, self.kept_steps - 1)
        try:
            step()
            if self.view is not None and self.view.pop_overflow() and not self._tells_whose(live):
                raise FloatingPointError(NOT_STORABLE)
        except BaseException as error:
            self.failed = True
            for request in live:
                request.fail(error)

    def _tells_whose(self, live: list[Request]) -> bool:
        """Return whether the overflow may belong to a request that has ended.

        A step that was launched early may have processed the final token of a request, or a token
        after which the request's logits are NaN.
        """
        if not any(request.ended for request in live) and self.batch.is_ahead:
            self.batch.step(ahead=False)
        return any(request.ended for request in live)

    def drop_ended(self) -> list[Request]:
        """Remove and return the ended requests."""
        requests = (*self._rows, *self._pending)
        ended = [request for request in requests if request is not None and request.ended]
        if not ended:
            return []
        self._pending = [request for request in self._pending if not request.ended]
        for place, request in enumerate(self._rows):
            if request is not None and request.ended:
                self._rows[place] = self.batch.rows[place] = None
                if self.view is not None:
                    self.view.clear_row(place)
        return ended

    @property
    def next_rows(self) -> int:
        """Number of rows of the next step."""
        live = self.live
        return self._size(live) if live else 0

    def _size(self, live: list[Request]) -> int:
        """Return the number of rows in the batch."""
        if self.view is None:
            return 1
        return self.batch.size_for(len(live), beside_prompts=self.kept_steps > 0)

    def _set_rows(self, live: list[Request]) -> None:
        """Assign rows to pending requests, or to all if the size of the batch changes."""
        size = self._size(live)
        if size != len(self._rows):
            self._rows, self._pending = [*live, *[None] * (size - len(live))], []
            if self.view is not None:
                self.view.set_rows([None if row is None else row.cache for row in self._rows])
            self.batch.set_rows(self._rows)
        elif self._pending:
            self.batch.set_rows(self._fill_rows())

    def _fill_rows(self) -> list[Request | None]:
        """Assign empty rows to pending requests, and return all rows."""
        empty = [place for place, row in enumerate(self._rows) if row is None]
        for place, request in zip(empty, self._pending, strict=False):
            self._rows[place] = request
            if self.view is not None:
                self.view.set_row(place, request.cache)
        self._pending = self._pending[len(empty) :]
        return self._rows


class RunningBatches:
    """All decoding requests: in one shared batch, or each in its own batch.

    Args:
        family: model family: the model and its special cases.
        store: page store of all requests' caches.
        thread: engine thread, the only thread that uses this object.
        waiting: function that returns the number of requests that wait for prefill but not for
            memory.

    Attributes:
        stepping: whether a decode step is running.
        freed: set when requests are removed; the caller resets it.
    """

    def __init__(
        self,
        family: Family,
        store: PageStore,
        thread: EngineThread,
        waiting: Callable[[], int],
    ) -> None:
        self.family, self._store, self._thread, self._waiting = family, store, thread, waiting
        self.stepping = self.freed = False
        self._shared: RunningBatch | None = None
        self._alone: list[RunningBatch] = []
        self.pace = StepTimer()
        self.wait_since = self.now()
        """Time since which running requests have waited for a step: the end of the last step, or
        the first join."""

    @property
    def live(self) -> list[Request]:
        """Requests that decode."""
        return [request for group in self._batches for request in group.live]

    @property
    def is_running(self) -> bool:
        """Whether any request decodes."""
        return any(group.is_running for group in self._batches)

    def joins(self, request: Request) -> bool:
        """Return whether a request may share a batch with others."""
        return not request.sampling.deterministic and self._decodes_any_rows

    @cached_property
    def _decodes_any_rows(self) -> bool:
        return decodes_any_rows(self.family.model)

    def join(self, request: Request) -> None:
        """Start decoding a prefilled request, whose first token has been sampled."""
        if not self.is_running:
            self.wait_since = self.now()
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
        # A view keeps the states of a row that has ended.
        view = BatchView(self._store) if self.family.keeps_states else None
        self._alone.append(RunningBatch(self._batch(request, view or request.cache), view))
        self._alone[-1].join(request)

    def forget_batch(self) -> None:
        """Make later requests decode in a new batch."""
        if self._shared is not None:
            self._alone.append(self._shared)
            self._shared = None

    @property
    def is_ahead(self) -> bool:
        """Whether the device computes a step whose tokens the host is about to read."""
        return any(group.is_running and group.batch.is_ahead for group in self._batches)

    @property
    def rows(self) -> int:
        """Number of rows of the shared batch's next step; 0 if there is no shared batch."""
        return 0 if self._shared is None else self._shared.next_rows

    def expect_prompts(self) -> None:
        """Give the shared batch a size for passes with prompts, for the next ``_KEPT_STEPS``
        steps."""
        if self._shared is not None:
            self._shared.kept_steps = _KEPT_STEPS

    def leave_prompts(self) -> None:
        """Give the shared batch the size of steps without prompts at once."""
        if self._shared is not None:
            self._shared.kept_steps = 0

    def step(self, piece: PromptPiece | None = None) -> EarlyPass | None:
        """Decode one token for each request.

        Args:
            piece: piece of prompts that the pass of the shared batch includes if it can.

        Returns:
            The pass that runs the piece beside the following step; None if there is none.
        """
        begin, shared = self.now(), self._shared
        self.stepping = True
        if shared is not None:
            shared.batch.piece, shared.batch.early = piece, None
        try:
            for group in self._batches:
                joined = group.finish_early()
                self.settle_ended()
                if not joined:
                    group.step()
        finally:
            self.stepping = False
            if shared is not None:
                shared.batch.piece = None
            self.wait_since = self.now()
            # The time of a batch's last step means nothing: it may have been launched early.
            if self.is_running:
                self.pace.note(begin, self.wait_since)
        return None if shared is None else shared.batch.early

    def now(self) -> DeviceTimer:
        """Return the time at which the device finishes all work launched so far."""
        return DeviceTimer(self.family.device)

    def after_step(self) -> None:
        """Wake the threads that wait for a step, after a step between the layers of a prompt."""
        self._thread.after_step()
        self._thread.call_watchers()  # The next step may come late.

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

        The step keeps the GPU busy until the host has launched the layers of the next prompt.
        """
        return self.wait_since.comes_later and self.reading_share() <= 1.0

    @property
    def steps_while_reading(self) -> bool:
        """Whether decode steps run between the layers of prompts.

        Not with tensor parallelism, where all ranks would have to agree on the layer.
        """
        return TPGroup.of(self.family.model).count == 1

    def settle_ended(self) -> None:
        """Remove ended requests and release their resources."""
        for request in self.drop_ended():
            request.settle()

    def drop_ended(self) -> list[Request]:
        """Remove and return ended requests; requests pending in a failed batch join another
        batch."""
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

    def between_layers(self, cache: OscarCache) -> None:
        """Run the waiting calls between two layers of a prompt, rather than after its last layer.

        Args:
            cache: cache that the prompt is written to.
        """
        if self._thread.has_calls:
            # Otherwise, answers that end would sweep pages that this pass has yet to read.
            with cache.paused():
                self.settle_ended()
                self._thread.run_calls()

    @property
    def _batches(self) -> list[RunningBatch]:
        return [*([] if self._shared is None else [self._shared]), *self._alone]

    def _batch(self, request: Request, cache: OscarCache) -> DecodeRunner:
        positions = request.prompt.positions
        axes, device = positions.shape[:-2], positions.device
        return DecodeRunner(self.family.model, cache, axes, device, self._thread.call_watchers)
