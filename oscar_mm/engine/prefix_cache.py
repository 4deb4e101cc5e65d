"""PrefixCache: cached prompt prefixes, shared by later requests."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from oscar_mm.cache.cache import OscarCache
from oscar_mm.engine.prompt import Prompt
from oscar_mm.modality import MediumSpan
from oscar_mm.pages.layout import PAGE_TOKENS

MIN_TOKENS = 32
"""Minimum prefix length in tokens; shorter prefixes are not worth a copy of the tables."""
_MAX_ENTRIES = 256
"""Maximum number of entries; each prompt is compared with every entry."""
_OF_TEXT = ("tokenizer", "chat_template")
"""Parts of the processor that affect only token ids, which are compared directly."""


def processor_settings(processor: Any) -> str:
    """Return a SHA-256 of the processor settings that determine how media become features."""
    parts = {name: part for name, part in vars(processor).items() if name not in _OF_TEXT}
    return attributes_digest(parts)


def attributes_digest(value: Any) -> str:
    """Return a SHA-256 of an object's attributes and items, including the content of its arrays.

    The class of an object is included, but the order of attributes and mapping items is ignored. A
    value without attributes and items is represented by its ``repr``.

    Args:
        value: nested objects, mappings, sequences, arrays and tensors, without cycles.

    Returns:
        64 hexadecimal digits.
    """
    return hashlib.sha256(json.dumps(_described(value), sort_keys=True).encode()).hexdigest()


def _described(value: Any) -> Any:
    """Convert a value to a JSON value that represents it."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().flatten()
        return [str(value.dtype), list(value.shape), _described(flat.view(torch.uint8).numpy())]
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        content = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return [str(value.dtype), list(value.shape), content]
    if isinstance(value, Mapping):
        return {repr(key): _described(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_described(item) for item in value]
    if isinstance(value, Set):
        return sorted(map(repr, value))
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return repr(value)
    return [f"{type(value).__module__}.{type(value).__qualname__}", _described(vars(value))]


class ReaderState(NamedTuple):
    """What keys and values depend on, apart from tokens and media.

    Attributes:
        processor: SHA-256 of the processor's settings, which matter to media only; None for a
            prompt without media.
        weights: state of the model's weights and adapters, see ``PrefillRunner.state``.
        adapter: digest of the adapter that the prompt chooses; None for none.
    """

    processor: str | None
    weights: object
    adapter: str | None

    def has_same_model(self, other: ReaderState) -> bool:
        """Return whether weights and adapters are the same."""
        return (self.weights, self.adapter) == (other.weights, other.adapter)


_Key = tuple[str, bytes]
"""Salt of a prompt, and bytes of its first ``MIN_TOKENS`` ids. A prompt is compared only with
entries that have its key: comparing it with all tokens of all entries would take milliseconds."""


def _key(prompt: Prompt, ids: np.ndarray) -> _Key:
    return prompt.salt, ids[:MIN_TOKENS].tobytes()


@dataclass(eq=False)
class _Entry:
    """Frozen cache together with the tokens and media of the prefix that it contains.

    Attributes:
        is_confirmed: whether the weights are known not to have changed during the prefill.
    """

    key: _Key
    state: ReaderState
    ids: np.ndarray
    media: tuple[MediumSpan, ...]
    cache: OscarCache
    bytes: int
    is_confirmed: bool = False

    def common(self, ids: np.ndarray, prompt: Prompt, state: ReaderState) -> int:
        """Return the number of leading tokens shared with a prompt of the same key, without
        splitting media; 0 if weights or adapters differ.

        If all media of a prompt attend to each other, all of them are shared, or none.
        """
        if not state.has_same_model(self.state):
            return 0
        length = min(len(ids), len(self.ids))
        differs = ids[:length] != self.ids[:length]
        first = int(differs.argmax()) if length else 0
        length = first if length and differs[first] else length
        for index, span in enumerate(prompt.media):
            if span.start >= length:
                break
            is_shared = (
                state.processor == self.state.processor
                and index < len(self.media)
                and _same_content(span, self.media[index])
            )
            if not is_shared or span.stop > length:
                length = span.start
                break
        for media in (prompt.media, self.media) if prompt.layout.two_way == "prompt" else ():
            if media and length < media[-1].stop:
                length = min(length, media[0].start)
        return length


class Match(NamedTuple):
    """Result of ``PrefixCache.find``.

    Attributes:
        cache: fork with the longest prefix that can be continued; None if there is none.
        shared: number of leading tokens that the prompt has in common with some entry, even if no
            entry can be continued there; 0 if these are fewer than ``MIN_TOKENS``.
    """

    cache: OscarCache | None
    shared: int


class PrefixCache:
    """Frozen forks of caches, keyed by the prompts that they contain.

    For use in the engine thread. A later prompt continues the longest prefix that it shares with an
    entry. The comparison covers every token id, the SHA-256 of each media item's decoded content,
    the SHA-256 of the processor's settings and the state of the model's weights and adapters
    (``oscar_mm.modules.weights_key``): a false hit would require two media with the same SHA-256. A
    prefix cache belongs to one pipeline, and thus to one model and one policy; call ``clear`` after
    writing to weights through ``weight.data``, which the state does not detect.

    A shared prefix ends at the end of a 128-token page or of a media item, never in between, so
    that neither the number of cached tokens nor the time of a request reveals a single token of
    another prompt. Prompts with different ``Prompt.salt`` share nothing.

    If the model keeps states (Qwen3.5) or has sliding windows, an entry can be shared only up to
    its end or one of its marks: states and windows of other lengths are not kept. A prompt that
    could have shared more gets a mark there (``Match.shared``), so that later prompts can.

    Tokens after a shared prefix attend to its pages. With policy "bf16", this changes nothing. With
    packed pages, the answer may differ slightly from that of a prompt prefilled in a single pass,
    in which attention over the prompt is exact.

    Args:
        limit: maximum size in bytes of pages, 16-bit slots and states; the least recently used
            entries are dropped first. Pages shared by several entries count once per entry.

    Attributes:
        hits: number of prompts with a cached prefix.
        misses: number of prompts without a cached prefix.
        tokens_saved: number of tokens that were not prefilled again.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.hits = self.misses = self.tokens_saved = 0
        # Ordered from least to most recently used.
        self._entries: list[_Entry] = []
        self._by_key = defaultdict[_Key, list[_Entry]](list)

    @property
    def bytes(self) -> int:
        """Total size of all entries, in bytes."""
        return sum(entry.bytes for entry in self._entries)

    @property
    def caches(self) -> list[OscarCache]:
        """Caches of all entries, least recently used first; do not change them."""
        return [entry.cache for entry in self._entries]

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._entries)

    def __str__(self) -> str:
        """Return a one-line summary."""
        return (
            f"{len(self)} prefixes, {self.bytes:,} bytes of {self.limit:,}: {self.hits} hits, "
            f"{self.misses} misses, {self.tokens_saved:,} tokens saved"
        )

    def find(self, prompt: Prompt, state: ReaderState) -> Match:
        """Return a fork with the longest cached prefix of a prompt.

        The prefix never covers the whole prompt: at least one token remains to be prefilled.

        Args:
            prompt: prompt of a single row.
            state: present state of processor and model; only entries with the same weights and
                adapter match, and only media with the same processor settings.
        """
        ids, best, longest, shared = _ids(prompt), None, MIN_TOKENS - 1, 0
        for entry in self._by_key.get(_key(prompt, ids[:-1]), ()):
            length = _whole(entry.common(ids[:-1], prompt, state), prompt.media)
            if length <= longest:
                continue
            shared = max(shared, length)
            length = _whole(entry.cache.longest_crop(length), prompt.media)
            if length > longest and length == entry.cache.longest_crop(length):
                best, longest = entry, length
        if best is None:
            self.misses += 1
            return Match(None, shared)
        self._entries.remove(best)
        self._entries.append(best)
        self.hits += 1
        self.tokens_saved += longest
        cache = best.cache.fork()
        cache.crop(longest - cache.get_seq_length())
        cache.mark()  # A length that is shared once may be shared again.
        return Match(cache, shared)

    @property
    def is_confirmed(self) -> bool:
        """Whether no entry has been kept since ``confirm`` was last called."""
        return all(entry.is_confirmed for entry in self._entries)

    def confirm(self, weights: object) -> None:
        """Drop the entries kept since the last call if the weights have changed since their prefill
        began; call this only while no request runs.

        ``keep`` does not do this because the state of the weights takes long to compute.

        Args:
            weights: present state of the weights, see ``ReaderState``.
        """
        for entry in [one for one in self._entries if not one.is_confirmed]:
            entry.is_confirmed = entry.state.weights == weights
            if not entry.is_confirmed:
                self._drop(entry)

    def keep(self, prompt: Prompt, state: ReaderState, cache: OscarCache) -> None:
        """Add the prompt just prefilled into a cache, up to ``kept_tokens``.

        Args:
            prompt: prompt of a single row.
            state: state of processor and model when the prefill began; see ``confirm``.
            cache: cache that begins with the prompt.
        """
        stop = kept_tokens(prompt)
        ids = _ids(prompt)[:stop]
        if not stop or cache.longest_crop(stop) != stop:
            return
        key = _key(prompt, ids)
        for entry in self._by_key.get(key, ())[:]:
            length = entry.common(ids, prompt, state)
            if length == stop == entry.cache.longest_crop(stop):
                return
            if length == len(entry.ids) == cache.longest_crop(length):
                self._drop(entry)
        frozen = cache.fork()
        frozen.crop(stop - frozen.get_seq_length())
        manager = frozen.kv_manager
        size = frozen.store.reached_bytes(manager.tables, manager.marks.kept) + frozen.state_bytes
        if size > self.limit:
            frozen.close()
            return
        total = self.bytes + size
        while len(self) >= _MAX_ENTRIES or total > self.limit:
            total -= self._entries[0].bytes
            self.drop_oldest()
        entry = _Entry(key, state, ids, prompt.media, frozen, size)
        self._entries.append(entry)
        self._by_key[key].append(entry)

    def drop_oldest(self) -> None:
        """Drop the least recently used entry."""
        self._drop(self._entries[0])

    def clear(self) -> None:
        """Drop all entries."""
        while self._entries:
            self.drop_oldest()

    def _drop(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        self._by_key[entry.key].remove(entry)
        if not self._by_key[entry.key]:
            del self._by_key[entry.key]
        entry.cache.close()


def kept_tokens(prompt: Prompt) -> int:
    """Return the number of leading tokens that a prefix cache keeps of a prompt: up to the end of
    its last media item or, if it has no media, of its last full page; 0 if these are
    fewer than ``MIN_TOKENS``."""
    stop = prompt.media[-1].stop if prompt.media else _whole(prompt.tokens, ())
    return stop if stop >= MIN_TOKENS else 0


def shares_media(one: Prompt, other: Prompt) -> bool:
    """Return whether a prompt can take its first media item from the cache of another one."""
    salts = (one.salt, one.adapter), (other.salt, other.adapter)
    return (
        bool(one.media and other.media and kept_tokens(other))
        and salts[0] == salts[1]
        and _same_content(one.media[0], other.media[0])
    )


def _whole(length: int, media: tuple[MediumSpan, ...]) -> int:
    """Return the length of the longest prefix of at most ``length`` tokens that ends at the end of
    a page or a media item."""
    ends = [span.stop for span in media if span.stop <= length]
    return max([length - length % PAGE_TOKENS, *ends])


def _ids(prompt: Prompt) -> np.ndarray:
    return prompt.inputs["input_ids"][0].cpu().numpy()


def _same_content(one: MediumSpan, other: MediumSpan) -> bool:
    """Return whether two media items have the same content and position; names are ignored."""
    fields = ("modality", "start", "stop", "digest")
    return all(getattr(one, name) == getattr(other, name) for name in fields)
