"""OscarLayer: one layer of a cache, which moves its bytes in and out of the store's pools.

TokenPlaces: where it reads the tokens of streams. LinearLayer: a layer of linear attention in the
same cache.
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from oscar_mm.cache.block_table import ModalityTable, SequenceTable
from oscar_mm.cache.page_store import PageStore
from oscar_mm.cache.step_plan import StepPlan
from oscar_mm.errors import InputError
from oscar_mm.ops.append import append
from oscar_mm.ops.library import numbers_of
from oscar_mm.ops.pack import NOT_STORABLE, pack_jobs
from oscar_mm.ops.store import store, store_layers
from oscar_mm.ops.unpack import unpack_slots
from oscar_mm.pages.layout import PAGE_TOKENS
from oscar_mm.policy import Bits, KVPolicy
from oscar_mm.quant.basis import Basis

_GPU_PAGES = 256
"""Pages that are unpacked at a time: 32,768 tokens, 134 MB of 8 heads of 128 in 16-bit
precision."""
_CPU_PAGES = 16
"""Pages that a CPU unpacks at a time: parts that stay in its caches are quicker."""


class LayerCache(Protocol):
    """What a layer needs of the cache that has it."""

    policy: KVPolicy
    store: PageStore

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a layer's new keys and values, (batch, KV heads, tokens, head_dim) each."""
        ...

    def check_overflow(self, layer: OscarLayer, tokens: int) -> None:
        """Check what a layer has stored of so many new tokens of each row."""
        ...

    def real_tokens(self, count: int) -> torch.Tensor:
        """(batch, count) bool on the CPU: which of the last tokens are no padding."""
        ...

    def get_seq_length(self) -> int:
        """Tokens of a row, padding included."""
        ...

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(length of the keys in the coming forward pass, 0)."""
        ...


class Pages(NamedTuple):
    """Packed pages of one format.

    Attributes:
        slots: (n,) int32.
        used: first token of each page that is in use, and the one after the last; None if all
            tokens are.
    """

    slots: torch.Tensor
    used: list[tuple[int, int]] | None


class TokenPlaces(NamedTuple):
    """Where a layer reads all tokens of some streams: those in pages first, stream by stream.

    Attributes:
        pages: bits -> pages.
        slots: (n,) int64, of the tokens in 16-bit precision.
    """

    pages: dict[Bits, Pages]
    slots: torch.Tensor

    @classmethod
    def of(cls, streams: Iterable[ModalityTable], device: torch.device) -> TokenPlaces:
        """The places of all tokens of these streams, for layers on a device."""
        packed: dict[Bits, list[ModalityTable]] = {}
        slots: list[int] = []
        for stream in streams:
            if stream.pages:
                packed.setdefault(stream.bits, []).append(stream)
            slots += stream.slots
        return cls(
            {bits: _pages(found, device) for bits, found in packed.items()},
            torch.tensor(slots, dtype=torch.int64, device=device),
        )


def _pages(streams: list[ModalityTable], device: torch.device) -> Pages:
    slots = [page for stream in streams for page in stream.pages]
    used = [
        tokens for stream in streams for tokens in zip(stream.starts, stream.stops, strict=True)
    ]
    return Pages(
        torch.tensor(slots, dtype=torch.int32, device=device),
        None if all(tokens == (0, PAGE_TOKENS) for tokens in used) else used,
    )


class OscarLayer(CacheLayerMixin):
    """One layer of an ``OscarCache``: its basis, and what a ``StepPlan`` does to its pools."""

    is_compileable = False
    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: LayerCache, index: int) -> None:
        self.is_initialized = False
        # Weak, so that slots go back as soon as nobody has the cache.
        self._cache, self.index = weakref.ref(cache), index
        self.sigma: torch.Tensor | None = None

    @property
    def cache(self) -> LayerCache:
        """The cache that has this layer; RuntimeError if it is gone."""
        cache = self._cache()
        if cache is None:
            raise RuntimeError("the cache of this layer is gone")
        return cache

    @property
    def keys(self) -> torch.Tensor:
        """Not there: models read it of a cross-attention whose keys do not grow."""
        raise NotImplementedError(
            "OscarLayer.keys: keys and values are in pages (OscarCache.unpacked makes a copy); for "
            "cross-attention use a DynamicCache"
        )

    values = keys  # pyright: ignore[reportAssignmentType] no attribute, so that none is taken

    def fork(self, cache: LayerCache) -> OscarLayer:
        """The same layer for a fork of the cache: the same pools and the same basis."""
        twin = copy.copy(self)
        twin._cache = weakref.ref(cache)
        if self.is_initialized:
            twin.bad = self.bad.clone()
        return twin

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take shapes, dtype and device from the first keys: (batch, KV heads, tokens, d)."""
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
        """Find or make the pools of this layer in the cache's store."""
        pools = self.cache.store.layer(self.index, kv_heads, head_dim, dtype, device)
        self.kv_heads, self.head_dim, self.dtype, self.device = kv_heads, head_dim, dtype, device
        self.recent, self.pages = pools.recent, pools.pages
        self.formats = pools.formats
        # Set by whatever finds that it cannot be stored; read where waiting costs nothing.
        with torch.inference_mode(False):
            self.bad = torch.zeros(1, dtype=torch.int32, device=device)
        self.is_initialized = True

    @property
    def basis(self) -> Basis:
        """Coordinates of the pages."""
        return Basis(self.head_dim, self.cache.policy.rotate, self.sigma)

    @torch.no_grad()
    def append(
        self, keys: torch.Tensor, values: torch.Tensor, step: StepPlan, *, beside: bool = False
    ) -> None:
        """Store a chunk, (batch, KV heads, tokens, head_dim) each, as the step says.

        Args:
            keys, values: of the chunk.
            step: where its tokens go.
            beside: as of ``oscar_mm.ops.append``.

        Raises:
            FloatingPointError: as ``OscarCache.check_overflow``.
        """
        page_store = self.cache.store
        page_store.layers[self.index].reserve(page_store.allocators)
        # In one dtype, so that pages do not depend on whether tokens were in 16-bit precision
        # before.
        dtype = self.recent.storage.dtype
        keys, values = (
            (x if x.stride(-1) == 1 else x.contiguous()).to(dtype) for x in (keys, values)
        )
        self.copy_pages(step)
        if not step.packs_at_end:
            self.pack(keys, values, step)
        writes = step.writes_on(self.device)
        if writes is not None:
            append(keys, values, self.recent.storage, writes, self.bad, beside)
        self.cache.check_overflow(self, keys.shape[2])
        step.finish(self.index)

    def copy_pages(self, step: StepPlan) -> None:
        """Copy the pages that a step is to fill and that others have too."""
        for bits, source, target in step.copies:
            pages = self.pages[bits].storage
            pages[target] = pages[source]

    def pack(self, keys: torch.Tensor, values: torch.Tensor, step: StepPlan) -> None:
        """Pack what a step says, out of tokens in 16-bit precision and new ones; keys and values
        are (batch, KV heads, tokens, head_dim) each, and any where the step packs no new token."""
        policy, by_token = self.cache.policy, self.cache.policy.by_token
        tables = step.slots_on(self.device) if by_token else step.whole_pages_on(self.device)
        for bits, of_bits in tables.items():
            (store if by_token else pack_jobs)(
                *(keys, values, self.recent.storage, *of_bits, self.pages[bits].storage),
                *(self.bad, self.sigma, numbers_of(self.formats[bits])),
                *(policy.rotate, policy.fit, policy.norm, policy.value_scale),
            )

    def check_stored(self) -> None:
        """Look whether all that was stored can be read again; waits for the device.

        Raises:
            FloatingPointError: keys or values held NaN, infinity or numbers beyond float16.
        """
        if bool(self.bad):
            raise FloatingPointError(f"layer {self.index}: {NOT_STORABLE}")

    def parts(
        self, places: TokenPlaces, dtype: torch.dtype
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values, (KV heads, n, head_dim) each, a part at a time.

        In the model's coordinates; first those in pages, then those in 16-bit precision.
        """
        most = _CPU_PAGES if self.device.type == "cpu" else _GPU_PAGES
        for bits, (slots, used) in places.pages.items():
            for start in range(0, len(slots), most):
                run = slice(start, start + most)
                sides = unpack_slots(
                    *(self.pages[bits].storage, slots[run], self.sigma),
                    *(numbers_of(self.formats[bits]), self.basis.rotate, dtype),
                )
                keys, values = (_joined(side, used and used[run]) for side in sides)
                yield keys, values
        for slots in places.slots.split(most * PAGE_TOKENS) if len(places.slots) else ():
            keys, values = self.recent.storage[slots].permute(1, 2, 0, 3).to(dtype)
            yield keys, values

    def with_past(
        self, step: StepPlan, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Unpacked past and new tokens of a step, (batch, KV heads, length, head_dim) each."""
        past = self.cache.get_seq_length() - keys.shape[2]
        if not past:
            return keys, values
        before = self.unpacked(step.past, past, keys.dtype)
        return torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)

    def unpacked(
        self, sequences: list[SequenceTable], length: int, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored keys and values in sequence order: (batch, KV heads, length, head_dim) each.

        In the model's coordinates and, if no other is asked for, dtype; 0 where a token is padding
        or forgotten.
        """
        dtype = dtype or self.dtype
        shape = (2, len(sequences), self.kv_heads, length, self.head_dim)
        both = torch.zeros(shape, dtype=dtype, device=self.device)
        for row, sequence in enumerate(sequences):
            target = both[:, row]
            for code, stream in sequence.streams.items():
                places = torch.from_numpy(sequence.positions(code)).to(self.device)
                for keys, values in self.parts(TokenPlaces.of([stream], self.device), dtype):
                    where, places = places.tensor_split([keys.shape[1]])
                    target[0][:, where], target[1][:, where] = keys, values
        return both[0], both[1]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Not for direct use: an ``OscarCache`` needs all its layers to take the same chunk."""
        return self.cache.update(key_states, value_states, self.index)

    def get_seq_length(self) -> int:
        """Tokens of a row, padding included."""
        return self.cache.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length of keys after ``query_length`` more tokens, 0)."""
        return self.cache.get_mask_sizes(query_length, self.index)

    def get_max_length(self) -> int:
        """-1: unbounded."""
        return -1


class LinearLayer(LinearAttentionLayer):
    """Transformers' own layer of linear attention, which holds a state instead of tokens."""

    @property
    def states(self) -> list[torch.Tensor]:
        """Tensors of the state."""
        both = (*self.conv_states.values(), *self.recurrent_states.values())
        return [state for state in both if state is not None]

    def fork(self) -> LinearLayer:
        """A layer of the same states, in tensors of its own."""
        twin = copy.copy(self)
        for name, by_state in vars(self).items():
            if isinstance(by_state, dict):
                own = {k: x.clone() if torch.is_tensor(x) else x for k, x in by_state.items()}
                setattr(twin, name, own)
        return twin


@torch.no_grad()
def pack_together(layers: Iterable[OscarLayer], step: StepPlan) -> None:
    """Pack the tokens of a step that packs at its end, by one launch for all layers of a kind.

    Args:
        layers: that have carried out the rest of the step.

    Raises:
        FloatingPointError: as ``OscarCache.check_overflow``.
    """
    kinds = defaultdict[tuple[Any, ...], list[OscarLayer]](list)
    for layer in layers:
        kinds[layer.device, layer.dtype, layer.kv_heads, layer.head_dim].append(layer)
    for (device, *_), alike in kinds.items():
        policy = alike[0].cache.policy
        for bits, tables in step.slots_on(device).items():
            store_layers(
                *([layer.recent.storage for layer in alike], *tables),
                *([layer.pages[bits].storage for layer in alike], [one.bad for one in alike]),
                *([layer.sigma for layer in alike], numbers_of(alike[0].formats[bits])),
                *(policy.rotate, policy.fit, policy.norm, policy.value_scale),
            )
        for layer in alike:
            layer.cache.check_overflow(layer, 1)


def layers_unstorable(layers: Iterable[OscarLayer]) -> list[OscarLayer]:
    """The layers whose ``check_stored`` raises; waits once for each device."""
    by_device = defaultdict[torch.device, list[OscarLayer]](list)
    for layer in layers:
        by_device[layer.device].append(layer)
    return [
        layer
        for there in by_device.values()
        for layer, bad in zip(there, torch.cat([x.bad for x in there]).tolist(), strict=True)
        if bad
    ]


def _joined(pages: torch.Tensor, used: list[tuple[int, int]] | None) -> torch.Tensor:
    """(n, KV heads, 128, head_dim) -> (KV heads, tokens in use, head_dim)."""
    if used is None:
        return pages.transpose(0, 1).flatten(1, 2)
    kept = [page[:, start:stop] for page, (start, stop) in zip(pages, used, strict=True)]
    return torch.cat(kept, dim=1)
