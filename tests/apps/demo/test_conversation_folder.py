"""Conversations go on when the page is served again."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from oscar_mm.apps.demo import session as session_module
from oscar_mm.apps.demo import sessions as module
from oscar_mm.apps.demo import sessions as sessions_module
from oscar_mm.apps.demo.session import Session
from oscar_mm.apps.demo.sessions import Sessions
from oscar_mm.apps.demo.visitor_input import AS_PRESET, SessionSettings
from oscar_mm.cache.checked_file import write_checked
from oscar_mm.chat import chat as chat_module
from oscar_mm.errors import InputError, MemoryBusy
from oscar_mm.modality import Modality
from tests.apps.demo.conftest import COMPACT, asked

BITS = {one.label: AS_PRESET for one in Modality}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "new" / "kept"


@pytest.fixture
def serve(pipe, uploads, folder):
    """Sessions over the folder, as after a restart."""
    made = []

    def again() -> Sessions:
        for sessions in made:
            sessions.close()
        made.append(Sessions(pipe, COMPACT, (uploads,), folder))
        return made[-1]

    yield again
    made[-1].close()


def converse(sessions: Sessions, uploads: Path, key: str = "a") -> Session:
    session = sessions.session(key)
    asked(session, "What?", uploads / "0.png", uploads / "tone.wav")
    return session


def test_a_conversation_goes_on_with_its_settings_curve_and_pictures(serve, uploads, pipe) -> None:
    session = serve().session("a")
    bits = BITS | {"image": "4/2"}
    session.begin(SessionSettings.of_fields("compact", bits, 64, "Be brief.", False))
    asked(session, "What?", uploads / "0.png", uploads / "tone.wav")
    session.forget(1)
    again = serve().visit("b", session.id)
    assert again is not session and again.id == session.id
    assert again.settings == session.settings
    assert again.conversation.segments == session.conversation.segments
    assert again.conversation.curve.last == session.conversation.curve.last
    assert again.conversation.forgotten == session.conversation.forgotten != []
    pictures = [[preview.html for preview in one.turns[0].previews] for one in (session, again)]
    assert pictures[0] == pictures[1] and all(pictures[0])
    asked(again, "And?")
    assert len(serve().visit("c", session.id).turns) == 2


def written(sessions: Sessions) -> Sessions:
    """Sessions, when the changes up to now are written."""
    assert sessions.folder is not None
    sessions.folder._writer.submit(bool).result(60)
    return sessions


@pytest.fixture
def after_crash(pipe, uploads, folder):
    """Reads a conversation as a page does that is served after the process was killed."""

    def read(session: Session) -> Session:
        sessions = Sessions(pipe, COMPACT, (uploads,), folder)
        try:
            return sessions.visit("later", session.id)
        finally:
            sessions.close()

    return read


def test_each_change_is_written_when_it_has_ended(serve, uploads, after_crash) -> None:
    sessions = serve()
    session = converse(sessions, uploads)
    written(sessions)
    assert [turn.answer for turn in after_crash(session).turns] == [session.turns[0].answer]
    asked(session, "And?")
    session.forget(1)
    written(sessions)
    read = after_crash(session)
    assert len(read.turns) == 2
    assert [one.forgotten for one in read.conversation.segments].count(True) == 1
    fork = sessions.fork("a")
    session.undo()
    written(sessions)
    assert (len(after_crash(session).turns), len(after_crash(fork).turns)) == (1, 2)
    session.begin()
    written(sessions)
    assert not after_crash(session).turns


def test_an_answer_that_is_stopped_is_written(serve, after_crash) -> None:
    sessions = serve()
    session = sessions.session("a")
    answering = session.ask("What?", [], max_new_tokens=60, temperature=0.0)
    while not session.exchanges or not session.exchanges[0].answer:
        next(answering)
    answering.close()
    written(sessions)
    assert after_crash(session).turns[0].answer == session.turns[0].answer


def test_nothing_is_written_without_a_change(serve, uploads, folder, monkeypatch) -> None:
    sessions = serve()
    session = converse(sessions, uploads)
    written(sessions)
    monkeypatch.setattr(module.ConversationFolder, "_write", lambda *_: pytest.fail("written"))
    session.save(uploads / "download.safetensors")
    list(session.ask("x" * 10**7, []))
    written(sessions)
    assert not session.is_unsaved
    assert serve().visit("b", session.id).turns


class SlowDisk:
    """Writes nothing before it is told to go on."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self.writers: list[Path] = []

    def write(self, path: Path, *content) -> None:
        self.writers.append(path)
        self.began.set()
        assert self.go_on.wait(60)
        write_checked(path, *content)
        self.writers.remove(path)


@pytest.fixture
def disk(serve, monkeypatch):
    made = SlowDisk()
    monkeypatch.setattr(chat_module, "write_checked", made.write)
    yield made
    made.go_on.set()


def test_a_question_waits_while_its_conversation_is_written(serve, uploads, disk) -> None:
    """Other conversations go on meanwhile; a conversation has no two writers at once."""
    sessions = serve()
    session, other = converse(sessions, uploads), sessions.session("b")
    assert disk.began.wait(60)
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(asked, session, "And?")
        asked(other, "What?")
        assert other.turns and len(session.turns) == 1 and len(disk.writers) == 1
        disk.go_on.set()
        asking.result(60)
    assert len(session.turns) == 2 and not session.turns[1].error
    written(sessions)
    assert not disk.writers and not session.is_unsaved and not other.is_unsaved


def test_a_change_waits_for_a_write_and_a_long_one_is_reported(
    serve, uploads, disk, monkeypatch
) -> None:
    sessions = serve()
    session = converse(sessions, uploads)
    assert disk.began.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(session_module, "_PATIENCE_S", 0.01)
        with pytest.raises(InputError, match="still being written to disk: try again"):
            session.undo()
    with ThreadPoolExecutor(1) as thread:
        forgetting = thread.submit(session.forget, 1)
        disk.go_on.set()
        forgetting.result(60)
    assert session.conversation.segments[1].forgotten and session.turns
    session.undo()
    assert not session.turns


def test_a_conversation_given_up_while_it_is_written_leaves_no_files(
    serve, uploads, folder, disk, monkeypatch
) -> None:
    sessions = serve()
    session = converse(sessions, uploads)
    assert disk.began.wait(60)
    monkeypatch.setattr(session_module, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(sessions_module, "MAX_UNVISITED_S", -1.0)
    sessions.leave("a")
    assert session not in sessions and disk.writers
    disk.go_on.set()
    written(sessions)
    assert list(folder.iterdir()) == []
    with pytest.raises(RuntimeError, match="closed"):
        session.conversation.chat.ask("And?")


def test_a_conversation_that_answers_is_written_afterwards(serve, uploads, after_crash) -> None:
    sessions = serve()
    session = converse(sessions, uploads)
    answering = session.ask("And?", [], max_new_tokens=6, temperature=0.0)
    next(answering)
    written(sessions)
    list(answering)
    written(sessions)
    assert len(after_crash(session).turns) == 2


def test_a_write_that_fails_leaves_the_old_files(
    serve, uploads, after_crash, folder, monkeypatch, caplog
) -> None:
    sessions = serve()
    session = converse(sessions, uploads)
    written(sessions)

    def full(*_) -> None:
        raise InputError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(chat_module, "write_checked", full)
        asked(session, "And?")
        written(sessions)
        assert "could not be stored: the disk is full" in caplog.text
        assert len(after_crash(session).turns) == 1
        assert len(list(folder.iterdir())) == 2
    sessions.close()
    assert len(after_crash(session).turns) == 2


def test_a_conversation_without_disk_space_is_written_with_the_next(
    serve, uploads, after_crash, monkeypatch
) -> None:
    sessions = serve()

    def refuse(*_) -> None:
        raise MemoryBusy("no room")

    with monkeypatch.context() as patch:
        patch.setattr(chat_module, "write_checked", refuse)
        session = converse(sessions, uploads)
        written(sessions)
    assert not after_crash(session).turns
    asked(sessions.session("b"), "What?")
    written(sessions)
    assert len(after_crash(session).turns) == 1 and not session.is_unsaved


def test_a_process_that_is_killed_while_it_writes(serve, uploads, after_crash, folder) -> None:
    """Its unfinished files go; a chat without the record of its last turn is read."""
    sessions = serve()
    session = converse(sessions, uploads)
    written(sessions)
    record = folder / f"{session.id}.json"
    old = record.read_text()
    asked(session, "And?", uploads / "1.png")
    written(sessions)
    record.write_text(old)
    part = folder / f".{session.id}.safetensors.0123456789abcdef.part"
    part.write_bytes(b"unfinished")
    (folder / ".notes.part").write_text("of somebody else")
    assert len(after_crash(session).turns) == 2
    assert not part.exists() and (folder / ".notes.part").exists()


def test_a_folder_is_bounded_while_the_page_is_served(serve, folder, monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_FILES", 2)
    sessions = serve()
    for key in "abc":
        asked(sessions.session(key), "What?")
    written(sessions)
    assert len(list(folder.glob("*.safetensors"))) == 2


def test_files_are_of_their_owner_alone(serve, uploads, folder) -> None:
    converse(serve(), uploads)
    serve()
    assert folder.stat().st_mode & 0o077 == 0
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".safetensors"]


def test_a_new_conversation_leaves_no_files_of_the_old_one(serve, uploads, folder) -> None:
    session = converse(serve(), uploads)
    session = serve().visit("a", session.id)
    session.begin()
    serve()
    assert list(folder.iterdir()) == []


def test_only_ids_name_files(serve, uploads, folder) -> None:
    session = converse(serve(), uploads)
    sessions = serve()
    outside = folder.parent / f"{session.id}.json"
    outside.write_text("{}")
    for wrong in ("", f"../{session.id}", f"{folder}/{session.id}", session.id[:-1], "x" * 10**6):
        other = sessions.visit(wrong[:40] or "none", wrong)
        assert not other.turns and other.id != wrong


def test_files_that_cannot_be_read_are_left(serve, uploads, folder, caplog) -> None:
    session = converse(serve(), uploads)
    for broken in (
        "[]",
        "{}",
        "{",
        "[" * 100_000,
        json.dumps({"preset": "compact", "bits": {}, "window": -1}),
    ):
        sessions = serve()
        (folder / f"{session.id}.json").write_text(broken)
        other = sessions.visit("b", session.id)
        assert not other.turns and other.id != session.id
        assert "cannot be read" in caplog.text
        caplog.clear()
    assert (folder / f"{session.id}.safetensors").is_file()


def test_files_that_cannot_be_removed_keep_no_other_conversation_out(
    serve, uploads, folder, caplog
) -> None:
    sessions = serve()
    lost, saved = (converse(sessions, uploads, key) for key in "ab")
    written(sessions)
    (folder / f"{lost.id}.safetensors").unlink()
    (folder / f"{lost.id}.safetensors").mkdir()
    lost.begin()
    again = serve()
    assert "cannot be removed" in caplog.text
    assert again.visit("b", saved.id).id == saved.id
    assert again.visit("a", lost.id).id != lost.id


def test_a_link_to_itself_goes(serve, uploads, folder) -> None:
    folder.mkdir(parents=True)
    link = folder / f"{'a' * 32}.safetensors"
    link.symlink_to(link)
    session = converse(serve(), uploads)
    assert not link.is_symlink()
    assert serve().visit("b", session.id).turns


def test_two_windows_at_once_have_one_conversation(serve, uploads) -> None:
    session = converse(serve(), uploads)
    sessions = serve()
    first, second = sessions._read(session.id), sessions._read(session.id)
    assert sessions._admit("a", first) is first and sessions._admit("b", second) is first
    asked(sessions.session("b"), "And?")
    assert len(first.turns) == 2


@pytest.mark.parametrize(("name", "bound"), [("MAX_FILES", 1), ("MAX_BYTES", 1), ("MAX_AGE_S", 60)])
def test_a_folder_is_bounded(serve, uploads, folder, monkeypatch, name, bound) -> None:
    sessions = serve()
    ids = [converse(sessions, uploads, key).id for key in "ab"]
    serve()
    (folder / "notes.safetensors").write_text("of somebody else")
    os.utime(folder / f"{ids[0]}.safetensors", (0, 0))
    monkeypatch.setattr(module, name, bound)
    sessions = serve()
    left = [bool(sessions.visit(session_id, session_id).turns) for session_id in ids]
    assert left == [False, name != "MAX_BYTES"]
    assert (folder / "notes.safetensors").exists()


def test_a_folder_that_cannot_be_made(pipe, uploads, tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        Sessions(pipe, COMPACT, (uploads,), tmp_path / "file")
