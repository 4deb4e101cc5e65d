"""Ledger: which token is where. Host-side, once for all layers; layers only move bytes.

A forward pass brings every layer the keys and values of the same new tokens. The ledger decides
once what is to happen to them (a ``Step``: pages to pack, blocks to write) and every layer carries
it out on its own pools. Crop, fork, beam reordering and reset are changes of the ledger alone, and
so is forgetting tokens, but for 16-bit ones behind them, which move up.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

import numpy as np

from oscar_mm.cache.layout import BLOCK_TOKENS, PAGE_TOKENS
from oscar_mm.cache.sequence import NOWHERE, SINK, Sequence
from oscar_mm.cache.step import PackJob, Step
from oscar_mm.cache.store import PageStore
from oscar_mm.cache.stream import Stream, in_blocks
from oscar_mm.errors import InputError
from oscar_mm.modality import PADDING, Modality

_BLOCKS_PER_PAGE = PAGE_TOKENS // BLOCK_TOKENS


class Ledger:
    """Sequences of a batch and the slots that hold them.

    Attributes:
        changes: grows with every change of a sequence. ``PageStore.trim`` counts its own.
    """

    def __init__(self, store: PageStore) -> None:
        self.store, self.policy, self.allocators = store, store.policy, store.allocators
        # Always the same list: the store takes its slots back once the ledger is gone.
        self.sequences: list[Sequence] = []
        self.steps = self.changes = 0
        self.last = Step()
        store.register(self)

    def fork(self) -> Ledger:
        """A ledger of the same sequences, over the same slots; what it adds is its own."""
        twin = Ledger(self.store)
        twin.steps = self.steps
        twin.hold([sequence.copy() for sequence in self.sequences])
        return twin

    def hold(self, sequences: list[Sequence]) -> None:
        """Become an owner of all slots of these sequences, which take the place of those held."""
        old = self.sequences[:]
        self.changes += 1
        # In this order, so that whatever interrupts it no slot is given back twice.
        self.store.share(sequences)
        self.sequences[:] = sequences
        self.store.release(old)

    @property
    def length(self) -> int:
        """Tokens of a row, padding included; the same for all rows."""
        return len(self.sequences[0].codes) if self.sequences else 0

    def advance(self, modalities: np.ndarray) -> Step:
        """Take in new tokens: (batch, tokens) modality ids, -1 for padding."""
        self.store.collect()
        self.changes += 1
        if not self.sequences:
            self.sequences += [Sequence() for _ in range(len(modalities))]
        step = Step(past=[sequence.before() for sequence in self.sequences])
        if (modalities == PADDING).any():
            step.real = [np.flatnonzero(row != PADDING) for row in modalities]
        writes: list[np.ndarray] = []
        for row, (sequence, ids) in enumerate(zip(self.sequences, modalities, strict=True)):
            if len(ids) == 1 and self._take_token(writes, row, sequence, int(ids[0])):
                continue
            codes = self._stream_codes(sequence, ids)
            sequence.codes += codes.tobytes()
            for code in np.unique(codes[codes != NOWHERE]).tolist():
                if code not in sequence.streams:
                    modality = Modality(code % SINK)
                    bits = 16 if code >= SINK else self.policy.bits_for(modality)
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

    def foretold(self, modalities: np.ndarray) -> np.ndarray | None:
        """``Step.writes`` of ``advance`` for (batch, 1) tokens, if it would do nothing but append.

        No sequence changes. What is written there is seen by nobody before ``advance``, but blocks
        that are free may be foretold to others too, see ``SlotAllocator.promises``. None where a
        page would be packed, a block copied, a stream begun or a pool grown, or no token stored.
        """
        self.store.collect()
        writes: list[tuple[int, int, int, int]] = []
        taken, blocks = 0, self.allocators[16]
        for row, code in enumerate(modalities[:, 0].tolist()):
            if code == PADDING:
                continue
            stream = self._stream_to_append_to(self.sequences[row], code)
            if stream is None:
                return None
            place = stream.tail % BLOCK_TOKENS
            block = stream.blocks[-1] if place else blocks.foretell(taken)
            if block is None:
                return None
            taken += place == 0
            writes.append((row, 0, block, place))
        return np.array(writes).T if writes else None

    def _take_token(
        self, writes: list[np.ndarray], row: int, sequence: Sequence, code: int
    ) -> bool:
        """What ``advance`` does, for one token that only goes to the end of its stream.

        A decode step of many rows brings little else. False, and nothing is done, for others.
        """
        stream = self._stream_to_append_to(sequence, code)
        if stream is None:
            return False
        place = stream.tail % BLOCK_TOKENS
        if place == 0:
            stream.blocks += self.allocators[16].allocate(1)
        sequence.codes.append(code)
        sequence.stored += 1
        stream.tail += 1
        writes.append(np.array([[row], [0], [stream.blocks[-1]], [place]]))
        return True

    def _stream_to_append_to(self, sequence: Sequence, code: int) -> Stream | None:
        """The stream to whose end a token goes and does nothing else; None where it may begin a
        stream, fill a page or meet another owner's block."""
        stream = sequence.streams.get(code)
        if stream is None or sequence.stored < self.policy.sinks:
            return None
        window = self.policy.window
        for other, one in sequence.streams.items():
            total = one.tail + (one is stream)
            if one.bits < 16 and total >= PAGE_TOKENS:
                in_window = int((sequence.recent(max(0, window - 1)) == other).sum())
                if total - in_window - (one is stream and window > 0) >= PAGE_TOKENS:
                    return None
        if stream.tail % BLOCK_TOKENS and self.allocators[16].is_shared(stream.blocks[-1]):
            return None
        return stream

    def _stream_codes(self, sequence: Sequence, ids: np.ndarray) -> np.ndarray:
        """Stream code of each new token; counts them as stored."""
        codes = ids.astype(np.uint8)  # PADDING, -1, becomes NOWHERE, 255
        real = np.flatnonzero(ids != PADDING)
        for index in real[: max(0, self.policy.sinks - sequence.stored)].tolist():
            if self.policy.bits_for(Modality(int(ids[index]))) < 16:
                codes[index] += SINK
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
            stream.add_pages(ids)
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
        first = int(places[0]) // BLOCK_TOKENS
        targets = in_blocks(stream.blocks[first:], places - first * BLOCK_TOKENS)
        writes.append(np.stack([np.full(len(new), row), new, *targets]))

    def crop(self, count: int) -> None:
        """Remove the last ``count`` tokens of every row."""
        if not 0 <= count <= self.length:
            raise ValueError(f"cannot remove {count} tokens from a cache of {self.length}")
        self.changes += 1
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
        self.hold([self.sequences[row].copy() for row in rows])

    def forget(self, row: int, start: int, stop: int) -> np.ndarray:
        """Take the tokens start to stop - 1 of a row out; its length and positions stay.

        Returns:
            (4, n) int64: blocks and places of 16-bit tokens that move up, and where to, for every
            layer to carry out in this order before anything else.
        """
        if not 0 <= row < len(self.sequences):
            raise InputError(f"forget: row {row} of a cache of {len(self.sequences)} sequences")
        if not 0 <= start <= stop <= self.length:
            raise InputError(
                f"forget: tokens {start} to {stop} of a cache of {self.length}; "
                "start <= stop, counted from 0"
            )
        self.changes += 1
        sequence = self.sequences[row]
        codes = np.frombuffer(bytes(sequence.codes[:stop]), dtype=np.uint8)
        before, gone = codes[:start], codes[start:]
        moves = []
        for code in np.unique(gone[gone != NOWHERE]).tolist():
            stream = sequence.streams[code]
            first = int((before == code).sum())
            last = first + int((gone == code).sum())
            sequence.stored -= last - first
            packed = stream.packed
            if first < packed:
                cut, left = stream.cut_pages(first, min(last, packed))
                self.allocators[stream.bits].share(left)
                self.allocators[stream.bits].release(cut)
            if last > packed:
                moves.append(self._close_gap(stream, max(first - packed, 0), last - packed))
        sequence.codes[start:stop] = bytes([NOWHERE]) * (stop - start)
        return np.concatenate([np.empty((4, 0), np.int64), *moves], axis=1)

    def _close_gap(self, stream: Stream, start: int, stop: int) -> np.ndarray:
        """Take the tokens start to stop - 1 out of a tail: those behind them move up."""
        slots, old = self.allocators[16], stream.blocks[:]
        if stop == stream.tail:
            slots.release(stream.drop_last(stop - start)[1])
            return np.empty((4, 0), np.int64)
        first = start // BLOCK_TOKENS
        # Tokens before the gap stay in place, unless their block is another owner's too.
        copied = first * BLOCK_TOKENS if slots.is_shared(old[first]) else start
        kept = np.concatenate([np.arange(copied, start), np.arange(stop, stream.tail)])
        targets = copied + np.arange(len(kept))
        stream.tail -= stop - start
        del stream.blocks[-(-stream.tail // BLOCK_TOKENS) :]
        for index in range(first, len(stream.blocks)):
            if slots.is_shared(old[index]):
                stream.blocks[index : index + 1] = slots.allocate(1)
        staying = set(stream.blocks)
        slots.release([block for block in old if block not in staying])
        return np.concatenate([in_blocks(old, kept), in_blocks(stream.blocks, targets)])

    def clear(self) -> None:
        """Forget all sequences."""
        self.select([])

    def streams(self) -> Iterator[Stream]:
        """All streams of all rows."""
        for sequence in self.sequences:
            yield from sequence.streams.values()

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables: one per token, four per block, eight per entry of a page."""
        ids = sum(2 * len(stream.pages) + len(stream.blocks) for stream in self.streams())
        return sum(len(sequence.codes) for sequence in self.sequences) + 4 * ids
