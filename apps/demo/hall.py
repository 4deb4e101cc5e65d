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
from oscar_mm.pipelines.twin import with_policy
from oscar_mm.policy import KVPolicy
from oscar_mm.sizes import format_bytes

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline

MAX_VISITORS = 64
IDLE_S = 900.0
"""A visitor that did nothing for so long gives way to a new one when the hall is full."""


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
        self._lock = threading.Lock()

    def pipeline(self, policy: KVPolicy) -> Pipeline:
        """The model with this cache format."""
        with self._lock:
            pipe = self._pipes.get(policy)
            if pipe is None:
                pipe = self._pipes[policy] = with_policy(self.pipe, policy)
            return pipe

    def visitor(self, session: str) -> Visitor:
        """Of a browser session; a new one is let in.

        Raises:
            InputError: the hall is full.
        """
        with self._lock:
            found, full = self._visitors.get(session), len(self._visitors) >= MAX_VISITORS
        if found is None:
            if full:
                self._make_room()
            new = Visitor(self)
            with self._lock:
                found = self._visitors.setdefault(session, new)
        found.seen = time.monotonic()
        return found

    def _make_room(self) -> None:
        """Whoever was idle longest leaves: a browser that lost its connection does not say so."""
        with self._lock:
            session, idlest = min(self._visitors.items(), key=lambda item: item[1].seen)
        if time.monotonic() - idlest.seen < IDLE_S:
            raise InputError(f"{MAX_VISITORS} visitors are here already: try again later")
        self.leave(session)

    def leave(self, session: str) -> None:
        """A visitor has left: what was held for it is free."""
        with self._lock:
            visitor = self._visitors.pop(session, None)
        if visitor is not None:
            visitor.close()

    def close(self) -> None:
        """All visitors leave."""
        for session in list(self._visitors):
            self.leave(session)

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
