"""Several visitors over one model: own chats, one budget, room for so many."""

import threading
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from oscar_mm.apps.demo import sessions as sessions_module
from oscar_mm.apps.demo.handlers import Handlers
from oscar_mm.apps.demo.page import GPU, LENGTH, MODEL
from oscar_mm.apps.demo.sessions import Sessions
from oscar_mm.apps.demo.visitor_input import AS_PRESET, SessionSettings
from oscar_mm.errors import InputError
from oscar_mm.modality import Modality
from oscar_mm.policy import KVPolicy
from tests.apps.demo.conftest import COMPACT, asked


def test_visitors_have_chats_of_their_own(sessions, uploads) -> None:
    one, other = sessions.session("a"), sessions.session("b")
    assert sessions.session("a") is one
    workers = [
        threading.Thread(target=asked, args=(who, "What?", uploads / f"{index}.png"))
        for index, who in enumerate((one, other))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    for index, who in enumerate((one, other)):
        with sessions.pipe.chat() as chat:
            image = [uploads / f"{index}.png"]
            assert who.exchanges[0].answer == chat.ask("What?", image, max_new_tokens=6).text
        assert len(who.exchanges) == 1
    assert sessions.status.startswith("2 visitors here, ")


def test_an_answer_that_ends_elsewhere_shows_nothing_here(sessions, tmp_path, uploads) -> None:
    """The page shows a new conversation meanwhile."""
    handlers, scenario = Handlers(sessions, tmp_path), (GPU, MODEL, LENGTH)
    request: Any = SimpleNamespace(session_hash="a")
    first = sessions.session("a")
    message = {"text": "What?", "files": [str(uploads / "0.png")]}
    running = handlers.ask(request, message, 0.0, 500, *scenario)
    assert "What?" in next(running)[0]
    new = handlers.begin(request, *scenario)[-1]
    assert new == sessions.session("a").id != first.id
    rest = [one for shown in running for one in shown]
    assert rest and all(one == gr.skip() for one in rest)
    assert len(first.exchanges) == 1 and not sessions.session("a").exchanges
    sessions.visit("a", first.id)
    [*_, last] = handlers.ask(request, {"text": "And?"}, 0.0, 4, *scenario)
    assert "And?" in str(last[0]) or last[1] == ""


@pytest.mark.parametrize("change", ["ask", "undo", "compare", "forget", "delete"])
def test_only_other_pages_are_told_of_a_change(
    sessions, tmp_path, uploads, monkeypatch, change
) -> None:
    handlers, scenario = Handlers(sessions, tmp_path), (GPU, MODEL, LENGTH)
    request: Any = SimpleNamespace(session_hash="a")
    session = sessions.session("a")
    asked(session, "What?", uploads / "0.png")
    sessions.visit("b", session.id)
    sessions.session("c")
    told: list[str] = []
    monkeypatch.setattr(sessions.changes, "tell", lambda *keys: told.extend(keys))
    if change == "ask":
        list(handlers.ask(request, {"text": "And?"}, 0.0, 4, *scenario))
    elif change == "undo":
        handlers.undo(request, *scenario)
    elif change == "compare":
        list(handlers.compare(request, True, *scenario))
    elif change == "forget":
        segments = session.conversation.segments
        [image] = [one for one in segments if one.modality is Modality.IMAGE]
        handlers.forget(request, SimpleNamespace(index=image.index), *scenario)
    else:
        event: Any = SimpleNamespace(action="delete", id=session.id)
        handlers.change_listed(request, event, session.id, "")
    assert set(told) == {"b"}


def test_a_conversation_is_deleted_while_it_answers(sessions, tmp_path) -> None:
    handlers, scenario = Handlers(sessions, tmp_path), (GPU, MODEL, LENGTH)
    request: Any = SimpleNamespace(session_hash="a")
    session = sessions.session("a")
    running = handlers.ask(request, {"text": "What?"}, 0.0, 500, *scenario)
    for _ in range(4):
        next(running)
    other = threading.Thread(target=sessions.delete, args=[session.id])
    other.start()
    for _ in running:
        pass
    other.join(timeout=60)
    assert session not in sessions and not sessions.session("a").exchanges
    choice: Any = SimpleNamespace(key=session.exchanges[0].key)
    shown = handlers.undo_at(request, choice, *scenario)
    assert "this question is gone" in shown[0]


def test_policies_share_a_model_a_lock_and_a_budget(sessions) -> None:
    policy = KVPolicy.preset("oscar", window=16)
    pipe = sessions.pipeline(policy)
    assert sessions.pipeline(KVPolicy.preset("oscar", window=16)) is pipe
    assert pipe.model is sessions.pipe.model and pipe.engine.thread is sessions.pipe.engine.thread
    assert sessions.pipeline(sessions.pipe.policy) is sessions.pipe
    before = sessions.pipe.budget.used_bytes
    session = sessions.session("a")
    session.begin(
        SessionSettings.of_fields(
            "oscar", {one.label: AS_PRESET for one in Modality}, 16, None, False
        )
    )
    asked(session, "What?")
    assert session.conversation.chat.pipe is pipe
    assert sessions.pipe.budget.used_bytes - before == pipe.store.memory().used_bytes > 0


def test_the_budget_holds_for_all_together(pipe, uploads) -> None:
    sessions = Sessions(pipe, COMPACT, (uploads,))
    limit = pipe.budget.limit
    try:
        first = sessions.session("first")
        asked(first, "What?", uploads / "0.png", uploads / "1.png")
        answer, segments = first.exchanges[0].answer, first.conversation.segments
        one = pipe.budget.used_bytes
        pipe.budget.limit = round(2.5 * one)
        others = [sessions.session(str(index)) for index in range(4)]
        for index, other in enumerate(others):
            settings = {one.label: "16" if index % 2 else AS_PRESET for one in Modality}
            other.begin(SessionSettings.of_fields("compact", settings, 32, None, False))
            asked(other, "What?", uploads / "2.png")
            assert pipe.budget.used_bytes <= pipe.budget.limit
            assert other.exchanges[0].counts, other.exchanges[0].error
        assert (
            first.conversation.segments == segments and first.conversation.curve.last.used_bytes > 0
        )
        asked(first, "And?")
        assert first.exchanges[1].counts and first.exchanges[0].answer == answer
    finally:
        pipe.budget.limit = limit
        sessions.close()


def test_the_page_may_be_full(sessions, monkeypatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 2)
    for session in "ab":
        asked(sessions.session(session), "What?")
    with pytest.raises(InputError, match="all 2 sessions are in use"):
        sessions.session("c")
    sessions.leave("a")
    first = sessions.session("c")
    asked(first, "What?")
    monkeypatch.setattr(sessions_module, "IDLE_S", 0.0)
    sessions.session("b")
    sessions.session("d")  # and c, idle longest, leaves
    asking = pytest.raises(InputError, match="reload the page")
    with asking:
        asked(first, "What?")
    assert sessions.session("b") is not first


def test_a_visitor_who_never_asked_gives_way(sessions) -> None:
    """Invented sessions keep nobody out, and push out nobody who has a conversation."""
    mine = sessions.session("mine")
    asked(mine, "What?")
    for index in range(100):
        invented = sessions.session(f"invented {index}")
        with pytest.raises(InputError, match="nothing to undo"):
            invented.undo()
    assert len(sessions._sessions) == sessions_module.MAX_SESSIONS
    asked(sessions.session("new"), "What?")
    for index in range(100):
        sessions.session(f"more {index}").show_error(InputError("no"))
    assert sessions.session("new").turns and sessions.session("mine") is mine
    assert len(sessions._sessions) == sessions_module.MAX_SESSIONS


def test_a_visitor_who_waits_for_the_first_answer_stays(sessions, monkeypatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 2)
    first = sessions.session("a")
    options = {"max_new_tokens": 6, "temperature": 0.0}
    answering = first.ask("What?", [], **options)
    next(answering)
    for index in range(5):
        sessions.session(str(index))
    assert sessions.session("a") is first
    list(answering)
    assert first.turns


def test_nobody_is_let_in_after_the_end(sessions) -> None:
    asked(sessions.session("a"), "What?")
    sessions.close()
    with pytest.raises(InputError, match="is being closed"):
        sessions.session("b")
    assert sessions.pipe.budget.used_bytes == 0


def test_a_conversation_goes_on_by_its_id(sessions, uploads) -> None:
    first = sessions.session("a")
    asked(first, "What?", uploads / "0.png")
    sessions.leave("a")
    assert sessions.visit("b", first.id) is first is sessions.session("b")
    asked(first, "And?")
    assert len(first.turns) == 2
    # A second window; the first one is closed.
    assert sessions.visit("c", first.id) is first
    sessions.leave("b")
    assert sessions.session("c") is first and sessions.status.startswith("1 visitor here")


def test_a_browser_whose_connection_broke_goes_on(sessions) -> None:
    session = sessions.session("a")
    asked(session, "What?")
    sessions.leave("a")
    assert sessions.session("a") is session and sessions.status.startswith("1 visitor here")
    for index in range(1000):
        sessions.visit(str(index), session.id)
        sessions.leave(str(index))
    assert len(sessions._former_visits) <= 4 * sessions_module.MAX_SESSIONS


def test_nobody_chooses_an_id(sessions) -> None:
    mine = sessions.session("mine")
    asked(mine, "What?")
    for guess in ("", "chosen", mine.id[:-1], mine.id.lower(), "mine", "../x", "x" * 10**6):
        other = sessions.visit("other", guess)
        assert other is not mine and other.id != guess and len(other.id) == 32


def test_an_empty_conversation_goes_with_its_visit(sessions) -> None:
    session = sessions.visit("a", "")
    sessions.leave("a")
    assert sessions.is_empty and sessions.visit("b", session.id) is not session


def test_conversations_that_nobody_visits_are_bounded(sessions, uploads, monkeypatch) -> None:
    left = [sessions.session(str(index)) for index in range(4)]
    for session in left:
        asked(session, "What?", uploads / "0.png")
    monkeypatch.setattr(sessions_module, "MAX_UNVISITED_BYTES", 2 * left[0].used_bytes)
    for index in range(3):
        sessions.leave(str(index))
    again = [sessions.visit("new", session.id) is session for session in left]
    assert again == [False, True, True, True]
    monkeypatch.setattr(sessions_module, "MAX_UNVISITED_S", -1.0)
    sessions.leave("new")
    assert [sessions.visit("new", session.id) is session for session in left] == 3 * [False] + [
        True
    ]


def test_a_full_page_gives_up_what_nobody_visits_first(sessions, monkeypatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 2)
    stays, left = sessions.session("a"), sessions.session("b")
    for session in (stays, left):
        asked(session, "What?")
    sessions.leave("b")
    asked(sessions.session("c"), "What?")
    assert sessions.session("a") is stays
    with pytest.raises(InputError, match="all 2 sessions are in use"):
        sessions.visit("b", left.id)


def test_invented_visits_are_bounded(sessions) -> None:
    session = sessions.session("a")
    for index in range(1000):
        sessions.visit(str(index), session.id)
    assert len(sessions._visits) <= 4 * sessions_module.MAX_SESSIONS
    assert sessions.session("999") is session


def test_a_fork_has_an_address_of_its_own(sessions, monkeypatch) -> None:
    session = sessions.session("a")
    asked(session, "What?")
    fork = sessions.fork("a")
    assert sessions.session("a") is fork and sessions.visit("b", session.id) is session
    asked(fork, "And?")
    assert (len(session.turns), len(fork.turns)) == (1, 2)
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 2)
    with pytest.raises(InputError, match="sessions are in use"):
        sessions.fork("a")
    assert sessions.session("a") is fork
