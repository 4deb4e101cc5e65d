"""Engine: reads prompts and decodes all answers of a pipeline, which come and go between steps."""

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
"""Most answers that decode together."""
_OVERTAKES = 8
"""How many smaller requests may begin while the first of the queue has no room."""
_IDLE_S = 1.0
"""Seconds after which a thread without work looks for it."""
Result = TypeVar("Result")


class Reservations(Protocol):
    """Keeps room for answers; ``oscar_mm.admission.admission.Admission`` does."""

    @property
    def prefill_chunk(self) -> int | None:
        """Tokens of a prompt that are read at a time; None for all at once."""
        ...

    def growth(
        self, prompt: Prompt, max_new_tokens: int, cache: OscarCache | None = None
    ) -> SlotForecast:
        """Slots that a prompt of a single row and its answer will take."""
        ...

    def reserve(self, growth: SlotForecast, prompt: Prompt, cache: OscarCache) -> object:
        """Make room for an answer; the room is kept until what is returned is dropped.

        Raises:
            MemoryBusy: there is no room while others have theirs.
        """
        ...


class Engine:
    """Reads prompts and decodes all answers of a pipeline together.

    A step reads the last token of every running answer in one forward pass; answers join and leave
    between two steps. While a prompt is read, steps come between its layers, so that both have
    half of the time, or reading more of it where more requests wait than run; reading ends there
    once nobody waits for the prompt. Prompts of several chunks take turns, and between two chunks
    all shorter prompts begin. Whoever waits for a piece of an answer makes the next step,
    for all, but where ``stepping_thread`` makes it.

    First come, first served: a request without room in the budget waits as long as others run, and
    is overtaken by a few smaller ones at most.

    Args:
        family: the model, its processor and what is special about them.
        store: of the caches of all answers.
        admission: gives answers their room.
        prefixes: beginnings of prompts that were read before; None if they are not kept.
        twin: an engine of the same lock and budget: a request without room waits for the answers
            of both.

    Attributes:
        reader: reads prompts; steps of running answers come between its layers.
        max_rows: most answers that decode together.
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
        """Those that have room and whose prompts are read chunk by chunk, in turn."""
        self._groups = RunningBatches(family, store, self._threads.wake, self.runnable_count)
        self.reader = PrefillRunner(family, store, admission.prefill_chunk, self._groups)
        self._advancing = self._left = False
        self._work = threading.Event()
        """Set where answers were submitted or a thread waits for room, for the stepping thread."""
        # A finalizer may take it within itself.
        self._queue_guard = threading.RLock()
        self._blocked = False
        """Whether the queue waits for room."""
        self._skipped_head, self._memory_waiters = 0, list[Callable[[], object]]()
        """How many requests have overtaken, and who waits for room without being in the queue."""
        self._twins = weakref.WeakSet[Engine]() if twin is None else twin._twins
        """The engines that share the budget, this one too."""
        with self.lock:
            self._twins.add(self)

    @property
    def lock(self) -> FairLock:
        """Held for each step of the model and each change of the store."""
        return self.store.lock

    @property
    def running(self) -> int:
        """How many answers decode, or have a prompt of which a part has been read."""
        return len(self._begun)

    @property
    def _begun(self) -> list[Request]:
        return [*self._reading, *self._groups.live]

    @property
    def waiting(self) -> int:
        """How many requests wait for their turn."""
        return len(self._queue)

    def runnable_count(self) -> int:
        """How many requests wait for more than room, which only answers that end give."""
        others = max(len(self._reading) - 1, 0)
        return others if self._blocked else others + len(self._queue)

    def release_graphs(self) -> None:
        """Drop what was captured of decode steps, of engines of the same lock too; the next answer
        captures its steps anew, and running answers keep theirs."""
        with self.lock:
            for twin in list(self._twins):
                twin._groups.forget_batch()
                twin._groups.settle_ended()
        gc.collect()

    def submit(self, request: Request) -> None:
        """Put an answer into the queue; from any thread."""
        with self._queue_guard:
            self._queue.append(request)
        self._work.set()

    @contextmanager
    def stepping_thread(self, after_step: Callable[[], None]) -> Iterator[None]:
        """Inside, a thread makes all steps, whether anybody waits for the answers or not.

        Args:
            after_step: called after each step, by the thread that makes it.
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
                    # Who waits aside may wait for answers of a twin, which nobody else may ask for.
                    self.run_until(
                        lambda: (
                            stopped() or not (self.running or self._queue or self._memory_waiters)
                        )
                    )
                except BaseException as error:  # It is that of the answers: steps go on.
                    with self.lock:
                        for answer in (*self._queue, *self._begun):
                            answer.fail(error)
                    self.drop_ended()
                    self._threads.wake()
                # Somebody may wait for an answer that was cancelled before a step.
                self._threads.wake()
                # Another such thread may have cleared it.
                self._work.wait(_IDLE_S)

    def run_until(self, done: Callable[[], bool]) -> None:
        """Return when ``done``; until then make steps for all answers, or wait while another
        thread does.

        Raises:
            BaseException: what interrupts a step, such as KeyboardInterrupt.
        """
        try:
            while not done():
                if self._threads.lead(done):
                    self._lead(done)
        finally:
            self._threads.promote()

    def _lead(self, done: Callable[[], bool]) -> None:
        """Make a step for all answers, unless ``done``."""
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

    def next_ended(self, answers: Collection[Request]) -> list[Request]:
        """Wait until some of these answers have ended, and return them."""
        self.run_until(lambda: any(answer.ended for answer in answers))
        return [answer for answer in answers if answer.ended]

    @contextmanager
    def wait_for_memory(self, begin: Callable[[], Result]) -> Iterator[Result]:
        """Inside, under the lock, for a moment: what ``begin`` returns, which waits for room as
        requests do. No model runs inside.

        Args:
            begin: takes room, and changes nothing where it raises ``MemoryBusy``; it is tried again
                when an answer has ended, as long as answers run.
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
        self._groups.freed = True  # Others may have waited for this one only.

    def _wait_for_end(self) -> None:
        """Go on until one of the answers that run has ended."""
        with self.lock:
            running = [answer for twin in self._twins for answer in twin._begun]
        self.run_until(lambda: not running or any(answer.ended for answer in running))

    def drop_ended(self) -> None:
        """Let go of answers that have ended: now or, if a step is being made, after it."""
        # A finalizer may come here in any thread between any two lines, of this method too.
        with self._queue_guard:
            for answer in list(self._queue):
                if answer.ended:
                    self._groups.freed = True
                    with suppress(ValueError):
                        self._queue.remove(answer)
        self._left = True
        if not (self._advancing or self._groups.stepping) and self.lock.acquire(blocking=False):
            try:
                self._left = False
                reading = [answer for answer in self._reading if answer.ended]
                for answer in reading:
                    self._groups.freed = True
                    self._reading.remove(answer)
                for answer in (*self._groups.drop_ended(), *reading):
                    # Slots stay: others may be at theirs.
                    answer.room = answer.chunks = None
            finally:
                self.lock.release()

    def _drop_left(self) -> None:
        """Let go of answers that ended while another thread had the lock, of twins too."""
        for twin in list(self._twins):
            if twin._left:
                twin.drop_ended()

    @eager
    @torch.inference_mode()
    def _advance(self) -> None:
        """Read the prompts that have room, then make a step."""
        self._advancing = True
        try:
            self._groups.settle_ended()
            twins = list(self._twins)
            if not self.running or any(twin._groups.freed for twin in twins):
                for twin in twins:
                    twin._groups.freed = twin._blocked = False
            if not self.running:
                self._prepare()
            # Steps came between the layers of what was read, for as long as it took.
            if self._admit() and not self._read_on():
                self._groups.step()
            self._groups.settle_ended()
        finally:
            self._advancing = False

    def _advance_twins(self) -> None:
        """Make a step for the answers of other engines, which have the room that this one needs."""
        for twin in list(self._twins):
            if twin is self or not twin.running:
                continue
            twin._advance()
            twin._threads.wake()
            if twin._left:
                twin.drop_ended()

    def _prepare(self) -> None:
        """Before the first of some answers: memory that their prompts do not take goes back, and
        what is known of other weights is forgotten."""
        prompts = [(x.prompt, x.cache) for x in list(self._queue) if not x.ended]
        growths = [self.admission.growth(prompt, 1, cache) for prompt, cache in prompts]
        added = [{bits: int(slots[0]) for bits, slots in x.added.items()} for x in growths]
        self.store.trim_surplus(sum(self.store.bytes_of(slots) for slots in added))
        if self.reader.refresh():
            self._groups.forget_batch()

    def _admit(self) -> bool:
        """Begin with the requests that have room, and read short prompts of several together.

        Returns:
            False if requests are left because others wait for the lock, to submit requests or to
            end answers.
        """
        while self._queue and not self._blocked and self.running < self.max_rows:
            self._groups.settle_ended()  # Steps came between the layers of the last prompt.
            with self._beginning() as answers:
                self._take_first(answers)
                if not answers:
                    self._blocked = True
                    return True
                if answers[0].unread.tokens > self.reader.max_at_once:
                    self._reading.extend(answers)
                else:
                    self._fill_batch(answers)
                    self._begin(answers)
            self._threads.wake_followers()
            if self.runnable_count() and self._groups.fills_pauses:
                self._groups.step()
                self._threads.wake()
            if self._queue and self.lock.is_contended:
                return False
        return True

    def _read_on(self) -> bool:
        """Read a chunk of the prompt that has waited longest for its next one.

        Returns:
            whether answers get their steps between the layers of the next one.
        """
        if not self._reading:
            return False
        answer = self._reading[0]
        try:
            with self._beginning() as answers:
                answers.append(answer)
                self._begin(answers)
        finally:
            self._reading.rotate(-1)
            if answer.ended or answer.chunks is None:
                self._reading.remove(answer)
        return bool(self._reading) and self._groups.steps_while_reading

    @contextmanager
    def _beginning(self) -> Iterator[list[Request]]:
        """Inside, the answers in the list begin: an error is theirs, and those that end give their
        room back."""
        answers: list[Request] = []
        try:
            yield answers
        except BaseException as error:
            for answer in answers:
                answer.fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            for answer in answers:
                if answer.ended:
                    answer.settle()
                    self._groups.freed = True

    def _take_first(self, taken: list[Request]) -> None:
        """Take the first request that has room, or fails, out of the queue."""
        for place, answer in enumerate(list(self._queue)):
            overtakes = place > 0 or bool(self._memory_waiters)
            if overtakes and self._skipped_head >= _OVERTAKES:
                return
            if self._take(answer, taken):
                self._skipped_head = self._skipped_head + 1 if overtakes else 0
                return

    def _fill_batch(self, taken: list[Request]) -> None:
        """Take the next requests too that have room and can be read in one pass with the first."""
        tokens = taken[0].unread.tokens
        while self._is_short(taken[0]) and self.running + len(taken) < self.max_rows:
            following = next(iter(list(self._queue)), None)
            if (
                following is None
                or tokens + following.prompt.tokens > self.reader.max_varlen_tokens
                or not self._is_short(following)
                or not self._take(following, taken)
            ):
                return
            tokens += following.unread.tokens

    def _take(self, answer: Request, taken: list[Request]) -> bool:
        """Make room for a request, and take it out of the queue; whether it need not wait."""
        try:
            if not answer.ended:
                self._reserve(answer)
        except MemoryBusy as error:
            # An answer that has just ended may not have given its pages up yet.
            if taken or self._groups.freed or any(twin.running for twin in self._twins):
                return False
            answer.fail(error)
        except Exception as error:
            answer.fail(error)
        taken.append(answer)
        with self._queue_guard, suppress(ValueError):
            self._queue.remove(answer)
        return True

    def _is_short(self, answer: Request) -> bool:
        """Whether a prompt is read in one pass with others: not where later ones may have its media
        in common."""
        shares = self.prefixes is not None and answer.prompt.media
        return (
            answer.prompt.tokens <= self.reader.max_varlen_tokens
            and answer.prompt_logprobs is None
            and not (shares or answer.cache.linear_layers)
            and self._groups.joins(answer)
        )

    def _reserve(self, answer: Request) -> None:
        """Find what is known of a prompt, and make room for the rest and for the answer.

        Raises:
            MemoryBusy: there is no room while others have theirs; nothing has changed.
        """
        prompt, cache, prefix = answer.prompt, answer.cache, None
        if self.prefixes is not None and not answer.has_past:
            answer.reader_state = self._reader_state()
            if answer.prompt_logprobs is None:  # Else the model must read every token.
                prefix = self.prefixes.find(prompt, answer.reader_state)
        if prefix is not None:
            prompt, cache = remaining(prompt, prefix.get_seq_length()), prefix
        try:
            answer.room = self._room(answer, prompt, cache)
        except BaseException:
            if prefix is not None:
                prefix.close()
            raise
        answer.unread, answer.cache = prompt, cache

    def _reader_state(self) -> tuple[object, ...]:
        """What keys and values depend on beside a prompt: settings of the processor, and weights
        and adapters of the model."""
        return processor_settings(self.family.processor), self.reader.state

    def _room(self, answer: Request, prompt: Prompt, cache: OscarCache) -> object:
        growth = self.admission.growth(prompt, answer.sampling.max_new_tokens, cache)
        return self.admission.reserve(growth, prompt, cache)

    def _begin(self, answers: list[Request]) -> None:
        """Read prompts, or a chunk of one, and choose the first token of each that was read."""
        live = [answer for answer in answers if not answer.ended]
        read = self._read_beginnings(live) if live else []
        if not read:
            return
        logits = torch.cat([row for _, row in read])
        samplers, ranks = [answer.sampler for answer, _ in read], TPGroup.of(self.family.model)
        chosen = Sampler(samplers, logits.device, ranks)(logits)
        tokens = chosen.listed()
        logprobs = chosen.logprobs(tokens)
        for place, ((answer, _), token) in enumerate(zip(read, tokens, strict=True)):
            if not answer.ended:  # It may have been cancelled meanwhile.
                answer.next_logprob = logprobs.get(place)
                answer.take(token)
            if self.prefixes is not None and not answer.has_past and answer.error is None:
                state = self._reader_state()
                if state == answer.reader_state:  # Nobody has changed it meanwhile.
                    self.prefixes.keep(answer.prompt, state, answer.cache)
            if not answer.ended:
                self._groups.join(answer)

    def _read_beginnings(self, answers: list[Request]) -> list[tuple[Request, torch.Tensor]]:
        """Read prompts, together or, if that fails, one by one, or a chunk of a single one: those
        that have been read, with (1, vocabulary) logits; none once all answers have ended."""
        several = len(answers) > 1
        pasts = [x.cache.fork() if several and x.cache.get_seq_length() else None for x in answers]
        try:
            found = self._read_next(answers)
            for past in pasts:
                if past is not None:
                    past.close()
            return [(x, row) for x, row in zip(answers, found, strict=True) if row is not None]
        except Cancelled as error:
            for answer, past in zip(answers, pasts, strict=True):
                if not answer.ended:  # A hook of others raised it.
                    answer.fail(error)
                answer.cache.reset()
                if past is not None:
                    past.close()
            return []
        except Exception as error:
            if not several:
                answers[0].fail(error)
                return []
        # After the handler, as the error's frames hold the activations.
        for answer, past in zip(answers, pasts, strict=True):
            if past is None:
                answer.cache.reset()
            else:
                answer.cache.close()
                answer.cache, answer.room = past, None
        for answer in answers:
            try:
                if answer.room is None:
                    answer.room = self._room(answer, answer.unread, answer.cache)
            except Exception as error:
                answer.fail(error)
        live = [answer for answer in answers if not answer.ended]
        return [one for answer in live for one in self._read_beginnings([answer])]

    def _read_next(self, answers: list[Request]) -> Sequence[torch.Tensor | None]:
        """Read the prompts of several answers, or the next chunk of a single one's; None for a
        prompt of which chunks are left."""
        if len(answers) > 1:
            prompts, caches = [x.unread for x in answers], [x.cache for x in answers]
            return self.reader.prefill_batch(
                prompts, caches, cancelled=lambda: all(answer.ended for answer in answers)
            )
        [answer] = answers
        if answer.chunks is None:
            answer.chunks = self.reader.read_in_chunks(
                answer.unread, answer.cache, lambda: answer.ended, answer.prompt_logprobs
            )
        logits = next(answer.chunks)
        if logits is not None:
            answer.chunks = None
        return [logits]
