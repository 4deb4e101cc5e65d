"""Blocks of a recording for Qwen3-Omni: what its audio tower reads independently.

The tower's attention is within windows of ``n_window_infer`` frames, which are 8 s, and its
convolutions are within chunks of 2 ``n_window`` frames, which are 1 s. So cuts between windows do
not change what it computes. The last chunk of a recording is padded to 1 s if the recording has
longer chunks, and not padded otherwise; therefore a block waits until another second was heard.

Features are logarithms of energy, and values of more than 80 dB below the loudest one in the
recording are raised to that level. Here it is the loudest one so far: a block differs from the
same part of the whole recording only in values that a later, louder sound would raise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from oscar_mm.engine.sound_blocks import SoundBlock, SoundBlocks
from oscar_mm.media.resample import RATE

FRAME = RATE // 100
"""Number of audio samples per frame of audio features."""
MASK = "feature_attention_mask"
_CONTEXT = 2
"""Frames before and after a part that its features depend on: a spectrum is of 25 ms of sound, and
one frame of 10 ms begins after the other."""
_FLOOR = 2.0
"""Features are at most this much below the loudest one: 80 dB."""


class OmniSoundBlocks(SoundBlocks):
    """See ``SoundBlocks``.

    Args:
        extractor: feature extractor of the processor.
        config: configuration of the audio tower.
    """

    def __init__(self, extractor: Any, config: Any) -> None:
        self._extractor = extractor
        self._chunk, self._block = 2 * config.n_window, config.n_window_infer
        self._samples = np.zeros(0, np.float32)
        """Samples that are in no block yet, after those of the ``_before`` frames before them."""
        self._before = 0
        self._loudest = -np.inf

    @property
    def _frames(self) -> int:
        return len(self._samples) // FRAME - self._before

    def push(self, samples: np.ndarray) -> list[SoundBlock]:
        """See ``SoundBlocks.push``."""
        self._samples = np.concatenate([self._samples, samples])
        blocks = []
        while self._frames >= self._block + self._chunk:
            end = (self._before + self._block) * FRAME
            part = self._samples[: end + _CONTEXT * FRAME]
            blocks.append(self._features(part, self._block))
            self._samples, self._before = self._samples[end - _CONTEXT * FRAME :], _CONTEXT
        return blocks

    def rest(self) -> SoundBlock | None:
        """See ``SoundBlocks.rest``."""
        return self._features(self._samples, self._frames) if self._frames else None

    def _features(self, samples: np.ndarray, frames: int) -> SoundBlock:
        """Return the features of frames that follow ``_before`` others in samples."""
        found = heard(self._extractor, samples)["input_features"]
        features = found[..., self._before : self._before + frames]
        self._loudest = max(self._loudest, float(features.max()))
        inputs = {
            "input_features": features.clamp(min=self._loudest - _FLOOR),
            MASK: torch.ones(1, frames, dtype=torch.long),
        }
        return SoundBlock(audio_tokens(frames * FRAME), inputs)


def heard(extractor: Any, samples: np.ndarray) -> dict[str, torch.Tensor]:
    """Compute the features of (n,) samples and their mask, with the processor's options."""
    found = extractor(
        [samples],
        sampling_rate=RATE,
        padding=True,
        truncation=False,
        return_attention_mask=True,
        return_tensors="pt",
    )
    return {"input_features": found["input_features"], MASK: found["attention_mask"]}


def audio_tokens(samples: int) -> int:
    """Return the number of tokens of a recording: 13 per second, plus one per 8 remaining frames.

    Args:
        samples: number of audio samples.
    """
    seconds, rest = divmod(samples // FRAME, 100)
    # Three convolutions each halve the number of frames, rounding up.
    return 13 * seconds + -(-rest // 8)
