"""Units of the pocket voice: what espeak-ng says for each token of the thinker, and its codes.

A frame of speech has five codes. Two describe its sound: the nearest of 256 spectra, and the
nearest of 256 differences from it. Three say where the talker is: which word it says, how many
frames the word still has, this one included, and which frame this is; words and frames are counted
modulo 256. The sound ignores them, but the talker, which is too small to count, reads them back.
"""

from __future__ import annotations

import io
import shutil
import string
import subprocess
import wave
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from examples.train_pocket.speech import NUMBERS

RATE, FRAME = 24_000, 1920  # samples in a second and in a frame of 80 ms
CODES = 256  # size of each codebook
SPECTRUM, DETAIL, PLACE, LEFT, COUNT = range(5)  # the codes of a frame
GROUPS = 5
SOUNDS = 2  # of them, the first ones, describe the sound
TAIL = 800  # samples of silence after a word at least: the last 768 of an answer are never made
SILENCE = 0.01  # of the peak
SPEED, PITCH = 165, 50


@dataclass
class Units:
    """What can be said.

    Attributes:
        waves: (units, longest, FRAME) float32 samples; unit 0 is a silent frame, 1 has two.
        frames: (units,) int64, number of frames of each.
        unit_of: (ids,) int64, the unit of each of the thinker's ids.
        codes: (units, longest, 2) int64, SPECTRUM and DETAIL of each frame.
    """

    waves: torch.Tensor
    frames: torch.Tensor
    unit_of: torch.Tensor
    codes: torch.Tensor

    def said(self, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the (frames, GROUPS) codes and the (frames, FRAME) samples of a text."""
        codes, waves = [], []
        for place, unit in enumerate(self.unit_of[torch.as_tensor(ids)].tolist()):
            count = int(self.frames[unit])
            left = count - torch.arange(count)
            places = torch.full((count,), place % CODES)
            codes.append(torch.cat([self.codes[unit, :count], places[:, None], left[:, None]], 1))
            waves.append(self.waves[unit, :count])
        found = torch.cat(codes)
        counted = torch.arange(len(found)) % CODES
        return torch.cat([found, counted[:, None]], dim=1), torch.cat(waves)


def words_of(tokenizer: PreTrainedTokenizerFast, size: int) -> list[str | None]:
    """Return what is said for each of ``size`` ids; None for a pause."""
    texts = [tokenizer.decode([number]) for number in range(len(tokenizer))]
    special = set(tokenizer.all_special_ids)
    known = [
        None if number in special else _word(text.strip()) for number, text in enumerate(texts)
    ]
    return known + [None] * (size - len(known))


def _word(text: str) -> str | None:
    if len(text) == 1 and text in string.digits:
        return NUMBERS[int(text)]
    return text.lower() if text and all(letter in string.ascii_letters for letter in text) else None


def speak(word: str, voice: str) -> np.ndarray:
    """Return a word as float32 at RATE with constant pitch, without silence at the ends.

    Raises:
        FileNotFoundError: espeak-ng is not installed.
        subprocess.CalledProcessError: espeak-ng failed.
    """
    program = shutil.which("espeak-ng")
    if program is None:
        raise FileNotFoundError("espeak-ng is not installed: apt-get install espeak-ng")
    spelled = f'<say-as interpret-as="characters">{word}</say-as>' if len(word) == 1 else word
    text = f'<speak><prosody range="0">{spelled}</prosody></speak>'
    command = [program, "-m", "-v", voice, "-s", str(SPEED), "-p", str(PITCH), "--stdout", text]
    sound = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
    with wave.open(io.BytesIO(sound)) as file:
        rate, data = file.getframerate(), file.readframes(file.getnframes())
    samples = resample(np.frombuffer(data, "<i2").astype(np.float32) / 32768, rate)
    loud = np.flatnonzero(np.abs(samples) > SILENCE * np.abs(samples).max())
    return samples[max(loud[0] - 120, 0) : loud[-1] + 1]


def resample(samples: np.ndarray, rate: int) -> np.ndarray:
    """Resample to RATE by the Fourier transform."""
    length = round(len(samples) * RATE / rate)
    spectrum = np.fft.rfft(samples)
    spectrum = np.pad(spectrum, (0, max(length // 2 + 1 - len(spectrum), 0)))[: length // 2 + 1]
    return (np.fft.irfft(spectrum, length) * length / len(samples)).astype(np.float32)


def record(tokenizer: PreTrainedTokenizerFast, size: int, voice: str) -> Units:
    """Record the units of a voice and find their codes.

    Args:
        tokenizer: tokenizer of the thinker.
        size: number of the thinker's ids.
        voice: voice of espeak-ng.
    """
    words = words_of(tokenizer, size)
    names = sorted({word for word in words if word is not None})
    clips = [np.zeros(FRAME, np.float32), np.zeros(2 * FRAME, np.float32)]
    clips += [speak(name, voice) for name in names]
    loudness = max(np.abs(clip).max() for clip in clips)
    frames = [max(1, len(clip) // FRAME) for clip in clips[:2]]
    frames += [-(-(len(clip) + TAIL) // FRAME) for clip in clips[2:]]
    waves = np.zeros((len(clips), max(frames) * FRAME), np.float32)
    for row, clip in zip(waves, clips, strict=True):
        row[: len(clip)] = 0.6 * clip / loudness
    numbers = {name: place + 2 for place, name in enumerate(names)}
    # Punctuation takes two frames; a space and what cannot be said, one.
    pauses = {tokenizer.convert_tokens_to_ids(mark) for mark in ",.:?"}
    unit_of = [
        numbers[word] if word is not None else int(number in pauses)
        for number, word in enumerate(words)
    ]
    shaped = torch.from_numpy(waves).view(len(clips), -1, FRAME)
    counts = torch.tensor(frames)
    return Units(shaped, counts, torch.tensor(unit_of), find_codes(shaped, counts))


def find_codes(waves: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
    """Return (units, longest, 2) codes of (units, longest, FRAME) samples, see ``Units``."""
    real = torch.arange(waves.shape[1]) < frames[:, None]
    features = spectra(waves[real])
    codes = torch.zeros(*waves.shape[:2], 2, dtype=torch.long)
    nearest, centres = cluster(features, CODES)
    detail, _ = cluster(features - centres[nearest], CODES)
    codes[real] = torch.stack([nearest, detail], dim=1)
    return codes


def spectra(waves: torch.Tensor) -> torch.Tensor:
    """Return (frames, features) log spectra of (frames, FRAME) samples, 10 ms by 10 ms."""
    parts = waves.unfold(1, 480, 240) * torch.hann_window(480)
    power = torch.fft.rfft(parts).abs().square()
    bands = torch.nn.functional.adaptive_avg_pool1d(power[..., :160], 32)
    return (bands + 1e-4).log().flatten(1)


def cluster(
    points: torch.Tensor, count: int, rounds: int = 30
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cluster of each of (points, features), and (clusters, features), by k-means."""
    generator = torch.Generator().manual_seed(0)
    centres = points[torch.randperm(len(points), generator=generator)[:count]].clone()
    for _ in range(rounds):
        nearest = torch.cdist(points, centres).argmin(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        sizes = torch.bincount(nearest, minlength=len(centres))[:, None]
        centres = torch.where(sizes > 0, sums / sizes.clamp(min=1), centres)
    return torch.cdist(points, centres).argmin(1), centres
