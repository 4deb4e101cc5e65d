"""Ledger: which token is where. Host-side, once for all layers; layers only move bytes.

A forward pass brings every layer the keys and values of the same new tokens. The ledger decides
once what is to happen to them (a ``Step``: pages to pack, blocks to write) and every layer carries
it out on its own pools. Crop, fork, beam reordering and reset are changes of the ledger alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from oscar_mm.cache.layout import BLOCK_TOKENS, PAGE_TOKENS
from oscar_mm.cache.pool import SlotAllocator
from oscar_mm.cache.stream import Stream
from oscar_mm.modality import PADDING, Modality
from oscar_mm.policy import KVPolicy

_BLOCKS_PER_PAGE = PAGE_TOKENS // BLOCK_TOKENS
_SINK = len(Modality)
"""Stream codes are the modality, plus this for the sinks of a modality that is packed."""
NOWHERE = 255
"""Stream code of padding: such a token has an index but is not stored."""


@dataclass
class PackJob:
    """Tokens of one stream that become pages: first those of its tail, then new ones."""

    row: int
    bits: int
    pages: list[int]
    blocks: list[int]
    tail: int
    source: np.ndarray


@dataclass
class Sequence:
    """One row of the batch: the stream of every token, and the streams."""

    codes: bytearray = field(default_factory=bytearray)
    streams: dict[int, Stream] = field(default_factory=dict)
    stored: int = 0

    def positions(self, code: int) -> np.ndarray:
        """Indices of the stream's tokens in the sequence, ascending."""
        return np.flatnonzero(np.frombuffer(self.codes, dtype=np.uint8) == code)

    def real_tokens(self, count: int) -> np.ndarray:
        """(count,) bool: which of the last ``count`` tokens are stored, not padding."""
        return np.frombuffer(bytes(self.codes[-count:]), dtype=np.uint8) != NOWHERE

    def before(self) -> Sequence:
        """The streams as they are now; the codes go on growing, beyond what these streams hold."""
        streams = {code: stream.copy() for code, stream in self.streams.items()}
        return Sequence(self.codes, streams, self.stored)

    def recent(self, window: int) -> np.ndarray:
        """Stream codes of the last ``window`` stored tokens."""
        codes = np.frombuffer(self.codes, dtype=np.uint8)
        tail = codes[-2 * window :] if window else codes[:0]
        stored = tail[tail != NOWHERE]
        if len(stored) < window < len(codes):
            stored = codes[codes != NOWHERE]
        return stored[-window:] if window else stored


@dataclass
class Step:
    """What one forward pass does to the pools of every layer, in this order.

    Attributes:
        packs: pages to pack. All of them are read before anything is written, because a block
            that a pack empties may be handed out again in the same step.
        copies: (source, target) blocks: a shared block is copied before it is appended to.
        writes: (4, n) int64: row and index of a new token, block and place that it is written to.
        real: for each row the indices of its tokens that are not padding; None if all are real.
        past: the sequences before the step. Their slots stay as they are until a layer carries
            the step out, so attention over the past and the new tokens comes first.
    """

    packs: list[PackJob] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    writes: np.ndarray | None = None
    real: list[np.ndarray] | None = None
    past: list[Sequence] = field(default_factory=list)
    _made: dict[Hashable, Any] = field(default_factory=dict)

    def writes_on(self, device: torch.device) -> torch.Tensor:
        """``writes`` on a device, moved there once for all its layers."""
        return self.once(device, lambda: torch.from_numpy(self.writes).to(device))

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` returns, made once for all layers that ask with the same key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class Ledger:
    """Sequences of a batch and the slots that hold them."""

    def __init__(self, policy: KVPolicy) -> None:
        self.policy = policy
        self.allocators = {bits: SlotAllocator() for bits in sorted({*policy.bits, 16})}
        self.sequences: list[Sequence] = []
        self.steps = 0
        self.last = Step()

    @property
    def length(self) -> int:
        """Tokens of a row, padding included; the same for all rows."""
        return len(self.sequences[0].codes) if self.sequences else 0

    def advance(self, modalities: np.ndarray) -> Step:
        """Take in new tokens: (batch, tokens) modality ids, -1 for padding."""
        if not self.sequences:
            self.sequences = [Sequence() for _ in range(len(modalities))]
        step = Step(past=[sequence.before() for sequence in self.sequences])
        if (modalities == PADDING).any():
            step.real = [np.flatnonzero(row != PADDING) for row in modalities]
        writes: list[np.ndarray] = []
        for row, (sequence, ids) in enumerate(zip(self.sequences, modalities, strict=True)):
            codes = self._stream_codes(sequence, ids)
            sequence.codes += codes.tobytes()
            for code in np.unique(codes[codes != NOWHERE]).tolist():
                if code not in sequence.streams:
                    modality = Modality(code % _SINK)
                    bits = 16 if code >= _SINK else self.policy.bits_for(modality)
                    sequence.streams[code] = Stream(modality, bits)
            for code, stream in sequence.streams.items():
                new = np.flatnonzero(codes == code)
                pages = self._pages_to_pack(sequence, code, stream, len(new))
                if pages or len(new):
                    self._plan(step, writes, row, stream, new, pages)
        step.writes = np.concatenate(writes, axis=1) if writes else None
        self.steps += 1
        self.last = step
        return step

    def _stream_codes(self, sequence: Sequence, ids: np.ndarray) -> np.ndarray:
        """Stream code of each new token; counts them as stored."""
        codes = ids.astype(np.uint8)  # PADDING, -1, becomes NOWHERE, 255
        real = np.flatnonzero(ids != PADDING)
        for index in real[: max(0, self.policy.sinks - sequence.stored)].tolist():
            if self.policy.bits_for(Modality(int(ids[index]))) < 16:
                codes[index] += _SINK
        sequence.stored += len(real)
        return codes

    def _pages_to_pack(self, sequence: Sequence, code: int, stream: Stream, new: int) -> int:
        """Full pages among the tokens of a tail that have left the window."""
        total = stream.tail + new
        if stream.bits == 16 or total < PAGE_TOKENS:
            return 0
        in_window = int((sequence.recent(self.policy.window) == code).sum())
        return max(0, total - in_window) // PAGE_TOKENS

    def _plan(
        self,
        step: Step,
        writes: list[np.ndarray],
        row: int,
        stream: Stream,
        new: np.ndarray,
        pages: int,
    ) -> None:
        """Add one stream's part to a step and bring the stream to its state after it."""
        blocks = self.allocators[16]
        taken = pages * PAGE_TOKENS
        from_tail = min(stream.tail, taken)
        if pages:
            read = stream.blocks[: pages * _BLOCKS_PER_PAGE]
            ids = self.allocators[stream.bits].allocate(pages)
            source = new[: taken - from_tail]
            step.packs.append(PackJob(row, stream.bits, ids, read, from_tail, source))
            stream.pages += ids
            stream.page_tokens += [PAGE_TOKENS] * pages
            stream.blocks = stream.blocks[len(read) :]
            stream.tail -= from_tail
            new = new[len(source) :]
            blocks.release(read)
        if not len(new):
            return
        if stream.tail % BLOCK_TOKENS and blocks.is_shared(stream.blocks[-1]):
            [own] = blocks.allocate(1)
            step.copies.append((stream.blocks[-1], own))
            blocks.release(stream.blocks[-1:])
            stream.blocks[-1] = own
        places = stream.tail + np.arange(len(new))
        stream.tail += len(new)
        stream.blocks += blocks.allocate(-(-stream.tail // BLOCK_TOKENS) - len(stream.blocks))
        targets = np.asarray(stream.blocks)[places // BLOCK_TOKENS]
        writes.append(np.stack([np.full(len(new), row), new, targets, places % BLOCK_TOKENS]))

    def crop(self, count: int) -> None:
        """Remove the last ``count`` tokens of every row."""
        if not 0 <= count <= self.length:
            raise ValueError(f"cannot remove {count} tokens from a cache of {self.length}")
        for sequence in self.sequences if count else ():
            removed = np.frombuffer(bytes(sequence.codes[-count:]), dtype=np.uint8)
            for code, stream in sequence.streams.items():
                pages, blocks = stream.drop_last(int((removed == code).sum()))
                self.allocators[16].release(blocks)
                if pages:
                    self.allocators[stream.bits].release(pages)
            sequence.stored -= int((removed != NOWHERE).sum())
            del sequence.codes[-count:]

    def select(self, rows: SequenceOf[int]) -> None:
        """Make the batch these rows of it, in this order, with repetition: slots are shared."""
        for row in rows:
            if not 0 <= row < len(self.sequences):
                raise IndexError(f"row {row} of a cache of {len(self.sequences)} sequences")
        old, self.sequences = self.sequences, []
        for row in rows:
            streams = {code: stream.copy() for code, stream in old[row].streams.items()}
            self._change_owners(streams.values(), SlotAllocator.share)
            self.sequences.append(Sequence(old[row].codes[:], streams, old[row].stored))
        for sequence in old:
            self._change_owners(sequence.streams.values(), SlotAllocator.release)

    def clear(self) -> None:
        """Forget all sequences."""
        self.select([])

    def streams(self) -> Iterator[Stream]:
        """All streams of all rows."""
        for sequence in self.sequences:
            yield from sequence.streams.values()

    def _change_owners(self, streams, change) -> None:
        for stream in streams:
            if stream.pages:
                change(self.allocators[stream.bits], stream.pages)
            change(self.allocators[16], stream.blocks)

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables: a stream code per token, four bytes per page or block id."""
        ids = sum(len(stream.pages) + len(stream.blocks) for stream in self.streams())
        return sum(len(sequence.codes) for sequence in self.sequences) + 4 * ids
