"""KVBudget: a bound on the bytes of all chats of a pipeline; who waits longest goes to disk."""

from __future__ import annotations

import tempfile
import weakref
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from oscar_mm.cache.layout import BLOCK_TOKENS, PAGE_TOKENS
from oscar_mm.decoding import Prompt
from oscar_mm.errors import InputError
from oscar_mm.modality import Modality

if TYPE_CHECKING:
    from oscar_mm.cache.store import PageStore
    from oscar_mm.holding import Holding
    from oscar_mm.prefixes import Prefixes


class KVBudget:
    """Makes room in stores before and after each turn; used under their lock.

    What counts are pages and 16-bit blocks in use, each once, of all chats and kept prefixes. To
    make room, prefixes go first, then the chats that were used least recently and are not
    answering are written to files; they come back with their next use. During a turn the store
    may grow beyond the budget, by what the turn's answer takes more than was foreseen.

    Args:
        store: of the pipeline; ``stores`` takes those of others that share the budget.
        limit: bytes.
        folder: for the files; made if it is not there. By default a temporary one. None: nothing
            is written, and a turn that does not fit is refused.
        prefixes: of the pipeline.

    Raises:
        InputError: the folder cannot be made.
    """

    def __init__(
        self, store: PageStore, limit: int, folder: str | Path | bool, prefixes: Prefixes | None
    ) -> None:
        self.limit, self.prefixes = limit, prefixes
        self.stores = weakref.WeakSet([store])
        self._temporary = None
        self.folder: Path | None = None
        try:
            if folder is True:
                # Goes away with this object, at the latest with the process.
                self._temporary = tempfile.TemporaryDirectory(prefix="oscar-mm-")
                self.folder = Path(self._temporary.name)
            elif folder is not False:
                self.folder = Path(folder)
                self.folder.mkdir(parents=True, exist_ok=True)
        except (OSError, TypeError) as error:
            raise InputError(f"spill={folder!r}: no folder that can be used: {error}") from None
        self._last_use: weakref.WeakKeyDictionary[Holding, int] = weakref.WeakKeyDictionary()
        self._clock = count()

    @property
    def used_bytes(self) -> int:
        """Of the limit."""
        return sum(store.memory().used_bytes for store in self.stores)

    def use(self, chat: Holding) -> None:
        """A chat is in use now."""
        self._last_use[chat] = next(self._clock)

    def new_file(self) -> Path:
        """Where the next chat goes."""
        return self.folder / f"chat-{uuid4().hex}.safetensors"

    def make_room(self, needed: int, chat: Holding) -> None:
        """Until ``needed`` more bytes are free for a chat.

        Raises:
            InputError: there is no room, and nothing more that could go.
        """
        while self.used_bytes + needed > self.limit:
            if self.prefixes:
                self.prefixes.drop_oldest()
                continue
            others = [one for one in self._last_use if one is not chat and one.can_be_spilled]
            if self.folder is None or not others:
                raise InputError(self._refusal(needed))
            min(others, key=self._last_use.__getitem__).spill(self.new_file())

    def settle(self, chat: Holding) -> None:
        """After a turn: others go until the budget holds; the chat itself stays, if need be."""
        try:
            self.make_room(0, chat)
        except InputError:
            # Told when it asks for more.
            return

    @staticmethod
    def bytes_of(store: PageStore, prompt: Prompt, new_tokens: int) -> int:
        """What a turn will take at most, but for the rounding of what is there; 0 before any."""
        policy = store.policy
        text = [Modality.TEXT] * new_tokens
        modalities = [*prompt.modalities[0].tolist(), *text]
        total = 0
        for pools in store.layers.values():
            block = pools.by_bits[16].slot_bytes
            for modality in set(modalities):
                tokens, bits = modalities.count(modality), policy.bits_for(Modality(modality))
                in_blocks = tokens
                if bits < 16:
                    in_blocks = min(tokens, PAGE_TOKENS + policy.window)
                    pages = max(0, tokens - policy.window) // PAGE_TOKENS
                    total += pages * pools.formats[bits].page_bytes
                total += -(-in_blocks // BLOCK_TOKENS) * block
        return total

    def _refusal(self, needed: int) -> str:
        used = self.used_bytes
        remedy = "forget() media, undo() turns or raise kv_budget"
        if self.folder is None:
            remedy = f"close() chats, {remedy}, or let chats be written to disk with spill=True"
        return (
            f"kv_budget is {self.limit:,} bytes: {used:,} are in use and this needs about "
            f"{needed:,} more: {remedy}"
        )
