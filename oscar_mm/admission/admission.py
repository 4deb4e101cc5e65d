"""Admission: checks that requests fit before any encoder runs, and reserves their memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
import torch

from oscar_mm.admission.capacity import (
    KVBudget,
    ModelShape,
    Reservation,
    activation_bytes,
    free_bytes,
    heads_by_layer,
    unused_bytes,
)
from oscar_mm.admission.request_size import RequestSize, medium_tokens, text_tokens
from oscar_mm.cache.block_table import SlotSet, min_page_tokens
from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.page_store import LayerShape, PageStore, unpacked_dtype
from oscar_mm.cache.placement import SlotForecast, bytes_over_time, pool_bytes, slot_forecast
from oscar_mm.cache.states import StateShape, kinds_of_states
from oscar_mm.engine.engine_thread import EngineThread
from oscar_mm.engine.family import Family
from oscar_mm.engine.message import Message, text_of
from oscar_mm.engine.prompt import Prompt
from oscar_mm.engine.template import USUAL, TemplateOptions
from oscar_mm.errors import InputError, MemoryBusy, RequestTooLarge
from oscar_mm.media.audio import silence
from oscar_mm.media.media import Media
from oscar_mm.modality import Modality
from oscar_mm.policy import PLAIN, Bits, KVPolicy
from oscar_mm.sizes import format_bytes

_SlotBytes: TypeAlias = "dict[torch.device, dict[int | None, dict[Bits, int]]]"
"""Device -> size of the sliding window -> bits -> bytes of a slot; None for layers that store all
tokens."""
_DOUBT = 0.05
"""Assumed maximum relative error of the duration in the header of a recording or video."""
_BLOCK = 1 << 16
"""Number of characters that the length check tokenizes at a time; shorter texts skip the check."""
_KEPT_TOKENS = 4096
"""Maximum number of tokens of prompt and answer whose slot forecast is kept. The thread that sends
a request needs it to check the request, and the engine thread needs the same forecast later."""


@lru_cache(maxsize=256)
def _forecast(policy: KVPolicy, modalities: bytes, answer: int) -> SlotForecast:
    """Return ``slot_forecast`` of a sequence without a past; all callers share the result and must
    not change it."""
    return slot_forecast(policy, np.frombuffer(modalities, np.int8), answer)


@dataclass(frozen=True)
class Past:
    """Past tokens that a request continues.

    Attributes:
        cache: cache that contains the past tokens.
        tokens: number of past tokens that count toward the context.
        remedies: function that returns ways to free some of these tokens, as texts for an error.
    """

    cache: OscarCache
    tokens: int
    remedies: Callable[[], list[str]] = list


@dataclass(eq=False)
class Admission:
    """Size checks for requests, and memory reservations for running requests.

    The exact size is checked once the prompt is built, before the model runs. If a request has
    media, its size is also estimated from texts and media headers before the media are decoded. A
    refused request changes nothing.

    Attributes:
        family: model family, which counts tokens and provides the model.
        store: page store of the caches.
        max_context: maximum number of tokens of a conversation, including its answer.
        prefill_chunk: number of tokens per chunk of a long prompt; None if prompts are not split.
        budget: limit on the total size of all caches; None for no limit.
        thread: engine thread, in which the caches are accessed.
    """

    family: Family
    store: PageStore
    max_context: int
    prefill_chunk: int | None = None
    budget: KVBudget | None = None
    thread: EngineThread = field(default_factory=EngineThread)
    _known: tuple[tuple[int, torch.device], _SlotBytes] | None = field(
        default=None, init=False, repr=False
    )
    """Cached result of ``_slot_bytes_by_window``, after the number of layers and the model's device
    for which it is valid."""

    @property
    def model(self) -> Any:
        """The transformers model that generates text."""
        return self.family.model

    @property
    def is_bounded(self) -> bool:
        """Whether a budget limits the memory of caches to what requests reserve."""
        return self.budget is not None

    @property
    def max_seconds(self) -> float:
        """Maximum length of a recording in seconds; longer audio does not fit into the context.

        60 if the family does not support audio, so that a long recording is not read in full only
        to be refused.
        """
        if Modality.AUDIO not in self.family.reads:
            return 60.0
        (hour,) = Media(audio=[silence(3600)], labels=["an hour"])
        return 3600 * self.max_context / self.family.min_tokens(hour)

    def check_text(
        self, name: str, text: Any, *, may_be_empty: bool = False, calls: bool = False
    ) -> None:
        """Refuse text that is invalid, empty or longer than the context.

        Does not wait for the engine.

        Args:
            name: name of the argument, for the error message.
            text: value passed by a user.
            may_be_empty: whether to allow an empty text.
            calls: whether to allow tool-call markers, which answers may contain.

        Raises:
            InputError: if the text is refused (``RequestTooLarge`` if it is too long); the error
                names the argument.
        """
        if not isinstance(text, str):
            raise InputError(f"{name} must be text, not {type(text).__name__}")
        self.check_characters(name, len(text))
        if not (may_be_empty or text.strip()):
            raise InputError(f"{name} is empty: add some text")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(f"{name} contains text that is not valid UTF-8: remove it") from None
        self.family.refuse_control_tokens(name, text, calls=calls)
        self._check_tokens(name, text)

    def check_messages(self, messages: Sequence[Message]) -> None:
        """Refuse messages with unsupported media, invalid texts, an empty system prompt or an
        empty last message, and texts that are too long together.

        Args:
            messages: messages of a turn or of a full conversation.

        Raises:
            InputError: if a message or media item is refused (``RequestTooLarge`` if texts are too
                long); the error names the message or the media item.
        """
        for message in messages:
            self.check_message(message)
        for message in (messages[0], messages[-1]):
            if message.is_empty and (message.role == "system" or message is messages[-1]):
                raise InputError(f"{message.place} is empty: add some text")
        if len(messages) > 1:
            self.check_text_length("messages", text_of(messages))

    def check_message(self, message: Message) -> None:
        """Refuse a message with unsupported media or with texts that ``check_text`` refuses.

        Raises:
            InputError: if the message is refused (``RequestTooLarge`` if a text is too long); the
                error names the message or the media item.
        """
        self.family.check_reads(message.media)
        calls = message.role == "assistant"
        for text in message.runs:
            self.check_text(message.place, text, may_be_empty=True, calls=calls)
        for text in message.labels:
            self.check_text(message.place, text, may_be_empty=True)

    def check_text_length(self, name: str, text: str) -> None:
        """Refuse a text that is longer than the context by itself. Does not wait for the engine.

        Raises:
            RequestTooLarge: if the text is too long; the error names the argument, its number of
                characters and the limit.
        """
        self.check_characters(name, len(text))
        self._check_tokens(name, text)

    def check_characters(self, name: str, count: int) -> None:
        """Refuse a text with more characters than can fit into the context, without tokenizing it.

        Raises:
            RequestTooLarge: see ``check_text_length``.
        """
        longest = self.family.longest_token
        if count > (limit := self.max_context * longest):
            raise self._too_long(name, count, limit, -(-count // longest))

    def check_outline(
        self,
        messages: Sequence[Message],
        shown: Media,
        max_new_tokens: int,
        past: Past | None = None,
        template: TemplateOptions = USUAL,
    ) -> None:
        """Refuse a request that does not fit, based on the sizes of its media before decoding.

        If other threads may close the cache of ``past``, call this in the engine thread.

        Args:
            messages: checked messages of the turn.
            shown: media of the messages, with their sizes from ``MediaReader.outline``.
            max_new_tokens: maximum number of tokens of the answer.
            past: past that the request continues.
            template: chat-template options of a request without a past.

        Raises:
            RequestTooLarge: if the request does not fit; the error states numbers and remedies.
            InputError: if the model does not support the media.
        """
        tokens = dict.fromkeys((modality.label for modality in Modality), 0)
        if past is not None and past.tokens:  # The template writes less between turns.
            tokens["text"] = self.family.tokenize(text_of(messages)).shape[1]
        else:
            tokens["text"] = text_tokens(self.family, messages, template)
        media: dict[Modality, list[tuple[str, int]]] = {}
        for medium in shown:
            counts = medium_tokens(self.family, medium)
            media.setdefault(medium.modality, []).append((medium.label, sum(counts.values())))
            for name, count in counts.items():
                tokens[name] += count
        size = RequestSize(tokens, max_new_tokens, media, at_least=True)
        size = size if past is None else replace(size, past=past.tokens, frees=past.remedies)
        doubt = int(_DOUBT * (tokens["audio"] + tokens["video"]))
        self._check_context(size, doubt)
        # Text comes last, so that as many media tokens as possible are in full pages. In another
        # order, other tokens may be in the window, and fewer tokens may wait for a page.
        row = [np.full(tokens[kind.label], int(kind), np.int8) for kind in reversed(Modality)]
        policy = self.store.policy
        waiting = sum(min_page_tokens(policy, bits) for bits in policy.bits if bits.packed)
        order = policy.window + policy.sinks + waiting
        self._check(size, np.concatenate(row)[doubt:], past, order)

    def check_prompt(self, prompt: Prompt, max_new_tokens: int, past: Past | None = None) -> None:
        """Refuse a prompt that, together with its answer, exceeds the context, budget or memory.

        Args:
            prompt: prompt of a single row.
            max_new_tokens: maximum number of tokens of the answer.
            past: past that the prompt continues.

        Raises:
            MemoryBusy: if other chats occupy the memory of a device.
            RequestTooLarge: if the prompt can never fit; the error states numbers and remedies.
        """
        size = RequestSize.of(prompt, max_new_tokens)
        size = size if past is None else replace(size, past=past.tokens, frees=past.remedies)
        self._check_context(size)
        self._check(size, prompt.modalities[0].numpy(), past)

    def longest_answer(self, prompt: Prompt, max_new_tokens: int, past: Past | None = None) -> int:
        """Return the maximum answer length in tokens that context, budget and memory allow.

        Args:
            prompt: prompt of a single row.
            max_new_tokens: requested answer length in tokens.
            past: past that the prompt continues.

        Returns:
            From 1 to ``max_new_tokens`` tokens.

        Raises:
            MemoryBusy, RequestTooLarge: if not even one token fits; see ``check_prompt``.
        """
        try:
            self.check_prompt(prompt, max_new_tokens, past)
        except RequestTooLarge as error:
            if max_new_tokens == 1:
                raise
            fits = error.fits - (error.asked - max_new_tokens)
            return self.longest_answer(prompt, max(1, fits), past)
        return max_new_tokens

    @cached_property
    def _longest_growth(self) -> SlotForecast:
        """Slot forecast for an answer that fills the context; cached, since it takes tens of ms."""
        return self._growth(np.full(1, Modality.TEXT, np.int8), self.max_context, None)

    def fair_answer(self, answers: int) -> int:
        """Return the maximum answer length in tokens if ``answers`` requests share memory evenly.

        The result is at most the context length. Memory that other caches use now counts as
        available; the memory that prompts need is ignored.
        """
        growth = self._longest_growth
        shares = [] if self.budget is None else [self.budget.limit / self.growth_bytes(growth)]
        shares += self.thread.call(partial(self._device_shares, growth))
        return int(self.max_context * min(1.0, min(shares, default=math.inf) / answers))

    def _device_shares(self, growth: SlotForecast) -> list[float]:
        """Return how many times a forecast fits into each GPU's memory; memory that caches use now
        counts as available."""
        shares = []
        for device in self._slot_bytes_by_device():
            if (free := free_bytes(device)) is not None:
                memory = free + self.store.free_bytes(device) + self._others_bytes(device, None)
                needed = self._pool_bytes(device, growth) + self._running_state_bytes[device]
                shares.append(memory / needed)
        return shares

    def growth(
        self, prompt: Prompt, max_new_tokens: int, cache: OscarCache | None = None
    ) -> SlotForecast:
        """Forecast the number of slots that a single-row prompt and its answer need.

        Args:
            prompt: prompt of a single row.
            max_new_tokens: maximum number of tokens of the answer.
            cache: cache that the prompt continues.
        """
        # An index of an array, since an operation on a tensor would let other threads run first.
        found = self._growth(prompt.modalities.numpy()[0], max_new_tokens, cache)
        return replace(found, marks=len(prompt.marks))

    def growth_bytes(self, growth: SlotForecast) -> int:
        """Return the peak number of bytes that a forecast adds."""
        return int(self._bytes_over_time(growth).max())

    def reserve(
        self, growth: SlotForecast, prompt: Prompt, cache: OscarCache
    ) -> Reservation | None:
        """Check that a request fits on its devices, and reserve its memory in the budget.

        Args:
            growth: slot forecast of prompt and answer.
            prompt: prompt of a single row, not prefilled yet.
            cache: cache that the request continues; its chat is not spilled while it is answering.

        Returns:
            The reservation, in effect while it is referenced; None without a budget.

        Raises:
            MemoryBusy: if there is not enough memory at present; then nothing changes.
        """
        for device, needed, available, _ in self._short_devices(growth, prompt.modalities.numel()):
            raise MemoryBusy(
                f"the request needs about {format_bytes(needed)}, but only "
                f"{format_bytes(available)} is free on {device}: close() some chats or send "
                "smaller requests"
            )
        if self.budget is None:
            return None
        added = self._bytes_over_time(growth) + len(prompt.marks) * self._state_bytes.total()
        self.budget.free_memory(int(added.max()))
        spares = self._running_state_bytes.total() - self._state_bytes.total()
        return self.budget.reserve(cache, prompt.tokens, added, spares)

    def reserve_speech(
        self, model: Any, cache: OscarCache, tokens: int, frames: int
    ) -> Reservation | None:
        """Check that the longest speech fits on the talker's device, and reserve its memory in the
        budget.

        Args:
            model: talker, a transformers model for generation.
            cache: empty cache of the speech.
            tokens: number of tokens that the talker reads before it speaks.
            frames: maximum number of frames, each of which is a token.

        Returns:
            The reservation, in effect while it is referenced; None without a budget.

        Raises:
            MemoryBusy: if there is not enough memory at present; then nothing changes.
        """
        policy, store, shape = cache.policy, cache.store, ModelShape.of(model.config, 0)
        sizes = shape.slot_bytes(policy, unpacked_dtype(policy, model.dtype).itemsize)
        growth = slot_forecast(policy, np.full(tokens, Modality.TEXT, np.int8), frames)
        added = shape.layers * bytes_over_time(growth.added, sizes)
        needed, free = int(added.max()), free_bytes(model.device)
        unused = {bits: allocator.free for bits, allocator in store.allocators.items()}
        if free is not None and needed > (available := free + store.bytes_of(unused)):
            raise MemoryBusy(
                f"the speech needs about {format_bytes(needed)}, but only "
                f"{format_bytes(available)} is free on {model.device}: close() some chats"
            )
        if self.budget is None:
            return None
        self.budget.stores.add(store)
        self.budget.free_memory(needed)
        return self.budget.reserve(cache, tokens, added)

    def shortage(self, needed: int, what: str) -> str | None:
        """Return an error text if more bytes do not fit into the budget without spilling.

        The result is None if they fit.

        Args:
            needed: additional bytes.
            what: subject and verb of the error message, such as "the row takes".
        """
        total = needed + (0 if self.budget is None else self.budget.used_bytes)
        if self.budget is None or total <= self.budget.limit:
            return None
        return f"kv_budget is {self.budget.limit:,} bytes, but {what} the total to {total:,}"

    @property
    def layer_shapes(self) -> list[LayerShape | StateShape]:
        """Shape of each layer's keys and values, for the heads of this rank, or of its state."""
        states, layers = kinds_of_states(self.model.config), sorted(self.family.layer_devices)
        shapes = self._kv_shapes
        return [self._state_shape if index in states else shapes[index] for index in layers]

    @property
    def _kv_shapes(self) -> dict[int, LayerShape]:
        """Shape of each layer's keys and values, if it has them, for the heads of this rank."""
        ranks, heads = self.store.ranks.count, heads_by_layer(self.model.config)
        last = len(heads) - 1  # The layer of a draft module comes after it, and has as many heads.
        return {
            index: LayerShape(max(1, kv_heads // ranks), head_dim, self._dtype)
            for index in self.family.layer_devices
            for kv_heads, head_dim in [heads[min(index, last)]]
        }

    @property
    def _state_shape(self) -> StateShape:
        """Shape of the state of every layer that has one, for the heads of this rank."""
        return StateShape.of(self.model.config, self._dtype, self.store.ranks.count)

    @property
    def _dtype(self) -> torch.dtype:
        return self.family.embeddings.weight.dtype

    @property
    def _state_bytes(self) -> Counter[torch.device]:
        """Device -> bytes of a row's states in the layers of the device."""
        found = Counter[torch.device]()
        if states := kinds_of_states(self.model.config):
            devices, each = self.family.layer_devices, self._state_shape.bytes
            for index in states:
                found[devices[index]] += each
        return found

    @property
    def _running_state_bytes(self) -> Counter[torch.device]:
        """Device -> bytes of the states of a row that decodes: on a GPU, where steps are launched
        early, twice ``_state_bytes``, because the row has spare states."""
        found = self._state_bytes
        return Counter({one: size * (1 + (one.type == "cuda")) for one, size in found.items()})

    def _check_tokens(self, name: str, text: str) -> None:
        """Refuse a text that is too long; tokenize it block by block and stop at the limit.

        Short texts are skipped: they are counted when the size of the request is checked.
        """
        tokens = 0
        for start in range(0, len(text) if len(text) > _BLOCK else 0, _BLOCK):
            block = text[start : start + _BLOCK]
            # A cut splits at most one token into characters; a block may get special tokens.
            new = self.family.tokenize(block).shape[1] - self.family.longest_token - 2
            if tokens + new > self.max_context:
                fit = start + _BLOCK * max(0, self.max_context - tokens) // max(1, new)
                raise self._too_long(name, len(text), fit, tokens + new)
            tokens += max(0, new)

    def _too_long(self, name: str, count: int, fit: int, tokens: int) -> RequestTooLarge:
        return RequestTooLarge(
            f"{name}: {count:,} characters are over the context of {self.max_context:,} "
            f"tokens, which fits about {fit:,} characters: use a shorter text",
            tokens,
            self.max_context,
        )

    def _growth(self, new: np.ndarray, answer: int, cache: OscarCache | None) -> SlotForecast:
        rows, policy = [] if cache is None else cache.kv_manager.sequences, self.store.policy
        stored = max(0, answer - 1)  # The last token of an answer is not stored.
        if not rows and len(new) + stored <= _KEPT_TOKENS:
            return _forecast(policy, new.tobytes(), stored)
        return slot_forecast(policy, new, stored, rows[0] if rows else None)

    def _bytes_over_time(self, growth: SlotForecast) -> np.ndarray:
        """Return the bytes added after 0, 1, 2, ... tokens of the answer, with a row's states."""
        stored = [
            bytes_over_time(found.added, sizes)
            for device in self._slot_bytes_by_window()
            for found, sizes in self._by_window(device, growth)
        ]
        return np.sum(stored, axis=0) + self._running_state_bytes.total()

    def _check_context(self, size: RequestSize, doubt: int = 0) -> None:
        if size.total - doubt > self.max_context:
            raise size.refusal(self.max_context, "the context")

    def _check(self, size: RequestSize, new: np.ndarray, past: Past | None, doubt: int = 0) -> None:
        """Run ``_check_bytes``, in the engine thread if there is a past or tensor parallelism.

        In all other cases, the check only reads counters and runs in the calling thread, so that a
        request need not wait for a step.
        """
        check = partial(self._check_bytes, size, new, past, doubt)
        if past is None and self.store.ranks.count == 1:
            check()
        else:
            self.thread.call(check)

    def _check_bytes(
        self, size: RequestSize, new: np.ndarray, past: Past | None, doubt: int = 0
    ) -> None:
        """Refuse a request that does not fit into the budget or a device.

        Args:
            size: size of the request.
            new: (tokens,) int8 modalities of the prompt.
            past: past that the request continues.
            doubt: number of tokens that may be packed although ``new`` implies 16-bit precision.

        Raises:
            MemoryBusy: if other chats occupy the memory of a device.
            RequestTooLarge: if the request would not fit even without other chats.
        """
        cache = None if past is None else past.cache
        whole = self._growth(new, size.answer, cache)
        doubtful = doubt * self._slot_bytes()[PLAIN]
        if self.budget is not None:
            limit = self.budget.limit
            before = 0 if cache is None else cache.held_bytes

            def in_budget(growth: SlotForecast, _: int) -> float:
                return before + max(0, self.growth_bytes(growth) - doubtful)

            if (needed := in_budget(whole, 0)) > limit:
                fits = self._fitting(size, new, whole, cache, in_budget, limit)
                raise size.refusal(
                    fits,
                    f"kv_budget ({format_bytes(needed)} of {format_bytes(limit)})",
                    "raise kv_budget",
                )
        for device, needed, available, others in self._short_devices(whole, len(new), cache):
            in_device = partial(self._device_bytes, device)
            fits = self._fitting(size, new, whole, cache, in_device, available)
            activations = format_bytes(self._activation_bytes(len(new)))
            refusal = size.refusal(
                fits,
                f"the free memory of {device} ({format_bytes(needed)} of "
                f"{format_bytes(available)}, {activations} of it during prefill)",
                "close() chats" if self.prefill_chunk else "set prefill_chunk, close() chats",
            )
            raise (MemoryBusy(str(refusal)) if needed <= available + others else refusal)

    def _short_devices(
        self, growth: SlotForecast, tokens: int, cache: OscarCache | None = None
    ) -> Iterator[tuple[torch.device, int, int, int]]:
        """Yield each GPU with too little memory: (device, needed bytes, available bytes, bytes of
        the other caches).

        A chat that the engine thread closes meanwhile may count as available and as another one,
        but never as neither: a request that fits is told to wait, not refused.
        """
        for device in self._slot_bytes_by_device():
            needed = self._device_bytes(device, growth, tokens)
            slots = self.store.free_bytes(device)
            # Free slots often suffice; asking torch for its unused bytes takes longer.
            fits = needed <= slots or needed <= unused_bytes(device) + slots
            if fits and self.store.ranks.count == 1:
                continue
            available = self._available_bytes(device)
            if available is not None and needed > available:
                others = self._others_bytes(device, cache)
                yield device, needed, self._available_bytes(device) or 0, others

    def _available_bytes(self, device: torch.device) -> int | None:
        """Return the bytes that pools on a device may take, on each rank; None if unknown."""
        slots = self.store.free_bytes(device)  # First, as ``trim`` may return them meanwhile.
        if (free := free_bytes(device)) is None:
            return None
        # All ranks must make the same decision.
        return self.store.ranks.all_min(free, device) + slots

    def _device_bytes(self, device: torch.device, growth: SlotForecast, tokens: int) -> int:
        stored = self._pool_bytes(device, growth)
        return stored + self._running_state_bytes[device] + self._activation_bytes(tokens)

    def _pool_bytes(self, device: torch.device, growth: SlotForecast) -> int:
        """Return by how many bytes the pools on a device grow."""
        return sum(pool_bytes(x.added, sizes) for x, sizes in self._by_window(device, growth))

    def _by_window(
        self, device: torch.device, growth: SlotForecast
    ) -> Iterator[tuple[SlotForecast, dict[Bits, int]]]:
        """Yield the forecast for the layers on a device with each size of window, and their
        ``_slot_bytes``."""
        for window, sizes in self._slot_bytes_by_window()[device].items():
            yield growth if window is None else growth.in_window(window), sizes

    def _fitting(
        self,
        size: RequestSize,
        new: np.ndarray,
        whole: SlotForecast,
        cache: OscarCache | None,
        cost: Callable[[SlotForecast, int], float],
        available: float,
    ) -> int:
        """Return how many tokens of the request, including its past, fit (binary search)."""
        fits, over = 0, len(new) + size.answer
        while over - fits > 1:
            middle = (fits + over) // 2
            if middle < len(new):
                growth = self._growth(new[:middle], 0, cache)
            else:
                growth = whole.until(middle - len(new) - 1)
            if cost(growth, min(middle, len(new))) <= available:
                fits = middle
            else:
                over = middle
        return size.past + fits

    def _activation_bytes(self, tokens: int) -> int:
        read, weight = min(tokens, self.prefill_chunk or tokens), self.family.embeddings.weight
        return activation_bytes(read, weight.shape[1], weight.element_size())

    def _slot_bytes(self) -> dict[Bits, int]:
        """Return bits -> bytes of a slot, summed over all layers."""
        sums: dict[Bits, int] = {}
        for sizes in self._slot_bytes_by_device().values():
            for bits, size in sizes.items():
                sums[bits] = sums.get(bits, 0) + size
        return sums

    def _slot_bytes_by_device(self) -> dict[torch.device, dict[Bits, int]]:
        """Return device -> bits -> bytes of a slot, summed over the layers of the device."""
        return {
            device: {
                bits: sum(sizes[bits] for sizes in by_window.values()) for bits in by_window[None]
            }
            for device, by_window in self._slot_bytes_by_window().items()
        }

    def _slot_bytes_by_window(self) -> _SlotBytes:
        """Return the bytes of a slot, summed over the layers of a device with the same window."""
        # Recomputed when layers have created their pools, or the model has moved.
        device, known = self.family.embeddings.weight.device, self._known
        known_for = len(self.store.layers), device
        if known is None or known[0] != known_for:
            known = self._known = known_for, self._sum_slot_bytes()
        return known[1]

    def _sum_slot_bytes(self) -> _SlotBytes:
        shape, states = ModelShape.of(self.model.config, 0), kinds_of_states(self.model.config)
        dtype, shapes = unpacked_dtype(self.store.policy, self._dtype), self._kv_shapes
        sizes = {
            one: replace(shape, kv_heads=one.kv_heads, head_dim=one.head_dim).slot_bytes(
                self.store.policy, dtype.itemsize
            )
            for one in {*shapes.values()}
        }
        by_device: _SlotBytes = {}
        for index, device in self.family.layer_devices.items():
            pools, window = self.store.layers.get(index), self.store.windows.get(index)
            expected = sizes[shapes[index]]
            by_window = by_device.setdefault(device, {None: dict.fromkeys(expected, 0)})
            sums = by_window.setdefault(window, dict.fromkeys(expected, 0))
            for bits in () if index in states else sums:
                sums[bits] += expected[bits] if pools is None else pools.by_bits[bits].bytes_each
        return by_device

    def _others_bytes(self, device: torch.device, cache: OscarCache | None) -> int:
        """Return the bytes of slots on a device that only other caches use."""
        used = self.store.used_bytes(device)
        if cache is not None:
            used -= self.store.bytes_of_slots(SlotSet.of(cache.kv_manager.streams()), device)
        return used
