"""Block tables: convert a scheduler's view of a batch to the tables of decode and store.

This is for engines such as vLLM, whose scheduler assigns each request a row of a block table.
A block is a stream page, and all tokens are packed immediately; rings also store some tokens
unpacked (``oscar_mm.ops.rings``). The tables are built on the device, since the host does not know
the lengths of the requests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from oscar_mm.kernels.launch import addresses, current_stream, ints, pointers
from oscar_mm.kernels.self_check import OperationKernel
from oscar_mm.ops.decode_tables import COLUMNS, FIELDS, START, assign
from oscar_mm.ops.rings import RingShape
from oscar_mm.ops.store_torch import CENTER_TOKENS, HEAD, NOTHING, TILE
from oscar_mm.pages.layout import PAGE_TOKENS

_WARPS = 8
_WRITTEN = 7


class BlockTables(NamedTuple):
    """Arguments of ``block_tables``. All are int32 except the slots; the last seven are outputs.

    Attributes:
        blocks: (rows, max pages): pages of each request, including those of its new tokens.
        lengths: (rows,): number of tokens of each request, including new ones.
        starts: (rows + 1,): start of each request's new tokens in the batch; a request without new
            tokens has no tokens at all.
        slots: (tokens,) int64: page * 128 + index in the page for each new token; a token with a
            negative slot is not stored.
        decodes: number of requests that use decode; they come first, and each has the same small
            number of new tokens.
        row_tiles: ``row_tiles`` of a request's new tokens if all requests decode; otherwise 0.
        kv_heads: number of KV heads per layer.
        columns: new tokens per decoding request times query heads per KV head.
        staged: whether ``store`` reads the new tokens from their rings instead of the new keys and
            values. If so, no request has more new tokens than its ring has slots.
        shape: shape of the rings.
        tails: (rows, 2), see ``oscar_mm.ops.rings``.
        items: (decodes or more, max pages, 2), see ``oscar_mm.ops.decode``: a request's pages,
            without its new tokens and the tokens that are read from its ring.
        counts: (decodes or more, 2), see ``oscar_mm.ops.decode``.
        assignments: (thread blocks, 16), see ``oscar_mm.ops.decode``.
        jobs: (``job_count``, 20), see ``oscar_mm.ops.store``, for new tokens in one row. Surplus
            jobs store nothing.
        begins: (``begin_count``, 36), see ``oscar_mm.ops.store``. A page's center is the mean of
            its first 32 keys if they are all new, otherwise of the request's last 32 new keys; if
            there are fewer new keys, it is the mean of keys stored in the previous page.
        recents: (decodes or more, ``shape.max_read`` or more), see ``oscar_mm.ops.decode``: the
            first tokens of a request, if its ring has received all of them, and its most recent
            ones.
        writes: (tokens, 3), see ``oscar_mm.ops.append``: slots of the new tokens in the rings.
    """

    blocks: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    slots: torch.Tensor
    decodes: int
    row_tiles: int
    kv_heads: int
    columns: int
    staged: bool
    shape: RingShape
    tails: torch.Tensor
    items: torch.Tensor
    counts: torch.Tensor
    assignments: torch.Tensor
    jobs: torch.Tensor
    begins: torch.Tensor
    recents: torch.Tensor
    writes: torch.Tensor

    @property
    def rows(self) -> int:
        """Number of requests."""
        return len(self.lengths)


def row_tiles(tokens: int) -> int:
    """Return the maximum number of jobs for consecutive tokens at any position."""
    return (tokens + 2 * (TILE - 1)) // TILE


def job_count(rows: int, tokens: int, of_row: int) -> int:
    """Return the maximum number of jobs for requests with this total number of new tokens.

    Args:
        of_row: ``BlockTables.row_tiles``.
    """
    return rows * of_row if of_row else 2 * rows + tokens // TILE


def begin_count(rows: int, tokens: int, of_row: int) -> int:
    """Return the maximum number of new pages for requests with this total number of new tokens."""
    return rows if of_row else rows + tokens // PAGE_TOKENS


class Params(ctypes.Structure):
    """Mirror of ``Params`` in csrc/block_tables/block_tables.cu, field for field."""

    _fields_ = (
        *pointers("blocks", "lengths", "starts", "slots", "tails"),
        *pointers("items", "counts", "assignments", "jobs", "begins", "recents", "writes"),
        *((name, ctypes.c_int64) for name in ("block_stride", "item_stride")),
        *ints("rows", "decodes", "row_tiles", "job_count", "begin_count", "write_count"),
        *ints("heads", "column_tiles", "workers"),
        *ints("sinks", "window", "size", "recent_stride", "staged"),
    )


class BlockTablesKernel(OperationKernel[None], operation="block_tables", bound=0.0):
    """CUDA kernel of ``block_tables``, the same for all formats."""

    def __init__(self, specialization: None, device: torch.device) -> None:
        super().__init__(specialization, device)
        self._kernel = self._load("block_tables/block_tables.cu", {})

    def __call__(self, given: BlockTables) -> None:
        """Launch the kernel."""
        params = Params(
            *addresses(given.blocks, given.lengths, given.starts, given.slots, given.tails),
            *addresses(*given[-_WRITTEN:]),
            *(given.blocks.stride(0), given.items.stride(0) // 2),
            *(given.rows, given.decodes, given.row_tiles),
            *(len(given.jobs), len(given.begins), len(given.writes)),
            *(given.kv_heads, -(-given.columns // COLUMNS), len(given.assignments)),
            *(given.shape.sinks, given.shape.window, given.shape.size),
            *(given.recents.stride(0), given.staged),
        )
        lines = len(given.jobs) + len(given.begins) + -(-len(given.writes) // 32)
        grid = (1 + given.decodes + -(-lines // _WARPS), 1, 1)
        stream = current_stream(given.blocks.device)
        self._kernel.launch(grid, (32 * _WARPS, 1, 1), 0, params, stream)

    @staticmethod
    def disagreement(
        specialization: None, kernel: Callable[[Any], None], device: torch.device
    ) -> float:
        """Return the fraction of numbers that differ, for decoding and mixed batches."""
        differing = []
        for past, new, decodes in _CHECKED:
            found, expected = (checked_tables(past, new, decodes, device) for _ in range(2))
            kernel(found)
            block_tables_by_numpy(expected)
            differing += [
                float((one != other).float().mean())
                for one, other in zip(found[-_WRITTEN:], expected[-_WRITTEN:], strict=True)
            ]
        return max(differing)


_CHECKED = (
    ([0, 100, 128, 5000, 127], [1, 1, 1, 1, 1], 5),
    ([12, 255, 0, 384], [5, 5, 5, 5], 4),
    ([200] * 70 + [90_000] + [0] * 9, [1] * 71 + [0] * 9, 80),
    ([7 * row for row in range(210)], [1] * 210, 210),
    ([33, 400, 0, 250, 100, 1280, 256], [1, 1, 300, 10, 40, 1, 640], 2),
    ([0, 7], [2000, 31], 0),
)
"""Past and new tokens of each request, and the number of decoding requests."""


def checked_tables(
    past: list[int], new: list[int], decodes: int, device: torch.device, workers: int = 132
) -> BlockTables:
    """Create arguments of ``block_tables`` for requests with these numbers of past and new tokens.

    Their pages are in random order, and one token is not stored.
    """
    generator = torch.Generator().manual_seed(0)
    rows, tokens, most = len(past), sum(new), max(map(sum, zip(past, new, strict=True)))
    of_row = row_tiles(new[0]) if decodes == rows else 0
    width = -(-most // PAGE_TOKENS) + 1
    blocks = torch.randperm(rows * width, generator=generator).view(rows, width)
    starts = torch.tensor([0, *new]).cumsum(0)
    slots = [
        int(blocks[row, place // PAGE_TOKENS]) * PAGE_TOKENS + place % PAGE_TOKENS
        for row in range(rows)
        for place in range(past[row], past[row] + new[row])
    ]
    slots[tokens // 2] = -1
    lengths = torch.tensor(past) + torch.tensor(new)
    shape = RingShape(4, 32, max(new[:decodes], default=1))
    # Rings of consecutive rows have all, some or no tokens; unless all rows decode, one row has no
    # ring.
    firsts = [[0, min(20, x), x][row % 3] for row, x in enumerate(past)]
    without = -1 if of_row else 1
    tails = torch.tensor(
        [[-1 if row == without else rows - row, x] for row, x in enumerate(firsts)]
    )
    shapes = (
        *((max(decodes, 1), width, 2), (max(decodes, 1), 2), (workers, FIELDS)),
        (job_count(rows, tokens, of_row), HEAD + TILE),
        (begin_count(rows, tokens, of_row), HEAD + CENTER_TOKENS),
        *((max(decodes, 1), shape.max_read), (tokens, 3)),
    )
    kv_heads, columns = 2, 4 * max(new[:decodes], default=1)
    written = [torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes]
    known = [x.to(device, torch.int32) for x in (blocks, lengths, starts)]
    how = (torch.tensor(slots, device=device), decodes, of_row, kv_heads, columns, bool(of_row))
    of_rings = shape, tails.to(device, torch.int32)
    return BlockTables(*known, *how, *of_rings, *written)  # pyright: ignore[reportCallIssue]


def block_tables(given: BlockTables) -> None:
    """Write the tables of decode and store for the requests of a batch."""
    kernel = BlockTablesKernel.of(None, given.blocks.device)
    (kernel or block_tables_by_numpy)(given)


def block_tables_by_numpy(given: BlockTables) -> None:
    """Run ``block_tables`` on the host; waits for the device."""
    blocks, lengths, starts, slots = (x.cpu().numpy() for x in given[:4])
    written = [x.cpu().numpy().copy() for x in given[-_WRITTEN:]]
    items, counts, assignments, jobs, begins, recents, writes = written
    tails, shape = given.tails.cpu().numpy(), given.shape
    past = np.maximum(lengths - np.diff(starts), 0)
    for row in range(given.decodes):
        ring, start = tails[row].tolist()
        sinks = min(shape.sinks, past[row]) if ring >= 0 and start == 0 else 0
        first = max(start, past[row] - shape.window, sinks) if ring >= 0 else past[row]
        exact = [*range(sinks), *range(first, past[row])]
        places = np.arange(0, first if first > sinks else 0, PAGE_TOKENS)
        count = len(places)
        items[row, :count, 0] = blocks[row, :count]
        items[row, :count, 1] = np.minimum(first - places, PAGE_TOKENS)
        items[row, : min(count, 1), 1] += START * sinks
        recents[row, : len(exact)] = ring * shape.entries + shape.place(torch.tensor(exact))
        counts[row] = len(exact), count
    if given.decodes:
        in_items = tuple((-(-exact // TILE), count) for exact, count in counts.tolist())
        shared = (given.kv_heads, given.columns, len(assignments))
        assignments[:] = assign(in_items[: given.decodes], *shared)
    else:
        assignments[:] = 0
    jobs[:], begins[:] = 0, 0
    jobs[:, 0] = begins[:, 0] = -1
    jobs[:, HEAD:], begins[:, HEAD:] = NOTHING, NOTHING
    writes[:] = 0, 0, -1
    writes[:, 1] = np.arange(len(writes))
    of_row, places = given.row_tiles, writes[:, 2]
    for row in range(given.rows):
        at = (row, starts[row], of_row)
        own = (past[row], starts[row], starts[row + 1], slots)
        _write_jobs(jobs[job_count(*at) :], *own)
        _write_begins(begins[begin_count(*at) :], *own, blocks[row])
        _write_places(places, *own[:3], int(tails[row, 0]), shape)
    if given.staged:
        for table in (jobs[:, HEAD:], begins[:, HEAD:]):
            is_token = table != NOTHING
            table[is_token] = ~places[table[is_token]]
    places[slots[: len(places)] < 0] = -1
    for target, table in zip(given[-_WRITTEN:], written, strict=True):
        target.copy_(torch.from_numpy(table))


def _write_jobs(jobs: np.ndarray, past: int, start: int, stop: int, slots: np.ndarray) -> None:
    for token in range(start, stop):
        place = past + token - start
        if slots[token] >= 0:
            job = jobs[place // TILE - past // TILE]
            job[:2] = slots[token] // PAGE_TOKENS, slots[token] % PAGE_TOKENS // TILE
            job[HEAD + place % TILE] = token


def _write_places(
    places: np.ndarray, past: int, start: int, stop: int, ring: int, shape: RingShape
) -> None:
    tokens = torch.arange(start, stop if ring >= 0 else start)
    positions = past + tokens - start
    has_place = (positions < shape.sinks) | (stop - tokens <= shape.size)
    kept = tokens[has_place].numpy()
    places[kept] = ring * shape.entries + shape.place(positions[has_place]).numpy()


def _write_begins(
    begins: np.ndarray, past: int, start: int, stop: int, slots: np.ndarray, blocks: np.ndarray
) -> None:
    first = -(-past // PAGE_TOKENS)
    for line, number in enumerate(range(first, -(-(past + stop - start) // PAGE_TOKENS))):
        token = start + number * PAGE_TOKENS - past
        source = max(start, min(token, stop - CENTER_TOKENS))
        count = min(stop - source, CENTER_TOKENS)
        if slots[token] < 0:
            continue
        begins[line, 0] = slots[token] // PAGE_TOKENS
        if count < CENTER_TOKENS and number > 0:
            begins[line, 3] = blocks[number - 1]
        else:
            begins[line, 2] = count
            begins[line, HEAD : HEAD + count] = source + np.arange(count)
