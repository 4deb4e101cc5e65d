"""Engine: access to the engine thread for a pipeline and its requests."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import TypeVar, cast

from oscar_mm.cache.page_store import PageStore
from oscar_mm.engine.engine_call import Call
from oscar_mm.engine.engine_thread import EngineThread
from oscar_mm.engine.family import Family
from oscar_mm.engine.prefill_runner import PrefillRunner
from oscar_mm.engine.prefix_cache import PrefixCache
from oscar_mm.engine.request import Request
from oscar_mm.engine.scheduler import Reservations, Scheduler
from oscar_mm.errors import MemoryBusy

Result = TypeVar("Result")


class Engine:
    """Runs a pipeline's requests in the engine thread, the only user of the model and caches.

    Requests run as long as a thread waits for one of them, or within ``keep_stepping``; all
    requests of the model advance together. Any thread may call any method.

    Args:
        family: model family: the model, its processor and their special cases.
        store: page store of all requests' caches.
        admission: reserves memory for requests.
        prefixes: prefix cache; None turns it off.
        thread: engine thread of the model; by default, a new thread.
    """

    def __init__(
        self,
        family: Family,
        store: PageStore,
        admission: Reservations,
        prefixes: PrefixCache | None = None,
        thread: EngineThread | None = None,
    ) -> None:
        self.family, self.store = family, store
        self.thread = EngineThread() if thread is None else thread
        self.scheduler = Scheduler(family, store, admission, self.thread, prefixes)

    @property
    def reader(self) -> PrefillRunner:
        """Runs prefill in the engine thread, with decode steps between the layers."""
        return self.scheduler.reader

    @property
    def max_rows(self) -> int:
        """Maximum number of requests that decode together."""
        return self.scheduler.max_rows

    @property
    def running(self) -> int:
        """Number of requests that decode or are partly prefilled."""
        return self.scheduler.running

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return self.scheduler.waiting

    @property
    def speech_bytes(self) -> int:
        """Bytes of a talker's keys and values in use; read it in the engine thread."""
        return self.scheduler.speech_bytes

    def submit(self, request: Request) -> None:
        """Put a request into the queue."""
        request.submitted = True
        self.scheduler.add(request)
        self.thread.wake()

    def abort(self) -> None:
        """Have the engine thread release the memory of ended requests, between two passes.

        Safe in a finalizer, which may run in any thread at any point.
        """
        self.thread.wake()

    def call(
        self,
        function: Callable[[], Result],
        *,
        runs_model: bool = False,
        timeout: float | None = None,
    ) -> Result:
        """Run a function in the engine thread and return its result.

        Args:
            function: function that may use caches and the store.
            runs_model: whether the function runs forward passes; it then runs between two passes,
                not between the layers of a prompt.
            timeout: maximum seconds until the function begins; None for no limit.

        Raises:
            BaseException: the function's error, or ``TimeoutError``.
        """
        return self.thread.call(function, runs_model=runs_model, timeout=timeout)

    def call_with_memory(
        self, function: Callable[[], Result], client: tuple[str, ...] = ()
    ) -> Result:
        """Run a function in the engine thread once there is memory for it.

        It waits in the request queue as long as requests run that may release memory.

        Args:
            function: function that takes memory; must change nothing if it raises ``MemoryBusy``.
            client: names that identify the client; see ``Request``.

        Raises:
            BaseException: the function's error.
        """
        if self.thread.is_current:
            return function()
        call = Call(function, client)

        def begin() -> None:
            try:
                call.attempt()
            except MemoryBusy as error:
                if not self.thread.busy:
                    call.fail(error)
                    return
                self.scheduler.add(call)
                self.thread.step_until(lambda: call.ended)

        self.thread.post(begin)
        return call.result()

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Wait until ``is_done`` returns True; requests run meanwhile.

        Args:
            is_done: cheap function, which the engine thread calls after each step.
        """
        self.thread.run_until(is_done)

    def next_ended(self, requests: Collection[Request]) -> list[Request]:
        """Wait until at least one of the requests has ended, and return those that have ended."""
        self.run_until(lambda: any(request.ended for request in requests))
        return [request for request in requests if request.ended]

    def keep_stepping(self, after_step: Callable[[], object]) -> AbstractContextManager[None]:
        """Run steps until the ``with`` block ends, as long as there are requests, even if no thread
        waits for an answer.

        Args:
            after_step: function called after each step, in the engine thread.
        """
        return self.thread.keep_stepping(after_step)

    def release_graphs(self) -> None:
        """Drop the CUDA graphs of decode steps, prompts and speech, for all engines of the model.

        Running requests keep their graphs; the next request captures its steps again.
        """

        def release() -> None:
            for scheduler in self.thread.schedulers:
                cast(Scheduler, scheduler).release_graphs()

        self.call(release, runs_model=True)
        gc.collect()
