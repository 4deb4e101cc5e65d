"""Bounded: refuses requests that have no room, with the numbers, before any tower runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from oscar_mm.admission.capacity import ModelShape, activation_bytes, free_bytes
from oscar_mm.admission.request_size import RequestSize
from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.slot_growth import (
    Growth,
    bytes_over_time,
    first_page_tokens,
    pool_bytes,
    slot_growth,
)
from oscar_mm.cache.slot_set import SlotSet
from oscar_mm.cache.store import LayerShape
from oscar_mm.errors import Busy, NoRoom
from oscar_mm.generation.prompt import Prompt
from oscar_mm.modality import Modality
from oscar_mm.pipelines.media import Media, outlined_media
from oscar_mm.pipelines.token_counts import medium_tokens, text_tokens
from oscar_mm.policy import PLAIN, Bits
from oscar_mm.sizes import format_bytes

if TYPE_CHECKING:
    from threading import RLock

    from oscar_mm.admission.kv_budget import KVBudget, Reservation
    from oscar_mm.cache.store import PageStore
    from oscar_mm.chat.spill import Spillable
    from oscar_mm.media import MediaLimits
    from oscar_mm.pipelines.family import Family
    from oscar_mm.policy import KVPolicy

_DOUBT = 0.05
"""Share of a recording or a video by which its header may be wrong."""
_BLOCK = 1 << 16
"""Characters that are counted at a time; texts of fewer are counted as a whole."""


class Bounded:
    """The part of a ``Pipeline`` that knows what a request takes.

    A request is told twice whether it has room: by the headers of its media before they are
    decoded, and exactly by its prompt before any tower runs. Nothing is changed by a refusal.
    """

    # What it knows of the pipeline.
    budget: KVBudget | None
    family: Family
    layer_devices: dict[int, torch.device]
    limits: MediaLimits
    lock: RLock
    max_context: int
    model: Any
    policy: KVPolicy
    prefill_chunk: int | None
    store: PageStore
    video_fps: float

    def check_characters(self, name: str, text: str) -> None:
        """Refuse a text with more characters than the context has room for, whatever they are.

        Takes no lock, and no time: nothing looks at the characters.

        Raises:
            NoRoom: names the argument, its characters and those that fit.
        """
        longest = self.family.longest_token
        if len(text) > (most := self.max_context * longest):
            raise self._too_long(name, text, most, -(-len(text) // longest))

    def check_tokens(self, name: str, text: str) -> None:
        """Refuse a long text that is over the context by itself; a short one is counted later.

        Takes no lock. Counts block by block and only as far as there is room, so that a text of
        any length takes no more than the longest one that fits.

        Raises:
            NoRoom: names the argument, its characters and those that fit.
        """
        tokens = 0
        for start in range(0, len(text) if len(text) > _BLOCK else 0, _BLOCK):
            block = text[start : start + _BLOCK]
            # A cut splits one token, at most into its characters; a block may get special ones.
            new = self.family.tokenize(block).shape[1] - self.family.longest_token - 2
            if tokens + new > self.max_context:
                fit = start + _BLOCK * max(0, self.max_context - tokens) // max(1, new)
                raise self._too_long(name, text, fit, tokens + new)
            tokens += max(0, new)

    def check_ahead(
        self, prompt: str, system: str | None, media: Mapping[str, Any], answer: int
    ) -> None:
        """Refuse a first turn by the headers of its media; as ``outline`` and ``check_outline``."""
        self.check_outline(prompt, system, self.outline(media), answer)

    def outline(self, media: Mapping[str, Any]) -> Media:
        """What the headers of media say, of which nothing is decoded.

        Args:
            media: "images", "videos", "audio" and "sound" as ``read_media`` takes them.

        Raises:
            InputError: media that cannot be read.
        """
        known = {"images": None, "videos": None, "audio": None, "sound": False} | dict(media)
        return outlined_media(
            **known, limits=self.limits, video_fps=self.video_fps, fit=self.family.largest_image
        )

    def check_outline(
        self,
        prompt: str,
        system: str | None,
        shown: Media,
        answer: int,
        *,
        past: OscarCache | None = None,
        held: int = 0,
        frees: Callable[[], list[str]] = list,
    ) -> None:
        """Refuse what is too much by what ``outline`` found.

        A ``past`` that others may close is read under the pipeline's lock, taken before.

        Args:
            prompt: the question, checked.
            system: system prompt of a first turn.
            shown: media of the turn.
            answer: max_new_tokens.
            past: what the request goes on from.
            held: tokens that count of it.
            frees: tells what would make room among those.

        Raises:
            NoRoom: the numbers, and what to lower.
            InputError: media that the model does not read.
        """
        self.check_characters("prompt", prompt)
        self.check_tokens("prompt", prompt)
        tokens = dict.fromkeys((modality.label for modality in Modality), 0)
        if held:  # The template writes less between turns.
            tokens["text"] = self.family.tokenize(prompt).shape[1]
        else:
            tokens["text"] = text_tokens(self.family, shown, prompt, system)
        with self.lock:
            named: dict[Modality, list[tuple[str, int]]] = {}
            for medium in shown:
                found = medium_tokens(self.family, medium)
                named.setdefault(medium.modality, []).append((medium.label, sum(found.values())))
                for name, count in found.items():
                    tokens[name] += count
            asked = RequestSize(tokens, answer, named, held, frees, at_least=True)
            doubt = int(_DOUBT * (tokens["audio"] + tokens["video"]))
            self._check_context(asked, doubt)
            # Text at the end, so that media are in full pages as far as can be. In another order
            # other tokens may be in the window, and fewer wait for a page.
            row = [np.full(tokens[one.label], int(one), np.int8) for one in reversed(Modality)]
            waiting = sum(first_page_tokens(bits) for bits in self.policy.bits if bits.packed)
            order = self.policy.window + self.policy.sinks + waiting
            self._check_bytes(asked, np.concatenate(row)[doubt:], past, order)

    def check_media(self, media: Media) -> None:
        """Refuse decoded media that are over the context by themselves, before processing.

        Raises:
            NoRoom: the numbers, and what to lower.
        """
        tokens = dict.fromkeys((modality.label for modality in Modality), 0)
        named: dict[Modality, list[tuple[str, int]]] = {}
        for medium in media:
            least = self.family.least_tokens(medium)
            tokens[medium.modality.label] += least
            named.setdefault(medium.modality, []).append((medium.label, least))
        self._check_context(RequestSize(tokens, 0, named, at_least=True))

    def check_length(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        past: OscarCache | None = None,
        *,
        held: int | None = None,
        frees: Callable[[], list[str]] = list,
    ) -> None:
        """Refuse a prompt that leaves no room for its answer in context, budget or memory.

        Args:
            prompt: of a single row.
            max_new_tokens: of the answer.
            past: what the prompt goes on from.
            held: tokens that count of it; by default all.
            frees: tells what would make room among those.

        Raises:
            NoRoom: the numbers, and what to lower.
        """
        if held is None:
            held = 0 if past is None else past.get_seq_length()
        asked = RequestSize.of(prompt, max_new_tokens, held, frees)
        self._check_context(asked)
        with self.lock:
            self._check_bytes(asked, prompt.modalities[0].numpy(), past)

    def growth(self, prompt: Prompt, max_new_tokens: int, past: OscarCache | None = None) -> Growth:
        """Slots that a prompt of a single row and its answer will take."""
        return self._growth(prompt.modalities[0].numpy(), max_new_tokens, past)

    def growth_bytes(self, growth: Growth) -> int:
        """Most bytes that it adds at any time."""
        return int(bytes_over_time(growth.added, self._slot_bytes()).max())

    def reserve(self, growth: Growth, tokens: int, cache: OscarCache) -> Reservation | None:
        """Keep what ``make_room`` has made free while an answer is written.

        Args:
            growth: of all rows.
            tokens: that are read, in each row.
            cache: that the answer goes on from.

        Returns:
            holds the room in the budget, if there is one, until it is dropped.
        """
        if self.budget is None:
            return None
        added = bytes_over_time(growth.added, self._slot_bytes())
        return self.budget.reserve(cache, tokens, added)

    def make_room(self, growth: Growth, tokens: int, chat: Spillable | None = None) -> None:
        """Before the model reads: what it will take is free in the budget and on its devices.

        Args:
            growth: of all rows.
            tokens: that are read, in all rows.
            chat: that stays; also stays who is answering.

        Raises:
            Busy: there is no room just now; nothing has changed.
        """
        for device, needed, room in self._short_devices(growth, tokens):
            raise Busy(
                f"{format_bytes(room)} are free on {device}, and this needs about "
                f"{format_bytes(needed)}: close() chats, or ask for less at once"
            )
        if self.budget is not None:
            self.budget.make_room(self.growth_bytes(growth), chat)

    def _too_long(self, name: str, text: str, fit: int, tokens: int) -> NoRoom:
        return NoRoom(
            f"{name}: {len(text):,} characters are over the context of {self.max_context:,} "
            f"tokens, where at most about {fit:,} fit: give a shorter text",
            tokens,
            self.max_context,
        )

    def _growth(self, new: np.ndarray, answer: int, past: OscarCache | None) -> Growth:
        rows = [] if past is None else past.ledger.sequences
        # An answer's last token is not stored.
        return slot_growth(self.policy, new, max(0, answer - 1), rows[0] if rows else None)

    def _check_context(self, asked: RequestSize, doubt: int = 0) -> None:
        if asked.total - doubt > self.max_context:
            raise asked.refusal(self.max_context, "the context")

    def _check_bytes(
        self, asked: RequestSize, new: np.ndarray, past: OscarCache | None, doubt: int = 0
    ) -> None:
        """Refuse what no budget and no device could hold; waits for nobody else to give way.

        Args:
            doubt: tokens that may be packed where ``new`` has them in 16 bit.

        Raises:
            Busy: other chats hold the memory of a device.
            NoRoom: what they hold would not be enough.
        """
        whole = self._growth(new, asked.answer, past)
        doubtful = doubt * self._slot_bytes()[PLAIN]
        if self.budget is not None:
            sizes, limit = self._slot_bytes(), self.budget.limit
            before = 0 if past is None else self._bytes_held(past)

            def in_budget(growth: Growth, _: int) -> float:
                return before + max(0, bytes_over_time(growth.added, sizes).max() - doubtful)

            if (needed := in_budget(whole, 0)) > limit:
                fits = self._fitting(asked, new, past, in_budget, limit)
                raise asked.refusal(
                    fits,
                    f"kv_budget ({format_bytes(needed)} of {format_bytes(limit)})",
                    "raise kv_budget",
                )
        for device, needed, room in self._short_devices(whole, len(new)):
            fits = self._fitting(asked, new, past, partial(self._device_bytes, device), room)
            activations = format_bytes(self._activation_bytes(len(new)))
            refusal = asked.refusal(
                fits,
                f"the free memory of {device} ({format_bytes(needed)} of {format_bytes(room)}, "
                f"{activations} of it while they are read)",
                "close() chats" if self.prefill_chunk else "set prefill_chunk, close() chats",
            )
            raise Busy(str(refusal)) if needed <= room + self._others(device, past) else refusal

    def _short_devices(
        self, growth: Growth, tokens: int
    ) -> Iterator[tuple[torch.device, int, int]]:
        """GPUs that have too little memory, with the bytes needed and those that are free."""
        for device in self._slot_bytes_by_device():
            if (free := free_bytes(device)) is None:
                continue
            # Ranks must all refuse, or none.
            agreed = torch.tensor(free, device=device)
            self.store.ranks.agree(agreed)
            room = int(agreed) + self._free_slots(device)
            if (needed := self._device_bytes(device, growth, tokens)) > room:
                yield device, needed, room

    def _device_bytes(self, device: torch.device, growth: Growth, tokens: int) -> int:
        stored = pool_bytes(growth.added, self._slot_bytes_by_device()[device])
        return stored + self._activation_bytes(tokens)

    def _fitting(
        self,
        asked: RequestSize,
        new: np.ndarray,
        past: OscarCache | None,
        cost: Callable[[Growth, int], float],
        room: float,
    ) -> int:
        """How many of the tokens that are asked have room."""
        fits, over = 0, len(new) + asked.answer
        while over - fits > 1:
            middle = (fits + over) // 2
            growth = self._growth(new[:middle], middle - len(new), past)
            if cost(growth, min(middle, len(new))) <= room:
                fits = middle
            else:
                over = middle
        return asked.held + fits

    def _activation_bytes(self, tokens: int) -> int:
        read = min(tokens, self.prefill_chunk or tokens)
        weight = self.model.get_input_embeddings().weight
        return activation_bytes(read, weight.shape[1], weight.element_size())

    @property
    def layer_shapes(self) -> list[LayerShape]:
        """What each layer stores, of which this rank has its part."""
        shape = ModelShape.of(self.model.config, 0)
        heads = max(1, shape.kv_heads // self.store.ranks.count)
        dtype = self.model.get_input_embeddings().weight.dtype
        return [LayerShape(heads, shape.head_dim, dtype)] * shape.layers

    def _slot_bytes(self) -> dict[Bits, int]:
        """Of one slot of each kind, in all layers."""
        found: dict[Bits, int] = {}
        for sizes in self._slot_bytes_by_device().values():
            for bits, size in sizes.items():
                found[bits] = found.get(bits, 0) + size
        return found

    def _slot_bytes_by_device(self) -> dict[torch.device, dict[Bits, int]]:
        shape = ModelShape.of(self.model.config, 0)
        own = replace(shape, kv_heads=self.layer_shapes[0].kv_heads)
        foretold = own.slot_bytes(self.policy, self.layer_shapes[0].dtype.itemsize)
        found: dict[torch.device, dict[Bits, int]] = {}
        for index, device in self.layer_devices.items():
            pools = self.store.layers.get(index)
            sums = found.setdefault(device, dict.fromkeys(foretold, 0))
            for bits in sums:
                # A pool knows the size of its slots from its first one on.
                there = 0 if pools is None else pools.by_bits[bits].slot_bytes
                sums[bits] += there or foretold[bits]
        return found

    def _bytes_held(self, cache: OscarCache) -> int:
        sizes = self._slot_bytes()
        return sum(count * sizes[bits] for bits, count in self._slots_held(cache).items())

    def _slots_held(self, cache: OscarCache) -> Mapping[Bits, int]:
        """Slots of each kind that a cache holds."""
        return SlotSet.of(cache.ledger.streams()).counts

    def _free_slots(self, device: torch.device) -> int:
        """Bytes of the store's pools on a device that are used again before they grow."""
        return self.store.bytes_of(
            {bits: x.free for bits, x in self.store.allocators.items()}, device
        )

    def _others(self, device: torch.device, past: OscarCache | None) -> int:
        """Bytes of the store's pools on a device that only others hold."""
        used = {bits: allocator.used for bits, allocator in self.store.allocators.items()}
        for bits, count in self._slots_held(past).items() if past is not None else ():
            used[bits] -= count
        return self.store.bytes_of(used, device)
