"""Hall: the visitors of a page, and the pipelines that answer them."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oscar_mm.apps.demo.settings import Settings
from oscar_mm.apps.demo.visitor import Visitor
from oscar_mm.errors import InputError
from oscar_mm.policy import KVPolicy
from oscar_mm.sizes import format_bytes

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline

MAX_VISITORS = 64
IDLE_S = 900.0
"""A visitor with a conversation who did nothing for so long gives way when the hall is full."""


class Hall:
    """Each visitor has a chat of its own; all share a model, a lock and a budget.

    Args:
        pipe: answers; with a ``kv_budget``, so that visitors cannot fill the memory.
        settings: of conversations where the visitor chose nothing else.
        folders: that files of messages may be in.
    """

    def __init__(self, pipe: Pipeline, settings: Settings, folders: Sequence[Path]) -> None:
        self.pipe, self.settings, self.folders = pipe, settings, folders
        self._pipes: weakref.WeakValueDictionary[KVPolicy, Pipeline] = weakref.WeakValueDictionary(
            {pipe.policy: pipe}
        )
        self._visitors: dict[str, Visitor] = {}
        self._lock, self._closed = threading.Lock(), False

    def pipeline(self, policy: KVPolicy) -> Pipeline:
        """The model with this cache format."""
        with self._lock:
            pipe = self._pipes.get(policy)
            if pipe is None:
                pipe = self._pipes[policy] = self.pipe.with_policy(policy)
            return pipe

    def visitor(self, session: str) -> Visitor:
        """Of a browser session; a new one is let in.

        A session costs a caller nothing to invent: when the hall is full, who has no conversation
        yet gives way, and is let in again with the first question.

        Raises:
            InputError: the hall is full, or closed.
        """
        with self._lock:
            found = self._visitors.get(session)
        if found is None:
            found = self._let_in(session, Visitor(self))
        found.seen = time.monotonic()
        return found

    def _let_in(self, session: str, new: Visitor) -> Visitor:
        """The new visitor, or who came with the same session meanwhile."""
        left = None
        with self._lock:
            if self._closed:
                raise InputError("the page is being closed")
            if session in self._visitors:
                return self._visitors[session]
            if len(self._visitors) >= MAX_VISITORS:
                left = self._visitors.pop(self._gives_way())
            self._visitors[session] = new
        if left is not None:
            left.close()
        return new

    def _gives_way(self) -> str:
        """Whose place is for another one: of those without a conversation, else of all, who was
        idle longest. A browser that lost its connection does not say so."""
        now = time.monotonic()
        session, idlest = max(
            self._visitors.items(), key=lambda item: (not item[1].converses, now - item[1].seen)
        )
        if idlest.converses and now - idlest.seen < IDLE_S:
            raise InputError(f"{MAX_VISITORS} visitors are here already: try again later")
        return session

    def leave(self, session: str) -> None:
        """A visitor has left: what was held for it is free."""
        with self._lock:
            visitor = self._visitors.pop(session, None)
        if visitor is not None:
            visitor.close()

    def close(self) -> None:
        """All visitors leave, as soon as their answers end, and no one is let in any more."""
        with self._lock:
            self._closed = True
            visitors = list(self._visitors.values())
        for visitor in visitors:
            visitor.stop()
        for visitor in visitors:
            visitor.close()
        with self._lock:
            self._visitors.clear()

    @property
    def is_empty(self) -> bool:
        """Whether no one is here, and so nothing is being answered."""
        return not self._visitors

    @property
    def status(self) -> str:
        """Who is here and what all of them hold, in words."""
        count, budget = len(self._visitors), self.pipe.budget
        people = f"{count} visitor{'' if count == 1 else 's'} here"
        if budget is None:
            return people
        with self.pipe.lock:
            used = budget.used_bytes
        return f"{people}, {format_bytes(used)} of {format_bytes(budget.limit)} in use"
