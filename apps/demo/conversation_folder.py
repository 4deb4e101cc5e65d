"""ConversationFolder: conversations in files, for a page that is served again."""

from __future__ import annotations

import json
import logging
import re
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscar_mm.apps.demo.measured_chat import MemorySample
from oscar_mm.apps.demo.visitor_input import SessionSettings
from oscar_mm.errors import Busy, InputError
from oscar_mm.files import whole_file, writing
from oscar_mm.policy import KVPolicy

if TYPE_CHECKING:
    from oscar_mm.apps.demo.session import Session

MAX_FILES = 64
"""Most conversations of a folder."""
MAX_BYTES = 4 * 2**30
"""Most bytes of a folder."""
MAX_AGE_S = 7 * 24 * 3600.0
"""How long a conversation stays in a folder."""
_ID = re.compile(r"[A-Za-z0-9_-]{32}")
_MOST_SAMPLES = 160
_PATIENCE_S = 60.0
"""How long ``save`` waits for a running answer."""
_log = logging.getLogger(__name__)


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
                if isinstance(error, Busy):
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
            "samples": [asdict(sample) for sample in chat.curve.thinned(_MOST_SAMPLES)],
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
