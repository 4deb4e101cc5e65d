"""Speech of an answer, which a talker generates while the answer is written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from oscar_mm.cache.batch_view import BatchView
from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.memory import MemoryReport
from oscar_mm.engine.prompt import Prompt

FIRST_FRAMES, PIECE_FRAMES = 2, 5
"""Frames in the first and in each later piece of speech: 0.16 s and 0.4 s, of 12.5 frames per
second."""

SIZES = (1, 2, 4, 8, 16)
"""Numbers of voices for which steps of speech are captured."""


@dataclass(frozen=True, eq=False)
class Speech:
    """A piece of speech, among the pieces of an answer.

    Attributes:
        samples: (samples,) float32, mono, from -1 to 1.
        sample_rate: samples per second.
    """

    samples: np.ndarray
    sample_rate: int


class Voice(ABC):
    """The speech of one answer; the engine thread extends it by one frame at a time.

    Args:
        prompt: prompt of a single row, which begins an answer.
        words: ids of the answer's first tokens, if the prompt contains any.

    Attributes:
        words: ids of the tokens to speak, as far as they are written.
        is_written: whether ``words`` is complete.
        ended: whether nothing more will be spoken.
        frames: number of frames generated so far.
        cache: keys and values of the talker; None before it begins.
        reservation: memory reservation, in effect while referenced.
        memory: memory report at the end; None before.
    """

    def __init__(self, prompt: Prompt, words: Sequence[int]) -> None:
        self.prompt, self.words = prompt, list(words)
        self.is_written = self.ended = False
        self.frames = 0
        self.cache: OscarCache | None = None
        self.reservation: object | None = None
        self.memory: MemoryReport | None = None

    @property
    @abstractmethod
    def needs_states(self) -> bool:
        """Whether the talker needs hidden states of the prompt, so that the whole prompt has to be
        prefilled within ``listening``."""

    @property
    @abstractmethod
    def prompt_tokens(self) -> int:
        """Number of tokens that the talker reads before the first frame."""

    @property
    def is_ready(self) -> bool:
        """Whether the words of the next frame are known."""
        return self.is_written or len(self.words) > self.frames + 1

    @property
    def ends_piece(self) -> bool:
        """Whether the latest frame completes a piece of speech."""
        later = self.frames - FIRST_FRAMES
        return self.is_said or (later >= 0 and later % PIECE_FRAMES == 0)

    @property
    @abstractmethod
    def is_said(self) -> bool:
        """Whether the talker has ended its speech."""

    @abstractmethod
    def listening(self, cache: OscarCache) -> AbstractContextManager[None]:
        """Within the block, collect the hidden states of the prompt that is read into a cache."""

    @abstractmethod
    def read(self, cache: OscarCache) -> Iterator[None]:
        """Prefill lazily, one chunk per iteration, and choose the first frame; needs a word."""

    def settle(self) -> None:
        """Release the memory; idempotent."""
        if self.cache is not None and not self.cache.closed:
            if self.is_said:
                self.cache.shrink()
                self.memory = self.cache.memory()
            self.cache.close()
        self.reservation = None
        self.ended = True  # Last: then the thread that waits for the answer may read ``memory``.


class Talker(ABC):
    """A model that turns the words of answers into speech; only the engine thread may run it.

    Attributes:
        model: transformers model, whose decoder has attention "oscar".
        speakers: names of the voices in lower case, the default first.
    """

    sample_rate: ClassVar[int]
    """Samples per second."""
    max_frames: int
    """Maximum number of frames of one answer."""
    model: Any
    speakers: tuple[str, ...]

    @abstractmethod
    def voice(self, prompt: Prompt, speaker: str, seed: int | None) -> Voice:
        """Create the voice of an answer.

        Args:
            prompt: prompt of a single row.
            speaker: one of ``speakers``.
            seed: seed of the frames' random choices; None for different choices each time.

        Raises:
            InputError: if the prompt does not begin an answer.
        """

    @abstractmethod
    def frames(self, cache: BatchView) -> Frames:
        """Return an object that adds frames to voices of this talker.

        Args:
            cache: cache whose rows will be the voices' caches.
        """


class Frames(ABC):
    """Adds frames to the voices of a talker; only the engine thread may use it."""

    @abstractmethod
    def size_for(self, voices: int) -> int:
        """Return the number of rows that the cache must have for a number of voices."""

    @abstractmethod
    def say(self, voices: Sequence[Any]) -> None:
        """Add a frame to each voice, all of which are ready.

        Args:
            voices: voices that have been read; their caches are the first rows of the cache, and
                the others are padding.
        """

    @abstractmethod
    def sound(self, voices: Sequence[Any]) -> list[np.ndarray]:
        """Return the samples of each voice's frames since the last call, (samples,) float32."""

    @abstractmethod
    def refresh(self) -> None:
        """Forget captured steps if weights have changed since they were captured."""

    @abstractmethod
    def forget(self) -> None:
        """Forget captured steps; later ones are captured again."""
