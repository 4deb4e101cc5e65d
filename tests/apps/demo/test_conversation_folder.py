"""Conversations go on when the page is served again."""

import json
import os
from pathlib import Path

import pytest

from oscar_mm.apps.demo import conversation_folder as module
from oscar_mm.apps.demo.session import AS_PRESET, Session, SessionSettings
from oscar_mm.apps.demo.sessions import Sessions
from oscar_mm.errors import InputError
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
    (folder / f"{lost.id}.safetensors").mkdir()
    again = serve()
    assert "cannot be removed" in caplog.text
    assert again.visit("b", saved.id).id == saved.id
    assert again.visit("a", lost.id).id != lost.id


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
