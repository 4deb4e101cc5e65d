"""Sessions: conversations of the demo page, with their visitors and pipelines.

ConversationFolder: conversations stored in files, so that they survive a restart of the server.
"""

from __future__ import annotations

import json
import logging
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

from oscar_mm.apps.demo.changes import Changes
from oscar_mm.apps.demo.conversation_list import ID, MAX_TITLE, Summary, title_of
from oscar_mm.apps.demo.live_speech import LiveSpeech
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
"""Maximum number of conversations on the server."""
IDLE_S = 900.0
"""Seconds of inactivity after which a full server may evict a visitor's conversation."""
MAX_UNVISITED_S = 6 * 3600.0
"""Maximum seconds to keep a conversation without a visitor."""
MAX_UNVISITED_BYTES = 2**30
"""Maximum total bytes of keys and values in conversations without a visitor."""
MAX_VISITS = 4 * MAX_SESSIONS
"""Maximum number of browsers whose latest conversation is remembered."""
MAX_FILES = 64
"""Maximum number of conversations in the conversation folder."""
MAX_BYTES = 4 * 2**30
"""Maximum total bytes of the files in the conversation folder."""
MAX_AGE_S = 7 * 24 * 3600.0
"""Maximum age in seconds of a conversation in the conversation folder."""
_MAX_SAMPLES = 160
_PATIENCE_S = 60.0
"""Maximum seconds that ``save`` waits for a running answer."""
_log = logging.getLogger(__name__)


class Sessions:
    """Sessions of the page: one conversation per visitor, with a shared model and KV budget.

    A conversation outlives its visit: until the conversation expires or is evicted, any browser
    that knows its id can continue it.

    Args:
        pipe: pipeline that generates the answers; its ``kv_budget`` limits the memory of all
            conversations.
        settings: default settings of new conversations.
        folders: folders from which the files of messages may be read; no others are allowed.
        keep: folder to which conversations are written after each change, so that they survive a
            restart of the server; None to write no conversations.

    Raises:
        InputError: if the folder cannot be created.
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
        # A browser that lost its connection returns with its previous session hash.
        self._former_visits: dict[str, str] = {}
        self._lock, self._closed = threading.Lock(), False
        self.changes = Changes(MAX_VISITS)

    def pipeline(self, policy: KVPolicy) -> Pipeline:
        """Return a pipeline for the model with this policy."""
        with self._lock:
            pipe = self._pipes.get(policy)
            if pipe is None:
                pipe = self._pipes[policy] = self.pipe.with_policy(policy)
            return pipe

    def session(self, key: str) -> Session:
        """Return the session that a browser is visiting, or begin a new session.

        Clients can invent any number of keys. When the server is full, a session without a
        conversation is therefore evicted, and is created again when its first question arrives.

        Args:
            key: the browser's session hash.

        Raises:
            InputError: if the demo has reached its session limit, or is closed.
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
        """Let a browser continue a conversation, or begin a new conversation if the id is unknown.

        Args:
            key: the browser's session hash.
            session_id: ``Session.id``, a secret that is part of the page's URL.

        Raises:
            InputError: if the demo has reached its session limit, or is closed.
        """
        self._give_up(self._expired())
        with self._lock:
            exists = session_id in self._sessions and not self._closed
            if exists:
                self._add_visit(key, session_id)
        return self.session(key) if exists else self._admit(key, self._read(session_id))

    def _read(self, session_id: str) -> Session:
        """Return a session with the conversation from the folder, or an empty session."""
        session = Session(self)
        if self.folder is not None and not self.folder.load(session, session_id):
            session.close()
            session = Session(self)
        return session

    def begin(self, key: str, settings: SessionSettings | None = None) -> Session:
        """Move a browser to a new conversation; an earlier one keeps its URL.

        Args:
            key: the browser's session hash.
            settings: settings of the new conversation; by default those of the earlier one.

        Raises:
            InputError: if the demo has reached its session limit, or is closed.
        """
        session = self.session(key)
        session.stop()
        session.stop_listening()
        if session.converses:
            return self._admit(key, Session(self, settings or session.settings), apart=True)
        session.begin(settings)
        return session

    def load(self, key: str, path: str | Path) -> Session:
        """Move a browser to a conversation from an uploaded file; an earlier one keeps its URL.

        Raises:
            InputError: if the file is no conversation of this model, or ``begin`` would fail.
        """
        loaded = Session(self, self.session(key).settings)
        try:
            loaded.load(path)
        except BaseException:
            loaded.close()
            raise
        loaded = self._admit(key, loaded, apart=True)
        self.save_later(loaded)
        return loaded

    def fork(self, key: str, last: str | None = None) -> Session:
        """Move a browser to a copy of its conversation; the original keeps its URL.

        Args:
            key: the browser's session hash.
            last: key of the last exchange to copy; by default all are copied.

        Raises:
            InputError: if the demo has reached its session limit, or is closed; see
                ``Session.fork``.
        """
        fork = self._admit(key, self.session(key).fork(last), apart=True)
        self.save_later(fork)
        return fork

    def summaries(self, ids: Sequence[str], words: Sequence[str] = ()) -> list[Summary]:
        """Describe the conversations with these ids that exist and are not empty, in order.

        Args:
            ids: ids of conversations.
            words: words that the title has, or that were said; see ``Summary.searched``.
        """
        found: list[Summary | None] = []
        for session_id in ids:
            session = self._sessions.get(session_id)
            if session is not None:
                found += [session.summary.searched(words, session.said)] if session.turns else []
            elif self.folder is not None:
                found.append(self.folder.summary(session_id, words))
        return [one for one in found if one is not None]

    def rename(self, session_id: str, title: str) -> None:
        """Set the title of a conversation, shortened to ``MAX_TITLE`` characters; "" is the
        default title. Do nothing if there is no such conversation."""
        name = title_of(title) if title.strip() else ""
        session = self._sessions.get(session_id)
        if session is not None:
            session.name, session.is_unsaved = name, True
            self.save_later(session)
        elif self.folder is not None:
            self.folder.rename(session_id, name)

    def delete(self, session_id: str, key: str = "") -> None:
        """End a conversation and delete its files; do nothing if there is no such conversation.

        Args:
            session_id: ``Session.id``.
            key: session hash of the browser that deletes it.
        """
        with self._lock:
            session = self._sessions.pop(session_id, None)
        if session is not None:
            session.stop()
            self._give_up([session])
            session.changed_by = key
            self.tell_others(session)
        elif self.folder is not None and ID.fullmatch(session_id):
            self.folder.remove(session_id)

    def model_of(self, session_id: str) -> str:
        """Return the name of the model of a stored conversation; "" if it is not known."""
        return "" if self.folder is None else self.folder.model_of(session_id)

    def save_later(self, session: Session) -> None:
        """Write a session to the conversation folder, if there is a folder, in the background."""
        if self.folder is not None and session in self:
            self.folder.save_later(session)

    def tell_others(self, session: Session) -> None:
        """Tell the pages of a conversation that another page has changed it."""
        self.changes.tell(
            *(
                key
                for key, visited in [*self._visits.items()]
                if visited == session.id and key != session.changed_by
            )
        )

    def speech(self, key: str) -> LiveSpeech | None:
        """Return the speech with this key if it is a session's latest; otherwise None."""
        with self._lock:
            found = [session.aloud for session in self._sessions.values()]
        return next((one for one in found if one is not None and one.key == key), None)

    def __contains__(self, session: Session) -> bool:
        """Return whether the session still exists, that is, has not been evicted or ended."""
        return self._sessions.get(session.id) is session

    def is_visited(self, key: str, session: Session) -> bool:
        """Return whether a browser's latest conversation is this one.

        Args:
            key: the browser's session hash.
            session: the conversation.
        """
        return self._visits.get(key) == session.id

    def _add_visit(self, key: str, session_id: str) -> None:
        self._former_visits.pop(key, None)
        _set_latest(self._visits, key, session_id)

    def _admit(self, key: str, new: Session, *, apart: bool = False) -> Session:
        """Add a new session and let a browser visit it.

        If another thread has just added one with the same key or id, the browser visits that one
        unless the new session is ``apart`` from what the browser visits now.
        """
        evicted: list[Session] = []
        admitted = None
        try:
            with self._lock:
                if self._closed:
                    raise InputError("the page is being closed")
                visited = new.id if new.id in self._sessions else self._visits.get(key, "")
                if not apart and visited in self._sessions:
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
            # The conversation that a browser leaves may be one too many without a visitor.
            self._give_up([*evicted, *(self._expired() if apart else ())])

    def _longest_idle(self) -> str:
        """Return the id of the session to evict: the session that has been idle longest.

        Sessions without a conversation are evicted first, then sessions without a visitor, then
        idle sessions with a visitor. A browser that lost its connection still counts as a visitor.

        Raises:
            InputError: if all sessions contain conversations with active visitors.
        """
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
            raise InputError(f"all {MAX_SESSIONS} sessions are in use: try again later")
        return key

    def leave(self, key: str) -> None:
        """End a visit; keep its conversation for a while, unless the conversation is empty."""
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
        session.stop_listening()
        self._give_up([] if session.id in self._sessions else [session])
        self._give_up(self._expired())

    def _expired(self) -> list[Session]:
        """Remove and return unvisited conversations that are too old or exceed the memory limit."""
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
        """Free sessions that have been removed, and delete their files."""
        for session in sessions:
            if self.folder is not None:
                self.folder.remove(session.id)
            session.close()

    def release(self) -> None:
        """Drop the model once the sessions are closed; gradio may keep the page, and so this
        object."""
        self._pipes.clear()
        self._sessions.clear()
        del self.pipe

    def close(self) -> None:
        """Accept no more sessions, stop all answers, and end all sessions.

        Conversations that have not been saved are written to the folder first.
        """
        self.changes.close()
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
        """Whether there are no sessions."""
        return not self._sessions

    @property
    def status(self) -> str:
        """Text with the number of visitors and their total memory."""
        count, budget = len(self._visits), self.pipe.budget
        people = f"{count} visitor{'' if count == 1 else 's'} here"
        if budget is None:
            return people
        used = self.pipe.engine.call(lambda: budget.used_bytes)
        return f"{people}, {format_bytes(used)} of {format_bytes(budget.limit)} in use"


def _set_latest(visits: dict[str, str], key: str, session_id: str) -> None:
    """Record a visit as the latest, and drop the oldest visit if there are too many."""
    visits.pop(key, None)
    visits[key] = session_id
    if len(visits) > MAX_VISITS:
        del visits[next(iter(visits))]


class ConversationFolder:
    """Folder of saved conversations; a visitor can open any conversation whose id they know.

    A conversation has two files named after its id: ``.safetensors``, as written by ``Chat.save``,
    and ``.json``, with settings, memory curve and previews. Both files are always complete, however
    the process ends. All files in the folder are trusted.

    Args:
        path: path of the folder; it is created if it is missing.

    Raises:
        InputError: if the folder cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in path.glob(".*.part"):  # Left over from a process that ended while writing.
            if ID.fullmatch(part.name[1:33]):
                self._remove(part)
        # So that a title is not given to a conversation whose files have just been removed.
        self._changing = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "conversation-writer")
        self._refused: deque[Session] = deque()
        self.prune()

    def save_later(self, session: Session) -> None:
        """Write a conversation in the background, one at a time; see ``save``.

        A conversation that is being changed is skipped, because this method is called again after
        the change. A conversation that was spilled to disk and does not fit in memory is written
        together with the next conversation.
        """
        self._writer.submit(self.save, session, patience=0.0)
        with suppress(IndexError):  # Other threads also take items from the queue.
            while True:
                self._writer.submit(self.save, self._refused.popleft(), patience=0.0)

    def save(self, session: Session, patience: float = _PATIENCE_S) -> None:
        """Write a conversation if it has changed; write no files for a conversation without turns.

        If the conversation cannot be written, log the error and keep its old files.

        Args:
            session: session with the conversation.
            patience: maximum seconds to wait for a running answer.
        """
        with session.unchanging(patience) as is_ready:
            if not (is_ready and session.is_unsaved):
                return
            # A change of the title during the write sets it again.
            session.is_unsaved = False
            try:
                self._write(session)
            except InputError as error:
                session.is_unsaved = True
                if isinstance(error, MemoryBusy):
                    self._refused.append(session)
                _log.warning("a conversation could not be stored: %s", error)
            except Exception:
                session.is_unsaved = True
                _log.exception("a conversation could not be stored")
            if session not in session.sessions:  # Evicted while it was being written.
                self.remove(session.id)
        self.prune()

    def close(self) -> None:
        """Wait until no conversation is being written, then write no more conversations."""
        self._writer.shutdown()

    def _write(self, session: Session) -> None:
        if not session.turns:
            self.remove(session.id)
            return
        chat, store = session.conversation, session.sessions.previews
        media = [span for turn in chat.chat.turns for span in turn.media]
        settings = session.settings
        record = {
            "name": session.name,
            "model": session.sessions.card.name,
            "title": session.summary.title,
            "media": session.summary.media,
            "bytes": session.used_bytes,
            "preset": settings.preset,
            "bits": settings.policy.bits._asdict(),
            "window": settings.policy.window,
            "samples": [asdict(sample) for sample in chat.curve.thinned(_MAX_SAMPLES)],
            "forgotten": chat.forgotten,
            "said": session.said,
            "previews": [store.html(span) for span in media],
        }
        path = self._path(session.id, "json")
        with writing(path), whole_file(path, private=True) as new:
            new.write_text(json.dumps(record))
            # Done last, so that the two files are replaced together.
            chat.chat.save(self._path(session.id, "safetensors"))

    def load(self, session: Session, session_id: str) -> bool:
        """Load a conversation from the folder into a new session; return whether it was loaded."""
        if not ID.fullmatch(session_id) or not self._path(session_id, "json").is_file():
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
            RecursionError,  # Raised for deeply nested JSON.
        ) as error:
            _log.warning("a conversation cannot be read: %s", error)
            return False
        session.id, session.is_unsaved = session_id, False
        session.name = str(record.get("name", ""))
        return True

    def summary(self, session_id: str, words: Sequence[str] = ()) -> Summary | None:
        """Describe a stored conversation; None if there is none, if an earlier version wrote it, or
        if it lacks one of the words."""
        record = self._record(session_id) or {}
        with suppress(KeyError, ValueError, TypeError, AttributeError):
            title = str(record.get("name") or record["title"])[:MAX_TITLE]
            media = {str(kind): int(count) for kind, count in record["media"].items()}
            stored = Summary(session_id, title, media, int(record["bytes"]))
            return stored.searched(words, [str(text) for text in record.get("said", ())])
        return None

    def model_of(self, session_id: str) -> str:
        """Return the name of the model of a conversation; "" if it is not known."""
        record = self._record(session_id)
        return str(record.get("model", "")) if record else ""

    def rename(self, session_id: str, name: str) -> None:
        """Set the title of a stored conversation; do nothing if there is none."""
        with self._changing:
            if (record := self._record(session_id)) is not None:
                path = self._path(session_id, "json")
                with writing(path), whole_file(path, private=True) as new:
                    new.write_text(json.dumps(record | {"name": name}))

    def _record(self, session_id: str) -> dict[str, Any] | None:
        if not ID.fullmatch(session_id):
            return None
        with suppress(OSError, ValueError, RecursionError):
            record = json.loads(self._path(session_id, "json").read_text())
            return record if isinstance(record, dict) else None
        return None

    def remove(self, session_id: str) -> None:
        """Remove the files of a conversation; files that cannot be removed are logged."""
        with self._changing:
            for suffix in ("json", "safetensors"):
                self._remove(self._path(session_id, suffix))

    def prune(self) -> None:
        """Remove conversations that are too old, then the oldest ones beyond the limits."""
        size, count = 0, 0
        for path in sorted(self.path.glob("*.safetensors"), key=_age):
            if not ID.fullmatch(path.stem):
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
    """Return the age of a file in seconds; infinity if the file is gone or links to itself."""
    with suppress(OSError):
        return time.time() - path.stat().st_mtime
    return float("inf")
