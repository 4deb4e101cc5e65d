"""Hands-free: what a microphone hears becomes questions, and a voice ends an answer."""

import base64
import wave
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from oscar_mm.apps.demo import hands_free
from oscar_mm.apps.demo.handlers import Handlers
from oscar_mm.apps.demo.hands_free import ASKED, LISTENING, SPEAKING, Ears
from oscar_mm.errors import InputError
from oscar_mm.models import SAMPLES

pytest.importorskip("webrtcvad", reason="turn detection needs webrtcvad-wheels")
RATE = 16_000
WHERE = ("H100", "Qwen3-VL-8B", "32K tokens")


def encoded(samples: np.ndarray) -> str:
    return base64.b64encode(samples.astype("<i2").tobytes()).decode()


def deaf(_: str) -> Any:
    """A question that nobody reads while it is said."""
    return SimpleNamespace(hear=lambda _: None, close=lambda: None)


def sound_event(
    samples: np.ndarray, *, push: bool = False, begins: bool = False, ends: bool = False
) -> Any:
    return SimpleNamespace(sound=encoded(samples), push=push, begins=begins, ends=ends)


def recorded(path: Path) -> np.ndarray:
    with wave.open(str(path)) as file:
        assert file.getframerate() == RATE and file.getnchannels() == 1
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


@pytest.fixture
def spoken() -> np.ndarray:
    """Silence, four digits, and silence again."""
    clip = recorded(SAMPLES / "clips" / "01.wav")
    return np.concatenate([np.zeros(RATE // 2), clip, np.zeros(RATE)]).astype("<i2")


def heard(ears: Ears, samples: np.ndarray) -> list[str]:
    """What is told after each fifth of a second, without repetitions."""
    told = [ears.hear(encoded(part)) for part in np.array_split(samples, len(samples) * 5 // RATE)]
    return [one for one, before in zip(told, [None, *told], strict=False) if one != before]


def test_a_question_ends_with_silence(spoken, tmp_path) -> None:
    ears = Ears(tmp_path / "said", tmp_path, deaf)
    assert heard(ears, np.tile(spoken, 2)) == [LISTENING, *[SPEAKING, ASKED, LISTENING] * 2]
    paths = [question.path for question in ears.take()]
    assert len(paths) == 2 and not ears.take()
    clip = spoken[RATE // 2 : -RATE].astype(float)
    for path in paths:
        found = recorded(path).astype(float)
        assert len(clip) < len(found) < len(spoken)
        # The whole clip is there: nothing was lost where pieces meet.
        match = np.correlate(found, clip, "valid").max() / (clip @ clip)
        assert match == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(("seconds", "pieces"), [(1, 3), (2.5, 1)])
def test_a_long_question_is_cut(spoken, tmp_path, monkeypatch, seconds: float, pieces: int) -> None:
    """It is asked once it ends, also if too little is left after the cut to be a question."""
    monkeypatch.setattr(hands_free, "LIMITS", SimpleNamespace(max_audio_seconds=seconds))
    ears = Ears(tmp_path, tmp_path, deaf)
    assert heard(ears, spoken) == [LISTENING, SPEAKING, ASKED, LISTENING]
    assert len(ears.take()) == pieces


@pytest.mark.parametrize("sound", [None, "", "x", "AA==", "AAAA" * 50_000, 3])
def test_what_is_no_sound_is_refused(sound: Any, tmp_path) -> None:
    with pytest.raises(InputError, match="16-bit samples at 16000 Hz"):
        Ears(tmp_path, tmp_path, deaf).hear(sound)


def test_the_space_for_recordings_is_bounded(spoken, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(hands_free, "MAX_STORED_BYTES", -1)
    with pytest.raises(InputError, match="cannot store more files"):
        heard(Ears(tmp_path, tmp_path, deaf), spoken)


def test_a_question_is_answered_and_a_voice_ends_the_answer(
    sessions, uploads, spoken, monkeypatch
) -> None:
    handlers, session = Handlers(sessions, uploads / "made"), sessions.session("a")
    monkeypatch.setattr(handlers, "_session", lambda _: session)
    request: Any = SimpleNamespace(session_hash="a")

    def hear(part: np.ndarray) -> str:
        return handlers.hear(request, sound_event(part))[0]

    parts = np.array_split(spoken, len(spoken) * 5 // RATE)
    assert ASKED in [hear(part) for part in parts]
    steps = handlers.answer_heard(request, 0.0, 200, *WHERE)
    next(steps)
    assert session.is_answering
    assert SPEAKING in [hear(part) for part in parts]
    shown = [*steps]
    [first] = session.exchanges
    assert len(first.previews) == 1 and (first.note or first.error), "it did not end by itself"
    assert len(shown) < 150
    # The interruption is the next question.
    assert [*handlers.answer_heard(request, 0.0, 5, *WHERE)]
    assert session.exchanges[-1].answer and not session.exchanges[-1].error
    assert not [*handlers.answer_heard(request, 0.0, 5, *WHERE)], "all was answered"


def said(handlers: Handlers, sound: np.ndarray, **how: bool) -> list[tuple[str, Any]]:
    """Return what the page gets for each fifth of a second."""
    request: Any = SimpleNamespace(session_hash="a")
    parts = np.array_split(sound, len(sound) * 5 // RATE)
    return [handlers.hear(request, sound_event(part, **how)) for part in parts]


@pytest.fixture
def handlers(sessions, uploads, monkeypatch) -> Handlers:
    made, session = Handlers(sessions, uploads / "made"), sessions.session("a")
    monkeypatch.setattr(made, "_session", lambda _: session)
    return made


def used(sessions: Any) -> int:
    return sessions.pipe.engine.call(lambda: sessions.pipe.store.memory().used_bytes)


@pytest.mark.parametrize("push", [False, True])
def test_a_long_question_is_read_while_it_is_said(handlers, sessions, spoken, push) -> None:
    """The panel shows its blocks of 8 s before it ends, and then all that a file would have had."""
    request: Any = SimpleNamespace(session_hash="a")
    session, clip = sessions.session("a"), spoken[RATE // 2 : -RATE]
    sound = np.tile(clip, 20 * RATE // len(clip) + 1)[: 20 * RATE]
    shown = said(handlers, sound, push=push)
    panels = [panel for state, panel in shown if isinstance(panel, str)]
    assert len(panels) == 2 and all("<svg" in panel for panel in panels)
    counts = [sample.by_modality.get("audio", 0) for sample in session.conversation.curve.samples]
    assert counts == [0, 104, 208] and not session.conversation.chat.turns
    assert session.used_bytes == session.conversation.curve.last.used_bytes > 0
    if push:
        assert handlers.hear(request, sound_event(clip[:0], push=True, ends=True))[0] == ASKED
    else:
        assert ASKED in [state for state, _ in said(handlers, np.zeros(RATE))]
    assert [*handlers.answer_heard(request, 0.0, 5, *WHERE)]
    [live] = session.turns
    read = session.conversation.memory.tokens
    [segment] = session.conversation.chat.audio
    assert live.answer and live.previews[0].path is not None
    tokens = [sample.tokens for sample in session.conversation.curve.samples]
    assert tokens == sorted(tokens)
    [recording] = live.media["audio"]
    session.undo()
    for _ in session.ask("", [recording], is_talk=True, max_new_tokens=5, temperature=0.0):
        pass
    assert session.conversation.memory.tokens == read
    [again] = session.conversation.chat.audio
    assert (again.label, again.tokens) == (segment.label, segment.tokens)


def test_a_recording_is_asked_if_the_chat_has_changed(handlers, sessions, spoken) -> None:
    """Somebody types before the question ends."""
    request: Any = SimpleNamespace(session_hash="a")
    session, clip = sessions.session("a"), spoken[RATE // 2 : -RATE]
    sound = np.tile(clip, 10 * RATE // len(clip) + 1)[: 10 * RATE]
    assert session.conversation.curve.last.tokens == 0
    said(handlers, sound, push=True)
    assert session.conversation.curve.last.tokens > 104
    for _ in session.ask("And this?", [], max_new_tokens=3):
        pass
    said(handlers, sound, push=True)
    assert handlers.hear(request, sound_event(clip[:0], push=True, ends=True))[0] == ASKED
    assert [*handlers.answer_heard(request, 0.0, 5, *WHERE)]
    assert [bool(one.error) for one in session.exchanges] == [False, False]
    assert session.conversation.chat.audio[0].tokens == pytest.approx(20 * 13, abs=1)


def test_stop_while_a_block_is_read_does_not_end_the_listening(
    handlers, sessions, spoken, monkeypatch
) -> None:
    session, clip = sessions.session("a"), spoken[RATE // 2 : -RATE]
    sound = np.tile(clip, 10 * RATE // len(clip) + 1)[: 10 * RATE]
    read = sessions.pipe.engine.reader.read_in_chunks
    stopped: list[None] = []

    def once(*arguments: Any) -> Any:
        if not stopped:
            stopped.append(session.stop())
        return read(*arguments)

    monkeypatch.setattr(sessions.pipe.engine.reader, "read_in_chunks", once)
    shown = said(handlers, sound, push=True)
    assert stopped == [None] and {state for state, _ in shown} == {SPEAKING}
    assert session.conversation.curve.last.by_modality["audio"] == 104


def test_nothing_is_left_of_a_question_that_is_not_asked(handlers, sessions, spoken) -> None:
    request: Any = SimpleNamespace(session_hash="a")
    session, clip = sessions.session("a"), spoken[RATE // 2 : -RATE]
    sound = np.tile(clip, 10 * RATE // len(clip) + 1)[: 10 * RATE]
    before = used(sessions)
    said(handlers, sound)
    assert used(sessions) > before
    assert handlers.hear(request, sound_event(clip[:0], ends=True))[0] == LISTENING
    assert used(sessions) == before and session.used_bytes == 0
    for leave in (sessions.leave, sessions.begin):
        session = sessions.session("a")
        handlers._session = lambda _, session=session: session
        said(handlers, sound, push=True)
        assert used(sessions) > before
        leave("a")
        assert used(sessions) == before
    assert not [*handlers.answer_heard(request, 0.0, 5, *WHERE)]


@pytest.mark.parametrize("push", [False, True])
def test_a_press_begins_anew_after_an_error(handlers, sessions, spoken, push, monkeypatch) -> None:
    """The page could not tell that the question before has ended."""
    request: Any = None
    session, clip = sessions.session("a"), spoken[RATE // 2 : -RATE]

    def fail() -> bool:
        raise RuntimeError("out of memory")

    said(handlers, clip, push=push)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="out of memory"):
        patched.setattr(session, "read_heard", fail)
        handlers.hear(request, sound_event(clip[:3200], push=push))
    handlers.hear(request, sound_event(clip[:3200], push=push, begins=True))
    said(handlers, clip[3200:], push=push)
    if push:
        assert handlers.hear(request, sound_event(clip[:0], push=True, ends=True))[0] == ASKED
    else:
        assert ASKED in [state for state, _ in said(handlers, np.zeros(RATE))]
    [question] = session.ears.take()
    question.live.close()
    # Hands-free, the silence at the end is part of the recording.
    assert len(clip) // 2 < len(recorded(question.path)) <= len(clip) + RATE * (not push)


def test_push_to_talk_without_sound_asks_nothing(handlers, sessions) -> None:
    request: Any = SimpleNamespace(session_hash="a")
    nothing = np.zeros(0)
    assert handlers.hear(request, sound_event(nothing, push=True, ends=True))[0] == LISTENING
    assert not [*handlers.answer_heard(request, 0.0, 5, *WHERE)]


def test_sound_that_nobody_asks_about_takes_the_cache_of_one_question(
    handlers, sessions, spoken, monkeypatch
) -> None:
    """A browser that sends without end costs files, which are bounded, and no more of the cache."""
    monkeypatch.setattr(hands_free, "LIMITS", SimpleNamespace(max_audio_seconds=10))
    clip, before = spoken[RATE // 2 : -RATE], used(sessions)
    sound = np.tile(clip, 9 * RATE // len(clip) + 1)[: 9 * RATE + 3200]
    said(handlers, sound, push=True)
    one = used(sessions) - before
    for _ in range(5):
        said(handlers, sound, push=True)
        assert 0 <= used(sessions) - before <= 2 * one
    sessions.leave("a")
    assert used(sessions) == before
