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
    ears = Ears(tmp_path / "said", tmp_path)
    assert heard(ears, np.tile(spoken, 2)) == [LISTENING, *[SPEAKING, ASKED, LISTENING] * 2]
    paths = ears.take()
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
    ears = Ears(tmp_path, tmp_path)
    assert heard(ears, spoken) == [LISTENING, SPEAKING, ASKED, LISTENING]
    assert len(ears.take()) == pieces


@pytest.mark.parametrize("sound", [None, "", "x", "AA==", "AAAA" * 50_000, 3])
def test_what_is_no_sound_is_refused(sound: Any, tmp_path) -> None:
    with pytest.raises(InputError, match="16-bit samples at 16000 Hz"):
        Ears(tmp_path, tmp_path).hear(sound)


def test_the_space_for_recordings_is_bounded(spoken, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(hands_free, "MAX_STORED_BYTES", -1)
    with pytest.raises(InputError, match="cannot store more files"):
        heard(Ears(tmp_path, tmp_path), spoken)


def test_a_question_is_answered_and_a_voice_ends_the_answer(
    sessions, uploads, spoken, monkeypatch
) -> None:
    handlers, session = Handlers(sessions, uploads / "made"), sessions.session("a")
    monkeypatch.setattr(handlers, "_session", lambda _: session)
    request: Any = None

    def hear(part: np.ndarray) -> str:
        event: Any = SimpleNamespace(sound=encoded(part))
        return handlers.hear(request, event)

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
