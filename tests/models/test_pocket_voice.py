"""The voice of pocket-omni: its own ears, which were trained on other voices, understand it."""

import numpy as np
import pytest

from oscar_mm import OscarOmniPipeline
from oscar_mm.models import SAMPLES

soxr = pytest.importorskip("soxr", reason="audio needs soxr")
DIGITS = ("0123", "4567", "89", "308", "5192", "74", "66")


@pytest.fixture(scope="module", params=["bf16", "compact"])
def omni(request) -> OscarOmniPipeline:
    return OscarOmniPipeline("pocket-omni", policy=request.param, device="cpu")


def heard(omni: OscarOmniPipeline, samples: np.ndarray) -> str:
    sound = soxr.resample(samples, 24_000, 16_000)
    return omni(prompt="What was said?", audio=(sound, 16_000), max_new_tokens=12).text


@pytest.mark.slow
def test_digits_are_understood(omni) -> None:
    said = [omni.read_aloud(digits, seed=0).complete().speech for digits in DIGITS]
    pairs = [
        pair
        for digits, samples in zip(DIGITS, said, strict=True)
        for pair in zip(digits, heard(omni, samples).ljust(len(digits)), strict=False)
    ]
    right = sum(one == other for one, other in pairs)
    assert right >= 0.9 * len(pairs), pairs
    # A digit takes 0.3 to 0.7 s, and speech ends with its text.
    seconds = [
        len(samples) / (24_000 * len(digits)) for digits, samples in zip(DIGITS, said, strict=True)
    ]
    assert all(0.3 < each < 0.7 for each in seconds)


@pytest.mark.daily("compact")
def test_a_chat_is_answered_aloud(omni) -> None:
    """Both turns, although the talker reads the clips too."""
    with omni.chat() as chat:
        for clip in ("06", "10"):
            path = SAMPLES / "clips" / f"{clip}.wav"
            answer = chat.ask("What was said?", audio=path, speak=True, seed=0, max_new_tokens=12)
            samples, text = answer.speech, answer.text
            assert len(text) == 3 and 0.9 < len(samples) / 24_000 < 2.1
            right = sum(x == y for x, y in zip(heard(omni, samples), text, strict=False))
            assert right >= 2
