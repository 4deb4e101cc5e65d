"""The speech atlas: digits, pairs of digits and words, spoken by espeak-ng in several voices.

python -m examples.train_pocket.speech OUT.npz

It needs the program espeak-ng (GPL-3), of which only the sound goes into the atlas.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from examples.train_pocket.words import SPOKEN

RATE = 16_000
# Voice, words a minute, pitch. Training never uses the held-out voices.
VOICES = [
    ("en-us", 150, 50),
    ("en-us+f2", 160, 55),
    ("en-us+m3", 170, 45),
    ("en-us+f4", 140, 60),
    ("en-gb", 155, 50),
    ("en-gb+m7", 165, 40),
    ("en-gb+f3", 175, 60),
    ("en-gb-scotland", 150, 45),
    ("en-gb-x-rp", 160, 55),
    ("en-gb-x-rp+f1", 145, 65),
    ("en-us+m1", 180, 35),
    ("en-gb-x-gbclan+m5", 160, 50),
    ("en-us+linda", 150, 50),
    ("en-gb+Annie", 165, 55),
    ("en-us+Denis", 155, 45),
    ("en-us+michel", 170, 50),
    ("en-gb+steph", 145, 60),
    ("en-us+john", 160, 40),
    ("en-029+f2", 155, 50),
    ("en-us-nyc+m4", 165, 55),
]
HELD_OUT = [("en-us+f5", 155, 55), ("en-gb-x-gbcwmd+m2", 160, 45)]
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SINGLE, PAIR, WORD = 0, 10, 110  # where each kind starts in the table of units


@dataclass
class SpeechAtlas:
    """Units that can be said, on one device.

    Attributes:
        samples: (total,) int8, mu-law, at RATE.
        starts, lengths: (voices, units) int64 in samples: digits, then pairs of digits, then words.
        held_out: number of voices, the last ones, that are not for training.
    """

    samples: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    held_out: int

    @classmethod
    def load(cls, path: Path, device: torch.device) -> SpeechAtlas:
        """Read the file that ``main`` wrote."""
        with np.load(path) as file:
            tensors = {name: torch.from_numpy(file[name]).to(device) for name in file.files}
        held_out = int(tensors.pop("held_out"))
        return cls(**tensors, held_out=held_out)


def units() -> list[str]:
    """Text of each unit of the atlas."""
    pairs = [f"{first} {second}" for first in NUMBERS for second in NUMBERS]
    return [*NUMBERS, *pairs, *SPOKEN]


def compress(samples: np.ndarray) -> np.ndarray:
    """Compress floats in -1 .. 1 to mu-law int8: 8 bits with the noise of 13."""
    bounded = np.clip(samples, -1, 1)
    return np.round(127 * np.sign(bounded) * np.log1p(255 * np.abs(bounded)) / np.log(256)).astype(
        np.int8
    )


def expand(codes: torch.Tensor) -> torch.Tensor:
    """Expand mu-law int8 to float32, the inverse of ``compress``."""
    scaled = codes.float() / 127
    return scaled.sign() * (torch.pow(256.0, scaled.abs()) - 1) / 255


def speak(text: str, voice: str, speed: int, pitch: int) -> np.ndarray:
    """Speech of espeak-ng as float32 at RATE, without silence at the ends, peak 0.9.

    Raises:
        FileNotFoundError: espeak-ng is not installed.
        subprocess.CalledProcessError: espeak-ng failed, for example at an unknown voice.
    """
    program = shutil.which("espeak-ng")
    if program is None:
        raise FileNotFoundError("espeak-ng is not installed: apt-get install espeak-ng")
    command = [program, "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", text]
    sound = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
    with wave.open(io.BytesIO(sound)) as file:
        rate, frames = file.getframerate(), file.readframes(file.getnframes())
    samples = np.frombuffer(frames, "<i2").astype(np.float32) / 32768
    samples = resample(samples, rate)
    loud = np.flatnonzero(np.abs(samples) > 0.02 * np.abs(samples).max())
    samples = samples[max(loud[0] - 80, 0) : loud[-1] + 400]
    return 0.9 * samples / np.abs(samples).max()


def resample(samples: np.ndarray, rate: int) -> np.ndarray:
    """Resample to RATE by the Fourier transform: nothing above 8 kHz folds back."""
    length = round(len(samples) * RATE / rate)
    spectrum = np.fft.rfft(samples)[: length // 2 + 1]
    return (np.fft.irfft(spectrum, length) * length / len(samples)).astype(np.float32)


def record(voices: list[tuple[str, int, int]], held_out: int, words: list[str]) -> SpeechAtlas:
    """Make an atlas of all words in all voices, the last ``held_out`` of them held out."""
    clips, starts, lengths, total = [], [], [], 0
    for voice in voices:
        for word in words:
            clip = compress(speak(word, *voice))
            clips.append(clip)
            starts.append(total)
            lengths.append(len(clip))
            total += len(clip)
    shape = (len(voices), len(words))
    return SpeechAtlas(
        samples=torch.from_numpy(np.concatenate(clips)),
        starts=torch.tensor(starts).view(shape),
        lengths=torch.tensor(lengths).view(shape),
        held_out=held_out,
    )


def main() -> None:
    """Record the atlas and write it to the path on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    atlas = record(VOICES + HELD_OUT, len(HELD_OUT), units())
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        out,
        samples=atlas.samples,
        starts=atlas.starts,
        lengths=atlas.lengths,
        held_out=np.int64(atlas.held_out),
    )
    seconds = len(atlas.samples) / RATE
    print(f"{out}: {len(VOICES)} voices, {seconds:.0f} s, {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
