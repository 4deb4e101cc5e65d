"""Holding: what a chat holds, in the pipeline's store or on disk."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.persist import load_cache, save_cache
from oscar_mm.chat.conversation import Conversation

if TYPE_CHECKING:
    from oscar_mm.generation.generation import Generation
    from oscar_mm.generation.prompt import Prompt
    from oscar_mm.pipelines.pipeline import Pipeline


class Spillable:
    """A conversation whose cache is in the store, or in a file; used under the pipeline's lock.

    Args:
        pipe: of the chat.
        conversation: to begin with.

    Attributes:
        now: the conversation; None once it was given up. Its ``kept`` is None while it is on disk.
        answering: the turn that goes on from it just now, or None.
    """

    def __init__(self, pipe: Pipeline, conversation: Conversation) -> None:
        self.pipe = pipe
        self.answering: Generation | None = None
        self.now: Conversation | None = conversation
        self._file: _File | None = None
        if pipe.budget is not None:
            with pipe.lock:
                pipe.budget.use(self)
                self.settle()

    @property
    def conversation(self) -> Conversation:
        """``now``; RuntimeError if the chat is closed."""
        if self.now is None:
            raise RuntimeError("the chat is closed")
        return self.now

    def at_hand(self) -> Conversation:
        """The conversation with its cache, which is read from its file if it was spilled.

        Raises:
            InputError: no room in the budget, or the file is gone or was altered.
        """
        budget, held, file = self.pipe.budget, self.conversation, self._file
        if budget is not None:
            budget.use(self)
        if file is not None:
            if budget is not None:
                budget.make_room(file.bytes, self)
            self.now = replace(held, kept=file.load(self.pipe))
            file.remove()
            self._file = None
        return self.without_reasoning()

    def without_reasoning(self) -> Conversation:
        """The conversation; what its cache, if it is in the store, held beyond the turns is gone:
        the reasoning of the last one."""
        held = self.conversation
        surplus = held.cache.get_seq_length() - held.tokens if held.kept is not None else 0
        if surplus:
            cache = held.cache.fork()
            cache.crop(-surplus)
            self.now = replace(held, kept=cache)
            held.cache.close()
        return self.conversation

    def make_room(self, prompt: Prompt, max_new_tokens: int) -> None:
        """Before a turn: what it will take is free, see ``Pipeline.make_room``.

        Raises:
            InputError: there is no room.
        """
        growth = self.pipe.growth(prompt, max_new_tokens, self.at_hand().cache)
        self.pipe.make_room(growth, prompt.tokens, self)

    def replace(self, new: Conversation) -> None:
        """Go on from ``new``, over a fork of the cache that is held now, and close that one."""
        old, self.now = self.conversation.cache, new
        old.close()

    def settle(self) -> None:
        """After a turn: others give way until the budget holds, if there is one."""
        if self.pipe.budget is not None:
            self.pipe.budget.settle(self)

    @property
    def can_be_spilled(self) -> bool:
        """Whether there is anything to spill, and no turn is going on."""
        held = self.now
        return bool(held and held.kept is not None and held.turns and not self.answering)

    def spill(self, path: Path) -> None:
        """Write keys and values to a file and give up their pages; ``at_hand`` gets them back.

        Raises:
            InputError: the file cannot be written.
        """
        held = self.conversation
        self._file = _File(path, held.cache, self.pipe.fingerprint)
        self.now = replace(held, kept=None)
        held.cache.close()

    def give_up(self) -> None:
        """Hold nothing from now on."""
        held, self.now = self.now, None
        if held is not None and held.kept is not None:
            held.kept.close()
        if self._file is not None:
            self._file.remove()


class _File:
    """A spilled cache; the file is removed when nobody can ask for it any more."""

    def __init__(self, path: Path, cache: OscarCache, fingerprint: str) -> None:
        save_cache(cache, path, fingerprint=fingerprint)
        self.path, self.bytes = path, path.stat().st_size
        self.remove = weakref.finalize(self, path.unlink, missing_ok=True)

    def load(self, pipe: Pipeline) -> OscarCache:
        cache, _ = load_cache(
            self.path, fingerprint=pipe.fingerprint, store=pipe.store, device=pipe.layer_devices
        )
        return cache
