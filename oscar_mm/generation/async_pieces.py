"""AsyncPieces: the pieces of an answer for a coroutine, which a thread takes meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, Self, TypeVar

T = TypeVar("T")


class _End(NamedTuple):
    """Comes after the last piece, with the error that ended the answer, if one did."""

    error: BaseException | None


class _Taker(Generic[T]):
    """A thread that takes the pieces of one answer and gives them to an event loop.

    It belongs to the answer alone, since it waits for the model: answers of many coroutines would
    fill a pool of threads, and wait for each other.
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
            # Where the coroutine has left, the answer ends soon, and counts as far as it came.
            for piece in self._pieces:
                self._give(piece)
        except BaseException as raised:  # It is raised in the coroutine.
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
        """End the answer, unless it has ended; from any thread."""
        self._left = True
        if not self._done:
            self._cancel()


class AsyncPieces(Generic[T]):
    """An asynchronous iterator over the pieces of an answer; errors of the answer are raised.

    Leaving the loop over it ends the answer, and so do ``aclose`` and the end of the task.

    Args:
        pieces: the answer.
        cancel: ends the answer, from any thread.
        begun: is given the thread that takes the pieces, once it runs.
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
        """Itself."""
        return self

    async def __anext__(self) -> T:
        """The next piece."""
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
        """End the answer; does nothing where it has ended or was not begun."""
        if self._taker is not None:
            self._taker.leave()

    async def aclose(self) -> None:
        """End the answer, as ``close``."""
        self.close()

    def __del__(self) -> None:
        """End the answer: a loop over it was left."""
        self.close()
