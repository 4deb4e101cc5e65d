"""EngineThread: the only thread that uses a model, its caches and its page stores."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from oscar_mm.engine.engine_call import Call, wait_for

_EXIT_S = 5.0
"""Maximum seconds that the interpreter waits at exit for the engine's current step."""
Result = TypeVar("Result")
Job = Callable[[], object]
_log = logging.getLogger("oscar_mm")


class Schedules(Protocol):
    """Interface of ``oscar_mm.engine.scheduler.Scheduler`` that the thread uses."""

    @property
    def freed(self) -> bool:
        """Whether requests have ended since the queue was blocked."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether requests decode or are partly prefilled."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether any requests are running or waiting."""
        ...

    def drop_ended(self) -> None:
        """Remove ended requests and release their memory; called between two passes."""
        ...

    def unblock(self) -> None:
        """Retry the queue entries that wait for memory."""
        ...

    def advance(self) -> None:
        """Prefill the prompts that have memory, then run a decode step."""
        ...

    def fail_all(self, error: BaseException) -> None:
        """End all requests with an error."""
        ...

    @property
    def is_ahead(self) -> bool:
        """Whether the device computes a decode step whose tokens the host is about to read."""
        ...


class _Waiter:
    """Thread that waits for the engine's steps.

    Attributes:
        is_done: function that returns whether the wait is over; called by the engine thread.
        ready: event set once ``is_done`` returns True.
        left: whether the thread no longer waits.
    """

    def __init__(self, is_done: Callable[[], bool]) -> None:
        self.is_done, self.ready, self.left = is_done, threading.Event(), False

    def release(self) -> bool:
        """Wake the thread if its wait is over; return whether it is."""
        try:
            over = self.left or self.is_done()
        except Exception:  # The waiting thread calls ``is_done`` again and gets the error itself.
            over = True
        if over:
            self.ready.set()
        return over


class EngineThread:
    """The only thread that uses a model, its caches and its page stores; other threads call it.

    It runs decode steps as long as a thread waits for one, or within ``keep_stepping``. Calls run
    in order of arrival, between two steps or between two layers of a prompt. The thread starts with
    the first call, also in a forked process, and ends with this object.

    Attributes:
        watchers: functions called in the engine thread after each step, see ``call_watchers``.
    """

    def __init__(self) -> None:
        self.watchers: list[Job] = []
        self._watchers_due = False
        """Whether a step has ended since the watchers were called."""
        self._starting = threading.Lock()
        self._process = 0
        self._thread: threading.Thread | None = None
        self._inbox: SimpleQueue[Job | None] = SimpleQueue()
        self._schedulers: list[weakref.ref[Schedules]] = []
        self._passes: deque[Call] = deque()
        """Calls that run the model, waiting for the end of the current pass."""
        self._waiters: list[_Waiter] = []
        self._works = False
        self._keeps_stepping = 0

    @property
    def is_current(self) -> bool:
        """Whether the calling thread may use the model: it is the engine thread, or the engine
        thread has ended because the interpreter is exiting."""
        thread = self._thread
        if thread is None or self._process != os.getpid():
            return False
        return thread is threading.current_thread() or not thread.is_alive()

    @property
    def schedulers(self) -> list[Schedules]:
        """Schedulers of the model, one for each page store, oldest first."""
        return [scheduler for made in self._schedulers if (scheduler := made()) is not None]

    @property
    def busy(self) -> bool:
        """Whether any requests are running, which will release their memory when they end."""
        return any(scheduler.is_running for scheduler in self.schedulers)

    def add(self, scheduler: Schedules) -> None:
        """Add a scheduler, which the thread drives until it is garbage-collected."""
        self._schedulers = [made for made in self._schedulers if made() is not None]
        self._schedulers.append(weakref.ref(scheduler))

    def call(
        self,
        function: Callable[[], Result],
        *,
        runs_model: bool = False,
        timeout: float | None = None,
    ) -> Result:
        """Run a function in the engine thread and return its result.

        Args:
            function: function that may use caches and stores.
            runs_model: whether the function runs forward passes; it then runs between two passes,
                not between the layers of a prompt.
            timeout: see ``Call.result``.

        Raises:
            BaseException: the function's error, or ``TimeoutError``.
        """
        if self.is_current:
            return function()
        call = Call(function)

        def begin() -> None:
            if runs_model:
                self._passes.append(call)
            else:
                call.run()

        self.post(begin)
        return call.result(timeout)

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Wait until ``is_done`` returns True; the engine runs steps meanwhile.

        Args:
            is_done: cheap function, which the engine thread calls after each step.

        Raises:
            RuntimeError: if called in the engine thread, which cannot wait for itself.
        """
        while not is_done():
            if self.is_current:
                raise RuntimeError("the engine thread cannot wait for its own steps")
            waiter = _Waiter(is_done)
            self.post(lambda waiter=waiter: self._waiters.append(waiter))
            try:
                wait_for(waiter.ready)
            except BaseException:  # Such as KeyboardInterrupt.
                waiter.left = True
                raise

    @contextmanager
    def keep_stepping(self, after_step: Job) -> Iterator[None]:
        """Run steps within the block as long as there are requests, even if no thread waits.

        Args:
            after_step: function called after each step, in the engine thread; see
                ``call_watchers``. It must not use caches, since the next step may be under way.
        """

        def change(count: int, change: Callable[[Job], None]) -> None:
            self._keeps_stepping += count
            change(after_step)

        self.call(lambda: change(1, self.watchers.append))
        try:
            yield
        finally:
            # Without waiting, so that a server can stop while a long prompt is prefilled.
            self.post(lambda: change(-1, self.watchers.remove))

    def step_until(self, is_done: Callable[[], bool]) -> None:
        """Have steps run until ``is_done`` returns True, without waiting; only for jobs of the
        engine thread."""
        self._waiters.append(_Waiter(is_done))

    def wake(self) -> None:
        """Make the thread look for ended requests and, within ``keep_stepping``, for new ones.

        Safe in a finalizer, which may run in any thread at any point.
        """
        self._inbox.put(lambda: self._handle(_nothing))

    def post(self, job: Job) -> None:
        """Queue a short job on the engine thread, without waiting for it."""
        if self._process != os.getpid():
            self._start()
        self._inbox.put(lambda: self._handle(job))

    def _start(self) -> None:
        with self._starting:
            if self._process == os.getpid():
                return
            # A forked process has no other threads, so their calls and waits are dropped.
            self._inbox, self._passes, self._waiters = SimpleQueue(), deque(), []
            self._works, self._keeps_stepping, self.watchers = False, 0, []
            self._watchers_due = False
            thread = threading.Thread(
                target=_run_jobs, args=[self._inbox], name="oscar-engine", daemon=True
            )
            thread.start()
            weakref.finalize(self, _end, self._inbox, thread)
            self._thread, self._process = thread, os.getpid()

    def _handle(self, job: Job) -> None:
        job()
        if not self._works:
            self._works = True
            try:
                self._work()
            finally:
                self._works = False
                self.release_waiters()

    def _work(self) -> None:
        """Run steps as long as threads wait for them."""
        while True:
            for scheduler in self.schedulers:
                _guard(scheduler, scheduler.drop_ended)
            if not self.run_calls():
                return
            while self._passes:
                self.call_watchers()  # The call may take long.
                self._passes.popleft().run()
            self.release_waiters()
            schedulers = [x for x in self.schedulers if x.has_work]
            if schedulers and (self._waiters or self._keeps_stepping):
                self._step(schedulers)
            elif self._passes or not self._inbox.empty():
                continue
            else:
                self.call_watchers()
                return

    def _step(self, schedulers: list[Schedules]) -> None:
        """Run a step of each scheduler that has requests."""
        every = self.schedulers
        if any(scheduler.freed for scheduler in every) or not self.busy:
            for scheduler in every:
                scheduler.unblock()
        for scheduler in schedulers:
            _guard(scheduler, scheduler.advance)
        self.after_step()

    def after_step(self) -> None:
        """Wake the threads whose wait is over, and call the watchers, at once or soon."""
        self.release_waiters()
        self._watchers_due = True
        if not any(scheduler.is_ahead for scheduler in self.schedulers):
            self.call_watchers()

    def call_watchers(self) -> None:
        """Call the watchers if a step has ended since they were called.

        If the device already computes the next step, ``after_step`` leaves this call to the place
        where the step after that is launched and this thread waits for the device. Threads that
        watchers wake, such as a server's event loop, then have the interpreter to themselves. If
        they had it before the launch, the device would wait for them.
        """
        if not self._watchers_due:
            return
        self._watchers_due = False
        for watcher in tuple(self.watchers):
            try:
                watcher()
            except Exception:
                _log.exception("a function that is called after each step failed")

    def release_waiters(self) -> None:
        """Wake the threads whose wait is over."""
        self._waiters = [waiter for waiter in self._waiters if not waiter.release()]

    @property
    def has_calls(self) -> bool:
        """Whether calls are waiting that may run between two layers."""
        return not self._inbox.empty()

    @property
    def has_passes(self) -> bool:
        """Whether calls are waiting that run the model."""
        return bool(self._passes)

    def wait_for_call(self, seconds: float) -> bool:
        """Wait for a call and run it; return False if none comes in time or the thread must end.

        Further calls that have arrived meanwhile are left to ``run_calls``.
        """
        try:
            job = self._inbox.get(timeout=seconds)
        except Empty:
            return False
        if job is None:
            self._inbox.put(None)
            return False
        job()
        return True

    def run_calls(self) -> bool:
        """Run the waiting calls; return False if the thread must end."""
        while not self._inbox.empty():
            if not self.wait_for_call(0.0):
                return False
        return True


def _guard(scheduler: Schedules, work: Job) -> None:
    """Run a scheduler's work; on an error, fail its requests and keep the thread alive."""
    try:
        work()
    except BaseException as error:
        scheduler.fail_all(error)


def _end(inbox: SimpleQueue[Job | None], thread: threading.Thread) -> None:
    """End the engine thread, waiting at exit for its current step.

    A daemon thread that returns from C++ code after the interpreter has ended aborts the process.
    """
    inbox.put(None)
    if thread is not threading.current_thread():
        thread.join(_EXIT_S)


def _nothing() -> None:
    """Do nothing: a job that only makes the thread look for work."""


def _run_jobs(inbox: SimpleQueue[Job | None]) -> None:
    """Run jobs until a None arrives; between jobs, keep a reference only to the queue."""
    while (job := inbox.get()) is not None:
        try:
            job()
        except BaseException:
            _log.exception("a job of the engine thread failed")
        del job
