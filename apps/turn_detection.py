"""Turn detection: where a user begins and ends to speak, by WebRTC's voice activity detector."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from oscar_mm.media.resample import RATE

_FRAME = RATE // 50
"""Samples of a frame of 20 ms, which the detector classifies."""
_ONSET = 4
"""Number of consecutive frames with a voice after which a user speaks: 80 ms, so that a click is
not a word."""
_MODES = 4
"""The detector's modes: 0 finds most voices, 3 is the surest that it was one."""


@dataclass(frozen=True)
class Began:
    """The user began to speak.

    Attributes:
        at: index of the sample, among all of the session, from which on the sound is kept.
    """

    at: int


@dataclass(frozen=True)
class Ended:
    """The user has been silent for long enough.

    Attributes:
        at: index of the sample after the last one that is kept.
    """

    at: int


class SpeechDetector:
    """Cuts a stream of samples at 16 kHz into what a user says.

    Args:
        threshold: from 0 to 1; the higher, the surer must the detector be.
        padding_ms: sound that is kept from before the beginning, in ms.
        silence_ms: silence after which the user has ended, in ms.
        heard: number of samples of the session before the first one.
    """

    def __init__(self, threshold: float, padding_ms: int, silence_ms: int, heard: int = 0) -> None:
        import webrtcvad

        self._detector: Any = webrtcvad.Vad(min(int(threshold * _MODES), _MODES - 1))
        self._silence = max(1, silence_ms * RATE // 1000 // _FRAME)
        padding = padding_ms * RATE // 1000 // _FRAME
        self._recent: deque[np.ndarray] = deque(maxlen=padding + _ONSET)
        self._rest = np.zeros(0, np.float32)
        self._heard, self._run = heard, 0
        self.speaking = False

    def push(self, samples: np.ndarray) -> list[Began | np.ndarray | Ended]:
        """Add (n,) float32 samples, and return what was said, with its beginnings and ends."""
        self._rest = np.concatenate([self._rest, samples])
        found: list[Began | np.ndarray | Ended] = []
        count = len(self._rest) // _FRAME
        for frame in np.split(self._rest[: count * _FRAME], count) if count else ():
            self._heard += _FRAME
            found += self._next(frame)
        self._rest = self._rest[count * _FRAME :]
        return found

    def _next(self, frame: np.ndarray) -> list[Began | np.ndarray | Ended]:
        pcm = (frame.clip(-1, 1) * 32767).astype("<i2").tobytes()
        is_voice = self._detector.is_speech(pcm, RATE)
        self._run = self._run + 1 if is_voice != self.speaking else 0
        if self.speaking:
            if self._run < self._silence:
                return [frame]
            self.speaking, self._run = False, 0
            return [frame, Ended(self._heard)]
        self._recent.append(frame)
        if self._run < _ONSET:
            return []
        kept = np.concatenate(self._recent)
        self.speaking, self._run = True, 0
        self._recent.clear()
        return [Began(self._heard - len(kept)), kept]
