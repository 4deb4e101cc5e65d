"""Window pages: where layers with a sliding window store the pages that their windows still reach.

A page has one id for all layers (``SlotPool``). Layers that attend to all tokens store it at that
index of their pools. Layers with a sliding window need only a few pages of a long sequence, so they
store page ``i`` at the place that ``WindowPages`` has assigned to it. A page that no window reaches
loses its place, which then serves another page; its tokens stay in the tables of the sequences,
since other layers still read them.

A page never gets its place back. So a sequence can return only to lengths at which the windows
reach pages with a place: those that are marked (``Marks``), and those so recent that nothing was
dropped since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from oscar_mm.cache.block_table import ModalityTable, SequenceTable, SlotPool
from oscar_mm.ops.decode_tables import SECOND
from oscar_mm.ops.store_torch import HEAD
from oscar_mm.policy import Bits

DROPPED, ZEROS = 0, 1
"""Places that belong to no page: what is written to pages without a place, and zeros that are read
instead of them."""
_RESERVED = 2
_MARGIN = 16
"""Number of tokens before a window that also keep their place, since passes that are planned or in
flight may begin at earlier tokens than the next one."""
_GROWTH = 16
"""After a sweep, at least 1/16 of the places are free. A sweep looks at all sequences; this way,
the next one comes only after many new pages, however many sequences there are."""
_LATEST_MARKS, _MARKED_WINDOWS = 6, 4
"""A sequence keeps the windows of its latest marks, and of all marks in its last tokens, in
windows."""


class SlotCounts(NamedTuple):
    """Numbers of slots of one kind that a layer has.

    Attributes:
        capacity: number of all slots.
        used: number of slots with an owner.
        free: number of slots that serve new tokens before the pool grows.
    """

    capacity: int
    used: int
    free: int


class Reach(NamedTuple):
    """Lengths of a sequence at which attention may continue.

    Attributes:
        table: the sequence, for reading only.
        lengths: numbers of its tokens.
    """

    table: SequenceTable
    lengths: Sequence[int]


class _Reached(NamedTuple):
    """Pages of a sequence that windows reach, by stream.

    Attributes:
        table: the sequence, which keeps its ``id`` in use.
        key: what the pages depend on: the lengths, and each stream's modality and entries.
        pages: format and pages of each stream.
    """

    table: SequenceTable
    key: tuple[Any, ...]
    pages: list[tuple[Bits, set[int]]]


def windows_of(config: Any) -> dict[int, int]:
    """Return layer index -> size in tokens of the layer's sliding window, for layers that have one.

    Empty for models whose configuration does not say which layers have it.

    Args:
        config: transformers configuration.
    """
    text = config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None)
    if not window or getattr(text, "attention_chunk_size", None) is not None:
        return {}
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        every = text.model_type in ("mistral", "mixtral")
        kinds = ["sliding_attention"] * text.num_hidden_layers if every else ()
    return {index: window for index, kind in enumerate(kinds) if kind == "sliding_attention"}


class _Places:
    """Places of the pages of one format.

    Attributes:
        of_page: page -> its place; -1 if it has none.
        free: places without a page.
        capacity: number of places, with the reserved ones.
        planned: page that was planned but not allocated -> its ``SlotPool.uses``.
    """

    def __init__(self) -> None:
        self.of_page = np.full(0, -1, np.int32)
        self.free: list[int] = []
        self.capacity = 0
        self.planned: dict[int, int] = {}

    def extend(self, pages: int) -> None:
        """Extend the table to this number of pages."""
        if (missing := pages - len(self.of_page)) > 0:
            none = np.full(max(missing, len(self.of_page)), -1, np.int32)
            self.of_page = np.concatenate([self.of_page, none])

    def read(self, pages: np.ndarray) -> np.ndarray:
        """Return the places that pages are read from, of any shape."""
        return np.maximum(self._found(pages), ZEROS)

    def written(self, pages: np.ndarray) -> np.ndarray:
        """Return the places that pages are written to; negative numbers stay."""
        return np.where(pages < 0, pages, np.maximum(self._found(pages), DROPPED))

    def _found(self, pages: np.ndarray) -> np.ndarray:
        self.extend(int(pages.max(initial=-1)) + 1)
        return self.of_page[np.maximum(pages, 0)] if len(self.of_page) else np.full_like(pages, -1)

    def drop(self, pages: np.ndarray) -> None:
        """Take the places of pages that have one."""
        places = self.of_page[pages]
        self.free += places[places >= 0].tolist()
        self.of_page[pages] = -1

    def grow(self, count: int) -> None:
        """Add free places until there are ``count``."""
        if not self.capacity:
            self.capacity = _RESERVED
        if (more := count - len(self.free)) > 0:
            self.free += range(self.capacity + more - 1, self.capacity - 1, -1)
            self.capacity += more


class WindowPages:
    """Places of pages in the pools of all layers with the same sliding window.

    Args:
        window: size of the window in tokens, including the token that attends.
        allocators: allocators of the pages' ids, by format.

    Attributes:
        window: see above.
    """

    def __init__(self, window: int, allocators: Mapping[Bits, SlotPool]) -> None:
        self.window, self._allocators = window, allocators
        self._places = {bits: _Places() for bits in allocators if bits.packed}
        self._known: dict[int, _Reached] = {}
        """Results of ``_reached_by`` since the last sweep, by ``id`` of the table."""

    def __contains__(self, bits: object) -> bool:
        """Return whether slots of this kind have places; tokens in 16-bit precision do not."""
        return bits in self._places

    @property
    def capacities(self) -> list[int]:
        """Number of places by format."""
        return [places.capacity for places in self._places.values()]

    def capacity(self, bits: Bits) -> int:
        """Return the number of places, which the pools must have."""
        return self._places[bits].capacity

    def used(self, bits: Bits) -> int:
        """Return the number of places of pages that have an owner."""
        owners, of_page = self._allocators[bits].owners, self._places[bits].of_page
        return sum(owners(page) > 0 for page in np.flatnonzero(of_page >= 0).tolist())

    def counts(self) -> dict[Bits, SlotCounts]:
        """Return the numbers of places by format. Free are those without a page, and those of pages
        without an owner, which the next ``sweep`` takes."""
        found = {}
        for bits, places in self._places.items():
            used = self.used(bits)
            free = max(0, places.capacity - _RESERVED) - used
            found[bits] = SlotCounts(places.capacity, used, free)
        return found

    def has(self, bits: Bits, page: int) -> bool:
        """Return whether a page has a place."""
        of_page = self._places[bits].of_page
        return page < len(of_page) and bool(of_page[page] >= 0)

    def read(self, bits: Bits, pages: Iterable[int]) -> list[int]:
        """Return the places from which pages are read."""
        return self._places[bits].read(np.array(list(pages), np.int32)).tolist()

    def items(self, items: np.ndarray, formats: tuple[Bits | None, Bits | None]) -> np.ndarray:
        """Return a copy of ``StoredTokens.items`` with places instead of pages.

        Args:
            items: (sequences, longest, 2) int32.
            formats: first and second page format.
        """
        found, is_second = items.copy(), items[..., 1] & SECOND != 0
        for bits, mine in zip(formats, (~is_second, is_second), strict=True):
            if bits is not None:
                pages = np.where(mine, items[..., 0], 0)
                found[..., 0] = np.where(mine, self._places[bits].read(pages), found[..., 0])
        return found

    def jobs(self, bits: Bits, jobs: np.ndarray) -> np.ndarray:
        """Return a copy of the ``jobs`` of ``oscar_mm.ops.store`` with places instead of pages."""
        return self._written(bits, jobs)

    def begins(self, bits: Bits, begins: np.ndarray) -> np.ndarray:
        """Return a copy of the ``begins`` of ``oscar_mm.ops.store`` with places instead of
        pages."""
        found = self._written(bits, begins)
        before = self._places[bits].read(np.maximum(begins[:, HEAD - 1], 0))
        found[:, HEAD - 1] = np.where(begins[:, 2] == 0, before, begins[:, HEAD - 1])
        return found

    def written(self, bits: Bits, pages: np.ndarray) -> np.ndarray:
        """Return the places to which pages are written; -1 stays."""
        return self._places[bits].written(pages)

    def _written(self, bits: Bits, table: np.ndarray) -> np.ndarray:
        found = table.copy()
        found[:, 0] = self._places[bits].written(table[:, 0])
        return found

    def begin(
        self,
        bits: Bits,
        pages: list[int],
        wanted: set[int] | None,
        sweep: Callable[[], None] | None,
    ) -> None:
        """Assign places to pages that a pass begins, and take those of the others.

        Args:
            bits: format of the pages.
            pages: the pages; those without an owner are only planned.
            wanted: pages of which some tokens are in a window after the pass; None for all.
            sweep: function that frees places; None while that is not possible.
        """
        places, owners = self._places[bits], self._allocators[bits].owners
        places.extend(max(pages, default=-1) + 1)
        gone = [page for page in pages if wanted is not None and page not in wanted]
        places.drop(np.array(gone, np.int64))
        kept = pages if wanted is None else [page for page in pages if page in wanted]
        # Before the sweep, which would take the places of planned pages.
        for page in kept:
            if not owners(page):
                places.planned[page] = self._allocators[bits].uses(page)
        missing = self._missing(places, kept)
        if len(missing) > len(places.free):
            if sweep is not None:
                sweep()
                missing = self._missing(places, kept)
            places.grow(max(len(missing), places.capacity // _GROWTH))
        if missing:
            places.of_page[missing] = [places.free.pop() for _ in missing]

    @staticmethod
    def _missing(places: _Places, pages: list[int]) -> list[int]:
        return [page for page in dict.fromkeys(pages) if places.of_page[page] < 0]

    def reached(self, reaches: Iterable[Reach]) -> dict[Bits, set[int]]:
        """Return the pages of which some tokens are in a window, by format, and the last page of
        each stream."""
        found: dict[Bits, set[int]] = {bits: set() for bits in self._places}
        for reach in reaches:
            for bits, pages in self._reached_by(reach):
                found[bits].update(pages)
        return found

    def _reached_by(self, reach: Reach) -> list[tuple[Bits, set[int]]]:
        """Return ``reached`` for one sequence, by stream.

        The result is kept while the sequence has the same lengths and entries; sequences of a
        prefix cache never change. A crop that removes no entry does not change the result, since
        it removes only tokens after all packed tokens of their streams.
        """
        table, lengths = reach
        streams = [(code, one) for code, one in table.streams.items() if one.pages]
        key = tuple(lengths), *((code, x.pages, x.starts, x.stops) for code, x in streams)
        known = self._known.get(id(table))
        if known is None or known.table is not table or known.key != key:
            found = [(one.bits, self._of_stream(reach, code, one)) for code, one in streams]
            known = self._known[id(table)] = _Reached(table, key, found)
        return known.pages

    def _of_stream(self, reach: Reach, code: int, stream: ModalityTable) -> set[int]:
        ends, pages = _ends(stream), {stream.pages[-1]}
        for length in reach.lengths:
            pages.update(stream.pages[self._in_window(reach.table, code, ends, length, _MARGIN)])
        return pages

    def _in_window(
        self, table: SequenceTable, code: int, ends: np.ndarray, length: int, margin: int = 0
    ) -> slice:
        """Return which pages of a stream have tokens in the window after ``length`` tokens.

        Args:
            table: the sequence.
            code: modality of the stream.
            ends: see ``_ends``.
            length: number of tokens.
            margin: number of tokens before the window that count as well.
        """
        start = max(0, length - self.window + 1 - margin)
        count = table.codes.count(code, start, length)
        if not count:
            return slice(0)
        first = table.codes.count(code, 0, start)
        last = int(ends.searchsorted(first + count, "left"))
        return slice(int(ends.searchsorted(first, "right")), last + 1)

    def can_return(self, table: SequenceTable, length: int) -> bool:
        """Return whether all pages in the window after the first ``length`` tokens have places."""
        return all(
            self.has(stream.bits, page)
            for code, stream in table.streams.items()
            if stream.pages
            for page in stream.pages[self._in_window(table, code, _ends(stream), length)]
        )

    def sweep(self, reaches: Iterable[Reach], sources: Iterable[tuple[Bits, int]] = ()) -> None:
        """Free the places of all pages that no window reaches and that are not planned.

        Args:
            reaches: all sequences of the store.
            sources: format and id of further pages that keep their places.
        """
        reaches = list(reaches)
        reached = self.reached(reaches)
        self._known = {x: self._known[x] for x in (id(reach.table) for reach in reaches)}
        for bits, page in sources:
            reached[bits].add(page)
        for bits, wanted in reached.items():
            places, uses = self._places[bits], self._allocators[bits].uses
            places.planned = {page: n for page, n in places.planned.items() if uses(page) == n}
            pages = np.flatnonzero(places.of_page >= 0)
            kept = np.isin(pages, np.array([*wanted, *places.planned], np.int64))
            places.drop(pages[~kept])

    def compact(self, bits: Bits, kept: Sequence[int]) -> list[int]:
        """Renumber pages and places, and remove the free places.

        Args:
            bits: format of the pages.
            kept: old ids of the pages, which are now numbered from 0.

        Returns:
            The old places in ascending order; the i-th becomes place i.
        """
        places = self._places[bits]
        places.extend(max(kept, default=-1) + 1)
        of_page = places.of_page[np.array(kept, np.int64)]
        used = np.sort(of_page[of_page >= 0])
        new = np.where(of_page < 0, -1, np.searchsorted(used, of_page) + _RESERVED)
        places.of_page, places.free, places.planned = new.astype(np.int32), [], {}
        places.capacity = _RESERVED + len(used) if len(used) else 0
        return [DROPPED, ZEROS, *used.tolist()] if len(used) else []


def _ends(stream: ModalityTable) -> np.ndarray:
    """Return, for each page of a stream, the number of the stream's tokens up to the page's end."""
    return np.cumsum(np.subtract(stream.stops, stream.starts))


def reach_of(table: SequenceTable, marks: Iterable[int], window: int) -> Reach:
    """Return where a sequence may continue: at its end and at its latest marks."""
    length = len(table.codes) if table.end is None else table.end
    marked = sorted(mark for mark in marks if mark < length)
    recent = [mark for mark in marked if mark > length - _MARKED_WINDOWS * window]
    return Reach(table, [length, *max(recent, marked[-_LATEST_MARKS:], key=len)])


def begun(
    jobs: Iterable[Any], copies: Iterable[tuple[Bits, int, int]]
) -> Iterator[tuple[Bits, int]]:
    """Yield format and id of each page that a step begins.

    Args:
        jobs: pack jobs of the step.
        copies: pages that the step copies: format, source and target.
    """
    for job in jobs:
        # The first page of a job continues earlier tokens unless it begins at their first.
        yield from ((job.bits, page) for page in job.pages[job.first > 0 :])
    for bits, _, target in copies:
        yield bits, target


def read(
    jobs: Iterable[Any], copies: Iterable[tuple[Bits, int, int]]
) -> Iterator[tuple[Bits, int]]:
    """Yield format and id of each page from which a step makes new pages; its sequences may have
    left these pages.

    Args:
        jobs: see ``begun``.
        copies: see ``begun``.
    """
    for job in jobs:
        if not all(len(source) for source in job.begins.values()):
            yield job.bits, job.before
    for bits, source, _ in copies:
        yield bits, source


def room(stream: ModalityTable, window_pages: Sequence[WindowPages]) -> int:
    """Return the number of tokens that can be appended to a stream's last page: none if layers with
    sliding windows no longer store it.

    Args:
        stream: the stream.
        window_pages: places of the pages in these layers.
    """
    free = stream.room
    if free and not all(places.has(stream.bits, stream.pages[-1]) for places in window_pages):
        return 0
    return free
