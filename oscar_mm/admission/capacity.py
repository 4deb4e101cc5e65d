"""Capacity: memory that a conversation needs, given a model's dimensions, and memory of devices.

``KVBudget`` limits the total size of all chats by spilling the least recently used chats to disk.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import numpy as np
import torch

from oscar_mm.cache.block_table import SlotSet
from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.page_store import PageStore
from oscar_mm.cache.placement import SlotForecast, bytes_over_time, slot_forecast
from oscar_mm.cache.states import StateShape, held_bytes, layers_of_states
from oscar_mm.cache.window_pages import windows_of
from oscar_mm.engine.prefix_cache import PrefixCache
from oscar_mm.errors import InputError, MemoryBusy
from oscar_mm.modality import Modality
from oscar_mm.pages.layout import PageFormat
from oscar_mm.policy import PLAIN, Bits, KVPolicy

HIDDEN_STATES = 6
"""Minimum number of hidden-state tensors alive at once during prefill.

LLaVA with grouped queries needs six: the layer's input and its norm, and queries, keys and values
during RoPE. Qwen's features and wider queries, encoder towers and experts need more. The number is
deliberately low, so that no request that would run is refused.
"""


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes available to torch and pools on a CUDA device; None on other devices."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + unused_bytes(device)


def unused_bytes(device: torch.device) -> int:
    """Return the bytes that torch has reserved on a device and not allocated, a part of
    ``free_bytes``.

    Unlike the rest, they are known without asking the driver, which takes 0.6 ms (H200).
    """
    if device.type != "cuda":
        return 0
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    if not stats:  # Torch has not used the device yet.
        return 0
    reserved, allocated = (stats[f"{x}_bytes"]["all"]["current"] for x in ("reserved", "allocated"))
    return reserved - allocated


def activation_bytes(tokens: int, hidden_size: int, itemsize: int) -> int:
    """Return the minimum number of bytes that a prefill of ``tokens`` needs besides the cache."""
    return HIDDEN_STATES * tokens * hidden_size * itemsize


RESERVED = 0.1
"""Share of a GPU's memory reserved for activations and the allocator."""


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a model that determine the size of its weights, keys and values.

    Attributes:
        layers: number of decoder layers, excluding layers that keep a state instead of keys and
            values.
        kv_heads: number of KV heads per layer.
        head_dim: channels per head.
        parameters: number of parameters of the full model, including its encoder towers.
        stored_bytes: bytes of quantized weights; None in 16-bit precision.
        state_bytes: bytes of the states that the other layers keep of a conversation.
        windows: sizes in tokens of the sliding windows of those layers that have one.
        full: KV heads and channels per head of the layers without a window, if these differ from
            those of the other layers.
    """

    layers: int
    kv_heads: int
    head_dim: int
    parameters: int
    stored_bytes: int | None = None
    state_bytes: int = 0
    windows: tuple[int, ...] = ()
    full: tuple[int, int] | None = None

    @classmethod
    def of(cls, config: Any, parameters: int, stored_bytes: int | None = None) -> ModelShape:
        """Return the dimensions of a model from its transformers configuration."""
        text, states = config.get_text_config(), len(layers_of_states(config))
        known, windows = states and hasattr(text, "linear_num_value_heads"), windows_of(config)
        heads = heads_by_layer(config)
        kv_heads, head_dim = heads[min(windows, default=0)]
        others = {one for i, one in enumerate(heads) if i not in windows} - {(kv_heads, head_dim)}
        return cls(
            layers=text.num_hidden_layers - states,
            kv_heads=kv_heads,
            head_dim=head_dim,
            parameters=parameters,
            stored_bytes=stored_bytes,
            state_bytes=states * StateShape.of(config, torch.bfloat16).bytes if known else 0,
            windows=tuple(windows.values()),
            full=next(iter(others), None),
        )

    @property
    def of_full(self) -> ModelShape:
        """The dimensions with the heads of layers without a window in all layers."""
        if self.full is None:
            return self
        kv_heads, head_dim = self.full
        return replace(self, kv_heads=kv_heads, head_dim=head_dim, full=None)

    def slot_bytes(self, policy: KVPolicy, itemsize: int = 2) -> dict[Bits, int]:
        """Return bits -> bytes of a page in one layer; ``PLAIN`` -> bytes of an unpacked token.

        If ``full`` is not None, this is for layers with a window; see ``of_full`` for the others.

        Args:
            policy: how keys and values are stored.
            itemsize: bytes per unpacked number.
        """
        sizes = {PLAIN: 2 * self.kv_heads * self.head_dim * itemsize}
        for bits in policy.packed_bits:
            sizes[bits] = PageFormat.of(policy, bits, self.kv_heads, self.head_dim).page_bytes
        return sizes

    @property
    def weight_bytes(self) -> int:
        """Size of the weights in bytes."""
        return 2 * self.parameters if self.stored_bytes is None else self.stored_bytes

    def kv_bytes(self, policy: KVPolicy, tokens: Mapping[str, int]) -> int:
        """Return the bytes of the pages, 16-bit tokens and states of a conversation that ends with
        text.

        Tables and free slots are not included: tables take less than 1% of any long conversation,
        and free slots depend on the other contents of the store.

        Args:
            policy: how keys and values are stored.
            tokens: modality ("text", "image", "video", "audio") -> number of tokens; the first
                text tokens are the sinks.
        """
        text = tokens.get(Modality.TEXT.label, 0)
        sinks = min(text, policy.sinks)
        media = [(one, tokens.get(one.label, 0)) for one in Modality if one is not Modality.TEXT]
        order = [(Modality.TEXT, sinks), *media, (Modality.TEXT, text - sinks)]
        row = np.concatenate([np.full(count, int(one), np.int8) for one, count in order])
        forecast = slot_forecast(policy, row, 0)

        def layer_bytes(found: SlotForecast, shape: ModelShape) -> int:
            return int(bytes_over_time(found.held, shape.slot_bytes(policy))[0])

        pages = (self.layers - len(self.windows)) * layer_bytes(forecast, self.of_full)
        pages += sum(layer_bytes(forecast.in_window(window), self) for window in self.windows)
        return pages + self.state_bytes

    def conversations(self, gpu_bytes: float, policy: KVPolicy, tokens: Mapping[str, int]) -> int:
        """Return how many conversations with these token counts fit on a GPU next to the weights; 0
        if the weights do not fit."""
        available = gpu_bytes * (1 - RESERVED) - self.weight_bytes
        return max(0, int(available // max(1, self.kv_bytes(policy, tokens))))


def heads_by_layer(config: Any) -> list[tuple[int, int]]:
    """Return the number of KV heads, and of channels per head, of each decoder layer.

    Args:
        config: transformers configuration; in Gemma 4, layers differ.
    """
    text = config.get_text_config()
    layers = getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers

    def heads_of(layer: Any) -> tuple[int, int]:
        heads = layer.num_attention_heads
        kv_heads = getattr(layer, "num_key_value_heads", None) or heads
        return kv_heads, getattr(layer, "head_dim", None) or layer.hidden_size // heads

    return [heads_of(layers[index]) for index in range(text.num_hidden_layers)]


class Spillable(Protocol):
    """Chat that may be spilled to a file."""

    @property
    def can_be_spilled(self) -> bool:
        """Whether the chat has pages and no turn is running."""
        ...

    @property
    def cache(self) -> OscarCache:
        """Cache with the chat's pages."""
        ...

    def spill(self, path: Path) -> None:
        """Write keys and values to a file and release their pages."""
        ...


@dataclass(frozen=True, eq=False)
class Reservation:
    """Memory reservation for a running request, in effect while it is referenced.

    Attributes:
        cache: cache of the prompt and its answer.
        begin: number of tokens in the cache after prefill.
        added: (tokens,) bytes added after 0, 1, 2, ... tokens of the answer.
        spares: bytes of the spare states, included in ``added``, which decode steps allocate.
        most: (tokens,) maximum of ``added`` after each number of tokens or more.
    """

    cache: OscarCache
    begin: int
    added: np.ndarray
    spares: int = 0
    most: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        most = np.maximum.accumulate(self.added[::-1])[::-1]
        object.__setattr__(self, "most", most)

    @property
    def outstanding(self) -> int:
        """Number of bytes that the answer may still take."""
        if self.cache.closed:
            return 0
        written = min(self.cache.get_seq_length() - self.begin, len(self.added) - 1)
        if written < 0:
            return int(self.most[0])
        taken = self.added[written] - (0 if self.cache.spares else self.spares)
        return int(self.most[written] - taken)


class KVBudget:
    """Limit on the total size of stores, enforced by dropping prefixes and spilling chats.

    Use it only in the engine thread. The budget counts the pages, 16-bit tokens and states of all
    chats, prefixes and requests, each once. To free memory, prefixes are dropped first; then idle
    chats are written to files, least recently used first, and loaded again at their next use. The
    size of a turn with its longest possible answer is forecast slot by slot
    (``oscar_mm.cache.placement``) and reserved; later requests get the rest.

    Args:
        store: page store of the pipeline; stores that share the budget are added to ``stores``, a
            weak set.
        limit: maximum size in bytes.
        folder: folder for the files, created if missing; True for a temporary folder. If False,
            no files are written, and a turn that does not fit is refused.
        prefixes: prefix cache of the pipeline; None if there is none.

    Raises:
        InputError: if the folder cannot be created.
    """

    def __init__(
        self, store: PageStore, limit: int, folder: str | Path | bool, prefixes: PrefixCache | None
    ) -> None:
        self.limit, self.prefixes = limit, prefixes
        self.stores = weakref.WeakSet([store])
        self._temporary = None
        self.folder: Path | None = None
        try:
            if folder is True:
                # Removed with this object, or at exit at the latest.
                self._temporary = tempfile.TemporaryDirectory(
                    prefix="oscar-mm-", ignore_cleanup_errors=True
                )
                self.folder = Path(self._temporary.name)
            elif folder is not False:
                self.folder = Path(folder)
                self.folder.mkdir(parents=True, exist_ok=True)
        except (OSError, TypeError) as error:
            raise InputError(f"spill={folder!r} cannot be used as a folder: {error}") from None
        self._last_use: weakref.WeakKeyDictionary[Spillable, int] = weakref.WeakKeyDictionary()
        self._clock = count()
        self._reservations: weakref.WeakSet[Reservation] = weakref.WeakSet()

    def close(self) -> None:
        """Remove the temporary folder; after that, no more chats are spilled."""
        if self._temporary is not None:
            self._temporary.cleanup()
            self.folder = None

    @property
    def used_bytes(self) -> int:
        """Number of bytes in use in all stores, with the states of their caches."""
        reports = [store.memory() for store in self.stores]
        return sum(report.used_bytes + report.state_bytes for report in reports)

    @property
    def taken_bytes(self) -> int:
        """Number of bytes in use in all stores, plus the bytes reserved for the rest of running
        requests."""
        return self.used_bytes + sum(reservation.outstanding for reservation in self._reservations)

    def reserve(
        self, cache: OscarCache, prompt: int, added: np.ndarray, spares: int = 0
    ) -> Reservation:
        """Reserve memory for a request; call ``free_memory`` first.

        Args:
            cache: cache that the request continues, before the prompt.
            prompt: number of tokens prefilled before the answer.
            added: (tokens,) bytes added after 0, 1, 2, ... tokens of the answer.
            spares: bytes of spare states among them, see ``Reservation``.

        Returns:
            The reservation, in effect while it is referenced.
        """
        reservation = Reservation(cache, cache.get_seq_length() + prompt, added, spares)
        self._reservations.add(reservation)
        return reservation

    def use(self, chat: Spillable) -> None:
        """Mark a chat as the most recently used."""
        self._last_use[chat] = next(self._clock)

    def new_file(self) -> Path:
        """Return the path for the next spilled chat."""
        if self.folder is None:
            raise InputError("kv_budget: chats cannot be written to disk because spill is False")
        return self.folder / f"chat-{uuid4().hex}.safetensors"

    def free_memory(self, needed: int, chat: Spillable | None = None) -> None:
        """Drop prefixes and spill chats until ``needed`` more bytes are free.

        Args:
            needed: bytes to free.
            chat: chat that needs the bytes; it is not spilled, and neither are answering chats.

        Raises:
            MemoryBusy: if dropping and spilling everything possible would not suffice; then nothing
                is dropped or spilled.
        """
        if self.taken_bytes + needed <= self.limit:
            return
        self._sweep()
        used = self.taken_bytes
        short = used + needed - self.limit
        if short <= 0:
            return
        if short > self._could_go(chat):
            raise MemoryBusy(self._refusal(used, needed))
        self._give_way(needed, chat)

    def settle(self, chat: Spillable) -> None:
        """Spill other chats after a turn of ``chat``, until the budget is met."""
        self._give_way(0, chat)

    def _give_way(self, needed: int, chat: Spillable | None) -> None:
        """Drop prefixes and spill other chats until ``needed`` bytes fit, or nothing is left to
        drop or spill."""
        while self.taken_bytes + needed > self.limit:
            if self.prefixes:
                self.prefixes.drop_oldest()
                self._sweep()
                continue
            others = self._others(chat)
            if not others:
                return
            min(others, key=self._last_use.__getitem__).spill(self.new_file())

    def _sweep(self) -> None:
        """Free the pages of layers with sliding windows that no window reaches any more."""
        for store in self.stores:
            store.sweep()

    def _others(self, chat: Spillable | None) -> list[Spillable]:
        if self.folder is None:
            return []
        return [other for other in self._last_use if other is not chat and other.can_be_spilled]

    def _could_go(self, chat: Spillable | None) -> int:
        """Return the bytes of slots used only by prefixes and other chats."""
        others = [other.cache for other in self._others(chat)]
        prefixes = [] if self.prefixes is None else self.prefixes.caches
        return self._freed([*others, *prefixes])

    def _freed(self, caches: Sequence[OscarCache]) -> int:
        """Return the bytes of slots used only by these caches, and of their states."""
        total = held_bytes(state for cache in caches for state in cache.states)
        for store in self.stores:
            kv_managers = [cache.kv_manager for cache in caches if cache.store is store]
            slots = SlotSet.of(
                stream for kv_manager in kv_managers for stream in kv_manager.streams()
            )
            total += store.bytes_of_slots(slots, own=True)
        return total

    def _refusal(self, used: int, needed: int) -> str:
        remedy = "forget() media, undo() turns, wait for other answers or raise kv_budget"
        if self.folder is None:
            remedy = f"close() chats, {remedy}, or let chats be written to disk with spill=True"
        return (
            f"kv_budget is {self.limit:,} bytes: {used:,} are in use and the request needs about "
            f"{needed:,} more: {remedy}"
        )
