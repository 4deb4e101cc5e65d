"""Mono: join pieces of audio at any rate into a checked mono recording at 16 kHz."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from oscar_mm.errors import InputError
from oscar_mm.media.limits import MediaCount, MediaLimits

RATE = 16_000
"""Samples per second that audio towers take."""

MIN_SECONDS = 0.1
"""Minimum length of a recording; a shorter recording is next to no input for an audio tower."""

# A file with less than this fraction of the length estimated from its header counts as cut off.
MIN_SHARE = 0.9

# A recording may be shorter than an exact header says by this many seconds (encoder delay and
# padding) plus this fraction (damaged frames).
_SLACK_S = 0.5
_SLACK_SHARE = 0.001

_SILENCE_S = 10
"""Seconds of silence to add at a time."""

# Channels cancel each other out if the peak of their mean is less than this fraction of their own
# peak; codec noise is below it.
_CANCELLED_SHARE = 1 / 32

_FULL_SCALE = 0.9999
_CLIPPED_SHARE = 0.01
# Larger floats must be integers that were not scaled to -1..1.
_LOUDEST = 4.0


@dataclass(frozen=True, eq=False)
class Audio:
    """A recording in the form that audio towers read.

    Attributes:
        samples: (N,) float32, mono, 16 kHz, nominally -1..1.
        source_rate: samples per second of the source.
        channels: number of channels in the source, before they were averaged.
    """

    samples: np.ndarray
    source_rate: int
    channels: int

    @property
    def seconds(self) -> float:
        """Length of the recording in seconds."""
        return len(self.samples) / RATE


class MonoPiece(NamedTuple):
    """Samples of part of a recording, averaged over its channels.

    Attributes:
        samples: (n,) float32.
        peak: largest absolute value in any channel.
        clipped: number of samples that are at full scale in any channel.
        mono_peak: largest absolute value of ``samples``.
    """

    samples: np.ndarray
    peak: float
    clipped: int
    mono_peak: float

    @classmethod
    def of(cls, piece: np.ndarray, label: str, out: np.ndarray | None = None) -> MonoPiece:
        """Average samples over channels; a single channel is not copied.

        Args:
            piece: (n, channels) float32 samples.
            label: name of the recording in messages.
            out: (n,) float32 array to write the mean of several channels to.

        Raises:
            InputError: if samples are NaN, infinite or far beyond full scale.
        """
        if not len(piece):
            return cls(piece.mean(axis=1, dtype=np.float32), 0.0, 0, 0.0)
        peak = _peak(piece)
        if not math.isfinite(peak):
            raise InputError(f"{label}: contains NaN or infinite samples; export it again")
        if peak > _LOUDEST:
            raise InputError(
                f"{label}: floats must lie in -1..1, but these are far outside; divide by 32768 "
                "or pass int16"
            )
        several = piece.shape[1] > 1
        mono = piece.mean(axis=1, dtype=np.float32, out=out) if several else piece[:, 0]
        mono_peak = _peak(mono) if several else peak
        if peak < _FULL_SCALE:
            return cls(mono, peak, 0, mono_peak)
        loud = np.abs(piece).max(axis=1) if several else np.abs(mono)
        return cls(mono, peak, int((loud >= _FULL_SCALE).sum()), mono_peak)


def _peak(samples: np.ndarray) -> float:
    return float(np.maximum(samples.max(), -samples.min()))


class Mono:
    """Builds a mono recording at 16 kHz piece by piece.

    Args:
        rate: samples per second of the pieces.
        channels: number of channels of the pieces.
        limits: media limits; ``max_audio_seconds`` is checked for each piece.
        label: name of the recording in messages.
        whole: (n,) float32 array of all samples, if the pieces are consecutive parts of it at
            16 kHz; None if the pieces are to be resampled and joined.
        count: totals of the request, to which each piece is added.

    Raises:
        InputError: if the rate is out of range.
    """

    def __init__(
        self,
        rate: int,
        channels: int,
        limits: MediaLimits,
        label: str,
        whole: np.ndarray | None = None,
        count: MediaCount | None = None,
    ) -> None:
        import soxr

        if not 1000 <= rate <= 1_000_000:
            raise InputError(
                f"{label}: {rate} samples per second is not a usable rate; use 8000 to 192000"
            )
        self._limits, self._label, self._of_request = limits, label, count
        self._rate, self._channels, self._whole = rate, channels, whole
        self._resampler = soxr.ResampleStream(rate, RATE, 1, dtype="float32")
        self._parts: list[np.ndarray] = []
        self._count, self._peak, self._clipped, self._mono_peak = 0, 0.0, 0, 0.0

    @property
    def seconds(self) -> float:
        """Seconds of audio added so far."""
        return self._count / self._rate

    def push(self, piece: np.ndarray) -> None:
        """Add (n, channels) float32 samples, which must not change afterwards.

        Raises:
            InputError: see ``MonoPiece.of`` and ``add``.
        """
        self.add(MonoPiece.of(piece, self._label))

    def add(self, piece: MonoPiece) -> None:
        """Add a piece.

        Raises:
            InputError: if the recording, or the audio of the whole request, is now too long.
            Cancelled: see ``MediaCount``.
        """
        self._peak = max(self._peak, piece.peak)
        self._mono_peak = max(self._mono_peak, piece.mono_peak)
        self._clipped += piece.clipped
        self._count += len(piece.samples)
        self._limits.check_audio(self._count / self._rate, self._label)
        if self._of_request is not None:
            self._of_request.add_sound(len(piece.samples) / self._rate, self._label)
        if self._whole is None:
            self._parts.append(self._resampled(piece.samples))

    def add_silence(self, until: float) -> None:
        """Add silence up to ``until`` seconds after the beginning of the recording.

        Raises:
            InputError, Cancelled: see ``add``; raised before the silence is allocated.
        """
        self._limits.check_audio(until, self._label)
        missing = round(until * self._rate) - self._count
        for start in range(0, missing, _SILENCE_S * self._rate):
            silence = np.zeros(min(missing - start, _SILENCE_S * self._rate), np.float32)
            self.add(MonoPiece(silence, 0.0, 0, 0.0))

    def begin_anew(self) -> None:
        """Subtract this recording from the request's totals, so that another ``Mono`` can build it
        again from the beginning."""
        if self._of_request is not None:
            self._of_request.add_sound(-self._count / self._rate, self._label)

    def _resampled(self, samples: np.ndarray, *, last: bool = False) -> np.ndarray:
        if self._rate == RATE:
            return samples
        return self._resampler.resample_chunk(samples, last=last)

    def take(self) -> np.ndarray:
        """Remove the joined samples so far from the recording, and return them."""
        parts, self._parts = self._parts, []
        return np.concatenate([np.zeros(0, np.float32), *parts])

    def finish(self, promised: float, *, estimated: bool = False) -> Audio:
        """End the recording; warn if it is silent or clipped, or if its channels cancel out.

        Args:
            promised: length in seconds according to the header; 0 if unknown.
            estimated: whether ``promised`` may be off by a few percent.

        Raises:
            InputError: if there are no samples, too few, or fewer than promised.
        """
        seconds = self.seconds
        if not self._count:
            raise InputError(f"{self._label}: has no samples; record or export it again")
        min_seconds = MIN_SHARE * promised
        if not estimated:
            min_seconds = max(min_seconds, (1 - _SLACK_SHARE) * promised - _SLACK_S)
        if seconds < min_seconds:
            raise InputError(
                f"{self._label}: ends after {seconds:.1f} of {promised:.1f} s, so the file is cut "
                "off; copy or download it again"
            )
        if seconds < MIN_SECONDS:
            raise InputError(
                f"{self._label}: lasts {seconds:.3f} s, which is too short; it must last at least "
                f"{MIN_SECONDS:g} s"
            )
        if not self._peak:
            warnings.warn(f"{self._label}: is silent from beginning to end", stacklevel=4)
        elif self._mono_peak < _CANCELLED_SHARE * self._peak:
            warnings.warn(
                f"{self._label}: is silent, because its channels cancel each other out; "
                "pass only one of them",
                stacklevel=4,
            )
        elif self._clipped > _CLIPPED_SHARE * self._count:
            share = self._clipped / self._count
            warnings.warn(
                f"{self._label}: is clipped ({share:.0%} of its samples are at full scale)",
                stacklevel=4,
            )
        return Audio(self._samples(), self._rate, self._channels)

    def _samples(self) -> np.ndarray:
        if self._whole is not None:
            return self._whole
        self._parts.append(self._resampled(np.empty(0, np.float32), last=True))
        return np.concatenate(self._parts)
