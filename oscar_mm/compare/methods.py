"""Lists of the methods to compare, with their names and sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import HQQQuantizedLayer, QuantoQuantizedLayer

from oscar_mm.compare.paged import Blocks, Paged, Restored
from oscar_mm.compare.rivals import FP8, INT4, Exact, ExLlamaV3, KVarN, Rival, TurboQuant
from oscar_mm.compare.teacher_forcing import LayerStates, Pair
from oscar_mm.policy import KVPolicy

# For each backend: its package, its layer and the axis that transformers' documentation recommends.
BACKENDS = {
    "quanto": ("optimum.quanto", QuantoQuantizedLayer, 0),
    "hqq": ("hqq", HQQQuantizedLayer, 1),
}


@dataclass(frozen=True)
class QuantizedCacheMethod:
    """A layer of ``transformers.QuantizedCache`` with its default groups of 64 channels per token.

    It quantizes the tokens that ``like`` packs, so that the comparison does not depend on different
    windows. The real cache quantizes the full prompt, and requantizes everything each time its
    residual is full.

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
        """Return why the method cannot run (its backend is not installed); None if it can."""
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

    def one_by_one(self, prompt: int) -> QuantizedCacheMethod:
        """Return this method unchanged, because each token is quantized separately."""
        return self

    def restored_from(self, ids: Tensor, prompt: int) -> Tensor:
        """See ``Paged.restored_from``; a token is restored once ``like`` packs it."""
        return self.like.restored_from(ids, prompt)

    def memory(self, layers: Sequence[LayerStates], ids: Tensor) -> None:
        """Return None, because the cache has no report."""
        return


def quantized_cache_methods(like: Paged) -> list[QuantizedCacheMethod]:
    """Return the methods of both backends with 2 and 4 bits."""
    return [QuantizedCacheMethod(name, bits, like) for name in BACKENDS for bits in (2, 4)]


def not_installed(backend: str) -> str | None:
    """Return a message that a backend's package is not installed; None if it is installed."""
    package = BACKENDS[backend][0]
    try:
        installed = find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is missing
        installed = False
    return None if installed else f"{package} is not installed"


def stored_bytes(stored: Any) -> int:
    """Return the size in bytes of a tensor that a backend has quantized: codes, scales, zeros."""
    if isinstance(stored, tuple):  # hqq
        codes, about = stored
        return sum(part.nbytes for part in (codes, about["scale"], about["zero"]))
    return sum(part.nbytes for part in (stored._data._data, stored._scale, stored._shift))


class Memory(Protocol):
    """Memory usage of a method, such as a ``MemoryReport``."""

    @property
    def kv_bytes(self) -> int:
        """Size of keys and values in bytes, including all overhead."""
        ...

    @property
    def values(self) -> int:
        """Number of key and value elements."""
        ...

    @property
    def bits_per_value(self) -> float:
        """Bits per element."""
        ...


class Method(Protocol):
    """A method of storing keys and values; arguments as in ``Paged``."""

    @property
    def name(self) -> str:
        """Name in tables and on command lines."""
        ...

    def missing(self, layers: Sequence[LayerStates], ids: Tensor) -> str | None:
        """Return why the method does not apply to this model or prompt; None if it does."""
        ...

    def restored(self, states: LayerStates, ids: Tensor) -> Restored:
        """Return a layer's keys and values as the method restores them."""
        ...

    def one_by_one(self, prompt: int) -> Method:
        """Return the method for tokens that are stored one by one after a prompt of this length."""
        ...

    def restored_from(self, ids: Tensor, prompt: int) -> Tensor:
        """Return, for each token, the first token that reads it in restored form."""
        ...

    def memory(self, layers: Sequence[LayerStates], ids: Tensor) -> Memory | None:
        """Return the memory used by the first row, measured on a real cache if there is one; None
        if unknown."""
        ...


class StoredPast:
    """The past as a method restores it, one layer per call; counts the stored bytes and values."""

    def __init__(self, method: Method, layers: Sequence[LayerStates], ids: Tensor) -> None:
        self.method, self.layers, self.ids = method, layers, ids
        self.stored_bytes = self.stored_values = 0

    def __call__(self, index: int) -> Pair:
        """Return the restored keys and values of a layer."""
        back = self.method.restored(self.layers[index], self.ids)
        self.stored_bytes += back.stored_bytes
        self.stored_values += back.stored_values
        return back.keys, back.values


def bits_per_value(stored_bytes: int, stored_values: int) -> float:
    """Return the bits per stored value; 16 if nothing is stored in fewer bits."""
    return 8 * stored_bytes / stored_values if stored_values else 16.0


class Named(Protocol):
    """An object that is selected by name."""

    @property
    def name(self) -> str:
        """Name in tables and on command lines."""
        ...


N = TypeVar("N", bound=Named)
REFERENCE, DEFAULT, COMPACT, CHANNEL = "16 bit", "standard", "compact", "channel"
PUBLISHED, FINE = "OScaR, published", "channel, groups 32"
_STANDARD = KVPolicy.preset(DEFAULT)
_COMPACT, _CHANNEL = KVPolicy.preset(COMPACT), KVPolicy.preset(CHANNEL)
_RECENT = {"window": _COMPACT.window, "sinks": _COMPACT.sinks}
"""Window and sinks of all methods, so that the comparison does not depend on different windows."""
_FINE = {"key_group": 32, "value_group": 32}
_OTHER_GROUP = next(size for size in (64, 128) if size != _CHANNEL.key_group)
"""Key group, in tokens, of the ablations that vary the key group of ``channel``."""
_PLAIN_VALUES = {"value_scale": "plain"}
_MINMAX = {"fit": "minmax", "value_scale": "plain"}
_NAIVE = {**_MINMAX, "norm": "plain", "balance": None}


def selected(things: Sequence[N], texts: Sequence[str]) -> list[N]:
    """Select the objects whose name equals a text, or contains a text that is not a full name.

    Args:
        things: objects to select from, whose order is kept.
        texts: names and parts of names; if there are none, all objects are selected.
    """
    names = {thing.name for thing in things}
    exact, parts = names.intersection(texts), [text for text in texts if text not in names]
    return [
        thing
        for thing in things
        if not texts or thing.name in exact or any(text in thing.name for text in parts)
    ]


def _channel(**changes: Any) -> KVPolicy:
    return replace(_CHANNEL, **changes)


def main_methods() -> list[Method]:
    """Return the methods of the main table."""
    plain = {name: KVPolicy.preset(name, **_RECENT) for name in ("kivi", "quarot", "oscar")}
    return [
        Paged(REFERENCE, KVPolicy.preset("bf16")),
        # One group per head, without rotation and centers.
        Paged("INT2 per token", replace(_COMPACT, rotate=False, center=False, **_NAIVE)),
        Paged("KIVI", plain["kivi"]),  # arXiv:2402.02750
        Paged("QuaRot", plain["quarot"]),  # arXiv:2404.00456
        Paged(PUBLISHED, plain["oscar"]),
        Paged(DEFAULT, _STANDARD),
        Paged(COMPACT, _COMPACT),
        Paged("standard, keys 4 bit", replace(_STANDARD, bits=(4, 2))),
        Paged("standard, 3 bit", replace(_STANDARD, bits=3)),
        Paged("standard, 4 bit", replace(_STANDARD, bits=4)),
        Paged("standard, center False", replace(_STANDARD, center=False)),
        Paged("standard, balance None", replace(_STANDARD, balance=None)),
        Paged("standard, norm plain", replace(_STANDARD, norm="plain")),
        Paged(CHANNEL, _CHANNEL),
        Paged("channel, balance None", _channel(balance=None)),
        Paged("channel, norm plain", _channel(norm="plain")),
        Paged("channel, norm refit", _channel(norm="refit")),
        Paged(f"channel, key group {_OTHER_GROUP}", _channel(key_group=_OTHER_GROUP)),
        Paged(FINE, _channel(**_FINE)),
        Paged("groups 32, balance None", _channel(**_FINE, balance=None)),
        Paged("groups 32, norm plain", _channel(**_FINE, norm="plain")),
        Paged("groups 32, norm refit", _channel(**_FINE, norm="refit")),
        Paged("channel, 4 bit", _channel(bits=4)),
        *(
            Paged(f"channel, {name} in 16 bit", _channel(bits={name: 16}))
            for name in ("text", "image", "audio")
        ),
        *quantized_cache_methods(Paged(CHANNEL, _CHANNEL)),
        *rival_methods(),
    ]


def rival_methods() -> list[Rival]:
    """Return other projects' formats, each with the 16-bit tokens of ``standard`` and with the
    project's own 16-bit tokens."""
    same = Exact(_STANDARD.sinks, _STANDARD.window + 1)
    found = []
    for bits in (4, 3, 2):
        kvarn, name = KVarN(bits, 2), f"KVarN k{bits}v2"
        own = Exact(sinks=kvarn.tile, tile=kvarn.tile)
        found += [Rival(name, kvarn, same), Rival(f"{name}, own tokens", kvarn, own)]
    for bits, preset in ((3, "3bit_nc"), (4, "k3v4_nc")):
        turbo, name = TurboQuant(3, bits), f"TurboQuant {preset}"
        # In vLLM, a token's query attends even to the token itself in packed form.
        own = Exact(recent=0, layers=2)
        found += [
            Rival(name, turbo, replace(same, layers=own.layers)),
            Rival(f"{name}, own tokens", turbo, own),
            Rival(f"{name}, all layers packed", turbo, same),
        ]
    # What vLLM's kernels read is the packed form, also of the token itself.
    found.append(Rival("INT4 per token and head, own tokens", INT4(), Exact(recent=0)))
    found.append(Rival("FP8, own tokens", FP8(), Exact(recent=0)))
    for bits in (4, 3, 2):
        exl, name = ExLlamaV3(bits, 2), f"ExLlamaV3 k{bits}v2"
        found += [Rival(name, exl, same), Rival(f"{name}, own tokens", exl, Exact())]
    return found


def block_methods() -> list[Blocks]:
    """Return variants of ``standard`` as used in vLLM, which read prompts in different step sizes;
    only the variants with a window keep tokens in 16-bit precision."""
    ways = {"": (None, 1), " in chunks of 200": (200, 200), " decoded": (40, 1)}
    widths: dict[str, Any] = {"": (3, 2), ", keys 4 bit": (4, 2), ", 2 bit": 2}
    packed = replace(_STANDARD, window=0, sinks=0)
    found = [
        Blocks(f"blocks{way}{width}", replace(packed, bits=bits), first=first, step=step)
        for way, (first, step) in ways.items()
        for width, bits in widths.items()
    ]
    windows = [(method, 32) for method in found] + [(found[0], window) for window in (64, 128)]
    return found + [
        replace(
            method,
            name=f"{method.name}, window {window}",
            policy=replace(method.policy, window=window, sinks=_STANDARD.sinks),
        )
        for method, window in windows
    ]


def ablation_methods() -> list[Paged]:
    """Return variants of ``channel``, most with a single change, that are not in the main table."""
    other = f"key group {_OTHER_GROUP}"
    changes: dict[str, dict[str, Any]] = {
        "rotate False": {"rotate": False},
        "token scaling None": {"token_scaling": None},
        "token scaling shared": {"token_scaling": "shared"},
        "fit minmax": _MINMAX,
        "fit minmax, norm plain": {**_MINMAX, "norm": "plain"},
        "value scale plain": _PLAIN_VALUES,
        f"{other}, value scale plain": {"key_group": _OTHER_GROUP, **_PLAIN_VALUES},
        "key group 32": {"key_group": 32},
        "value group 32": {"value_group": 32},
        "value group 64": {"value_group": 64},
        f"{other}, value group 64": {"key_group": _OTHER_GROUP, "value_group": 64},
        "window 0": {"window": 0},
        "window 128": {"window": 128},
        "sinks 0": {"sinks": 0},
        "sinks 64": {"sinks": 64},
    }
    return [
        *(Paged(f"channel, {name}", _channel(**change)) for name, change in changes.items()),
        Paged("groups 32, value scale plain", _channel(**_FINE, **_PLAIN_VALUES)),
        Paged("channel, mixed pages", _CHANNEL, mixed=True),
        Paged("groups 32, mixed pages", _channel(**_FINE), mixed=True),
        Paged("OScaR, published, mixed pages", KVPolicy.preset("oscar", **_RECENT), mixed=True),
    ]
