"""Call: a function that the engine thread runs for another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from oscar_mm.errors import MemoryBusy

_SLICE_S = 1.0
"""Seconds after which a wait is restarted: a signal just before it would not interrupt it."""
Result = TypeVar("Result")


class Call(Generic[Result]):
    """Function that the engine thread runs once for another thread.

    Args:
        function: the function; it must change nothing if it raises ``MemoryBusy``.
        client: names that identify the client for whom the thread calls; see ``Request``.

    Attributes:
        ended: whether the function has returned or raised, or no thread waits for it any more.
    """

    def __init__(self, function: Callable[[], Result], client: tuple[str, ...] = ()) -> None:
        self._function: Callable[[], Result] | None = function
        self.client = client
        self.ended = False
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._running = threading.Lock()
        self._done = threading.Event()

    def attempt(self) -> None:
        """Run the function in the calling thread and keep its result or error.

        Raises:
            MemoryBusy: if there is not enough memory at present; the call then has not ended.
        """
        with self._running:
            function = self._function
            if self.ended or function is None:
                return
            try:
                # Between the layers of a prompt the engine is in inference mode, whose tensors
                # cannot be changed outside of it.
                with torch.inference_mode(False), torch.no_grad():
                    self._result = function()
            except MemoryBusy:
                raise
            except BaseException as error:  # Raised again in the thread that waits.
                self._error = error
            self._end()

    def run(self) -> None:
        """Run the function as ``attempt`` does, but end the call with an error if memory is
        lacking."""
        try:
            self.attempt()
        except MemoryBusy as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the call with an error."""
        self._error = error
        self._end()

    def _end(self) -> None:
        self.ended, self._function = True, None
        self._done.set()

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the function; return its result or raise its error.

        Args:
            timeout: maximum seconds until the function begins; None for no limit.

        Raises:
            TimeoutError: if the function has not begun by then; it will never run.
        """
        try:
            in_time = wait_for(self._done, timeout)
        except BaseException:  # Such as KeyboardInterrupt: do not wait for a running function.
            self._withdraw(blocking=False)
            raise
        if not in_time and self._withdraw():
            raise TimeoutError(f"the engine has been busy for more than {timeout} s")
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # The frames of its traceback reference this call.
        return self._result  # pyright: ignore[reportReturnType]

    def _withdraw(self, *, blocking: bool = True) -> bool:
        """Return True if the function has not begun and never will.

        Args:
            blocking: whether to wait for a running function.
        """
        if not self._running.acquire(blocking):
            return False
        try:
            began, self.ended = self.ended, True
            return not began
        finally:
            self._running.release()


def wait_for(event: threading.Event, timeout: float | None = None) -> bool:
    """Wait for an event; return False after ``timeout`` seconds."""
    if timeout is not None:
        return event.wait(timeout)
    while not event.wait(_SLICE_S):
        pass
    return True
