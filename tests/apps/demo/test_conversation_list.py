"""The list of a browser's conversations, and hints about media that the model cannot see."""

import io
import json
import threading
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from PIL import Image

from oscar_mm.apps.demo import sessions as sessions_module
from oscar_mm.apps.demo.conversation_list import (
    MAX_LISTED,
    MAX_TITLE,
    Summary,
    conversation_list,
    ids_in,
    title_of,
    words_in,
)
from oscar_mm.apps.demo.curve_picture import COLORS, SIZE, curve_picture
from oscar_mm.apps.demo.handlers import Handlers
from oscar_mm.apps.demo.measured_chat import MemoryCurve
from oscar_mm.apps.demo.media_hint import media_hint
from oscar_mm.apps.demo.sessions import Sessions
from oscar_mm.chat.conversation import Segment
from oscar_mm.errors import InputError
from oscar_mm.modality import Modality
from tests.apps.demo.conftest import COMPACT, asked

EVIL = "<img src=x onerror=alert(1)>\"'"


def test_a_new_conversation_leaves_the_earlier_one(sessions, uploads) -> None:
    first = sessions.session("a")
    asked(first, "What is it?", uploads / "0.png")
    second = sessions.begin("a")
    assert second is sessions.session("a") is not first
    assert not second.exchanges and first in sessions and len(first.turns) == 1
    asked(second, "And what is this?", uploads / "1.png", uploads / "2.png")
    found = sessions.summaries([second.id, "x" * 32, first.id])
    assert [one.title for one in found] == ["And what is this?", "What is it?"]
    assert [one.media for one in found] == [{"picture": 2}, {"picture": 1}]
    assert all(one.used_bytes > 0 for one in found)
    assert sessions.visit("a", first.id) is first


def test_an_empty_conversation_keeps_its_address(sessions) -> None:
    first = sessions.session("a")
    assert sessions.begin("a") is first
    assert sessions.summaries([first.id]) == []


def test_titles_are_the_visitors(sessions, uploads) -> None:
    session = sessions.session("a")
    asked(session, "What is it?", uploads / "0.png")
    sessions.rename(session.id, f"  My\npictures {'x' * 200}")
    [found] = sessions.summaries([session.id])
    assert found.title.startswith("My pictures xxx") and len(found.title) == MAX_TITLE
    assert sessions.fork("a").summary.title.startswith("Copy of My pictures")
    sessions.rename(session.id, " ")
    assert session.summary.title == "What is it?"
    sessions.rename("x" * 32, "nobody's")


def test_deleted_conversations_are_gone(sessions, uploads) -> None:
    session = sessions.session("a")
    before = session.used_bytes
    asked(session, "What is it?", uploads / "0.png")
    assert session.used_bytes > before
    for _ in range(2):
        sessions.delete(session.id)
    assert session not in sessions and sessions.summaries([session.id]) == []
    assert not sessions.session("a").turns
    with pytest.raises(InputError, match="has ended"):
        asked(session, "Still there?")


def test_stored_conversations_are_listed_renamed_and_deleted(pipe, uploads, tmp_path) -> None:
    made = Sessions(pipe, COMPACT, (uploads,), tmp_path)
    session = made.session("a")
    asked(session, "What is it?", uploads / "0.png", uploads / "tone.wav")
    expected = session.summary
    made.close()
    made = Sessions(pipe, COMPACT, (uploads,), tmp_path)
    assert made.summaries([session.id]) == [expected]
    made.rename(session.id, "Renamed")
    made.rename("../" + "x" * 29, "elsewhere")
    [found] = made.summaries([session.id])
    assert found.title == "Renamed" and found.media == {"picture": 1, "clip": 1}
    assert made.visit("b", session.id).summary == found
    made.close()
    made = Sessions(pipe, COMPACT, (uploads,), tmp_path)
    made.delete("../" + session.id)
    assert made.summaries([session.id]) == [found]
    made.delete(session.id)
    assert made.summaries([session.id]) == [] and not list(tmp_path.iterdir())
    made.close()


def test_search_in_what_was_said(pipe, uploads, tmp_path) -> None:
    """Also in conversations that are only in the folder."""
    made = Sessions(pipe, COMPACT, (uploads,), tmp_path)
    session = made.session("a")
    asked(session, "Which fruit\n is RED?", uploads / "0.png")
    asked(session, f"{'And ' * 60} the (bird) [x]?")
    session.exchanges[1].answer = "A Straße \ud800 of 5 €. " * 9
    session.is_unsaved = True
    made.rename(session.id, "My title")
    searches = {
        "": "",
        "TITLE my": "",
        "red  title": "Which fruit is RED?",
        "(BIRD) [": "And And And the (bird) [x]?",
        "fruit straße": "Which fruit is RED?",
        "of": "A Straße ? of 5 €. A Straße ? of 5 €.",
        "horse": None,
        "red horse": None,
    }

    def check() -> None:
        for query, expected in searches.items():
            found = [one.found for one in made.summaries([session.id], words_in(query))]
            if expected is None:
                assert found == [], query
            else:
                assert len(found) == 1 and expected in found[0], (query, found)
                assert bool(found[0]) == bool(expected) and len(found[0]) < 140

    check()
    made.close()
    made = Sessions(pipe, COMPACT, (uploads,), tmp_path)
    check()
    record = tmp_path / f"{session.id}.json"
    kept = json.loads(record.read_text())
    del kept["said"]  # As earlier versions wrote it.
    record.write_text(json.dumps(kept))
    assert len(made.summaries([session.id], ["title"])) == 1
    assert made.summaries([session.id], ["fruit"]) == []
    made.close()


def test_what_was_found_is_marked_and_escaped() -> None:
    summary = Summary("x" * 32, "Title", {}, 2048).searched(["IMG", "("], [EVIL])
    assert summary is not None
    html = conversation_list([summary], "", ["IMG", "("])
    assert "&lt;<mark>img</mark> src=x onerror=alert<mark>(</mark>1)" in html and "<img" not in html
    nothing = conversation_list([], "", ["horse"])
    assert "<li" not in nothing and "listed here" not in nothing
    assert words_in(f"a  b {'x' * 999}")[:2] == ["a", "b"] and len(words_in("x" * 999)[0]) == 200


def test_a_title_given_during_a_write_is_stored(pipe, uploads, tmp_path, monkeypatch) -> None:
    made = Sessions(pipe, COMPACT, (uploads,), tmp_path)
    session, write = made.session("a"), made.folder._write
    asked(session, "What is it?", uploads / "0.png")

    def write_and_rename(written) -> None:
        write(written)
        monkeypatch.setattr(made.folder, "_write", write)
        made.rename(session.id, "Late")

    monkeypatch.setattr(made.folder, "_write", write_and_rename)
    session.is_unsaved = True
    made.folder.save(session)
    made.close()
    made = Sessions(pipe, COMPACT, (uploads,), tmp_path)
    assert made.summaries([session.id])[0].title == "Late"
    made.close()


RECORDS = (
    *("{", "[]", "null", "3", '{"preset": "compact"}'),
    '{"title": "t", "media": {}, "bytes": "x"}',
    '{"title": "t", "media": {"picture": null}, "bytes": 1}',
)


@pytest.mark.parametrize("record", RECORDS)
def test_records_of_earlier_versions_are_left_out(pipe, uploads, tmp_path, record: str) -> None:
    """Damaged ones too, whoever names them."""
    made = Sessions(pipe, COMPACT, (uploads,), tmp_path)
    (tmp_path / f"{'x' * 32}.json").write_text(record)
    made.rename("x" * 32, "Title")
    assert made.summaries(["x" * 32]) == []
    made.close()


def test_a_title_does_not_bring_back_what_is_deleted(pipe, uploads, tmp_path, monkeypatch) -> None:
    made = Sessions(pipe, COMPACT, (uploads,), tmp_path)
    session = made.session("a")
    asked(session, "What is it?", uploads / "0.png")
    made.close()
    made = Sessions(pipe, COMPACT, (uploads,), tmp_path)
    read = made.folder._record
    other = threading.Thread(target=made.delete, args=[session.id])

    def read_while_it_is_deleted(session_id: str) -> dict | None:
        record = read(session_id)
        other.start()
        other.join(0.3)
        return record

    monkeypatch.setattr(made.folder, "_record", read_while_it_is_deleted)
    made.rename(session.id, "Title")
    other.join()
    made.close()
    assert not list(tmp_path.iterdir())


def test_a_title_that_cannot_be_stored(pipe, uploads, tmp_path, monkeypatch) -> None:
    """The visitor is told, without the folder's path."""
    made = Sessions(pipe, COMPACT, (uploads,), tmp_path / "kept")
    session = made.session("a")
    asked(session, "What is it?", uploads / "0.png")
    made.close()
    made = Sessions(pipe, COMPACT, (uploads,), tmp_path / "kept")

    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(sessions_module, "whole_file", fail)
    handlers = Handlers(made, tmp_path / "files")
    request: Any = SimpleNamespace(session_hash="a")
    event: Any = SimpleNamespace(id=session.id, action="rename", name="Title")
    with pytest.raises(gr.Error, match="the title could not be stored") as caught:
        handlers.change_listed(request, event, session.id, "")
    assert str(tmp_path) not in caught.value.message
    made.close()


def test_new_chats_keep_no_more_than_visitors_may_leave(sessions, uploads, monkeypatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_UNVISITED_BYTES", 1)
    for _ in range(3):
        asked(sessions.session("a"), "What is it?", uploads / "0.png")
        latest = sessions.begin("a")
    assert [*sessions._sessions.values()] == [latest]


def test_a_loaded_file_is_a_conversation_of_its_own(sessions, uploads, tmp_path) -> None:
    session = sessions.session("a")
    asked(session, "What is it?", uploads / "0.png")
    session.save(uploads / "kept.safetensors")
    loaded = sessions.load("a", uploads / "kept.safetensors")
    assert loaded is sessions.session("a") is not session and session in sessions
    assert [turn.question for turn in loaded.turns] == ["What is it?"]
    with pytest.raises(InputError):
        sessions.load("a", uploads / "broken.png")
    assert sessions.session("a") is loaded
    (uploads / "kept.safetensors").unlink()


def test_ids_of_a_browser_are_bounded() -> None:
    ids = [f"{number:032d}" for number in range(MAX_LISTED + 20)]
    assert ids_in(" ".join([*ids, ids[0]])) == ids[:MAX_LISTED]
    assert ids_in(f"{ids[0]} {ids[0]} short <script>") == ids[:1]
    assert ids_in("x" * 10_000_000) == ["x" * 32]
    assert ids_in(None) == []


def test_titles() -> None:
    assert title_of("  What\n is  it? ") == "What is it?"
    assert title_of("") == title_of("\n") == "Conversation"
    assert len(title_of("word " * 1000)) == MAX_TITLE
    assert title_of("half \ud800 a pair") == "half ? a pair"


def test_the_list_escapes_what_visitors_write() -> None:
    html = conversation_list([Summary("x" * 32, EVIL, {"picture": 1, "clip": 2}, 2048)], "x" * 32)
    assert "<img" not in html and "1 picture · 2 clips · 2.05 KB" in html
    assert html.count("aria-current") == 1 and json.dumps(EVIL)[1:-1] not in html
    assert "listed here" in conversation_list([], "")


SEEN = [
    Segment(place, modality, 18, 100, str(place), 0, forgotten=forgotten)
    for place, (modality, forgotten) in enumerate(
        [
            (Modality.TEXT, False),
            (Modality.IMAGE, True),
            (Modality.IMAGE, False),
            (Modality.AUDIO, False),
        ]
    )
]


@pytest.mark.parametrize(
    ("question", "hint"),
    [
        ("What is the code in picture 2?", ""),
        ("What is the code in picture 1?", "Picture 1 was forgotten"),
        ("What is in Picture 7?", "There are 2 pictures"),
        ("What is in image 0?", "There are 2 pictures"),
        ("Read pictures 2, 9 and 1.", "There are 2 pictures; picture 1 was forgotten"),
        ("Add the sums of pictures 2 and 1.", "Picture 1 was forgotten"),
        ("What was said in clip 2?", "There is 1 clip"),
        ("Which video 1 is it?", "There is no video"),
        ("Which picture says 93015?", ""),
        ("What is in picture 99999999999999999999?", "There are 2 pictures"),
    ],
)
def test_hints_about_media(question: str, hint: str) -> None:
    assert media_hint(question, SEEN) == hint


def test_an_answer_about_a_forgotten_picture_says_so(session, uploads) -> None:
    asked(session, "What is picture 1?", uploads / "0.png")
    assert "forgotten" not in session.turns[0].hint
    [index] = [one.index for one in session.conversation.segments if one.modality.label == "image"]
    session.forget(index)
    asked(session, "What is picture 1, and what is picture 3?")
    assert session.turns[1].hint.startswith("Picture 1 was forgotten; there is 1 picture")


def test_the_picture_of_the_curve(session, uploads) -> None:
    empty = Image.open(io.BytesIO(curve_picture(MemoryCurve(), "tiny", "compact")))
    assert empty.size == SIZE
    asked(session, "What is it?", uploads / "0.png", uploads / "1.png")
    drawn = Image.open(io.BytesIO(curve_picture(session.conversation.curve, "tiny", "compact")))
    colors = {color for _, color in drawn.getcolors(1 << 20)}
    wanted = {tuple(bytes.fromhex(COLORS[part][1:])) for part in ("text", "image")}
    assert drawn.format == "PNG" and wanted <= colors
    assert tuple(bytes.fromhex(COLORS["video"][1:])) not in colors
