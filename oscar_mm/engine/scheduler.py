"""Scheduler: continuous batching of the requests of one page store."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import chain
from time import perf_counter
from typing import Protocol

import torch

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.page_store import PageStore
from oscar_mm.cache.placement import SlotForecast
from oscar_mm.engine.device_timer import PassTimer
from oscar_mm.engine.engine_call import Call
from oscar_mm.engine.engine_thread import EngineThread
from oscar_mm.engine.family import Family
from oscar_mm.engine.mixed_prefill import MixedPrefill
from oscar_mm.engine.prefill_runner import PrefillRunner
from oscar_mm.engine.prefix_cache import (
    PrefixCache,
    ReaderState,
    kept_tokens,
    processor_settings,
    shares_media,
)
from oscar_mm.engine.prompt import Prompt, remaining
from oscar_mm.engine.request import Request
from oscar_mm.engine.running_batches import RunningBatches
from oscar_mm.engine.sampling import SampledTokens, Sampler
from oscar_mm.engine.spoken_request import SpokenRequest
from oscar_mm.engine.voices import SpeechMemory, Voices
from oscar_mm.errors import Cancelled, MemoryBusy
from oscar_mm.fast_decode.row_adapters import RowAdapters
from oscar_mm.ops.pack import NOT_STORABLE
from oscar_mm.tensor_parallel import TPGroup
from oscar_mm.torch_modes import eager

MAX_ROWS = 256
"""Maximum number of requests that decode together."""
_MAX_OVERTAKES = 8
"""Maximum number of requests admitted out of order while the head of the queue lacks memory."""
_GROW_AHEAD_TOKENS = 512
"""Number of an answer's first tokens for which pools grow when its short prompt is admitted. The
rest of a long answer may never come."""
_MAX_CLIENTS = 1024
"""Number of clients whose latest turns are remembered."""
_log = logging.getLogger(__name__)
_PrefillResult = tuple[list[Request], SampledTokens]
"""Requests whose prompts are complete, and their first tokens."""


class Reservations(SpeechMemory, Protocol):
    """Reserves memory for requests; implemented by ``oscar_mm.admission.admission.Admission``."""

    @property
    def prefill_chunk(self) -> int | None:
        """Number of tokens per chunk of a long prompt; None if prompts are not split."""
        ...

    @property
    def is_bounded(self) -> bool:
        """Whether a budget limits the memory of caches to what requests reserve."""
        ...

    def growth(
        self, prompt: Prompt, max_new_tokens: int, cache: OscarCache | None = None
    ) -> SlotForecast:
        """Forecast the slots of a single-row prompt and its output."""
        ...

    def reserve(self, growth: SlotForecast, prompt: Prompt, cache: OscarCache) -> object:
        """Reserve memory for a request, until the returned object is dropped.

        Raises:
            MemoryBusy: if other requests have reserved the memory at present.
        """
        ...


class Scheduler:
    """Schedules the requests of one page store: prefill, and decode steps of one batch.

    A decode step runs the last token of every running request through the model in one forward
    pass; requests join and leave between two steps. Short prompts are prefilled at once; in long
    ones, decode steps run between the layers (``LayeredPrefill``). Prefill stops between two layers
    once its requests are cancelled. Long prompts are prefilled in chunks, round robin, and shorter
    prompts start between two chunks.

    Scheduling is first come, first served: a request that does not fit into the budget waits while
    others run, and only a few smaller requests may overtake it. Calls that need memory wait in the
    same queue. If requests have clients, the client with the fewest running requests is next; of
    several, the one whose latest turn is longest ago.

    Only the engine thread may use a scheduler, except for ``add`` and the properties.

    Args:
        family: model family: the model, its processor and their special cases.
        store: page store of all requests' caches.
        admission: reserves memory for requests.
        thread: engine thread of the model.
        prefixes: prefix cache; None turns it off.

    Attributes:
        reader: runner of prefill, with decode steps between the layers.
        max_rows: maximum number of requests that decode together.
    """

    def __init__(
        self,
        family: Family,
        store: PageStore,
        admission: Reservations,
        thread: EngineThread,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.family, self.store, self.admission = family, store, admission
        self.prefixes, self.max_rows, self._thread = prefixes, MAX_ROWS, thread
        self._queue: deque[Request | Call] = deque()
        self._chunked: deque[Request] = deque()
        """Requests whose memory is reserved and whose prompts are prefilled in chunks."""
        self._batches = RunningBatches(family, store, thread, self.runnable_count)
        self.reader = PrefillRunner(family, store, admission.prefill_chunk, self._batches)
        self._mixed: MixedPrefill | None = None
        self._may_mix = True
        """Whether a new ``_mixed`` is to be created for the model's current weights, once the old
        one has no requests."""
        self._passes = PassTimer()
        self._wait_ended = 0.0
        """Time of ``perf_counter`` at which the wait of ``_wait_for_prompts`` was to end."""
        self._voices = Voices(store.policy, admission)
        self._blocked = False
        """Whether the queue waits for memory."""
        self._has_admitted = False
        """Whether a request has been admitted since the weights' state was read."""
        self._skipped_head = 0
        """Number of requests admitted ahead of the current head of the queue so far."""
        self._turns = 0
        self._latest_turns: dict[tuple[str, ...], int] = {}
        """Number of the latest turn of each client, earliest first; see ``_turn_key``."""
        thread.add(self)

    @property
    def running(self) -> int:
        """Number of requests that decode or are partly prefilled."""
        return len(self._active)

    @property
    def _active(self) -> list[Request]:
        return [*self._chunked, *self._mixed_requests, *self._batches.live]

    @property
    def _mixed_requests(self) -> list[Request]:
        """Requests whose prompts mixed passes read."""
        return [] if self._mixed is None else self._mixed.requests

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return sum(isinstance(entry, Request) and not entry.ended for entry in list(self._queue))

    @property
    def is_running(self) -> bool:
        """Whether requests decode, are partly prefilled or are being spoken."""
        return self._reads_or_decodes or bool(self._voices.live)

    @property
    def _reads_or_decodes(self) -> bool:
        return bool(self._chunked or self._mixed_requests) or self._batches.is_running

    @property
    def speech_bytes(self) -> int:
        """Bytes of a talker's keys and values in use."""
        return self._voices.used_bytes

    @property
    def has_work(self) -> bool:
        """Whether any requests are running or waiting."""
        return bool(self._queue) or self.is_running

    @property
    def is_ahead(self) -> bool:
        """Whether the device computes a decode step whose tokens the host is about to read."""
        return self._batches.is_ahead

    @property
    def freed(self) -> bool:
        """Whether requests have ended since the queue was blocked."""
        return self._batches.freed

    def unblock(self) -> None:
        """Retry the queue entries that wait for memory."""
        self._batches.freed = self._blocked = False

    def add(self, entry: Request | Call) -> None:
        """Add a request, or a call that needs memory, to the queue. Safe from any thread."""
        if isinstance(entry, SpokenRequest) and entry.script is not None:
            self._voices.add(entry)
        else:
            self._queue.append(entry)

    def runnable_count(self) -> int:
        """Count the waiting requests that could run now; while the queue is blocked, its requests
        do not count."""
        others = max(len(self._chunked) - 1, 0)
        return others if self._blocked else others + len(self._queue)

    def release_graphs(self) -> None:
        """Drop the CUDA graphs of decode steps, prompts and speech; not within a pass.

        Running requests keep their graphs; the next request captures its steps again.
        """
        self._batches.forget_batch()
        self._batches.settle_ended()
        self._may_mix = True
        if not self._mixed_requests:
            self._mixed = None
        self._voices.release_graphs()
        self.reader.release_graphs()

    @eager
    @torch.inference_mode()
    def capture_mixed_passes(self, until: float) -> None:
        """Capture the mixed passes of the running batch before prompts need them; see
        ``MixedPrefill.warm_up``."""
        if self._mixed is not None:
            self._mixed.warm_up(self._batches, until)
            self._batches.leave_prompts()
            self._batches.settle_ended()

    def fail_all(self, error: BaseException) -> None:
        """End all requests with an error."""
        for entry in (*list(self._queue), *self._active, *self._voices.live):
            entry.fail(error)
        self.drop_ended()

    def drop_ended(self) -> None:
        """Remove ended requests and release their memory. Not for use during a pass, which may
        still need the memory."""
        for entry in list(self._queue):
            if entry.ended:
                self._dequeue(entry)
        for request in list(self._chunked):
            if request.ended:
                self._batches.freed = True
                self._chunked.remove(request)
                request.settle()
        for request in () if self._mixed is None else self._mixed.drop_ended():
            self._batches.freed = True
            request.settle()
        self._batches.settle_ended()
        self._batches.freed |= self._voices.drop_ended()
        self._confirm_prefixes()
        if not self.is_running:
            self.store.trim_if_skipped()

    def _confirm_prefixes(self) -> None:
        """Once idle, confirm the prefix cache: from now on, weights may be changed."""
        if self.prefixes is not None and not (self.is_running or self.prefixes.is_confirmed):
            self.prefixes.confirm(self.reader.present_state())

    def _dequeue(self, entry: Request | Call) -> None:
        """Remove an entry from the queue and retry the other entries, which it may have
        blocked."""
        self._batches.freed = True
        with suppress(ValueError):
            self._queue.remove(entry)

    @eager
    @torch.inference_mode()
    def advance(self) -> None:
        """Prefill the prompts that have memory, then run a decode step."""
        others = self.is_running
        if not others:
            self._prepare()
        self._admit()
        self._wait_for_prompts()
        # Decode steps already ran between the layers of a chunk, and if no other requests run, the
        # first tokens need not wait for the second ones.
        decodes = not self._prefill_chunk() and others
        if self._mixed is not None and self._mixed_requests:
            self._step_mixed(self._mixed)
        elif decodes:
            self._batches.step()
        self._batches.settle_ended()
        if self._voices.live:
            self._batches.freed |= self._voices.step(others=self._reads_or_decodes)
        self._confirm_prefixes()

    def _prepare(self) -> None:
        """Prepare to leave the idle state: return surplus pool memory, and drop the graphs and
        prefixes of other weights if these have changed."""
        waiting = (entry for entry in list(self._queue) if isinstance(entry, Request))
        prompts = [(x.prompt, x.cache) for x in waiting if not x.ended]
        growths = [self.admission.growth(prompt, 1, cache) for prompt, cache in prompts]
        added = [{bits: int(slots[0]) for bits, slots in x.added.items()} for x in growths]
        self.store.trim_surplus(sum(self.store.bytes_of(slots) for slots in added))
        self._voices.trim()
        if self.reader.refresh():
            self._batches.forget_batch()
            self._mixed, self._may_mix = None, True
        if self.prefixes is not None:
            self.prefixes.confirm(self.reader.state)
        self._has_admitted = False

    def _admit(self) -> None:
        """Admit requests that get memory, and prefill short prompts together.

        Stops early if calls that run the model are waiting, or if all requests admitted so far are
        over. Threads are woken between two prompts, but not with tensor parallelism, where they
        would act at different times in each process.
        """
        wakes = TPGroup.of(self.family.model).count == 1
        while self._queue and not self._blocked and len(active := self._active) < self.max_rows:
            if self._mixed is not None and (self._mixed.is_full or self._awaits_media()):
                return
            running = *active, *self._voices.live
            if self._has_admitted and all(request.is_over for request in running):
                return  # The weights may have changed since: the next step reads their state.
            self._batches.settle_ended()  # Requests may have ended during the last prefill.
            with self._request_scope() as requests:
                if not self._admit_first(requests):
                    self._blocked = True
                    return
                mixed = self._mixed_for(requests[0]) if requests else None
                if mixed is not None:
                    mixed.add(requests[0])
                    self._grow_ahead(mixed.requests)
                elif requests and requests[0].unread.tokens > self.reader.max_at_once:
                    self._chunked.extend(requests)
                elif requests:
                    self._fill_batch(requests)
                    self._grow_ahead(requests)
                    self._prefill(requests)
            if requests and mixed is None and wakes:  # First tokens do not wait for the next step.
                self._thread.after_step()
            self._thread.run_calls()
            if self._thread.has_passes:
                return

    def _wait_for_prompts(self) -> None:
        """While the device runs a pass with prompts, admit requests until shortly before its end.

        The next pass then includes a prompt that comes while this one runs. If the host launched it
        at once, such a prompt would wait for both.
        """
        while (seconds := self._seconds_for_prompts()) > 0:
            end = perf_counter() + seconds
            self._thread.call_watchers()
            if not self._thread.wait_for_call(seconds):
                self._wait_ended = end  # If other threads delay this one, it must wake up earlier.
                return
            self._admit()
        self._wait_ended = perf_counter()

    def _seconds_for_prompts(self) -> float:
        """Return the seconds that the host may wait for prompts; 0 or less if it should not."""
        if self._mixed is None or self._chunked or self._voices.live or self._thread.has_passes:
            return 0.0
        return self._passes.seconds_left() if self._mixed.has_room(self._batches.rows) else 0.0

    def _mixed_for(self, request: Request) -> MixedPrefill | None:
        """Return the reader of mixed passes if it takes the prompt of a request."""
        if request.ended or not self._batches.joins(request):
            return None
        if self._may_mix:
            if self._mixed_requests:
                return None
            # The old scratch is freed before the new one takes memory.
            self._mixed, self._may_mix = None, False
            axes = request.prompt.positions.shape[:-2]
            self._mixed = MixedPrefill.of(self.family, self.store, self.reader.sigmas, axes)
        return self._mixed if self._mixed is not None and self._mixed.takes(request) else None

    def _awaits_media(self) -> bool:
        """Return whether the next request is to wait until mixed passes have read its media for
        another one, and the prefix cache has them."""
        reading = [one for one in self._mixed_requests if one.unread.media and not one.has_past]
        if self.prefixes is None or not reading:
            return False
        following = min(list(self._queue), key=self._turn_key())
        return (
            isinstance(following, Request)
            and not following.has_past
            and any(shares_media(following.prompt, one.prompt) for one in reading)
        )

    def _step_mixed(self, mixed: MixedPrefill) -> None:
        """Run a decode step together with the next piece of prompts.

        The host takes the first tokens of an earlier piece while the device runs this one. After an
        error, ``_prefill_alone`` prefills each prompt alone.
        """
        with self._request_scope() as requests:
            requests += mixed.drop_ended()  # Calls may have used their caches since they ended.
            complete = mixed.take_complete()
            requests += [request for one in complete for request in one.requests]
            again: list[tuple[Request, BaseException, bool]] = []
            try:
                many_wait = self._batches.reading_share() > 1.0
                self._batches.expect_prompts()
                rows = self._batches.rows
                may_wait = mixed.has_room(rows)
                if mixed.awaits_towers:
                    self._thread.call_watchers()  # Towers may take long.
                piece = mixed.next_piece(rows, many_wait=many_wait)
                early = self._batches.step(piece)
                if early is not None:
                    if may_wait:  # Other launches may take longer, such as after towers.
                        self._passes.note_launch(early.launched - self._wait_ended)
                    self._passes.note_begin((rows, piece and piece.size), early)
                if piece is not None:
                    mixed.finish(piece)
            except BaseException as error:  # Even an interrupt by a hook, which would recur.
                _log.warning(
                    "prompts are read one by one after an error in a mixed pass: %s", error
                )
                again += [(request, error, changed) for request, changed in mixed.drop_all()]
            for one in complete:
                if one.stored.overflowed():
                    error = FloatingPointError(NOT_STORABLE)
                    again += [(x, error, True) for x in one.requests if not x.ended]
                else:
                    self._start_decoding(one.requests, one.chosen)
            requests += [request for request, *_ in again]
            for request, error, changed in again:
                self._prefill_alone(request, error, changed=changed)

    def _prefill_alone(self, request: Request, error: BaseException, *, changed: bool) -> None:
        """Prefill a prompt alone after an error in its mixed passes.

        If the cache had a past and has changed since, the request fails.
        """
        if changed and (request.has_past or request.unread.tokens < request.prompt.tokens):
            request.fail(error)
            return
        if changed:
            request.cache.reset()
        request.sampler.restart()
        self._prefill([request])

    def _prefill_chunk(self) -> bool:
        """Prefill the next chunk of the prompt that has waited longest for it.

        Returns:
            Whether decode steps will run between the layers of the next chunk.
        """
        if not self._chunked:
            return False
        request = self._chunked[0]
        try:
            with self._request_scope() as requests:
                requests.append(request)
                self._prefill(requests)
        finally:
            self._chunked.rotate(-1)
            if request.ended or request.chunks is None:
                self._chunked.remove(request)
        return bool(self._chunked) and self._batches.steps_while_reading

    @contextmanager
    def _request_scope(self) -> Iterator[list[Request]]:
        """Fail the requests in the yielded list if the block raises, and settle those that have
        ended."""
        requests: list[Request] = []
        try:
            yield requests
        except BaseException as error:  # Even an interrupt from a hook fails only these requests.
            for request in requests:
                request.fail(error)
        finally:
            for request in requests:
                if request.ended:
                    request.settle()
                    self._batches.freed = True

    def _admit_first(self, taken: list[Request]) -> bool:
        """Dequeue the first entry that can run now or fails; return whether there is one.

        Args:
            taken: list that a dequeued request is added to.
        """
        queue = list(self._queue)
        # Making the key takes a pass over all running requests.
        if len({entry.client for entry in queue}) > 1:
            queue.sort(key=self._turn_key())
        for place, entry in enumerate(queue):
            if place > 0 and self._skipped_head >= _MAX_OVERTAKES:
                return False
            if self._try_admit(entry, taken):
                self._skipped_head = self._skipped_head + 1 if place > 0 else 0
                return True
        return False

    def _fill_batch(self, taken: list[Request]) -> None:
        """Dequeue the next requests that get memory and fit into the same prefill pass."""
        tokens = taken[0].unread.tokens
        while self._is_short(taken[0]) and self.running + len(taken) < self.max_rows:
            following = min(list(self._queue), key=self._turn_key(taken), default=None)
            if (
                not isinstance(following, Request)
                or tokens + following.prompt.tokens > self.reader.max_varlen_tokens
                or not self._is_short(following)
                or not self._try_admit(following, taken)
            ):
                return
            tokens += following.unread.tokens

    def _turn_key(
        self, taken: Sequence[Request] = ()
    ) -> Callable[[Request | Call], list[tuple[int, int]]]:
        """Return the sort key of the queue's order of turns; requests in ``taken`` count as
        running.

        Requests of one client, and those without a client, have equal keys: they keep the order of
        arrival.
        """
        clients = [request.client for request in (*self._active, *taken)]
        running = Counter(chain.from_iterable(map(_prefixes, clients)))

        def turn(entry: Request | Call) -> list[tuple[int, int]]:
            return [
                (running[name], self._latest_turns.get(name, 0)) for name in _prefixes(entry.client)
            ]

        return turn

    def _try_admit(self, entry: Request | Call, taken: list[Request]) -> bool:
        """Reserve memory for a request, or run a call, and dequeue the entry; return False if it
        has to wait."""
        try:
            if isinstance(entry, Call):
                entry.attempt()
            elif not entry.ended:
                self._reserve(entry)
        except MemoryBusy as error:
            # A request that has just ended may not have released its pages yet.
            if taken or self._batches.freed or self._thread.busy:
                return False
            entry.fail(error)
        except BaseException as error:
            entry.fail(error)
        if isinstance(entry, Request):
            taken.append(entry)
            self._has_admitted = True
        with suppress(ValueError):
            self._queue.remove(entry)
        self._record_turn(entry.client)
        return True

    def _record_turn(self, client: tuple[str, ...]) -> None:
        """Remember that it was a client's turn, and forget the turn that is longest ago."""
        self._turns += 1
        for name in _prefixes(client):
            self._latest_turns.pop(name, None)
            self._latest_turns[name] = self._turns
        while len(self._latest_turns) > _MAX_CLIENTS:
            del self._latest_turns[next(iter(self._latest_turns))]

    def _is_short(self, request: Request) -> bool:
        """Return whether a prompt may share a prefill pass with others; prompts with media may not
        if there is a prefix cache."""
        shares = self.prefixes is not None and request.prompt.media
        return (
            request.prompt.tokens <= self.reader.max_varlen_tokens
            and not request.is_read_alone
            and not shares
            and self.family.shares_passes
            and self._batches.joins(request)
        )

    def _reserve(self, request: Request) -> None:
        """Match the prefix cache and reserve memory for the remaining prompt and the output.

        Raises:
            MemoryBusy: if other requests have reserved the memory; nothing has changed then.
        """
        prompt, cache, prefix, shared = request.prompt, request.cache, None, 0
        if self.prefixes is not None and not request.has_past:
            request.reader_state = self._reader_state(prompt)
            if request.prompt_logprobs is None:  # Prompt logprobs need every token to be prefilled.
                prefix, shared = self.prefixes.find(prompt, request.reader_state)
            prompt = self.family.marked(prompt, [shared, kept_tokens(prompt)])
        if prefix is not None:
            prompt, cache = remaining(prompt, prefix.get_seq_length()), prefix
        try:
            request.reservation = self._reservation(request, prompt, cache)
        except BaseException:
            if prefix is not None:
                prefix.close()
            raise
        request.unread, request.cache = prompt, cache

    def _reader_state(self, prompt: Prompt) -> ReaderState:
        """Return the state that a prompt's keys and values depend on."""
        adapters = RowAdapters.of(self.family.model)
        own = None if adapters is None else adapters.digest(prompt.adapter)
        settings = processor_settings(self.family.processor) if prompt.media else None
        return ReaderState(settings, self.reader.state, own)

    def _reservation(self, request: Request, prompt: Prompt, cache: OscarCache) -> object:
        growth = self.admission.growth(prompt, request.sampling.max_new_tokens, cache)
        soon = growth.until(_GROW_AHEAD_TOKENS).added
        request.slot_counts = {bits: int(counts.max()) for bits, counts in soon.items()}
        return self.admission.reserve(growth, prompt, cache)

    def _grow_ahead(self, requests: Iterable[Request]) -> None:
        """Grow pools for requests whose short prompts are about to be read."""
        # Running requests take slots too until the next request is admitted: one of each kind is
        # assumed for each.
        counts = Counter(dict.fromkeys(self.store.allocators, self.running))
        for request in requests:
            counts.update(request.slot_counts)
        self.store.grow_ahead(counts, spares=not self.admission.is_bounded)

    def _prefill(self, requests: list[Request]) -> None:
        """Prefill prompts, or a chunk of a prompt, and sample the first token for each completed
        prompt."""
        live = [request for request in requests if not request.ended]
        self._thread.call_watchers()  # Before long work.
        for read, chosen in self._prefill_or_retry(live) if live else []:
            self._start_decoding(read, chosen)

    def _start_decoding(self, read: list[Request], chosen: SampledTokens) -> None:
        """Give requests their first tokens, keep their prompts in the prefix cache, and let them
        join the decode steps."""
        tokens = chosen.listed()
        logprobs = chosen.logprobs(tokens)
        for place, (request, token) in enumerate(zip(read, tokens, strict=True)):
            if not request.ended:  # The request may have been cancelled during prefill.
                request.next_logprob = logprobs.get(place)
                request.take(token)
                if isinstance(request, SpokenRequest):
                    self._voices.add(request)
            state = request.reader_state
            if self.prefixes is not None and state is not None and request.error is None:
                self.prefixes.keep(request.prompt, state, request.cache)
            if not request.ended:
                self._batches.join(request)

    def _sample_first(self, requests: list[Request], logits: torch.Tensor) -> SampledTokens:
        """Sample the first token of each prompt, and launch a decode step of the running requests.

        The step keeps the device busy while the host waits for the tokens, lets the requests join,
        and launches the next prompt.
        """
        samplers, ranks = [request.sampler for request in requests], TPGroup.of(self.family.model)
        chosen = Sampler(samplers, logits.device, ranks)(logits)
        if self._batches.live and self._batches.fills_pauses:
            self._batches.step()
            if ranks.count == 1:
                self._batches.after_step()
        return chosen

    def _prefill_or_retry(self, requests: list[Request]) -> list[_PrefillResult]:
        """Prefill prompts together, or one by one if that fails; or a chunk of a single prompt.

        Returns:
            The requests whose prompts are complete, with their first tokens; empty if all requests
            have ended.
        """
        several = len(requests) > 1
        pasts = [x.cache.fork() if several and x.cache.get_seq_length() else None for x in requests]
        try:
            found = self._run_prefill(requests)
            for past in pasts:
                if past is not None:
                    past.close()
            return found
        except Cancelled as error:
            for request, past in zip(requests, pasts, strict=True):
                if not request.ended:  # Raised by a user's hook, not by our own check.
                    request.fail(error)
                request.cache.reset()
                if past is not None:
                    past.close()
            return []
        except Exception as error:
            if not several:
                requests[0].fail(error)
                return []
        # Outside the handler, because the error's frames keep activations alive.
        for request, past in zip(requests, pasts, strict=True):
            request.sampler.restart()
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
        return [one for request in live for one in self._prefill_or_retry([request])]

    def _run_prefill(self, requests: list[Request]) -> list[_PrefillResult]:
        """Prefill the prompts of several requests, or the next chunk of a single one.

        Returns:
            The requests of each pass with their first tokens; empty if a prompt has chunks left.
        """
        if len(requests) > 1:
            prompts, caches = [x.unread for x in requests], [x.cache for x in requests]
            passes = self.reader.prefill_passes(
                prompts, caches, cancelled=lambda: all(request.ended for request in requests)
            )
            # Each pass is checked when the loop continues, after the copy of its tokens started.
            return [(requests[x], self._sample_first(requests[x], rows)) for x, rows in passes]
        [request] = requests
        if request.chunks is None:
            request.chunks = self.reader.read_in_chunks(
                request.unread, request.cache, lambda: request.ended, request.prompt_logprobs
            )
        with request.listening():
            logits = next(request.chunks)
        if logits is None:
            return []
        found = [(requests, self._sample_first(requests, logits))]
        next(request.chunks, None)  # Check the keys and values of the last chunk.
        request.chunks = None
        return found


@lru_cache(maxsize=_MAX_CLIENTS)
def _prefixes(client: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return the client with only its first name, with its first two names, and so on."""
    return tuple(client[:count] for count in range(1, len(client) + 1))
