"""PrefixCache: beginnings of earlier prompts, which later prompts continue."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.memory import token_bytes
from oscar_mm.engine.prompt import Prompt
from oscar_mm.modality import MediumSpan
from oscar_mm.pages.layout import PAGE_TOKENS

MIN_TOKENS = 32
"""Shorter prefixes are not worth a copy of the tables."""
_MAX_ENTRIES = 256
"""Every prompt is compared with each entry."""
_OF_TEXT = ("tokenizer", "chat_template")
"""Parts of a processor that decide on token ids alone; the ids themselves are compared."""


def processor_settings(processor: Any) -> str:
    """SHA-256 of a processor's settings, filters and tables, which turn media into features."""
    parts = {name: part for name, part in vars(processor).items() if name not in _OF_TEXT}
    return attributes_digest(parts)


def attributes_digest(value: Any) -> str:
    """SHA-256 of an object's attributes and items, down to the content of its arrays.

    The order of attributes and of a mapping's items does not count, the class of an object does. A
    value without attributes and items counts as its ``repr``.

    Args:
        value: nested objects, mappings, sequences, arrays and tensors, without cycles.

    Returns:
        64 hexadecimal digits.
    """
    return hashlib.sha256(json.dumps(_described(value), sort_keys=True).encode()).hexdigest()


def _described(value: Any) -> Any:
    """The JSON value that stands for a value."""
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


_Key = tuple[object, str]
"""State of what reads a prompt, and the salt of the prompt."""


@dataclass(eq=False)
class _Entry:
    """A frozen cache, and what decides whether a prompt begins with the same tokens and media."""

    key: _Key
    ids: np.ndarray
    media: tuple[MediumSpan, ...]
    cache: OscarCache
    bytes: int

    def common(self, key: _Key, ids: np.ndarray, media: tuple[MediumSpan, ...]) -> int:
        """How many tokens at the beginning are the same; a medium counts as a whole."""
        if key != self.key:
            return 0
        length = min(len(ids), len(self.ids))
        differs = np.flatnonzero(ids[:length] != self.ids[:length])
        length = int(differs[0]) if len(differs) else length
        for index, span in enumerate(media):
            if span.start >= length:
                break
            same = index < len(self.media) and _same_content(span, self.media[index])
            if not same or span.stop > length:
                return span.start
        return length


class PrefixCache:
    """Frozen forks of caches by the prompts that they read; used under the pipeline's lock.

    A later prompt continues the longest beginning that it shares with an entry. The comparison
    covers every token id, the SHA-256 of every medium's decoded content and what read it, which is
    the SHA-256 of the processor's settings and the state of the model's weights and adapters
    (``oscar_mm.modules.weights_key``): a wrong hit would need two media with one SHA-256. A prefix
    cache belongs to one pipeline, so to one model and one policy; call ``clear`` after writing to
    weights through ``weight.data``, which no state shows.

    A shared beginning ends with a page of 128 tokens or with a medium, and never in between: how
    much of a prompt was known, or how long it took, tells nobody a single token of another's.
    Prompts of different ``Prompt.salt`` share nothing.

    Tokens after a shared prefix read it from its pages. With policy "bf16" that changes nothing;
    with packed pages the answer may differ a little from one that read the whole prompt at once,
    whose attention over the prompt is exact.

    Args:
        limit: most bytes of pages and blocks; the least recently used entries go first. Pages that
            entries share count for each.

    Attributes:
        hits: prompts that found a prefix.
        misses: prompts that found none.
        tokens_saved: tokens that were not read again.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.hits = self.misses = self.tokens_saved = 0
        # Least recently used first.
        self._entries: list[_Entry] = []

    @property
    def bytes(self) -> int:
        """Bytes of all entries."""
        return sum(entry.bytes for entry in self._entries)

    @property
    def caches(self) -> list[OscarCache]:
        """The caches of all entries, the least recently used first; not to be changed."""
        return [entry.cache for entry in self._entries]

    def __len__(self) -> int:
        """How many entries there are."""
        return len(self._entries)

    def __str__(self) -> str:
        """One line."""
        return (
            f"{len(self)} prefixes, {self.bytes:,} bytes of {self.limit:,}: {self.hits} hits, "
            f"{self.misses} misses, {self.tokens_saved:,} tokens saved"
        )

    def find(self, prompt: Prompt, state: object) -> OscarCache | None:
        """A fork that holds the longest known beginning of a prompt; None if none is known.

        At least the prompt's last token is left to be read.

        Args:
            prompt: of a single row.
            state: of what is to read it; only beginnings that were read in an equal one count.
        """
        ids, best, longest = _ids(prompt), None, MIN_TOKENS - 1
        key = state, prompt.salt
        for entry in self._entries:
            length = _whole(entry.common(key, ids[:-1], prompt.media), prompt.media)
            if length > longest:
                best, longest = entry, length
        if best is None:
            self.misses += 1
            return None
        self._entries.remove(best)
        self._entries.append(best)
        self.hits += 1
        self.tokens_saved += longest
        cache = best.cache.fork()
        cache.crop(longest - cache.get_seq_length())
        return cache

    def keep(self, prompt: Prompt, state: object, cache: OscarCache) -> None:
        """Remember a prompt that a cache has just read: up to its last medium, or whole pages."""
        stop = prompt.media[-1].stop if prompt.media else _whole(prompt.tokens, ())
        ids, key = _ids(prompt)[:stop], (state, prompt.salt)
        if stop < MIN_TOKENS:
            return
        for entry in self._entries[:]:
            length = entry.common(key, ids, prompt.media)
            if length == stop:
                return
            if length == len(entry.ids):
                self._drop(entry)
        size = token_bytes(cache.kv_manager, 0, stop)
        if size > self.limit:
            return
        while len(self) >= _MAX_ENTRIES or self.bytes + size > self.limit:
            self.drop_oldest()
        frozen = cache.fork()
        frozen.crop(stop - frozen.get_seq_length())
        self._entries.append(_Entry(key, ids, prompt.media, frozen, size))

    def drop_oldest(self) -> None:
        """Drop the least recently used entry."""
        self._drop(self._entries[0])

    def clear(self) -> None:
        """Drop all entries."""
        while self._entries:
            self.drop_oldest()

    def _drop(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        entry.cache.close()


def _whole(length: int, media: tuple[MediumSpan, ...]) -> int:
    """The longest beginning of at most so many tokens that ends with a page or a medium."""
    ends = [span.stop for span in media if span.stop <= length]
    return max([length - length % PAGE_TOKENS, *ends])


def _ids(prompt: Prompt) -> np.ndarray:
    return prompt.inputs["input_ids"][0].cpu().numpy()


def _same_content(one: MediumSpan, other: MediumSpan) -> bool:
    """Whether two media are the same at the same place, whatever their names."""
    fields = ("modality", "start", "stop", "digest")
    return all(getattr(one, name) == getattr(other, name) for name in fields)
