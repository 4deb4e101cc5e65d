"""Speaks clips/01.wav to 10.wav, which pocket-omni can hear: what contents.json says.

    python examples/media/make_clips.py [FOLDER]

Digits are said one by one or in pairs, in several voices. Needs the program espeak-ng. 16 kHz,
mono, 16 bit.
"""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import soundfile
import soxr

CONTENTS = Path(__file__).with_name("contents.json")
RATE = 16_000
PAUSE_S = 0.25  # of silence before and after
# Voice, words a minute and pitch of espeak-ng; used in turn.
VOICES = (
    ("en-us", 150, 50),
    ("en-gb+f3", 165, 60),
    ("en-us+m3", 170, 45),
    ("en-gb-scotland", 150, 45),
    ("en-us+f2", 160, 55),
)
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def words(said: str) -> str:
    """Digits as words, with a breath after each two; a word as it is."""
    if not said.isdecimal():
        return said
    names = [NUMBERS[int(digit)] for digit in said]
    return ", ".join(" ".join(names[place : place + 2]) for place in range(0, len(names), 2))


def speak(sentence: str, voice: str, speed: int, pitch: int) -> np.ndarray:
    """(samples,) float32 at RATE, with a little silence around it."""
    command = ["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", sentence]
    spoken = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
    samples, rate = soundfile.read(io.BytesIO(spoken), dtype="float32")
    loud = np.flatnonzero(np.abs(samples) > 0.02 * np.abs(samples).max())
    samples = soxr.resample(samples[loud[0] : loud[-1] + 1], rate, RATE)
    return np.pad(0.8 * samples / np.abs(samples).max(), round(PAUSE_S * RATE))


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    (folder / "clips").mkdir(exist_ok=True)
    clips = json.loads(CONTENTS.read_text())["clips"]
    for place, (number, said) in enumerate(clips.items()):
        spoken = speak(words(said), *VOICES[place % len(VOICES)])
        soundfile.write(folder / "clips" / f"{number}.wav", spoken, RATE, subtype="PCM_16")


if __name__ == "__main__":
    main()
