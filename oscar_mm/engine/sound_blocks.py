"""SoundBlocks: the blocks in which a model reads a recording that is still being made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch


class SoundBlock(NamedTuple):
    """Part of a recording that the audio tower reads independently of the other parts.

    Attributes:
        tokens: number of the part's tokens.
        inputs: arguments of the model's forward with one row for the part, on the CPU.
    """

    tokens: int
    inputs: dict[str, torch.Tensor]


class SoundBlocks(ABC):
    """Cuts one recording into blocks while it is being made."""

    @abstractmethod
    def push(self, samples: np.ndarray) -> list[SoundBlock]:
        """Add (n,) float32 samples at 16 kHz, and return the blocks that are complete now."""

    @abstractmethod
    def rest(self) -> SoundBlock | None:
        """Return the end of the recording, which is in no block yet; None if it has no token."""
