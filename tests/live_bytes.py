"""Bytes of tensors that are alive at once, on any device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside, counts what operations make, as long as somebody holds it.

    Attributes:
        now: bytes that are alive.
        peak: most of them so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if _is_tensor(x)]
        output = func(*args, **(kwargs or {}))
        for tensor in filter(_is_tensor, tree_leaves(output)):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._sizes or key in given:
                continue
            self._sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key)
        return output

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
