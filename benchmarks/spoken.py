"""Recordings of spoken digits and questions about them, as pocket-omni understands both."""

from __future__ import annotations

import json
import random
import wave
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from examples.train_pocket.speech import NUMBERS, RATE, VOICES, speak

VOICES_USED = VOICES[:4]
_GAP_S = 0.06
_MOST_S, _LEAST_S = 3.5, 1.0


@cache
def _unit(words: str, voice: tuple[str, int, int]) -> np.ndarray:
    return speak(words, *voice)


def clip(digits: str, voice: tuple[str, int, int]) -> np.ndarray:
    """(samples,) float32 at 16 kHz: digits in pairs, as the model heard them in training."""
    gap = np.zeros(round(_GAP_S * RATE), np.float32)
    parts = [gap]
    for place in range(0, len(digits), 2):
        words = " ".join(NUMBERS[int(digit)] for digit in digits[place : place + 2])
        parts += [_unit(words, voice), gap]
    sound = np.concatenate(parts)[: round(_MOST_S * RATE)]
    return np.pad(sound, (0, max(0, round(_LEAST_S * RATE) - len(sound))))


def write(path: Path, samples: np.ndarray) -> None:
    """A WAV file of 16 bit."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 32767).astype("<i2").tobytes())


def questions(
    folder: Path, recordings: int, clips: int, asked: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Rows of audio-qa: ``asked`` questions about each recording, a conversation of clips.

    Every other question is answered freely, the rest by choosing among four; the wrong choices are
    what other clips of the same recording say.
    """
    rng = random.Random(seed)
    rows = []
    for number in range(recordings):
        voice = rng.choice(VOICES_USED)
        said: list[str] = []
        while len(said) < clips:
            digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(3, 5)))
            if digits not in said:
                said.append(digits)
        names = [f"recording{number:02}-clip{place:02}.wav" for place in range(1, clips + 1)]
        for name, digits in zip(names, said, strict=True):
            write(folder / name, clip(digits, voice))
        for turn, place in enumerate(rng.sample(range(clips), asked)):
            row = {
                "id": f"r{number:02}q{turn:02}",
                "audio": names,
                "question": f"What was said in clip {place + 1}?",
                "answer": said[place],
                "group": "free",
            }
            if turn % 2:
                others = rng.sample([one for one in said if one != said[place]], 3)
                choices = rng.sample([said[place], *others], 4)
                row |= {"choices": choices, "group": "choices"}
            rows.append(row)
    return rows


def save(path: Path, rows: list[dict[str, Any]]) -> Path:
    """As JSONL."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def unshared(folder: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows, each about files of its own (links), so that nothing can be shared."""
    found = []
    for row in rows:
        names = [f"{row['id']}-{name}" for name in row["audio"]]
        for name, link in zip(row["audio"], names, strict=True):
            (folder / link).hardlink_to(folder / name)
        found.append(row | {"audio": names})
    return found
