"""Sessions: the visitors of a page, and the pipelines that answer them."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oscar_mm.apps.demo.model_card import ModelCard
from oscar_mm.apps.demo.session import Session, SessionSettings
from oscar_mm.errors import InputError
from oscar_mm.policy import KVPolicy
from oscar_mm.sizes import format_bytes

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline

MAX_SESSIONS = 64
IDLE_S = 900.0
"""A full page gives up a conversation whose visitor has done nothing for so long."""


class Sessions:
    """Each visitor has a chat of its own; all share a model, a lock and a budget.

    Args:
        pipe: answers; its ``kv_budget`` keeps visitors from filling the memory.
        settings: settings of conversations for which the visitor has chosen none.
        folders: the only folders from which files of messages are read.
    """

    def __init__(self, pipe: Pipeline, settings: SessionSettings, folders: Sequence[Path]) -> None:
        self.pipe, self.settings, self.folders = pipe, settings, folders
        self.card = ModelCard.of(pipe)
        self._pipes: weakref.WeakValueDictionary[KVPolicy, Pipeline] = weakref.WeakValueDictionary(
            {pipe.policy: pipe}
        )
        self._sessions: dict[str, Session] = {}
        self._lock, self._closed = threading.Lock(), False

    def pipeline(self, policy: KVPolicy) -> Pipeline:
        """Give the model this cache format."""
        with self._lock:
            pipe = self._pipes.get(policy)
            if pipe is None:
                pipe = self._pipes[policy] = self.pipe.with_policy(policy)
            return pipe

    def session(self, key: str) -> Session:
        """Return a browser's session, or begin one.

        Anybody can invent keys for free: when the page is full, a session without a conversation
        makes way, and begins anew with the first question.

        Args:
            key: the browser's session hash.

        Raises:
            InputError: the page is full, or closed.
        """
        with self._lock:
            session = self._sessions.get(key)
        if session is None:
            session = self._admit(key, Session(self))
        session.last_active = time.monotonic()
        return session

    def _admit(self, key: str, new: Session) -> Session:
        """Add the new session, unless another thread has added one for this key meanwhile."""
        evicted = None
        with self._lock:
            if self._closed:
                raise InputError("the page is being closed")
            if key in self._sessions:
                return self._sessions[key]
            if len(self._sessions) >= MAX_SESSIONS:
                evicted = self._sessions.pop(self._longest_idle())
            self._sessions[key] = new
        if evicted is not None:
            evicted.close()
        return new

    def _longest_idle(self) -> str:
        """Choose whom to evict: among sessions without a conversation, else among all, the one
        idle longest. A browser that lost its connection does not say so."""
        now = time.monotonic()
        key, session = max(
            self._sessions.items(), key=lambda item: (not item[1].converses, -item[1].last_active)
        )
        if session.converses and now - session.last_active < IDLE_S:
            raise InputError(f"{MAX_SESSIONS} visitors are here already: try again later")
        return key

    def leave(self, key: str) -> None:
        """End a session and free its memory."""
        with self._lock:
            session = self._sessions.pop(key, None)
        if session is not None:
            session.close()

    def close(self) -> None:
        """End all sessions as soon as their answers end, and admit no more."""
        with self._lock:
            self._closed = True
            sessions = list(self._sessions.values())
        for session in sessions:
            session.stop()
        for session in sessions:
            session.close()
        with self._lock:
            self._sessions.clear()

    @property
    def is_empty(self) -> bool:
        """Whether there are no sessions, so that the model answers nobody."""
        return not self._sessions

    @property
    def status(self) -> str:
        """The number of visitors and the memory of all, in words."""
        count, budget = len(self._sessions), self.pipe.budget
        people = f"{count} visitor{'' if count == 1 else 's'} here"
        if budget is None:
            return people
        with self.pipe.lock:
            used = budget.used_bytes
        return f"{people}, {format_bytes(used)} of {format_bytes(budget.limit)} in use"
