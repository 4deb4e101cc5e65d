"""Sessions: the conversations of a page, who visits them, and the pipelines that answer.

ConversationFolder: conversations in files, for a page that is served again.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscar_mm.apps.demo.measured_chat import MemorySample
from oscar_mm.apps.demo.session import Session
from oscar_mm.apps.demo.transcript import PreviewStore
from oscar_mm.apps.demo.visitor_input import SessionSettings
from oscar_mm.apps.model_card import ModelCard
from oscar_mm.errors import InputError, MemoryBusy
from oscar_mm.files import whole_file, writing
from oscar_mm.policy import KVPolicy
from oscar_mm.sizes import format_bytes

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline

MAX_SESSIONS = 64
"""Most conversations on the server."""
IDLE_S = 900.0
"""A full page gives up a conversation whose visitor has done nothing for so long."""
MAX_UNVISITED_S = 6 * 3600.0
"""How long a conversation that nobody visits stays."""
MAX_UNVISITED_BYTES = 2**30
"""Most bytes of keys and values of all conversations that nobody visits."""
MAX_VISITS = 4 * MAX_SESSIONS
"""Most browsers whose latest conversation is remembered."""
MAX_FILES = 64
"""Most conversations of a folder."""
MAX_BYTES = 4 * 2**30
"""Most bytes of a folder."""
MAX_AGE_S = 7 * 24 * 3600.0
"""How long a conversation stays in a folder."""
_ID = re.compile(r"[A-Za-z0-9_-]{32}")
_MAX_SAMPLES = 160
_PATIENCE_S = 60.0
"""How long ``save`` waits for a running answer."""
_log = logging.getLogger(__name__)


class Sessions:
    """Each visitor has a chat of its own; all share a model, a lock and a budget.

    A conversation outlives the visit: who knows its id goes on with it, until it is old or others
    need its place.

    Args:
        pipe: answers; its ``kv_budget`` keeps visitors from filling the memory.
        settings: settings of conversations for which the visitor has chosen none.
        folders: the only folders from which files of messages are read.
        keep: folder to which conversations are written after each change, and from which they go
            on when the page is served again; None for none.

    Raises:
        InputError: the folder cannot be made.
    """

    def __init__(
        self,
        pipe: Pipeline,
        settings: SessionSettings,
        folders: Sequence[Path],
        keep: Path | None = None,
    ) -> None:
        self.pipe, self.settings, self.folders = pipe, settings, tuple(folders)
        self.card, self.previews = ModelCard.of(pipe), PreviewStore()
        self.folder = None if keep is None else ConversationFolder(keep)
        self._pipes: weakref.WeakValueDictionary[KVPolicy, Pipeline] = weakref.WeakValueDictionary(
            {pipe.policy: pipe}
        )
        self._sessions: dict[str, Session] = {}
        self._visits: dict[str, str] = {}
        # A browser whose connection broke comes back with its old session hash.
        self._former_visits: dict[str, str] = {}
        self._lock, self._closed = threading.Lock(), False

    def pipeline(self, policy: KVPolicy) -> Pipeline:
        """Give the model this cache format."""
        with self._lock:
            pipe = self._pipes.get(policy)
            if pipe is None:
                pipe = self._pipes[policy] = self.pipe.with_policy(policy)
            return pipe

    def session(self, key: str) -> Session:
        """Return the session that a browser visits, or begin one.

        Anybody can invent keys for free: when the page is full, a session without a conversation
        makes way, and begins anew with the first question.

        Args:
            key: the browser's session hash.

        Raises:
            InputError: the page is full, or closed.
        """
        with self._lock:
            if key in self._former_visits:
                self._add_visit(key, self._former_visits[key])
            session = self._sessions.get(self._visits.get(key, ""))
        if session is None:
            session = self._admit(key, Session(self))
        session.last_active = time.monotonic()
        return session

    def visit(self, key: str, session_id: str) -> Session:
        """Have a browser go on with a conversation, or begin one where there is none of this id.

        Args:
            key: the browser's session hash.
            session_id: ``Session.id``, which only those know who have the page's address.

        Raises:
            InputError: the page is full, or closed.
        """
        self._give_up(self._expired())
        with self._lock:
            exists = session_id in self._sessions and not self._closed
            if exists:
                self._add_visit(key, session_id)
        return self.session(key) if exists else self._admit(key, self._read(session_id))

    def _read(self, session_id: str) -> Session:
        """Read a conversation of the folder into a session, or make an empty one."""
        session = Session(self)
        if self.folder is not None and not self.folder.load(session, session_id):
            session.close()
            session = Session(self)
        return session

    def fork(self, key: str) -> Session:
        """Have a browser visit a copy of its conversation; the other stays at its address.

        Raises:
            InputError: the page is full, or closed.
        """
        fork = self._admit(key, self.session(key).fork(), is_fork=True)
        self.save_later(fork)
        return fork

    def save_later(self, session: Session) -> None:
        """Write a session to the folder, if there is one, in the background."""
        if self.folder is not None and session in self:
            self.folder.save_later(session)

    def __contains__(self, session: Session) -> bool:
        """Whether the session has not been given up."""
        return self._sessions.get(session.id) is session

    def _add_visit(self, key: str, session_id: str) -> None:
        self._former_visits.pop(key, None)
        _set_latest(self._visits, key, session_id)

    def _admit(self, key: str, new: Session, *, is_fork: bool = False) -> Session:
        """Add the new session, unless another thread has added one for this key or id meanwhile."""
        evicted: list[Session] = []
        admitted = None
        try:
            with self._lock:
                if self._closed:
                    raise InputError("the page is being closed")
                visited = new.id if new.id in self._sessions else self._visits.get(key, "")
                if not is_fork and visited in self._sessions:
                    admitted = self._sessions[visited]
                else:
                    if len(self._sessions) >= MAX_SESSIONS:
                        evicted = [self._sessions.pop(self._longest_idle())]
                    admitted = self._sessions[new.id] = new
                self._add_visit(key, admitted.id)
                return admitted
        finally:
            if admitted is not new:
                new.close()
            self._give_up(evicted)

    def _longest_idle(self) -> str:
        """Choose whom to evict: among sessions without a conversation, else among those that
        nobody visits, else among all, the one idle longest. A browser that lost its connection
        does not say so."""
        now, visited = time.monotonic(), set(self._visits.values())
        key, session = max(
            self._sessions.items(),
            key=lambda item: (
                not item[1].converses,
                item[0] not in visited,
                -item[1].last_active,
            ),
        )
        if session.converses and key in visited and now - session.last_active < IDLE_S:
            raise InputError(f"{MAX_SESSIONS} visitors are here already: try again later")
        return key

    def leave(self, key: str) -> None:
        """End a visit; its conversation stays for a while, an empty one goes at once."""
        with self._lock:
            session_id = self._visits.pop(key, "")
            session = self._sessions.get(session_id)
            if session is None:
                return
            _set_latest(self._former_visits, key, session_id)
            if session_id in self._visits.values():
                return
            session.last_active = time.monotonic()
            if not session.converses:
                del self._sessions[session_id]
        session.stop()
        self._give_up([] if session.id in self._sessions else [session])
        self._give_up(self._expired())

    def _expired(self) -> list[Session]:
        """Take out the conversations that nobody visits and that are old or, together, large."""
        now, size, expired = time.monotonic(), 0, []
        with self._lock:
            visited = set(self._visits.values())
            left = [session for session in self._sessions.values() if session.id not in visited]
            for session in sorted(left, key=lambda session: -session.last_active):
                size += session.used_bytes
                if size > MAX_UNVISITED_BYTES or now - session.last_active > MAX_UNVISITED_S:
                    expired.append(self._sessions.pop(session.id))
        return expired

    def _give_up(self, sessions: Sequence[Session]) -> None:
        """Free sessions that were taken out, and their files."""
        for session in sessions:
            if self.folder is not None:
                self.folder.remove(session.id)
            session.close()

    def close(self) -> None:
        """End all sessions as soon as their answers end, and admit no more; write what is not
        written yet."""
        with self._lock:
            self._closed = True
            sessions = list(self._sessions.values())
        for session in sessions:
            session.stop()
        for session in sessions:
            if self.folder is not None:
                self.folder.save(session)
            session.close()
        if self.folder is not None:
            self.folder.close()
        with self._lock:
            self._sessions.clear()
            self._visits.clear()
            self._former_visits.clear()

    @property
    def is_empty(self) -> bool:
        """Whether there are no sessions, so that the model answers nobody."""
        return not self._sessions

    @property
    def status(self) -> str:
        """The number of visitors and the memory of all, in words."""
        count, budget = len(self._visits), self.pipe.budget
        people = f"{count} visitor{'' if count == 1 else 's'} here"
        if budget is None:
            return people
        with self.pipe.lock.briefly():
            used = budget.used_bytes
        return f"{people}, {format_bytes(used)} of {format_bytes(budget.limit)} in use"


def _set_latest(visits: dict[str, str], key: str, session_id: str) -> None:
    """Add a visit as the latest one; the oldest of too many goes."""
    visits.pop(key, None)
    visits[key] = session_id
    if len(visits) > MAX_VISITS:
        del visits[next(iter(visits))]


class ConversationFolder:
    """Writes conversations to a folder, and reads one when a visitor has its id.

    A conversation takes two files named by its id: ``.safetensors`` as ``Chat.save`` writes it, and
    ``.json`` with settings, curve and previews. Whoever can write to the folder is trusted. Both
    are complete files at any time, however the process ends.

    Args:
        path: folder of the files, made if it is missing.

    Raises:
        InputError: the folder cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in path.glob(".*.part"):  # A process ended while it wrote.
            if _ID.fullmatch(part.name[1:33]):
                self._remove(part)
        self._writer = ThreadPoolExecutor(1, "conversation-writer")
        self._refused: deque[Session] = deque()
        self.prune()

    def save_later(self, session: Session) -> None:
        """Write a conversation as of ``save`` in the background, one after the other.

        Nothing is written while the conversation is changed, as the end of the change is followed
        by another call. One that is on disk and finds no room in memory is written with the next.
        """
        self._writer.submit(self.save, session, patience=0.0)
        with suppress(IndexError):  # Other threads take some too.
            while True:
                self._writer.submit(self.save, self._refused.popleft(), patience=0.0)

    def save(self, session: Session, patience: float = _PATIENCE_S) -> None:
        """Write a conversation if it has changed; one without turns has no files.

        The log tells of a conversation that cannot be written; its old files stay.

        Args:
            session: the conversation.
            patience: seconds to wait for a running answer.
        """
        with session.unchanging(patience) as is_ready:
            if not (is_ready and session.is_unsaved):
                return
            try:
                self._write(session)
                session.is_unsaved = False
            except InputError as error:
                if isinstance(error, MemoryBusy):
                    self._refused.append(session)
                _log.warning("a conversation is not kept: %s", error)
            except Exception:
                _log.exception("a conversation is not kept")
            if session not in session.sessions:  # It was given up while it was written.
                self.remove(session.id)
        self.prune()

    def close(self) -> None:
        """Return when nothing is written any more."""
        self._writer.shutdown()

    def _write(self, session: Session) -> None:
        if not session.turns:
            self.remove(session.id)
            return
        chat, store = session.conversation, session.sessions.previews
        media = [span for turn in chat.chat.turns for span in turn.media]
        settings = session.settings
        record = {
            "preset": settings.preset,
            "bits": settings.policy.bits._asdict(),
            "window": settings.policy.window,
            "samples": [asdict(sample) for sample in chat.curve.thinned(_MAX_SAMPLES)],
            "forgotten": chat.forgotten,
            "previews": [store.html(span) for span in media],
        }
        path = self._path(session.id, "json")
        with writing(path), whole_file(path, private=True) as new:
            new.write_text(json.dumps(record))
            # Last, so that the two files are replaced together.
            chat.chat.save(self._path(session.id, "safetensors"))

    def load(self, session: Session, session_id: str) -> bool:
        """Have a new session go on with a conversation of the folder; False if there is none."""
        if not _ID.fullmatch(session_id) or not self._path(session_id, "json").is_file():
            return False
        try:
            record: dict[str, Any] = json.loads(self._path(session_id, "json").read_text())
            policy = KVPolicy.preset(record["preset"], bits=record["bits"], window=record["window"])
            session.begin(SessionSettings(policy, record["preset"]))
            session.restore(self._path(session_id, "safetensors"), record["previews"])
            chat = session.conversation
            chat.curve.samples = [MemorySample(**sample) for sample in record["samples"]]
            chat.forgotten = [(tokens, name) for tokens, name in record["forgotten"]]
        except (
            *(InputError, OSError, ValueError, LookupError, TypeError),
            RecursionError,  # brackets in brackets
        ) as error:
            _log.warning("a conversation cannot be read: %s", error)
            return False
        session.id, session.is_unsaved = session_id, False
        return True

    def remove(self, session_id: str) -> None:
        """Remove the files of a conversation; the log tells of those that stay."""
        for suffix in ("json", "safetensors"):
            self._remove(self._path(session_id, suffix))

    def prune(self) -> None:
        """Remove old conversations, and the oldest of too many or too large ones."""
        size, count = 0, 0
        for path in sorted(self.path.glob("*.safetensors"), key=_age):
            if not _ID.fullmatch(path.stem):
                continue
            age = _age(path)
            with suppress(OSError):
                size, count = size + path.stat().st_size, count + 1
            if size > MAX_BYTES or count > MAX_FILES or age > MAX_AGE_S:
                self.remove(path.stem)

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("a conversation's file cannot be removed: %s", error)

    def _path(self, session_id: str, suffix: str) -> Path:
        return self.path / f"{session_id}.{suffix}"


def _age(path: Path) -> float:
    """Return seconds since a file was written; one that is gone, or a link to itself, is oldest."""
    with suppress(OSError):
        return time.time() - path.stat().st_mtime
    return float("inf")
