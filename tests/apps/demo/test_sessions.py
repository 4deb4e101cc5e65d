"""Several visitors over one model: own chats, one budget, room for so many."""

import threading

import pytest

from oscar_mm.apps.demo import sessions as sessions_module
from oscar_mm.apps.demo.session import AS_PRESET, chosen
from oscar_mm.apps.demo.sessions import Hall
from oscar_mm.errors import InputError
from oscar_mm.modality import Modality
from oscar_mm.policy import KVPolicy
from tests.apps.demo.conftest import COMPACT, asked


def test_visitors_have_chats_of_their_own(hall, uploads) -> None:
    one, other = hall.visitor("a"), hall.visitor("b")
    assert hall.visitor("a") is one
    workers = [
        threading.Thread(target=asked, args=(who, "What?", uploads / f"{index}.png"))
        for index, who in enumerate((one, other))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    for index, who in enumerate((one, other)):
        with hall.pipe.chat() as chat:
            image = [uploads / f"{index}.png"]
            assert who.exchanges[0].answer == chat.ask("What?", image, max_new_tokens=6).text
        assert len(who.exchanges) == 1
    assert hall.status.startswith("2 visitors here, ")


def test_policies_share_a_model_a_lock_and_a_budget(hall) -> None:
    policy = KVPolicy.preset("oscar", window=16)
    pipe = hall.pipeline(policy)
    assert hall.pipeline(KVPolicy.preset("oscar", window=16)) is pipe
    assert pipe.model is hall.pipe.model and pipe.lock is hall.pipe.lock
    assert hall.pipeline(hall.pipe.policy) is hall.pipe
    before = hall.pipe.budget.used_bytes
    visitor = hall.visitor("a")
    visitor.begin(chosen("oscar", {one.label: AS_PRESET for one in Modality}, 16, None, False))
    asked(visitor, "What?")
    assert visitor.side.chat.pipe is pipe
    assert hall.pipe.budget.used_bytes - before == pipe.store.memory().used_bytes > 0


def test_the_budget_holds_for_all_together(pipe, uploads) -> None:
    hall = Hall(pipe, COMPACT, (uploads,))
    limit = pipe.budget.limit
    try:
        first = hall.visitor("first")
        asked(first, "What?", uploads / "0.png", uploads / "1.png")
        answer, segments = first.exchanges[0].answer, first.side.segments
        one = pipe.budget.used_bytes
        pipe.budget.limit = round(2.5 * one)
        others = [hall.visitor(str(index)) for index in range(4)]
        for index, other in enumerate(others):
            settings = {one.label: "16" if index % 2 else AS_PRESET for one in Modality}
            other.begin(chosen("compact", settings, 32, None, False))
            asked(other, "What?", uploads / "2.png")
            assert pipe.budget.used_bytes <= pipe.budget.limit
            assert other.exchanges[0].counts, other.exchanges[0].error
        assert first.side.segments == segments and first.side.curve.last.held > 0
        asked(first, "And?")
        assert first.exchanges[1].counts and first.exchanges[0].answer == answer
    finally:
        pipe.budget.limit = limit
        hall.close()


def test_the_hall_may_be_full(hall, monkeypatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_VISITORS", 2)
    for session in "ab":
        asked(hall.visitor(session), "What?")
    with pytest.raises(InputError, match="2 visitors are here already"):
        hall.visitor("c")
    hall.leave("a")
    first = hall.visitor("c")
    asked(first, "What?")
    monkeypatch.setattr(sessions_module, "IDLE_S", 0.0)
    hall.visitor("b")
    hall.visitor("d")  # and c, idle longest, leaves
    asking = pytest.raises(InputError, match="reload the page")
    with asking:
        asked(first, "What?")
    assert hall.visitor("b") is not first


def test_who_never_asked_gives_way(hall) -> None:
    """Invented sessions keep nobody out, and push out nobody who has a conversation."""
    mine = hall.visitor("mine")
    asked(mine, "What?")
    for index in range(100):
        invented = hall.visitor(f"invented {index}")
        with pytest.raises(InputError, match="nothing to take back"):
            invented.undo()
    assert len(hall._visitors) == sessions_module.MAX_VISITORS
    asked(hall.visitor("new"), "What?")
    for index in range(100):
        hall.visitor(f"more {index}").tell(InputError("no"))
    assert hall.visitor("new").turns and hall.visitor("mine") is mine
    assert len(hall._visitors) == sessions_module.MAX_VISITORS


def test_who_waits_for_the_first_answer_stays(hall, monkeypatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_VISITORS", 2)
    first = hall.visitor("a")
    options = {"max_new_tokens": 6, "temperature": 0.0}
    answering = first.ask("What?", [], **options)
    next(answering)
    for index in range(5):
        hall.visitor(str(index))
    assert hall.visitor("a") is first
    list(answering)
    assert first.turns


def test_nobody_is_let_in_after_the_end(hall) -> None:
    asked(hall.visitor("a"), "What?")
    hall.close()
    with pytest.raises(InputError, match="is being closed"):
        hall.visitor("b")
    assert hall.pipe.budget.used_bytes == 0
