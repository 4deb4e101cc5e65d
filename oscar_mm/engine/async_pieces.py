"""AsyncPieces: the pieces of an answer as an asynchronous iterator, read by a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, Self, TypeVar

T = TypeVar("T")


class _End(NamedTuple):
    """End marker after the pieces, with the error that ended the answer, or None."""

    error: BaseException | None


class _Taker(Generic[T]):
    """A thread that reads the pieces of one answer and passes them to an event loop.

    Each answer has its own thread, because the thread waits for the model: in a shared thread pool,
    the answers of many coroutines would wait for each other.
    """

    def __init__(self, pieces: Iterator[T], cancel: Callable[[], None]) -> None:
        self._pieces, self._cancel = pieces, cancel
        self._loop = asyncio.get_running_loop()
        self.taken: asyncio.Queue[T | _End] = asyncio.Queue()
        self.thread = threading.Thread(target=self._take, name="oscar-stream")
        self._left = self._done = False

    def _take(self) -> None:
        error: BaseException | None = None
        try:
            # After ``leave``, the answer ends soon; read to the end so that it is completed.
            for piece in self._pieces:
                self._give(piece)
        except BaseException as raised:  # Raised again in the coroutine.
            error = raised
        self._done = True
        self._give(_End(error))

    def _give(self, piece: T | _End) -> None:
        if self._left:
            return
        try:
            self._loop.call_soon_threadsafe(self.taken.put_nowait, piece)
        except RuntimeError:  # The loop is closed.
            self.leave()

    def leave(self) -> None:
        """End the answer unless it has ended; may be called from any thread."""
        self._left = True
        if not self._done:
            self._cancel()


class AsyncPieces(Generic[T]):
    """An asynchronous iterator over the pieces of an answer, which raises the answer's errors.

    Leaving the ``async for``, calling ``aclose`` or cancelling the task ends the answer.

    Args:
        pieces: iterator over the pieces, which may block.
        cancel: function that ends the answer; called from any thread.
        begun: function called with the thread that reads the pieces, once it runs.
    """

    def __init__(
        self,
        pieces: Iterator[T],
        cancel: Callable[[], None],
        begun: Callable[[threading.Thread], None] | None = None,
    ) -> None:
        self._pieces, self._cancel, self._begun = pieces, cancel, begun
        self._taker: _Taker[T] | None = None

    def __aiter__(self) -> Self:
        """Return the iterator itself."""
        return self

    async def __anext__(self) -> T:
        """Return the next piece, without blocking the event loop."""
        if self._taker is None:
            self._taker = _Taker(self._pieces, self._cancel)
            self._taker.thread.start()
            if self._begun is not None:
                self._begun(self._taker.thread)
        taken = self._taker.taken
        try:
            piece = await taken.get()
        except BaseException:  # The task was cancelled.
            self.close()
            raise
        if not isinstance(piece, _End):
            return piece
        taken.put_nowait(_End(None))
        if piece.error is not None:
            raise piece.error
        raise StopAsyncIteration

    def close(self) -> None:
        """End the answer; do nothing if it has ended or has not begun."""
        if self._taker is not None:
            self._taker.leave()

    async def aclose(self) -> None:
        """End the answer; the same as ``close``."""
        self.close()

    def __del__(self) -> None:
        """End the answer when the iterator is dropped, for example by leaving ``async for``."""
        self.close()
