"""Steps: tables of decode and store for a step's requests, and the layout of prompt tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from oscar_mm.kernels.launch import multiprocessors
from oscar_mm.ops.block_tables import (
    BlockTables,
    begin_count,
    block_tables,
    job_count,
    row_tiles,
)
from oscar_mm.ops.decode_tables import FIELDS, upload
from oscar_mm.ops.rings import MAX_ROWS, RING_FIELDS, RingArguments, RingShape, find_rings
from oscar_mm.ops.store_torch import CENTER_TOKENS, HEAD, TILE
from oscar_mm.pages.layout import PAGE_TOKENS

Layer = TypeVar("Layer")


@dataclass(frozen=True)
class Past:
    """Pages of requests that have tokens computed in earlier steps.

    Attributes:
        slots: (pages,) int32: all pages of the requests, one request after the other.
        places: (tokens,) int64: indices of the new tokens among all tokens of these pages.
        table: (requests, max pages) int32: indices into ``slots`` for each request, possibly more
            than its tokens need.
        lengths: (requests,) int32: number of tokens of each request, including new ones.
        longest: upper bound of the lengths.
        exact: (2, tokens) int64: for tokens in rings, their indices among all tokens of these pages
            and in the rings. If a ring lacks a token, the index of a new token is used instead.
    """

    slots: torch.Tensor
    places: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    longest: int
    exact: torch.Tensor


@dataclass(frozen=True)
class Reading:
    """Consecutive requests whose new tokens belong to their prompts.

    Attributes:
        tokens: range of their new tokens in the batch.
        starts: (requests + 1,) int32: start of each request's tokens in this range.
        longest: maximum number of new tokens per request.
        past: tokens computed in earlier steps; None if there are none.
    """

    tokens: slice
    starts: torch.Tensor
    longest: int
    past: Past | None


class Rings:
    """The rings of running requests, shared by all table builders for the same layers.

    Args:
        count: number of rings, equal to the maximum number of running requests.
        shape: shape of a ring.
        blocks: number of vLLM's blocks.
        device: device of all tables.
        keeps: see ``oscar_mm.ops.rings.RingArguments``.

    Attributes:
        shape, blocks: as given.

    Raises:
        ValueError: if there are more rings than the maximum number of rows in a batch.
    """

    def __init__(
        self, count: int, shape: RingShape, blocks: int, device: torch.device, *, keeps: bool = True
    ) -> None:
        if count > MAX_ROWS:
            raise ValueError(f"{count} running requests: must be at most {MAX_ROWS}")
        self.shape, self.blocks, self._keeps, self._clock = shape, blocks, keeps, 0
        self._owners = torch.full((blocks, 2), -1, dtype=torch.int32, device=device)
        self._rings = torch.zeros(count, RING_FIELDS, dtype=torch.int32, device=device)

    def find(
        self,
        blocks: torch.Tensor,
        lengths: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        tails: torch.Tensor,
    ) -> None:
        """Find the rings of a step's requests; see ``oscar_mm.ops.rings``.

        Called for one micro-batch after the other. All micro-batches together have no more requests
        than there are rings, so no two requests get the same ring.
        """
        self._clock = (self._clock + 1) % 2**31
        now = (self.shape.spare, self._clock, self._keeps)
        find_rings(
            RingArguments(blocks, lengths, starts, slots, *now, tails, self._owners, self._rings)
        )


class ForwardPass(Generic[Layer]):
    """Tracks the progress of a forward pass through the layers.

    Args:
        count: number of layers.

    Attributes:
        layers: layers that the pass has reached.
        is_complete: whether the pass has reached all layers.
        is_captured: whether the pass ran in a CUDA graph capture.
    """

    def __init__(self, count: int) -> None:
        self._count, self.layers = count, list[Layer]()
        self.is_complete = self.is_captured = False

    def through(self, layer: Layer) -> list[Layer]:
        """Record a layer; return all layers if it is the last one, otherwise an empty list."""
        self.layers.append(layer)
        self.is_captured |= torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if len(self.layers) < self._count:
            return []
        self.is_complete, found, self.layers = True, self.layers, []
        return found


@dataclass(frozen=True)
class Step:
    """The requests of a step, the same for all layers of a model.

    Attributes:
        tables: tables of decode, store and append.
        decodes: number of decoding requests, which come first.
        query_tokens: number of new tokens per decoding request.
        readings: all other requests, whose new tokens belong to their prompts.
        passed: layers that have attended, ``oscar_mm.vllm_plugin.attention.StoredLayer``.
    """

    tables: BlockTables
    decodes: int
    query_tokens: int
    readings: tuple[Reading, ...]
    passed: ForwardPass[Any]

    @property
    def has_rings(self) -> bool:
        """Whether layers store new tokens in rings."""
        return self.tables.staged or self.tables.shape.max_read > 0

    @property
    def decode_tokens(self) -> int:
        """Number of tokens of the decoding requests, which come first."""
        return self.decodes * self.query_tokens


class StepTables:
    """Tables of consecutive steps, at fixed addresses for captured graphs.

    Args:
        rows: maximum number of requests per step.
        tokens: maximum number of new tokens per step.
        pages: maximum number of pages per request.
        kv_heads: number of KV heads per layer.
        group: number of query heads per KV head.
        max_unpacked: maximum number of pages of past tokens to unpack at a time; a single request
            may have more.
        device: device of all tables.
        rings: rings of the layers.
        layers: number of layers. If all requests of a step decode, the last layer stores the tokens
            from the rings for all layers at once, in a fraction of the time. This begins only after
            a forward pass has reached all layers, because a draft model's pass reaches only its own
            layers. If 0, each layer stores its own tokens.
        stages: whether the tokens of such steps are stored from the rings; if False, each layer
            stores them from its keys and values, and writes to the rings only if it reads them.

    Raises:
        ValueError: if there are more requests than the tables allow.
    """

    def __init__(
        self,
        rows: int,
        tokens: int,
        pages: int,
        kv_heads: int,
        group: int,
        max_unpacked: int,
        device: torch.device,
        rings: Rings,
        layers: int = 0,
        *,
        stages: bool = True,
    ) -> None:
        if rows > MAX_ROWS:
            raise ValueError(f"max_num_seqs={rows}: must be at most {MAX_ROWS}")
        self._kv_heads, self._group, self._max_unpacked = kv_heads, group, max_unpacked
        self._device, self._rings, self._layers = device, rings, layers
        self._passed = ForwardPass[Any](layers)
        self._goes_through_all: bool | None = None if stages else False
        shapes = (
            *((rows, pages, 2), (rows, 2), (multiprocessors(device), FIELDS)),
            (job_count(rows, tokens, 0), HEAD + TILE),
            (begin_count(rows, tokens, 0), HEAD + CENTER_TOKENS),
            *((rows, max(rings.shape.max_read, 1)), (max(tokens, rows * rings.shape.spare), 3)),
        )
        tables = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes)
        self._items, self._counts, self._assignments, self._jobs, self._begins, *others = tables
        self._recents, self._writes = others
        self._tails = torch.zeros(rows, 2, dtype=torch.int32, device=device)

    def step(
        self,
        blocks: torch.Tensor,
        lengths: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        decodes: int,
        query_tokens: int,
        host_starts: np.ndarray,
        host_lengths: np.ndarray,
    ) -> Step:
        """Build the tables for a step, overwriting those of the previous step.

        Args:
            blocks, lengths, starts, slots: see ``BlockTables``.
            decodes: number of decoding requests, which come first.
            query_tokens: number of new tokens per decoding request.
            host_starts: ``starts`` on the host.
            host_lengths: upper bounds of ``lengths`` on the host, for requests that do not decode;
                ``blocks`` has enough pages for these lengths.

        Raises:
            ValueError: if there are more requests or tokens than fit in the tables.
        """
        self._learn()
        rows = len(lengths)
        of_row = row_tiles(query_tokens) if decodes == rows else 0
        tokens = rows * query_tokens if of_row else int(host_starts[rows])
        if rows > len(self._recents) or job_count(rows, tokens, of_row) > len(self._jobs):
            raise ValueError(f"{rows} requests with {tokens} new tokens do not fit in the tables")
        is_staged = bool(of_row and self._goes_through_all)
        tails = self._tails[:rows]
        self._rings.find(blocks, lengths, starts, slots, tails)
        tables = BlockTables(
            *(blocks, lengths, starts, slots, decodes, of_row),
            *(self._kv_heads, self._group * query_tokens, is_staged),
            *(self._rings.shape, tails),
            *(self._items[: max(decodes, 1)], self._counts[: max(decodes, 1)], self._assignments),
            self._jobs[: job_count(rows, tokens, of_row)],
            self._begins[: begin_count(rows, tokens, of_row)],
            *(self._recents[: max(decodes, 1)], self._writes[:tokens]),
        )
        block_tables(tables)
        host = (host_starts[: rows + 1], host_lengths)
        readings = tuple(self._readings(blocks, lengths, tails, decodes, *host))
        self._passed = ForwardPass[Any](self._layers)
        return Step(tables, decodes, query_tokens, readings, self._passed)

    def _learn(self) -> None:
        """Record whether the first forward pass reached all layers.

        Later passes do not change the record, even if they are interrupted, so that all captured
        graphs store in the same way. If the first pass was captured, steps store layer by layer.
        """
        passed = self._passed
        if self._goes_through_all is None and (passed.layers or passed.is_complete):
            self._goes_through_all = not (passed.layers or passed.is_captured)

    def _readings(
        self,
        blocks: torch.Tensor,
        lengths: torch.Tensor,
        tails: torch.Tensor,
        first: int,
        starts: np.ndarray,
        bounds: np.ndarray,
    ) -> Iterator[Reading]:
        """Yield the requests from ``first`` on, in runs of bounded size; in each run, either all
        requests have past tokens or none has."""
        new, rows = np.diff(starts), len(starts) - 1
        while rows > first and not new[rows - 1]:
            rows -= 1  # padding
        if first == rows:
            return
        pages = -(-bounds[:rows] // PAGE_TOKENS)
        has_past = bounds[:rows] > new[:rows]
        while first < rows:
            stop = first + 1
            while (
                stop < rows
                and has_past[stop] == has_past[first]
                and (not has_past[first] or pages[first : stop + 1].sum() <= self._max_unpacked)
            ):
                stop += 1
            run = slice(first, stop)
            past = None
            if has_past[first]:
                longest = int(bounds[run].max())
                of_run = (lengths[run], tails[run], run, new[run], pages[run])
                past = self._past(blocks, *of_run, longest)
            begin, end = int(starts[first]), int(starts[stop])
            yield Reading(
                slice(begin, end),
                self._upload(starts[first : stop + 1] - begin, np.int32),
                int(new[run].max()),
                past,
            )
            first = stop

    def _past(
        self,
        blocks: torch.Tensor,
        lengths: torch.Tensor,
        tails: torch.Tensor,
        run: slice,
        new: np.ndarray,
        pages: np.ndarray,
        longest: int,
    ) -> Past:
        firsts = np.cumsum(pages) - pages
        columns = np.arange(int(pages.max()))
        table = np.where(columns < pages[:, None], firsts[:, None] + columns, 0)
        # A mask on the device is not used, because the host would wait for its length.
        requests = np.repeat(np.arange(run.start, run.stop), pages)
        numbers = np.arange(int(pages.sum())) - np.repeat(firsts, pages)
        # Count from the end of each request, which only the device knows if drafts were rejected.
        places = [
            first * PAGE_TOKENS + np.arange(-count, 0)
            for first, count in zip(firsts, new, strict=True)
        ]
        rows = self._upload(np.repeat(np.arange(len(new)), new), np.int64)
        return Past(
            blocks[self._upload(requests, np.int64), self._upload(numbers, np.int64)],
            self._upload(np.concatenate(places), np.int64) + lengths[rows],
            self._upload(table, np.int32),
            lengths,
            longest,
            self._exact(lengths - self._upload(new, np.int64), tails, firsts * PAGE_TOKENS),
        )

    def _exact(self, past: torch.Tensor, tails: torch.Tensor, firsts: np.ndarray) -> torch.Tensor:
        """Return ``Past.exact`` for requests with these numbers of past tokens; their tokens begin
        at ``firsts``."""
        shape, past = self._rings.shape, past[:, None]
        ring, start = tails[:, :1].long(), tails[:, 1:]
        numbers = torch.arange(-shape.window, shape.sinks, device=self._device)
        positions = torch.where(numbers < 0, past + numbers, numbers)
        has = (ring >= 0) & (positions >= start) & (positions < past)
        places = ring * shape.entries + shape.place(positions)
        target = torch.where(has, positions, past) + self._upload(firsts, np.int64)[:, None]
        return torch.stack([target.flatten(), places.masked_fill(~has, 0).flatten()])

    def _upload(self, array: np.ndarray, dtype: type) -> torch.Tensor:
        return upload(np.ascontiguousarray(array, dtype=dtype), self._device)
