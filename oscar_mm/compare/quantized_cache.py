"""Transformers' own QuantizedCache, where the packages that it needs are installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import HQQQuantizedLayer, QuantoQuantizedLayer

from oscar_mm.cache.memory import MemoryReport
from oscar_mm.compare.forced import LayerStates
from oscar_mm.compare.paged import Paged, Restored

# By backend: its package, its layer and the axis that transformers' documentation advises.
BACKENDS = {
    "quanto": ("optimum.quanto", QuantoQuantizedLayer, 0),
    "hqq": ("hqq", HQQQuantizedLayer, 1),
}


@dataclass(frozen=True)
class QuantizedCacheMethod:
    """A layer of ``transformers.QuantizedCache`` with its default groups of 64 channels a token.

    It stores the tokens that ``like`` packs, so that methods are compared and not windows. The real
    cache quantizes a whole prompt, and everything anew each time its residual is full.

    Attributes:
        backend: "quanto" or "hqq".
        bits: 2 or 4.
        like: method that packs the same tokens.
    """

    backend: str
    bits: int
    like: Paged

    @property
    def name(self) -> str:
        """Name in tables, like "quanto, 2 bit"."""
        return f"{self.backend}, {self.bits} bit"

    def missing(self, layers: Sequence[LayerStates], ids: Tensor) -> str | None:
        """Which package is not installed; None if the method applies."""
        return not_installed(self.backend)

    def restored(self, states: LayerStates, ids: Tensor) -> Restored:
        """Quantize the tokens that ``like`` packs and read them back; arguments as in ``Paged``."""
        keys, values = states.keys.clone(), states.values.clone()
        where = torch.cat([torch.empty(0, dtype=torch.long), *self.like.packed(ids).values()])
        where = where.sort().values.to(keys.device)
        if not len(where):
            return Restored(keys, values, 0, 0)
        _, kind, axis = BACKENDS[self.backend]
        layer = kind(nbits=self.bits, axis_key=axis, axis_value=axis)
        sides = [side[:, :, where].contiguous() for side in (keys, values)]
        layer.update(*sides)
        stored = (layer._quantized_keys, layer._quantized_values)
        for side, quantized in zip((keys, values), stored, strict=True):
            side[:, :, where] = layer._dequantize(quantized)
        return Restored(keys, values, sum(map(stored_bytes, stored)), 2 * sides[0].numel())

    def memory(self, layers: Sequence[LayerStates], ids: Tensor) -> MemoryReport | None:
        """None: the cache has no report."""
        return None


def quantized_cache_methods(like: Paged) -> list[QuantizedCacheMethod]:
    """Methods of both backends with 2 and 4 bits."""
    return [QuantizedCacheMethod(name, bits, like) for name in BACKENDS for bits in (2, 4)]


def not_installed(backend: str) -> str | None:
    """A sentence that names the package a backend lacks; None if it is installed."""
    package = BACKENDS[backend][0]
    try:
        installed = find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is missing
        installed = False
    return None if installed else f"{package} is not installed"


def stored_bytes(stored: Any) -> int:
    """Bytes of codes, scales and zeros of a tensor that a layer of ``BACKENDS`` has quantized."""
    if isinstance(stored, tuple):  # hqq
        codes, about = stored
        return sum(part.nbytes for part in (codes, about["scale"], about["zero"]))
    return sum(part.nbytes for part in (stored._data._data, stored._scale, stored._shift))
