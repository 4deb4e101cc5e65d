"""KVBudget: a bound on the bytes of all chats of a pipeline; who waits longest goes to disk."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import numpy as np

from oscar_mm.cache.slot_set import SlotSet
from oscar_mm.errors import Busy, InputError

if TYPE_CHECKING:
    from oscar_mm.cache.cache import OscarCache
    from oscar_mm.cache.store import PageStore
    from oscar_mm.chat.spill import Spillable
    from oscar_mm.generation.prefix_cache import PrefixCache


@dataclass(frozen=True, eq=False)
class Reservation:
    """Room for an answer that is being written, as long as its writer keeps this.

    Attributes:
        cache: that grows.
        begin: tokens that it holds when the prompt is read.
        added: bytes that it has taken after 0, 1, 2, ... tokens of the answer.
    """

    cache: OscarCache
    begin: int
    added: np.ndarray

    @property
    def outstanding(self) -> int:
        """Bytes that it may still take."""
        if self.cache.closed:
            return 0
        written = min(self.cache.get_seq_length() - self.begin, len(self.added) - 1)
        taken = self.added[written] if written >= 0 else 0
        return int(self.added[max(0, written) :].max() - taken)


class KVBudget:
    """Makes room in stores before and after each turn; used under their lock.

    What counts are pages and tokens in 16 bit, each once, of all chats, kept prefixes and
    requests without a chat. To make room, prefixes go first, then the chats that were used least
    recently and are not answering are written to files; they come back with their next use. What
    a turn takes is counted slot by slot (``oscar_mm.cache.slot_growth``), up to its longest
    answer, and reserved: others that come meanwhile get what is left.

    Args:
        store: of the pipeline; ``stores`` takes those of others that share the budget, as long
            as they are there.
        limit: bytes.
        folder: for the files; made if it is not there. By default a temporary one. None: nothing
            is written, and a turn that does not fit is refused.
        prefixes: of the pipeline.

    Raises:
        InputError: the folder cannot be made.
    """

    def __init__(
        self, store: PageStore, limit: int, folder: str | Path | bool, prefixes: PrefixCache | None
    ) -> None:
        self.limit, self.prefixes = limit, prefixes
        self.stores = weakref.WeakSet([store])
        self._temporary = None
        self.folder: Path | None = None
        try:
            if folder is True:
                # Goes away with this object, at the latest with the process.
                self._temporary = tempfile.TemporaryDirectory(
                    prefix="oscar-mm-", ignore_cleanup_errors=True
                )
                self.folder = Path(self._temporary.name)
            elif folder is not False:
                self.folder = Path(folder)
                self.folder.mkdir(parents=True, exist_ok=True)
        except (OSError, TypeError) as error:
            raise InputError(f"spill={folder!r}: no folder that can be used: {error}") from None
        self._last_use: weakref.WeakKeyDictionary[Spillable, int] = weakref.WeakKeyDictionary()
        self._clock = count()
        self._reservations: weakref.WeakSet[Reservation] = weakref.WeakSet()

    def close(self) -> None:
        """Remove the folder if it is a temporary one; nothing can be written to disk any more."""
        if self._temporary is not None:
            self._temporary.cleanup()
            self.folder = None

    @property
    def used_bytes(self) -> int:
        """Of the limit."""
        return sum(store.memory().used_bytes for store in self.stores)

    @property
    def taken_bytes(self) -> int:
        """Of the limit, with what answers that are being written may still take."""
        return self.used_bytes + sum(one.outstanding for one in self._reservations)

    def reserve(self, cache: OscarCache, prompt: int, added: np.ndarray) -> Reservation:
        """Keep what ``make_room`` has made free for an answer.

        Args:
            cache: that the answer goes on from, before the prompt.
            prompt: tokens that are read before the answer.
            added: bytes after 0, 1, 2, ... tokens of the answer.

        Returns:
            holds the room until it is dropped.
        """
        reservation = Reservation(cache, cache.get_seq_length() + prompt, added)
        self._reservations.add(reservation)
        return reservation

    def use(self, chat: Spillable) -> None:
        """A chat is in use now."""
        self._last_use[chat] = next(self._clock)

    def new_file(self) -> Path:
        """Where the next chat goes."""
        if self.folder is None:
            raise InputError("kv_budget: spill is False, so that nothing can be written to disk")
        return self.folder / f"chat-{uuid4().hex}.safetensors"

    def make_room(self, needed: int, chat: Spillable | None = None) -> None:
        """Until ``needed`` more bytes are free.

        Args:
            needed: bytes.
            chat: that they are for, which stays; also stays who is answering just now.

        Raises:
            Busy: there is no room, whatever else could go, until others have ended; nothing has
                gone then.
        """
        used = self.taken_bytes
        short = used + needed - self.limit
        if short > 0 and short > self._could_go(chat):
            raise Busy(self._refusal(used, needed))
        self._give_way(needed, chat)

    def settle(self, chat: Spillable) -> None:
        """After a turn: others go until the budget holds; the chat itself stays, if need be."""
        self._give_way(0, chat)

    def _give_way(self, needed: int, chat: Spillable | None) -> None:
        """Prefixes and other chats go until that much is free, or nothing more can go."""
        while self.taken_bytes + needed > self.limit:
            if self.prefixes:
                self.prefixes.drop_oldest()
                continue
            others = self._others(chat)
            if not others:
                return
            min(others, key=self._last_use.__getitem__).spill(self.new_file())

    def _others(self, chat: Spillable | None) -> list[Spillable]:
        if self.folder is None:
            return []
        return [one for one in self._last_use if one is not chat and one.can_be_spilled]

    def _could_go(self, chat: Spillable | None) -> int:
        """Bytes of the slots that nobody but prefixes and other chats holds."""
        others = [one.conversation.cache for one in self._others(chat)]
        kept = [] if self.prefixes is None else self.prefixes.caches
        return self._freed([*others, *kept])

    def _freed(self, caches: Sequence[OscarCache]) -> int:
        """Bytes of the slots that nobody but these caches holds."""
        total = 0
        for store in self.stores:
            some = [cache.ledger for cache in caches if cache.store is store]
            held = SlotSet.of(stream for ledger in some for stream in ledger.streams())
            total += held.bytes(store, unshared=True)
        return total

    def _refusal(self, used: int, needed: int) -> str:
        remedy = "forget() media, undo() turns, wait for other answers or raise kv_budget"
        if self.folder is None:
            remedy = f"close() chats, {remedy}, or let chats be written to disk with spill=True"
        return (
            f"kv_budget is {self.limit:,} bytes: {used:,} are in use and this needs about "
            f"{needed:,} more: {remedy}"
        )
