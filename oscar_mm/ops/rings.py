"""Rings: assign a ring of 16-bit tokens to each request of a batch.

Each layer stores all tokens of a request in pages. It also stores the request's most recent and
first tokens unpacked, in a ring; there is one ring for each request that may run.
Schedulers such as vLLM's supply the rows of a batch and their blocks, but do not identify the
request of a row: rows move, come and go, and a block may be shared with other requests or
reassigned. So the device remembers, for each block, the ring of the row that wrote to it last, and,
for each ring, the number of its current tenant (its lease). A row continues the ring of its last
block if

- the ring still has that tenant, and the tenant has at least as many tokens as the row (it may have
  more because of rejected drafts); and
- no earlier row of the batch continues the same ring.

All other rows that store tokens get the least recently used rings, emptied. So if a request was
preempted, begins with another request's blocks, or waited too long, its ring has only the tokens
computed since then; the others are in pages.

The content of a ring is always correct: when a block is first written, at its beginning, it loses
its previous owner, so the owner of a row's last block wrote the tokens in that block. Blocks are
shared only if all tokens up to their end are the same, so a row whose last block was written by
another request may continue that request's ring. A KV connector loads tokens into blocks without
calling this operation. That would matter only if it loaded a new request into the last block of
another request of the same length; so with a connector, the rings of requests that are not in the
batch are released (``RingArguments.keeps``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from oscar_mm.kernels.launch import addresses, current_stream, ints, pointers
from oscar_mm.kernels.self_check import OperationKernel
from oscar_mm.pages.layout import PAGE_TOKENS

MAX_ROWS = 4096
"""Maximum number of requests per batch, and of rings."""
RING_FIELDS = 4
"""Numbers per ring: lease, the tenant's first token in the ring, the tenant's number of tokens,
clock."""
_THREADS = 1024


class RingShape(NamedTuple):
    """Sizes of a ring.

    Attributes:
        sinks: number of a request's first tokens, which have separate slots.
        window: number of most recent tokens that are read.
        spare: number of slots for new tokens of a decode step, so that they do not overwrite
            tokens that the step reads.
    """

    sinks: int
    window: int
    spare: int

    @property
    def size(self) -> int:
        """Number of slots for tokens that are not sinks."""
        return self.window + self.spare

    @property
    def entries(self) -> int:
        """Number of slots per ring."""
        return self.sinks + self.size

    @property
    def max_read(self) -> int:
        """Maximum number of tokens that a step reads per request."""
        return self.sinks + self.window

    def place(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the slots of tokens in their request's ring, given their positions."""
        later = self.sinks + positions % self.size
        return torch.where(positions < self.sinks, positions, later)


class RingArguments(NamedTuple):
    """Arguments of ``find_rings``. All are int32 except the slots; the last three are outputs.

    Attributes:
        blocks, lengths, starts, slots: see ``oscar_mm.ops.block_tables.BlockTables``.
        new_tokens: maximum number of new tokens per decoding request.
        clock: number of this call, one more than that of the previous call; restarts from 0 after
            2**31 - 1.
        keeps: whether requests that are not in the batch keep their rings.
        tails: (rows, 2): the ring of each row, or -1, and the row's first token in the ring.
        owners: (blocks, 2): ring and lease of the row that last wrote to each block; -1 if none.
        rings: (rings, ``RING_FIELDS``): state of each ring.
    """

    blocks: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    slots: torch.Tensor
    new_tokens: int
    clock: int
    keeps: bool
    tails: torch.Tensor
    owners: torch.Tensor
    rings: torch.Tensor


class Params(ctypes.Structure):
    """Mirror of ``Params`` in csrc/block_tables/rings.cu, field for field."""

    _fields_ = (
        *pointers("blocks", "lengths", "starts", "slots", "tails", "owners", "rings"),
        ("block_stride", ctypes.c_int64),
        *ints("rows", "block_count", "ring_count", "new_tokens", "clock", "keeps"),
    )


class RingsKernel(OperationKernel[None], operation="rings", bound=0.0):
    """CUDA kernel of ``find_rings``, the same for all formats."""

    def __init__(self, specialization: None, device: torch.device) -> None:
        super().__init__(specialization, device)
        self._kernel = self._load("block_tables/rings.cu", {})

    def __call__(self, given: RingArguments) -> None:
        """Launch the kernel."""
        params = Params(
            *addresses(given.blocks, given.lengths, given.starts, given.slots),
            *addresses(given.tails, given.owners, given.rings),
            given.blocks.stride(0),
            *(len(given.lengths), len(given.owners), len(given.rings)),
            *(given.new_tokens, given.clock, given.keeps),
        )
        stream = current_stream(given.blocks.device)
        self._kernel.launch((1, 1, 1), (_THREADS, 1, 1), 0, params, stream)

    @staticmethod
    def disagreement(
        specialization: None, kernel: Callable[[Any], None], device: torch.device
    ) -> float:
        """Return the fraction of numbers that differ over a sequence of changing batches."""
        differing = []
        steps = checked_steps(device), checked_steps(device)
        for found, expected in zip(*steps, strict=True):
            kernel(found)
            rings_by_numpy(expected)
            differing += [
                float((one != other).float().mean())
                for one, other in zip(found[-3:], expected[-3:], strict=True)
            ]
        return max(differing)


def checked_steps(device: torch.device, ring_count: int = 40, steps: int = 30) -> list[Any]:
    """Create arguments of ``find_rings`` for steps with requests that come, go and change rows.

    Some requests share blocks of others, and some steps store nothing. All steps have the same
    rings.
    """
    generator = np.random.default_rng(0)
    zeros = {"dtype": torch.int32, "device": device}
    owners = torch.full((ring_count * 20, 2), -1, **zeros)
    rings = torch.zeros(ring_count, RING_FIELDS, **zeros)
    free = generator.permutation(len(owners)).tolist()
    running: list[tuple[list[int], int]] = []
    found = []
    for clock in range(1, steps):
        while len(running) < ring_count * 3 // 4:
            shared = running[0][0][:1] if running and generator.random() < 0.2 else []
            running.append((shared + [free.pop(0) for _ in range(4)], len(shared) * PAGE_TOKENS))
        generator.shuffle(running)
        batch, running = running[: ring_count * 2 // 3], running[ring_count * 2 // 3 :]
        news = [int(generator.choice([1, 1, 3, 127, 130])) for _ in batch]
        totals = [past + new for (_, past), new in zip(batch, news, strict=True)]
        blocks = torch.zeros(len(batch), 8, **zeros)
        for row, (own, _) in enumerate(batch):
            blocks[row, : len(own)] = torch.tensor(own)
        starts = torch.tensor([0, *np.cumsum(news)], **zeros)
        slots = torch.full((sum(news),), -1 if clock % 7 == 0 else 1, device=device)
        tails = torch.zeros(len(batch), 2, **zeros)
        known = (blocks, torch.tensor(totals, **zeros), starts, slots)
        found.append(RingArguments(*known, 4, clock, clock % 5 > 0, tails, owners, rings))
        for (own, past), total in zip(batch, totals, strict=True):
            if total + 130 > len(own) * PAGE_TOKENS:
                free = own[1:] + free
            else:  # Drafts may be rejected; the first new token is never a draft.
                running.append((own, max(past + 1, total - int(generator.integers(0, 3)))))
    return found


def find_rings(given: RingArguments) -> None:
    """Find or assign the ring of each row that stores tokens."""
    kernel = RingsKernel.of(None, given.blocks.device)
    (kernel or rings_by_numpy)(given)


def rings_by_numpy(given: RingArguments) -> None:
    """Run ``find_rings`` on the host; waits for the device."""
    blocks, lengths, starts, slots = (x.cpu().numpy() for x in given[:4])
    tails, owners, rings = (x.cpu().numpy().copy() for x in given[-3:])
    past = np.maximum(lengths - np.diff(starts), 0)
    storing = [
        row
        for row, (start, stop) in enumerate(pairwise(starts.tolist()))
        if stop > start and slots[stop - 1] >= 0
    ]

    def own(row: int, first: int) -> np.ndarray:
        """Return the blocks of a row from ``first`` on, including those of its new tokens."""
        found = blocks[row, first : -(-lengths[row] // PAGE_TOKENS)]
        return found[(found >= 0) & (found < len(owners))]

    for row in storing:
        owners[own(row, -(-past[row] // PAGE_TOKENS))] = -1, 0
    continued: dict[int, int] = {}
    for row in storing:
        if past[row] and 0 <= (block := blocks[row, (past[row] - 1) // PAGE_TOKENS]) < len(owners):
            ring, lease = owners[block].tolist()
            if 0 <= ring < len(rings) and rings[ring, 0] == lease:
                beyond = rings[ring, 2] - past[row]
                if 0 <= beyond < given.new_tokens:
                    continued.setdefault(ring, row)
    ring_of = {row: ring for ring, row in continued.items()}
    ages = (np.int64(given.clock) - rings[:, 3]) % 2**32
    unclaimed = sorted(set(range(len(rings))) - set(continued), key=lambda i: (-ages[i], i))
    if not given.keeps:
        rings[unclaimed, 0] += 1
    free = iter(unclaimed)
    tails[: len(lengths)] = -1, 0
    for row in storing:
        ring, lease = ring_of.get(row, -1), 0
        if ring < 0 and (ring := next(free, -1)) >= 0:
            rings[ring, 0] += 1
            rings[ring, 1] = past[row]
        if ring >= 0:
            lease = rings[ring, 0]
            rings[ring, 2:] = lengths[row], given.clock
            tails[row] = ring, rings[ring, 1]
        owners[own(row, past[row] // PAGE_TOKENS)] = ring, lease
    for target, table in zip(given[-3:], (tails, owners, rings), strict=True):
        target.copy_(torch.from_numpy(table))
