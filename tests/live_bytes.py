"""Bytes of tensors that are alive at once, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oscar_mm.engine.engine_thread import EngineThread


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts the bytes of tensors created within the block while they live.

    Args:
        thread: an engine thread, whose tensors are counted too; idle at the block's begin and end.

    Attributes:
        now: bytes that are alive.
        peak: most of them so far.
    """

    def __init__(self, thread: EngineThread | None = None) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._thread, self._theirs = thread, None if thread is None else _Counted(self)

    def __enter__(self) -> LiveBytes:
        self._in_thread("__enter__")
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._in_thread("__exit__", None, None, None)

    def _in_thread(self, name: str, *arguments: Any) -> None:
        """Enter or leave the mode in the engine thread: modes of torch are each thread's own."""
        if self._thread is not None:
            # No call, which would restore the modes at its end.
            self._thread.post(lambda: getattr(self._theirs, name)(*arguments))
            self._thread.call(lambda: None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        given: set[int] | None = None
        for tensor in _tensors((output,)):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._sizes or tensor.is_meta:  # That takes no memory.
                continue
            if given is None:
                given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
            if key in given:
                continue
            self._sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key)
        return output

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


class _Counted(TorchDispatchMode):
    """Mode of another thread that counts for the one of this thread."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self._live = live

    def __torch_dispatch__(self, *call: Any, **named: Any) -> Any:
        return self._live.__torch_dispatch__(*call, **named)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Those of an operation's arguments or results; every operation comes here, so it is quick."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())
