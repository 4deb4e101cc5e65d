"""Engine: schedules the requests of a pipeline, with continuous batching."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Protocol, TypeVar

import torch

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.page_store import PageStore
from oscar_mm.cache.placement import SlotForecast
from oscar_mm.engine.family import Family
from oscar_mm.engine.prefill_runner import PrefillRunner
from oscar_mm.engine.prefix_cache import PrefixCache, processor_settings
from oscar_mm.engine.prompt import Prompt, remaining
from oscar_mm.engine.request import Request
from oscar_mm.engine.running_batches import RunningBatches
from oscar_mm.engine.sampling import Sampler
from oscar_mm.errors import Cancelled, MemoryBusy
from oscar_mm.tensor_parallel import TPGroup
from oscar_mm.threads import FairLock, LeaderFollowers
from oscar_mm.torch_modes import eager

MAX_ROWS = 256
"""Maximum number of requests that decode together."""
_OVERTAKES = 8
"""Maximum number of requests admitted out of order while the head of the queue lacks memory."""
_IDLE_S = 1.0
"""Seconds after which the idle step thread checks for work."""
Result = TypeVar("Result")


class Reservations(Protocol):
    """Reserves memory for requests; implemented by ``oscar_mm.admission.admission.Admission``."""

    @property
    def prefill_chunk(self) -> int | None:
        """Tokens per chunk of a long prompt; None if prompts are not split."""
        ...

    def growth(
        self, prompt: Prompt, max_new_tokens: int, cache: OscarCache | None = None
    ) -> SlotForecast:
        """Forecast the slots of a single-row prompt and its output."""
        ...

    def reserve(self, growth: SlotForecast, prompt: Prompt, cache: OscarCache) -> object:
        """Reserve memory for a request, until the returned object is dropped.

        Raises:
            MemoryBusy: if the memory is reserved by other requests at present.
        """
        ...


class Engine:
    """Scheduler of a pipeline: prefills prompts and decodes all running requests as one batch.

    A decode step runs the last token of every running request through the model in one forward
    pass; requests join and leave between two steps. During prefill, decode steps run between the
    layers of the prompt: prefill and decode each get half of the time, and prefill gets more if
    more requests wait than run. Prefill stops between two layers once its requests are cancelled.
    Long prompts are prefilled in chunks, round robin, and all shorter prompts start between two
    chunks. Any thread waiting for output runs the next step for the whole batch, unless
    ``stepping_thread`` runs a dedicated step thread.

    Scheduling is first come, first served: a request that does not fit into the budget waits while
    others run, and only a few smaller requests may overtake it.

    Args:
        family: the model, its processor and their special cases.
        store: page store of all requests' caches.
        admission: reserves the memory of requests.
        prefixes: prefix cache; None turns it off.
        twin: engine with the same lock and budget; a request without memory waits for the requests
            of both engines.

    Attributes:
        reader: runs prefill, with decode steps between the layers.
        max_rows: maximum number of requests that decode together.
    """

    def __init__(
        self,
        family: Family,
        store: PageStore,
        admission: Reservations,
        prefixes: PrefixCache | None = None,
        twin: Engine | None = None,
    ) -> None:
        self.family, self.store, self.admission = family, store, admission
        self.prefixes, self.max_rows = prefixes, MAX_ROWS
        self._threads = LeaderFollowers(store.lock)
        self._queue: deque[Request] = deque()
        self._reading: deque[Request] = deque()
        """Requests whose memory is reserved and whose prompts are prefilled in chunks."""
        self._batches = RunningBatches(family, store, self._threads.wake, self.runnable_count)
        self.reader = PrefillRunner(family, store, admission.prefill_chunk, self._batches)
        self._advancing = self._left = False
        self._work = threading.Event()
        """Wakes the step thread: requests were submitted, or a thread waits for memory."""
        # Reentrant: a finalizer may run while this thread holds it.
        self._queue_guard = threading.RLock()
        self._blocked = False
        """Whether the queue waits for memory."""
        self._skipped_head, self._memory_waiters = 0, list[Callable[[], object]]()
        """Requests admitted out of order so far; callers outside the queue that wait for memory."""
        self._twins = weakref.WeakSet[Engine]() if twin is None else twin._twins
        """Engines that share the budget, including this one."""
        with self.lock:
            self._twins.add(self)

    @property
    def lock(self) -> FairLock:
        """Lock of the store, which every model step and every change of the store needs."""
        return self.store.lock

    @property
    def running(self) -> int:
        """Number of requests that decode or are partly prefilled."""
        return len(self._begun)

    @property
    def _begun(self) -> list[Request]:
        return [*self._reading, *self._batches.live]

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._queue)

    def runnable_count(self) -> int:
        """Count the waiting requests that could run now: none of the queue while it is blocked."""
        others = max(len(self._reading) - 1, 0)
        return others if self._blocked else others + len(self._queue)

    def release_graphs(self) -> None:
        """Drop the CUDA graphs of decode steps, for all engines of the same lock.

        Running requests keep theirs; the next request captures its steps again.
        """
        with self.lock:
            for twin in list(self._twins):
                twin._batches.forget_batch()
                twin._batches.settle_ended()
        gc.collect()

    def submit(self, request: Request) -> None:
        """Put a request into the queue. Safe to call from any thread."""
        with self._queue_guard:
            self._queue.append(request)
        self._work.set()

    @contextmanager
    def stepping_thread(self, after_step: Callable[[], None]) -> Iterator[None]:
        """Run all steps in a dedicated thread within the block, even if no caller waits for output.

        Args:
            after_step: called after each step, in the thread that ran it.
        """
        stop = threading.Event()
        threading.Thread(target=self._make_steps, args=[stop.is_set], daemon=True).start()
        self._threads.watchers.append(after_step)
        try:
            yield
        finally:
            self._threads.watchers.remove(after_step)
            stop.set()
            self._work.set()

    def _make_steps(self, stopped: Callable[[], bool]) -> None:
        with self._threads.sole_leader():
            while not stopped():
                self._work.clear()
                try:
                    # Memory waiters may depend on requests of a twin that no other thread drives.
                    self.run_until(
                        lambda: (
                            stopped() or not (self.running or self._queue or self._memory_waiters)
                        )
                    )
                except BaseException as error:  # Fails the requests; the step thread survives.
                    with self.lock:
                        for request in (*self._queue, *self._begun):
                            request.fail(error)
                    self.drop_ended()
                    self._threads.wake()
                # A thread may wait for a request that was cancelled before any step.
                self._threads.wake()
                # With a timeout: another step thread may have cleared the event.
                self._work.wait(_IDLE_S)

    def run_until(self, done: Callable[[], bool]) -> None:
        """Run steps for all requests until ``done``, or wait while another thread runs them.

        Raises:
            BaseException: if a step is interrupted, such as by KeyboardInterrupt.
        """
        try:
            while not done():
                if self._threads.lead(done):
                    self._lead(done)
        finally:
            self._threads.promote()

    def _lead(self, done: Callable[[], bool]) -> None:
        """Run a step for all requests, unless ``done``."""
        try:
            with self.lock:
                if not done():
                    self._drop_left()
                    self._advance()
                    if not (self.running or done()):
                        self._advance_twins()
        finally:
            self._threads.step_down()
            if self._left:
                self.drop_ended()

    def next_ended(self, requests: Collection[Request]) -> list[Request]:
        """Wait until some of the given requests have ended, and return these."""
        self.run_until(lambda: any(request.ended for request in requests))
        return [request for request in requests if request.ended]

    @contextmanager
    def wait_for_memory(self, begin: Callable[[], Result]) -> Iterator[Result]:
        """Yield the result of ``begin`` under the lock, once there is memory.

        ``begin`` waits for memory as requests do. The lock is taken briefly: run no model within
        the block.

        Args:
            begin: takes memory; changes nothing if it raises ``MemoryBusy``. It is tried again each
                time a request ends, as long as requests run.
        """
        with ExitStack() as waiting:
            while True:
                with self.lock.briefly():
                    self._drop_left()
                    try:
                        begun = begin()
                    except MemoryBusy:
                        if not any(twin.running for twin in self._twins):
                            raise
                    else:
                        waiting.close()
                        yield begun
                        return
                if begin not in self._memory_waiters:
                    self._memory_waiters.append(begin)
                    waiting.callback(self._stop_waiting, begin)
                    self._work.set()
                self._wait_for_end()

    def _stop_waiting(self, begin: Callable[[], object]) -> None:
        self._memory_waiters.remove(begin)
        self._batches.freed = True  # This waiter alone may have blocked the queue.

    def _wait_for_end(self) -> None:
        """Run steps until one of the running requests has ended."""
        with self.lock:
            running = [request for twin in self._twins for request in twin._begun]
        self.run_until(lambda: not running or any(request.ended for request in running))

    def drop_ended(self) -> None:
        """Drop ended requests: now, or after the step that is running."""
        # A finalizer may call this in any thread at any point, even within this method.
        with self._queue_guard:
            for request in list(self._queue):
                if request.ended:
                    self._batches.freed = True
                    with suppress(ValueError):
                        self._queue.remove(request)
        self._left = True
        if not (self._advancing or self._batches.stepping) and self.lock.acquire(blocking=False):
            try:
                self._left = False
                reading = [request for request in self._reading if request.ended]
                for request in reading:
                    self._batches.freed = True
                    self._reading.remove(request)
                for request in (*self._batches.drop_ended(), *reading):
                    # Slots are released later, as a finalizer may interrupt a slot operation.
                    request.reservation = request.chunks = None
            finally:
                self.lock.release()

    def _drop_left(self) -> None:
        """Drop requests that ended while another thread had the lock, including those of twins."""
        for twin in list(self._twins):
            if twin._left:
                twin.drop_ended()

    @eager
    @torch.inference_mode()
    def _advance(self) -> None:
        """Prefill the prompts that have memory, then run a decode step."""
        self._advancing = True
        try:
            self._batches.settle_ended()
            twins = list(self._twins)
            if not self.running or any(twin._batches.freed for twin in twins):
                for twin in twins:
                    twin._batches.freed = twin._blocked = False
            if not self.running:
                self._prepare()
            # Decode steps already ran between the layers of the prefill.
            if self._admit() and not self._read_on():
                self._batches.step()
            self._batches.settle_ended()
        finally:
            self._advancing = False

    def _advance_twins(self) -> None:
        """Run a step for the requests of twin engines, which occupy the memory needed here."""
        for twin in list(self._twins):
            if twin is self or not twin.running:
                continue
            twin._advance()
            twin._threads.wake()
            if twin._left:
                twin.drop_ended()

    def _prepare(self) -> None:
        """On leaving idle: return surplus pool memory, and drop graphs if the weights changed."""
        prompts = [(x.prompt, x.cache) for x in list(self._queue) if not x.ended]
        growths = [self.admission.growth(prompt, 1, cache) for prompt, cache in prompts]
        added = [{bits: int(slots[0]) for bits, slots in x.added.items()} for x in growths]
        self.store.trim_surplus(sum(self.store.bytes_of(slots) for slots in added))
        if self.reader.refresh():
            self._batches.forget_batch()

    def _admit(self) -> bool:
        """Admit requests that have memory, and prefill short prompts together.

        Returns:
            False if requests remain because other threads want the lock, to submit or end requests.
        """
        while self._queue and not self._blocked and self.running < self.max_rows:
            self._batches.settle_ended()  # Requests may have ended during the last prefill.
            with self._beginning() as requests:
                self._take_first(requests)
                if not requests:
                    self._blocked = True
                    return True
                if requests[0].unread.tokens > self.reader.max_at_once:
                    self._reading.extend(requests)
                else:
                    self._fill_batch(requests)
                    self._begin(requests)
            self._threads.wake_followers()
            if self.runnable_count() and self._batches.fills_pauses:
                self._batches.step()
                self._threads.wake()
            if self._queue and self.lock.is_contended:
                return False
        return True

    def _read_on(self) -> bool:
        """Prefill a chunk of the prompt that has waited longest for its next one.

        Returns:
            Whether decode steps will run between the layers of the next chunk.
        """
        if not self._reading:
            return False
        request = self._reading[0]
        try:
            with self._beginning() as requests:
                requests.append(request)
                self._begin(requests)
        finally:
            self._reading.rotate(-1)
            if request.ended or request.chunks is None:
                self._reading.remove(request)
        return bool(self._reading) and self._batches.steps_while_reading

    @contextmanager
    def _beginning(self) -> Iterator[list[Request]]:
        """Fail the requests in the yielded list if the block raises, and settle those that end."""
        requests: list[Request] = []
        try:
            yield requests
        except BaseException as error:
            for request in requests:
                request.fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            for request in requests:
                if request.ended:
                    request.settle()
                    self._batches.freed = True

    def _take_first(self, taken: list[Request]) -> None:
        """Dequeue the first request that gets memory or fails."""
        for place, request in enumerate(list(self._queue)):
            overtakes = place > 0 or bool(self._memory_waiters)
            if overtakes and self._skipped_head >= _OVERTAKES:
                return
            if self._take(request, taken):
                self._skipped_head = self._skipped_head + 1 if overtakes else 0
                return

    def _fill_batch(self, taken: list[Request]) -> None:
        """Dequeue the following requests that get memory and fit into the same prefill pass."""
        tokens = taken[0].unread.tokens
        while self._is_short(taken[0]) and self.running + len(taken) < self.max_rows:
            next_request = next(iter(list(self._queue)), None)
            if (
                next_request is None
                or tokens + next_request.prompt.tokens > self.reader.max_varlen_tokens
                or not self._is_short(next_request)
                or not self._take(next_request, taken)
            ):
                return
            tokens += next_request.unread.tokens

    def _take(self, request: Request, taken: list[Request]) -> bool:
        """Reserve memory for a request and dequeue it; return False if it has to wait."""
        try:
            if not request.ended:
                self._reserve(request)
        except MemoryBusy as error:
            # A request that has just ended may not have released its pages yet.
            if taken or self._batches.freed or any(twin.running for twin in self._twins):
                return False
            request.fail(error)
        except Exception as error:
            request.fail(error)
        taken.append(request)
        with self._queue_guard, suppress(ValueError):
            self._queue.remove(request)
        return True

    def _is_short(self, request: Request) -> bool:
        """Whether a prompt may share a prefill pass; media for the prefix cache rule that out."""
        shares = self.prefixes is not None and request.prompt.media
        return (
            request.prompt.tokens <= self.reader.max_varlen_tokens
            and request.prompt_logprobs is None
            and not (shares or request.cache.linear_layers)
            and self._batches.joins(request)
        )

    def _reserve(self, request: Request) -> None:
        """Match the prefix cache and reserve memory for the remaining prompt and the output.

        Raises:
            MemoryBusy: if the memory is reserved by other requests; nothing has changed then.
        """
        prompt, cache, prefix = request.prompt, request.cache, None
        if self.prefixes is not None and not request.has_past:
            request.reader_state = self._reader_state()
            if request.prompt_logprobs is None:  # Prompt logprobs need every token to be prefilled.
                prefix = self.prefixes.find(prompt, request.reader_state)
        if prefix is not None:
            prompt, cache = remaining(prompt, prefix.get_seq_length()), prefix
        try:
            request.reservation = self._reservation(request, prompt, cache)
        except BaseException:
            if prefix is not None:
                prefix.close()
            raise
        request.unread, request.cache = prompt, cache

    def _reader_state(self) -> tuple[object, ...]:
        """Return what keys and values depend on apart from the prompt: processor settings, weights
        and adapters."""
        return processor_settings(self.family.processor), self.reader.state

    def _reservation(self, request: Request, prompt: Prompt, cache: OscarCache) -> object:
        growth = self.admission.growth(prompt, request.sampling.max_new_tokens, cache)
        return self.admission.reserve(growth, prompt, cache)

    def _begin(self, requests: list[Request]) -> None:
        """Prefill prompts, or a chunk of one, and sample the first token of each complete one."""
        live = [request for request in requests if not request.ended]
        read = self._read_beginnings(live) if live else []
        if not read:
            return
        logits = torch.cat([row for _, row in read])
        samplers, ranks = [request.sampler for request, _ in read], TPGroup.of(self.family.model)
        chosen = Sampler(samplers, logits.device, ranks)(logits)
        tokens = chosen.listed()
        logprobs = chosen.logprobs(tokens)
        for place, ((request, _), token) in enumerate(zip(read, tokens, strict=True)):
            if not request.ended:  # The request may have been cancelled during prefill.
                request.next_logprob = logprobs.get(place)
                request.take(token)
            if self.prefixes is not None and not request.has_past and request.error is None:
                state = self._reader_state()
                if state == request.reader_state:  # Weights and settings are unchanged.
                    self.prefixes.keep(request.prompt, state, request.cache)
            if not request.ended:
                self._batches.join(request)

    def _read_beginnings(self, requests: list[Request]) -> list[tuple[Request, torch.Tensor]]:
        """Prefill prompts together, or one by one if that fails, or a chunk of a single prompt.

        Returns:
            The requests whose prompts are complete, with (1, vocabulary) logits; empty once all
            requests have ended.
        """
        several = len(requests) > 1
        pasts = [x.cache.fork() if several and x.cache.get_seq_length() else None for x in requests]
        try:
            found = self._read_next(requests)
            for past in pasts:
                if past is not None:
                    past.close()
            return [(x, row) for x, row in zip(requests, found, strict=True) if row is not None]
        except Cancelled as error:
            for request, past in zip(requests, pasts, strict=True):
                if not request.ended:  # Raised by a foreign hook, not by our own check.
                    request.fail(error)
                request.cache.reset()
                if past is not None:
                    past.close()
            return []
        except Exception as error:
            if not several:
                requests[0].fail(error)
                return []
        # Outside the handler, whose error keeps activations alive through its frames.
        for request, past in zip(requests, pasts, strict=True):
            if past is None:
                request.cache.reset()
            else:
                request.cache.close()
                request.cache, request.reservation = past, None
        for request in requests:
            try:
                if request.reservation is None:
                    request.reservation = self._reservation(request, request.unread, request.cache)
            except Exception as error:
                request.fail(error)
        live = [request for request in requests if not request.ended]
        return [one for request in live for one in self._read_beginnings([request])]

    def _read_next(self, requests: list[Request]) -> Sequence[torch.Tensor | None]:
        """Prefill the prompts of several requests, or the next chunk of a single one.

        Returns:
            Logits of each prompt; None for a prompt with chunks left.
        """
        if len(requests) > 1:
            prompts, caches = [x.unread for x in requests], [x.cache for x in requests]
            return self.reader.prefill_batch(
                prompts, caches, cancelled=lambda: all(request.ended for request in requests)
            )
        [request] = requests
        if request.chunks is None:
            request.chunks = self.reader.read_in_chunks(
                request.unread, request.cache, lambda: request.ended, request.prompt_logprobs
            )
        logits = next(request.chunks)
        if logits is not None:
            request.chunks = None
        return [logits]
