"""SpillableConversation: a conversation whose cache is in the pipeline's store or in a file."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.persist import load_cache, save_cache
from oscar_mm.chat.conversation import ChatEngine, Conversation
from oscar_mm.generation.generation import Generation
from oscar_mm.generation.prompt import Prompt


class SpillableConversation:
    """A conversation that may go to disk while nobody uses it; used under the pipeline's lock.

    Args:
        engine: of the chat.
        conversation: to begin with.

    Attributes:
        answering: the answer that is being written just now, or None.
    """

    def __init__(self, engine: ChatEngine, conversation: Conversation) -> None:
        self.engine = engine
        self.answering: Generation | None = None
        self._conversation: Conversation | None = conversation
        self._file: _SpillFile | None = None
        if (budget := engine.admission.budget) is not None:
            with engine.lock:
                budget.use(self)
                self.settle()

    @property
    def conversation(self) -> Conversation:
        """The conversation, without its cache (``kv`` is None) while that is on disk.

        Raises:
            RuntimeError: the chat is closed.
        """
        if self._conversation is None:
            raise RuntimeError("the chat is closed")
        return self._conversation

    @conversation.setter
    def conversation(self, new: Conversation) -> None:
        self._conversation = new

    @property
    def cache(self) -> OscarCache:
        """The cache of the conversation; RuntimeError while it is on disk."""
        return self.conversation.cache

    @property
    def closed(self) -> bool:
        """Whether the conversation was given up."""
        return self._conversation is None

    def load(self) -> Conversation:
        """The conversation with its cache, which is read from its file if it was spilled.

        Raises:
            InputError: no room in the budget, or the file is gone or was altered.
        """
        conversation, budget = self.conversation, self.engine.admission.budget
        if budget is not None:
            budget.use(self)
        if (file := self._file) is not None:
            if budget is not None:
                budget.make_room(file.bytes, self)
            self.conversation = replace(conversation, kv=file.load(self.engine))
            file.remove()
            self._file = None
        return self.drop_reasoning()

    def drop_reasoning(self) -> Conversation:
        """The conversation, after the reasoning of its last answer has left the cache, if that is
        in the store."""
        conversation = self.conversation
        if conversation.kv is None:
            return conversation
        old = conversation.cache
        if surplus := old.get_seq_length() - conversation.tokens:
            cache = old.fork()
            cache.crop(-surplus)
            self.conversation = replace(conversation, kv=cache)
            old.close()
        return self.conversation

    def make_room(self, prompt: Prompt, max_new_tokens: int) -> None:
        """Have what a turn will take free, before it is read.

        Raises:
            Busy: there is no room.
        """
        cache, admission = self.load().cache, self.engine.admission
        admission.reserve(admission.growth(prompt, max_new_tokens, cache), prompt, cache, self)

    def replace(self, new: Conversation) -> None:
        """Go on from ``new``, over a fork of the present cache, and close the present one."""
        old, self.conversation = self.conversation.cache, new
        old.close()
        new.cache.shrink()

    def settle(self) -> None:
        """After a turn: others give way until the budget holds, if there is one."""
        if (budget := self.engine.admission.budget) is not None:
            budget.settle(self)

    @property
    def can_be_spilled(self) -> bool:
        """Whether there is anything to spill, and no turn is going on."""
        now = self._conversation
        return bool(now and now.kv is not None and now.turns and not self.answering)

    def spill(self, path: Path) -> None:
        """Write keys and values to a file and give up their pages; ``load`` gets them back.

        Raises:
            InputError: the file cannot be written.
        """
        conversation = self.conversation
        self._file = _SpillFile(path, conversation.cache, self.engine.family.fingerprint)
        self.conversation = replace(conversation, kv=None)
        conversation.cache.close()

    def close(self) -> None:
        """Give up pages and file; a second time does nothing."""
        conversation, self._conversation = self._conversation, None
        if conversation is not None and conversation.kv is not None:
            conversation.kv.close()
        if self._file is not None:
            self._file.remove()


class _SpillFile:
    """A spilled cache; the file is removed when nobody can ask for it any more."""

    def __init__(self, path: Path, cache: OscarCache, fingerprint: str) -> None:
        save_cache(cache, path, fingerprint=fingerprint)
        self.path, self.bytes = path, path.stat().st_size
        self.remove = weakref.finalize(self, path.unlink, missing_ok=True)

    def load(self, engine: ChatEngine) -> OscarCache:
        """The cache, in the engine's store."""
        cache, _ = load_cache(
            self.path,
            fingerprint=engine.family.fingerprint,
            store=engine.store,
            device=engine.family.layer_devices,
        )
        return cache
