"""Cache layer: copies the keys and values of one layer to and from the store's pools.

``TokenPlaces`` locates the tokens of streams in the pools.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from oscar_mm.cache.block_table import ModalityTable, SequenceTable
from oscar_mm.cache.page_store import PageStore
from oscar_mm.cache.step_plan import StepPlan
from oscar_mm.cache.window_pages import WindowPages
from oscar_mm.errors import InputError
from oscar_mm.ops.append import append
from oscar_mm.ops.decode_tables import upload
from oscar_mm.ops.library import numbers_of, recipe_numbers
from oscar_mm.ops.pack import NOT_STORABLE, pack_jobs
from oscar_mm.ops.store import store, store_layers
from oscar_mm.ops.unpack import unpack_slots
from oscar_mm.pages.codecs.registry import codec_of
from oscar_mm.pages.layout import PAGE_TOKENS
from oscar_mm.pages.quantize import Recipe
from oscar_mm.policy import Bits, KVPolicy
from oscar_mm.quant.basis import Basis
from oscar_mm.tensor_parallel import TPGroup

_GPU_PAGES = 256
"""Number of pages that a GPU unpacks at a time: 32,768 tokens, 134 MB with 8 heads of 128 channels
in 16-bit precision."""
_CPU_PAGES = 16
"""Number of pages that a CPU unpacks at a time; few enough to fit in the CPU's caches."""
_FEW_TOKENS = PAGE_TOKENS
"""Maximum number of tokens in a part that is joined to the part before it: attention to one part
more takes longer than copying that part."""

_FLAG_BYTES = torch.int32.itemsize
_Sides = tuple[torch.Tensor, torch.Tensor]
"""Keys and values."""
_Flag = tuple[torch.Tensor, int]
"""Overflow flags of several layers, and the index of one; see ``OscarLayer.use_flag``."""


class LayerCache(Protocol):
    """Interface of the cache that owns a layer."""

    policy: KVPolicy
    store: PageStore

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a layer's new keys and values, (batch, KV heads, tokens, head_dim) each."""
        ...

    def check_overflow(self, layer: OscarLayer, tokens: int) -> None:
        """Check that a layer could store the keys and values of a step, ``tokens`` per row."""
        ...

    def real_tokens(self, count: int) -> torch.Tensor:
        """Return (batch, count) bool on the CPU: whether each of the last tokens is not padding."""
        ...

    def get_seq_length(self) -> int:
        """Return the number of tokens in each row, padding included."""
        ...

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (length of the keys in the next forward pass, 0)."""
        ...


class Pages(NamedTuple):
    """Packed pages of one format.

    Attributes:
        slots: (n,) int32, page ids.
        used: (tokens,) int64, indices of the used tokens among the 128 n tokens of the pages; None
            if all are used.
    """

    slots: torch.Tensor
    used: torch.Tensor | None


class TokenPlaces(NamedTuple):
    """Pages and slots that contain the tokens of some streams, packed tokens first.

    Attributes:
        pages: bits -> runs of pages that are unpacked together.
        slots: (n,) int64, slot ids of the tokens in 16-bit precision.
    """

    pages: dict[Bits, list[Pages]]
    slots: torch.Tensor

    @classmethod
    def of(
        cls,
        streams: Iterable[ModalityTable],
        device: torch.device,
        places: WindowPages | None = None,
    ) -> TokenPlaces:
        """Return the pages and slots of these streams as tensors on the layers' device.

        Args:
            streams: the streams.
            device: device of the layers.
            places: where the layers store their pages; None if at the pages' ids. Tokens of pages
                without a place are zeros.
        """
        packed: dict[Bits, list[ModalityTable]] = {}
        slots: list[int] = []
        for stream in streams:
            if stream.pages:
                packed.setdefault(stream.bits, []).append(stream)
            slots += stream.slots
        return cls(
            {bits: [*_runs(found, device, places)] for bits, found in packed.items()},
            upload(np.array(slots, np.int64), device),
        )


def _runs(
    streams: list[ModalityTable], device: torch.device, window_pages: WindowPages | None
) -> Iterator[Pages]:
    slots, starts, stops = (
        np.array([x for stream in streams for x in getattr(stream, name)], np.int32)
        for name in ("pages", "starts", "stops")
    )
    if window_pages is not None:
        slots = np.array(window_pages.read(streams[0].bits, slots), np.int32)
    tokens, most = np.arange(PAGE_TOKENS), _run_length(device)
    for start in range(0, len(slots), most):
        run = slice(start, start + most)
        used = (tokens >= starts[run, None]) & (tokens < stops[run, None])
        indices = None if used.all() else upload(used.ravel().nonzero()[0], device)
        yield Pages(upload(slots[run], device), indices)


def _run_length(device: torch.device) -> int:
    """Return the number of pages that a device unpacks at a time."""
    return _CPU_PAGES if device.type == "cpu" else _GPU_PAGES


class OscarLayer(CacheLayerMixin):
    """Layer of an ``OscarCache`` that carries out step plans on its pools."""

    is_compileable = False
    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: LayerCache, index: int) -> None:
        self.is_initialized = False
        # Weak, so that slots are released as soon as the cache is unreferenced.
        self._cache, self.index = weakref.ref(cache), index
        self.sigma: torch.Tensor | None = None
        self.flag: _Flag
        self._overflow: torch.Tensor | None = None

    @property
    def cache(self) -> LayerCache:
        """Cache that owns this layer; raises RuntimeError if the cache was garbage-collected."""
        cache = self._cache()
        if cache is None:
            raise RuntimeError("the cache of this layer no longer exists")
        return cache

    @property
    def keys(self) -> torch.Tensor:
        """Always raise NotImplementedError: models read ``keys`` only for cross-attention."""
        raise NotImplementedError(
            "OscarLayer.keys: keys and values are in pages; OscarCache.unpacked returns a copy. "
            "For cross-attention, use a DynamicCache"
        )

    values = keys  # pyright: ignore[reportAssignmentType] no attribute, so that none is taken

    def fork(self, cache: LayerCache, flag: _Flag | None = None) -> OscarLayer:
        """Return a copy of this layer for a fork of the cache, with the same pools and basis.

        Args:
            cache: cache that will own the copy.
            flag: copy of the flag, see ``use_flag``; by default, the flag is copied here.
        """
        twin = OscarLayer.__new__(OscarLayer)
        vars(twin).update(vars(self))  # ``copy.copy`` takes longer, for each of many layers.
        twin._cache = weakref.ref(cache)
        if flag is not None:
            twin.use_flag(*flag)
        elif self.is_initialized:
            twin.use_flag(self.overflow.clone(), 0)
        return twin

    def use_flag(self, flags: torch.Tensor, place: int) -> None:
        """Use one of several flags as overflow flag.

        Args:
            flags: (n,) int32 flags of layers on the same device.
            place: index of this layer's flag.
        """
        self.flag, self._overflow = (flags, place), None

    @property
    def overflow(self) -> torch.Tensor:
        """(1,) int32 overflow flag, set on the device and read only when no synchronization is
        needed."""
        if self._overflow is None:  # Most forks are never written to, and need no view.
            flags, place = self.flag
            self._overflow = flags[place : place + 1]
        return self._overflow

    @property
    def own_bytes(self) -> int:
        """Bytes of the layer's tensors besides the pools: flag and balancing vectors."""
        return _FLAG_BYTES + (0 if self.sigma is None else self.sigma.nbytes)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Set up the layer for the shape, dtype and device of its first keys and values."""
        if key_states.shape != value_states.shape:
            raise InputError(
                f"layer {self.index}: keys {tuple(key_states.shape)} and values "
                f"{tuple(value_states.shape)} differ in shape: this model is not supported"
            )
        _, kv_heads, _, head_dim = key_states.shape
        self.use_pools(kv_heads, head_dim, key_states.dtype, key_states.device)

    def use_pools(
        self, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Use the pools of this layer in the cache's store, which are created if missing."""
        pools = self.cache.store.layer(self.index, kv_heads, head_dim, dtype, device)
        self.kv_heads, self.head_dim, self.dtype, self.device = kv_heads, head_dim, dtype, device
        self.recent, self.pages, self.places = pools.recent, pools.pages, pools.places
        self.formats, policy = pools.formats, self.cache.policy
        self.recipes = {
            bits: recipe_numbers(Recipe.of(page_format, policy))
            for bits, page_format in self.formats.items()
        }
        self._appends_tokens = codec_of(policy).appends_tokens
        with torch.inference_mode(False):
            self.use_flag(torch.zeros(1, dtype=torch.int32, device=device), 0)
        self.is_initialized = True

    @property
    def basis(self) -> Basis:
        """Basis in which keys and values are stored in the pages."""
        return Basis(self.head_dim, self.cache.policy.rotate, self.sigma)

    @torch.no_grad()
    def append(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        step: StepPlan,
        *,
        beside: bool = False,
        row: int | None = None,
    ) -> None:
        """Store a chunk's keys and values according to a step plan.

        Args:
            keys, values: (batch, KV heads, tokens, head_dim) of the chunk.
            step: plan that says where the chunk's tokens are stored.
            beside: see ``oscar_mm.ops.append``.
            row: index of the only row of a chained step to store; None for all rows.

        Raises:
            FloatingPointError: see ``OscarCache.check_overflow``.
        """
        page_store = self.cache.store
        page_store.layers[self.index].reserve(page_store.allocators)
        # One dtype, so that pages do not depend on whether tokens were in 16-bit precision before.
        dtype = self.recent.storage.dtype
        keys, values = (
            (x if x.stride(-1) == 1 else x.contiguous()).to(dtype) for x in (keys, values)
        )
        self.copy_pages(step)
        if not (step.packs_at_end or step.chained):
            self.pack(keys, values, step)
        writes = step.writes_on(self.device)
        if writes is not None:
            writes = writes if row is None else writes[row : row + 1]
            append(keys, values, self.recent.storage, writes, self.overflow, beside)
        self.cache.check_overflow(self, keys.shape[2])
        if row is None:
            step.finish(self.index)

    def copy_pages(self, step: StepPlan) -> None:
        """Copy the shared pages that a step fills."""
        for bits, source, target in step.copies:
            pages = self.pages[bits].storage
            source, target = self.pool_indices(bits, (source, target))
            pages[target] = pages[source]

    def pack(self, keys: torch.Tensor, values: torch.Tensor, step: StepPlan) -> None:
        """Run a step's pack jobs on stored 16-bit tokens and on new tokens.

        Args:
            keys, values: (batch, KV heads, tokens, head_dim) of the new tokens; not read if the
                step packs no new token.
            step: plan with the pack jobs.
        """
        if self._appends_tokens:
            tables, write = step.slots_on(self.device, self.places), store
        else:
            tables, write = step.whole_pages_on(self.device, self.places), pack_jobs
        for bits, of_bits in tables.items():
            if not len(of_bits[0]):  # No window reaches the new pages.
                continue
            write(
                *(keys, values, self.recent.storage, *of_bits, self.pages[bits].storage),
                *(self.overflow, self.sigma, self.recipes[bits]),
            )

    def pack_stored(self, step: StepPlan) -> None:
        """Run a step's pack jobs before its new tokens are stored; none of them reads these."""
        # Any values can stand in for the new tokens, which are not packed.
        some = self.recent.storage[:1, 0, :, None, :].expand(len(step.past), -1, -1, -1)
        self.pack(some, some, step)

    def pool_indices(self, bits: Bits, slots: Sequence[int]) -> list[int]:
        """Return where the pools of this layer have slots of a kind; see ``WindowPages.read`` for
        pages that sliding windows no longer reach."""
        if self.places is None or bits not in self.places:
            return [*slots]
        return self.places.read(bits, slots)

    @property
    def not_storable(self) -> FloatingPointError:
        """The error for keys or values that are out of range."""
        return FloatingPointError(f"layer {self.index}: {NOT_STORABLE}")

    def check_stored(self) -> None:
        """Check that no stored key or value was out of range; waits for the device.

        Raises:
            FloatingPointError: if keys or values contained NaN, infinity or numbers beyond float16.
        """
        if bool(self.overflow):
            raise self.not_storable

    def parts(
        self, places: TokenPlaces, dtype: torch.dtype
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the keys and values of tokens in parts, (KV heads, n, head_dim) each.

        Keys and values are in the model's coordinates; packed tokens come first.
        """
        last: _Sides | None = None
        for part in chain(self._packed(places, dtype), self._in_16_bit(places, dtype)):
            if last is None:
                last = part
            elif part[0].shape[1] <= _FEW_TOKENS:
                last = torch.cat([last[0], part[0]], 1), torch.cat([last[1], part[1]], 1)
            else:
                yield last
                last = part
        if last is not None:
            yield last

    def _packed(self, places: TokenPlaces, dtype: torch.dtype) -> Iterator[_Sides]:
        for bits, runs in places.pages.items():
            for slots, used in runs:
                sides = unpack_slots(
                    *(self.pages[bits].storage, slots, self.sigma),
                    *(numbers_of(self.formats[bits]), self.basis.rotate, dtype),
                )
                keys, values = (_joined(side, used) for side in sides)
                yield keys, values

    def _in_16_bit(self, places: TokenPlaces, dtype: torch.dtype) -> Iterator[_Sides]:
        most = _run_length(self.device) * PAGE_TOKENS
        for slots in places.slots.split(most) if len(places.slots) else ():
            keys, values = self.recent.storage[slots].permute(1, 2, 0, 3).to(dtype)
            yield keys, values

    def with_past(
        self, step: StepPlan, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the unpacked past and the new tokens of a step, (batch, KV heads, length,
        head_dim) each."""
        past = self.cache.get_seq_length() - keys.shape[2]
        if not past:
            return keys, values
        before = self.unpacked(step.past, past, keys.dtype)
        return torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)

    def unpacked(
        self, sequences: Sequence[SequenceTable], length: int, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stored keys and values in sequence order, (batch, KV heads, length, head_dim)
        each.

        They are in the model's coordinates and, by default, its dtype; padding and forgotten tokens
        are 0.
        """
        dtype = dtype or self.dtype
        shape = (2, len(sequences), self.kv_heads, length, self.head_dim)
        both = torch.zeros(shape, dtype=dtype, device=self.device)
        for row, sequence in enumerate(sequences):
            target = both[:, row]
            for code, stream in sequence.streams.items():
                places = torch.from_numpy(sequence.positions(code)).to(self.device)
                found = TokenPlaces.of([stream], self.device, self.places)
                for keys, values in self.parts(found, dtype):
                    where, places = places.tensor_split([keys.shape[1]])
                    target[0][:, where], target[1][:, where] = keys, values
        return both[0], both[1]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call ``OscarCache.update`` for this layer; callers should use that method instead."""
        return self.cache.update(key_states, value_states, self.index)

    def get_seq_length(self) -> int:
        """Return the number of tokens in each row, padding included."""
        return self.cache.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (length of the keys after ``query_length`` more tokens, 0)."""
        return self.cache.get_mask_sizes(query_length, self.index)

    def get_max_length(self) -> int:
        """Return -1, which means unbounded."""
        return -1


@torch.no_grad()
def pack_together(layers: Iterable[OscarLayer], step: StepPlan) -> None:
    """Pack the tokens that a step defers to its end, with one launch for all layers of a kind.

    Args:
        layers: layers that have carried out the rest of the step.

    Raises:
        FloatingPointError: see ``OscarCache.check_overflow``.
    """
    kinds = defaultdict[tuple[Any, ...], list[OscarLayer]](list)
    for layer in layers:
        shape = layer.dtype, layer.kv_heads, layer.head_dim
        kinds[layer.device, layer.places, *shape].append(layer)
    for (device, places, *_), alike in kinds.items():
        for bits, tables in step.slots_on(device, places).items():
            store_layers(
                *([layer.recent.storage for layer in alike], *tables),
                *([layer.pages[bits].storage for layer in alike], [one.overflow for one in alike]),
                *([layer.sigma for layer in alike], alike[0].recipes[bits]),
            )
        for layer in alike:
            layer.cache.check_overflow(layer, 1)


def layers_unstorable(layers: Iterable[OscarLayer], ranks: TPGroup) -> list[OscarLayer]:
    """Return the layers with keys or values out of range on any rank; waits once for each
    device."""
    found: list[OscarLayer] = []
    for there, flags in _flags(layers):
        ranks.all_reduce(flags)
        found += [one for one, overflow in zip(there, flags.tolist(), strict=True) if overflow]
    return found


def forked(layers: Iterable[OscarLayer], cache: LayerCache) -> list[OscarLayer]:
    """Return forks of layers that have received keys; one launch a device copies all flags."""
    forks = {
        layer.index: layer.fork(cache, (flags, place))
        for there, flags in _flags(layers)
        for place, layer in enumerate(there)
    }
    return [forks[index] for index in sorted(forks)]


def _flags(layers: Iterable[OscarLayer]) -> Iterator[tuple[list[OscarLayer], torch.Tensor]]:
    """Yield the layers of each device and a copy of their overflow flags, (layers,) int32."""
    by_device = defaultdict[torch.device, list[OscarLayer]](list)
    for layer in layers:
        by_device[layer.device].append(layer)
    for there in by_device.values():
        flags, _ = there[0].flag
        if len(flags) == len(there) and all(
            layer.flag[0] is flags and layer.flag[1] == place for place, layer in enumerate(there)
        ):
            yield there, flags.clone()  # Takes a fraction of the time for many layers.
        else:
            yield there, torch.cat([layer.overflow for layer in there])


def _joined(pages: torch.Tensor, used: torch.Tensor | None) -> torch.Tensor:
    """Concatenate the used tokens of (n, KV heads, 128, head_dim) pages to (KV heads, tokens,
    head_dim); see ``Pages``."""
    tokens = pages.transpose(0, 1).flatten(1, 2)
    return tokens if used is None else tokens.index_select(1, used)
