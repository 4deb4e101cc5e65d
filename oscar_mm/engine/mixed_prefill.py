"""Mixed prefill: short prompts are read in pieces, each in the pass of a decode step.

A pass has the rows of the running requests, and as many tokens of waiting prompts as fit. The
maximum number of rows of a pass bounds the time between tokens. Before a pass, the towers read the
media of the prompts that it begins, all together.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from time import perf_counter
from typing import NamedTuple

import torch

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.page_store import PageStore
from oscar_mm.engine.family import Family
from oscar_mm.engine.media_rows import media_rows
from oscar_mm.engine.request import Request
from oscar_mm.engine.running_batches import RunningBatches
from oscar_mm.engine.sampling import SampledTokens, Sampler
from oscar_mm.fast_decode.graph_runner import graph_capture
from oscar_mm.fast_decode.picture_tower import PictureTower
from oscar_mm.fast_decode.prompt_layers import PromptLayers
from oscar_mm.fast_decode.prompt_scratch import (
    MAX_PIECE,
    MAX_PROMPTS,
    PromptPiece,
    PromptRange,
    PromptScratch,
    StoredPrompts,
    stored_tokens,
)
from oscar_mm.fast_decode.row_adapters import RowAdapters
from oscar_mm.modality import Modality
from oscar_mm.tensor_parallel import TPGroup

_USUAL_ROWS = 1024
"""Maximum number of rows of a pass while few requests wait. A GPU computes no faster per token with
more, and decode steps that share the weights with prompts are spread over more passes; but the host
takes as long for each pass."""
_STRETCHED_ROWS = _USUAL_ROWS + 128
"""Maximum number of rows of a pass while few requests wait, if prompts then take fewer passes. The
end of a prompt in a short pass of its own would cost the first token more."""
_ROWS_ALONE = (64, 128, 256, 512, 768, _USUAL_ROWS, _STRETCHED_ROWS, 1536, 2048, MAX_PIECE)
"""Numbers of rows that a pass without a decode step may have; a graph is kept for each. Products
compute tiles of 128 rows, so other numbers would waste a part of a tile."""
_ROWS_WITH_DECODE = (128, 256, 512, 768, _USUAL_ROWS, _STRETCHED_ROWS, MAX_PIECE)
"""Numbers of rows that a pass with a decode step may have: fewer, since a graph is captured for
each of them and each batch size."""
_MIN_PROMPT_TOKENS = 32
"""Minimum number of prompt tokens in a pass."""
WARM_UP_STEPS = 3 * len(_ROWS_WITH_DECODE)
"""Number of decode steps that ``MixedPrefill.warm_up`` takes for each batch size."""
_SEPARATE_PIECES = 4
"""Number of pieces of one size that run after the steps of a batch of one size, before a pass of
both is captured. A capture takes as long as ten passes, and while clients arrive, each batch size
lasts for a few steps only."""
_log = logging.getLogger(__name__)
_MAX_WARM_UP_STEPS = 6
"""Maximum number of steps for two passes with a piece of one size, as a step that is already under
way takes no piece."""


@dataclass(eq=False)
class _Reading:
    """Request whose prompt has been read in part, or is about to be.

    Attributes:
        request: the request; its memory is reserved.
        past: number of tokens in its cache, which come first in the scratch.
        start: index of the first token in the scratch; None until there is room.
        read: number of tokens of the prompt that have been read.
        has_begun: whether its inputs are in the scratch.
        changes_cache: whether the request's cache is being, or has been, written to.
    """

    request: Request
    past: int
    start: int | None = None
    read: int = 0
    has_begun: bool = False
    changes_cache: bool = False

    @property
    def unread(self) -> int:
        return self.request.unread.tokens - self.read

    @property
    def tokens(self) -> int:
        return self.past + self.request.unread.tokens

    @property
    def first(self) -> int:
        """Index of the first token of the prompt."""
        assert self.start is not None
        return self.start + self.past

    @property
    def stop(self) -> int:
        assert self.start is not None
        return self.start + self.tokens


class CompletePrompts(NamedTuple):
    """Requests whose prompts are complete, and the device's results for them.

    Attributes:
        chosen: their first tokens.
        stored: result of storing their keys and values.
    """

    requests: list[Request]
    chosen: SampledTokens
    stored: StoredPrompts


class MixedPrefill:
    """Reads short prompts on one GPU; used in the engine thread.

    Prompts are read in order, and a piece may end one prompt and begin another.

    Args:
        family: model family.
        scratch: memory for prompts that are not complete.
        unused: cache for calls that only embed.
        tower: the model's vision tower as graphs; None if it runs only as modules.
    """

    def __init__(
        self,
        family: Family,
        scratch: PromptScratch,
        unused: OscarCache,
        tower: PictureTower | None = None,
    ) -> None:
        self._family, self._scratch, self._unused = family, scratch, unused
        self._tower = tower
        self._readings = deque[_Reading]()
        self._ranges: list[tuple[_Reading, PromptRange]] = []
        """Prompts of the piece that is about to be launched."""
        self._complete = deque[CompletePrompts]()
        self._uses = Counter[tuple[int, int]]()
        """Number of pieces so far by decoding rows and rows of the piece."""

    @classmethod
    def of(
        cls,
        family: Family,
        store: PageStore,
        sigmas: dict[int, torch.Tensor],
        axes: tuple[int, ...],
    ) -> MixedPrefill | None:
        """Return a reader of a model's prompts; None if the model, its device or the policy is not
        supported.

        Args:
            family: model family.
            store: page store of the requests' caches.
            sigmas: balancing factors by layer, see ``PrefillRunner.sigmas``.
            axes: leading axes of the position ids.
        """
        model, capture = family.model, graph_capture({family.device}, small=True)
        if (
            capture is None
            or family.keeps_states
            or not PromptLayers.takes(model)
            or not PromptScratch.takes(model, store.policy)
        ):
            return None
        levels = family.feature_levels
        tokens = PromptScratch.capacity(model, levels, family.device)
        try:
            scratch = PromptScratch(model, store, axes, sigmas, tokens, levels, capture)
        except torch.OutOfMemoryError:
            return None
        unused = OscarCache(store.policy, store=store)
        tower, adapts = family.fast_tower, RowAdapters.of(model) is not None
        if tower is None or adapts or not PictureTower.takes(tower):
            return cls(family, scratch, unused)
        return cls(family, scratch, unused, PictureTower(tower, capture))

    @property
    def requests(self) -> list[Request]:
        """Requests whose prompts are being read, or whose first tokens are on their way."""
        waiting = [request for one in self._complete for request in one.requests]
        return [*waiting, *(reading.request for reading in self._readings)]

    @property
    def is_full(self) -> bool:
        """Whether the next pass needs no further prompts: it is full, or the scratch is."""
        return sum(x.unread for x in self._readings) >= MAX_PIECE or any(
            reading.start is None for reading in self._readings
        )

    @property
    def awaits_towers(self) -> bool:
        """Whether towers may run before the next pass."""
        return any(x.request.unread.media and not x.has_begun for x in self._readings)

    def has_room(self, rows: int) -> bool:
        """Return whether a request that came now could be read in the next pass, and the host has
        little to do before it: no towers run.

        Args:
            rows: number of rows that decode in the same pass.
        """
        if self.awaits_towers:
            return False
        return sum(x.unread for x in self._readings) < _piece_sizes(rows, _USUAL_ROWS)[-1]

    def takes(self, request: Request) -> bool:
        """Return whether a prompt can be read in pieces; ``request.cache`` must be its own."""
        prompt = request.unread
        shows = bool((prompt.modalities.numpy() != Modality.TEXT).any())
        return (
            not self._scratch.fails
            and stored_tokens(request.cache) + prompt.tokens <= self._scratch.tokens
            and self._scratch.can_take(request.cache)
            and not request.is_read_alone
            and shows <= bool(prompt.media)
            and not (shows and prompt.layout.two_way)
        )

    def add(self, request: Request) -> None:
        """Add a request that ``takes`` accepts."""
        self._readings.append(_Reading(request, stored_tokens(request.cache)))
        self._allocate()

    def drop_all(self) -> list[tuple[Request, bool]]:
        """Remove and return the requests whose prompts are not complete, and whether their caches
        may have changed."""
        dropped = [(one.request, one.changes_cache) for one in self._readings]
        self._readings.clear()
        return dropped

    def drop_ended(self) -> list[Request]:
        """Remove and return the ended requests whose prompts are not complete, and return those
        that wait for their first tokens."""
        dropped = [x for x in self._readings if x.request.ended]
        self._readings = deque(x for x in self._readings if x not in dropped)
        waiting = [request for one in self._complete for request in one.requests]
        self._complete = deque(
            one for one in self._complete if not all(request.ended for request in one.requests)
        )
        return [x.request for x in dropped] + [request for request in waiting if request.ended]

    def next_piece(self, rows: int, *, many_wait: bool = False) -> PromptPiece | None:
        """Prepare the next piece of the prompts; None if there is nothing to read.

        Args:
            rows: number of rows that decode in the same pass.
            many_wait: whether prompts are to be read in the longest passes.
        """
        self._allocate()
        unread = [x for x in self._readings if x.start is not None and x.unread]
        if not unread:
            return None
        left = sum(x.last - x.first for _, x in _adjacent(unread, MAX_PIECE))
        # A long pass is padded to its size; unless it is nearly full, two short ones take no
        # longer.
        fills = not rows or rows + left > 2 * _USUAL_ROWS
        most = MAX_PIECE if many_wait and fills else _most_rows(rows, left)
        size = _piece_size(rows, left, most)
        self._uses[rows, size] += 1
        if alone := not rows or self._uses[rows, size] <= _SEPARATE_PIECES:
            size = _piece_size(0, left, most)
        self._ranges = list(_adjacent(unread, size))
        self._begin([one for one, _ in self._ranges if not one.has_begun])
        piece = self._prepared(size)
        piece.alone = alone
        return piece

    def _prepared(self, size: int) -> PromptPiece:
        """Write the tables of ``_ranges`` for a piece of ``size`` rows."""
        prompts = [one.request.unread for one, _ in self._ranges]
        positions = [
            prompt.positions[..., one.read : one.read + x.last - x.first]
            for prompt, (one, x) in zip(prompts, self._ranges, strict=True)
        ]
        return self._scratch.prepare(
            [x for _, x in self._ranges],
            torch.cat(positions, -1),
            size,
            [prompt.adapter for prompt in prompts],
        )

    def _begin(self, readings: list[_Reading]) -> None:
        """Write what prompts need to the scratch: the tokens in their caches, their embeddings, and
        what the towers make of their media."""
        if not readings:
            return
        prompts = [one.request.unread for one in readings]
        ids = torch.cat([prompt.ids for prompt in prompts], 1)
        rows = self._family.embeddings(ids)[0]
        parts = rows.split([prompt.tokens for prompt in prompts])
        for one, part in zip(readings, parts, strict=True):
            self._scratch.put(part, one.first)
            if one.past:
                self._scratch.load(one.request.cache, one.first - one.past)
        for found in media_rows(self._family, prompts, self._unused, self._tower):
            one = readings[found.place]
            self._scratch.put(found.rows, one.first + found.start, found.features)
        for one in readings:
            one.has_begun = True

    def finish(self, piece: PromptPiece) -> None:
        """Launch a piece unless it was launched with a decode step; then sample the first tokens of
        the prompts that it completes, and store their keys and values."""
        if piece.logits is None:
            # In its size without decoding rows: any other would need a graph of its own.
            size = _piece_size(0, sum(x.last - x.first for _, x in self._ranges))
            piece = piece if size == piece.size else self._prepared(size)
            self._scratch.run_alone(piece)
        for reading, x in self._ranges:
            reading.read += x.last - x.first
        assert piece.logits is not None
        done = [one for one, x in self._ranges if x.completes]
        logits = piece.logits
        # New tokens with a past before them are not adjacent to others.
        for _, some in groupby(done, key=lambda one: one.past and id(one)):
            group = list(some)
            self._complete.append(self._completed(group, logits[: len(group)]))
            logits = logits[len(group) :]
            for one in group:
                self._readings.remove(one)

    def _completed(self, done: list[_Reading], logits: torch.Tensor) -> CompletePrompts:
        """Sample the first tokens of adjacent prompts, and store their keys and values."""
        requests = [one.request for one in done]
        for one in done:
            one.changes_cache = True
        chosen = Sampler([x.sampler for x in requests], self._family.device, TPGroup())(logits)
        stored = self._scratch.store(
            [request.cache for request in requests],
            [request.unread.modalities[0].numpy() for request in requests],
            done[0].first,
        )
        return CompletePrompts(requests, chosen, stored)

    def warm_up(self, batches: RunningBatches, until: float) -> None:
        """Capture the tower, and pieces of all sizes, alone and with decode steps of the running
        requests, the most frequent sizes first.

        Args:
            batches: the running requests, which continue.
            until: time of ``perf_counter`` after which nothing more is captured.
        """
        captured = _SEPARATE_PIECES + 2  # After those, one pass is eager and one captured.
        if self._tower is not None:
            self._tower.warm_up(until)
        batches.expect_prompts()
        for rows in dict.fromkeys((0, batches.rows)):
            sizes = sorted(_piece_sizes(rows), key=lambda size: (size + rows != _USUAL_ROWS, -size))
            missing = [size for size in sizes if self._uses[rows, size] < captured]
            while missing and not self._readings and perf_counter() < until:
                self._uses[rows, missing[0]] = captured
                self._run_padding(batches, rows, missing.pop(0))
            if missing:
                _log.debug("not captured yet: pieces of %s rows with %d that decode", missing, rows)

    def _run_padding(self, batches: RunningBatches, rows: int, size: int) -> None:
        """Run a piece of one token and padding twice, while the scratch is empty."""
        left = 2
        for _ in range(_MAX_WARM_UP_STEPS):
            ranges = [PromptRange(0, 1, 0, 1)]
            piece = self._scratch.prepare(ranges, 0, size, [None])
            if rows:
                batches.expect_prompts()  # Otherwise the batch would change its size.
                batches.step(piece)
            else:
                self._scratch.run_alone(piece)
            left -= piece.logits is not None
            if not left:
                return

    def take_complete(self) -> list[CompletePrompts]:
        """Remove and return the prompts that earlier pieces completed."""
        complete = list(self._complete)
        self._complete.clear()
        return complete

    def _allocate(self) -> None:
        """Give prompts room in the scratch, in order."""
        for reading in self._readings:
            if reading.start is None:
                reading.start = self._find_space(reading.tokens)
                if reading.start is None:
                    return

    def _find_space(self, tokens: int) -> int | None:
        """Return the index for a prompt in the scratch, after the last one or at the beginning;
        None if there is no room."""
        placed = [x for x in self._readings if x.start is not None]
        if not placed:
            return 0
        begin, end = placed[0].start, placed[-1].stop
        assert begin is not None
        if end <= begin:  # The last prompts are before the first.
            return end if begin - end >= tokens else None
        if self._scratch.tokens - end >= tokens:
            return end
        return 0 if begin >= tokens else None


def _piece_size(rows: int, unread: int, most: int = MAX_PIECE) -> int:
    """Return the number of rows for prompt tokens in a pass of at most ``most`` rows, of which
    ``rows`` decode."""
    sizes = _piece_sizes(rows, most)
    return next((size for size in sizes if size >= unread), sizes[-1])


def _most_rows(rows: int, unread: int) -> int:
    """Return the maximum number of rows of a pass in which ``rows`` decode, while few requests
    wait, of whose prompts ``unread`` tokens are left."""
    usual, stretched = (ceil(unread / (most - rows)) for most in (_USUAL_ROWS, _STRETCHED_ROWS))
    return _STRETCHED_ROWS if stretched < usual else _USUAL_ROWS


def _piece_sizes(rows: int, most: int = MAX_PIECE) -> list[int]:
    totals = _ROWS_WITH_DECODE if rows else _ROWS_ALONE
    return [total - rows for total in totals if _MIN_PROMPT_TOKENS + rows <= total <= most]


def _adjacent(unread: list[_Reading], size: int) -> Iterator[tuple[_Reading, PromptRange]]:
    """Yield the tokens that come next, up to ``size`` tokens of adjacent prompts."""
    end = None
    for count, one in enumerate(unread):
        if count == MAX_PROMPTS or not size or (end is not None and one.start != end):
            return
        assert one.start is not None
        first, end = one.first + one.read, one.stop
        last = min(end, first + size)
        size -= last - first
        yield one, PromptRange(one.start, end, first, last)
