"""Speech of an answer, which a talker generates while the answer is written."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

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
        frames: number of frames of the answer's speech up to the end of these samples.
    """

    samples: np.ndarray
    sample_rate: int
    frames: int = 0


def heard_tokens(
    tokens: int, heard: float, said: float, frames: float, *, is_complete: bool
) -> int:
    """Return how many of an answer's tokens the first part of its speech says.

    Args:
        tokens: number of tokens of the answer.
        heard: duration of the part.
        said: duration of the speech so far, in the same unit.
        frames: number of its frames, of which each says at most one token.
        is_complete: whether this is all speech of the answer; then the part says the same share of
            the tokens as of the speech.
    """
    share = heard / said if said else 0.0
    return min(tokens, math.ceil(share * (tokens if is_complete else frames)))


class End(NamedTuple):
    """Where the question of a spoken turn ends.

    Attributes:
        tokens: number of the chat's tokens up to here.
        length: number of the talker's tokens up to here.
        position: RoPE position of the talker's next token.
    """

    tokens: int
    length: int
    position: float


@dataclass(frozen=True, eq=False)
class Heard:
    """What a talker has heard of a chat: the questions up to that of the latest spoken turn.

    Attributes:
        cache: the talker's keys and values, perhaps followed by speech; None before the first.
        ends: the end of the question of each spoken turn.
        unread: voices of the latest turns, whose questions are not in the cache, since their
            answers were not spoken, or ended before.
        forgotten: spans of the talker's tokens in ``unread``, which are forgotten when they are
            read.
    """

    cache: OscarCache | None = None
    ends: tuple[End, ...] = ()
    unread: tuple[Voice, ...] = ()
    forgotten: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> End:
        """The end of what was heard."""
        return self.ends[-1] if self.ends else End(0, 0, 0.0)

    def until(self, tokens: int) -> Heard:
        """Return what was heard within the first ``tokens`` tokens of the chat."""
        kept = tuple(end for end in self.ends if end.tokens <= tokens)
        read = len(self.ends) - len(self.unread)
        unread = self.unread[: max(len(kept) - read, 0)]
        forgotten = tuple(span for span in self.forgotten if kept and span[1] <= kept[-1].length)
        return Heard(self.cache if kept else None, kept, unread, forgotten)

    def without(self, start: int, stop: int) -> Heard:
        """Return a copy with its own cache, without the talker's tokens ``start`` to
        ``stop - 1``."""
        copy = self.forked()
        if copy.cache is None or copy.cache.get_seq_length() < stop:
            return replace(copy, forgotten=(*self.forgotten, (start, stop)))
        copy.cache.forget(start, stop)
        return copy

    def continued(self) -> OscarCache | None:
        """Return a fork of the cache without speech; None if nothing has been read."""
        if self.cache is None:
            return None
        read = self.ends[len(self.ends) - len(self.unread) - 1]
        cache = self.cache.fork()
        cache.crop(min(read.length - cache.get_seq_length(), 0))
        return cache

    def forked(self) -> Heard:
        """Return a copy with its own cache."""
        return replace(self, cache=self.continued())

    def close(self) -> None:
        """Release the memory, in the engine thread; surplus memory returns to the device."""
        if self.cache is not None:
            self.cache.close()
            self.cache.store.trim_surplus()


class Begun(NamedTuple):
    """Beginning of a prompt that the model has read already.

    Attributes:
        tokens: number of its tokens.
        states: states of its media, see ``MediaStates.kept``.
    """

    tokens: int = 0
    states: tuple[torch.Tensor, ...] = ()


NOT_BEGUN = Begun()


class VoiceInputs(NamedTuple):
    """What a voice speaks, and how.

    Attributes:
        prompt: prompt of a single row, which begins the answer.
        speaker: name of the voice in lower case.
        seed: seed of the frames' random choices; None for different choices each time.
        past: what the talker has heard of the chat; None outside of chats.
        missed: (tokens,) ids of the chat between ``past`` and the prompt, without media; None if
            there are none.
        begun: beginning of the prompt that the model has read already.
    """

    prompt: Prompt
    speaker: str
    seed: int | None = None
    past: Heard | None = None
    missed: torch.Tensor | None = None
    begun: Begun = NOT_BEGUN


class MediaStates(ABC):
    """Hidden states of the media in a prompt, which a talker reads.

    Attributes:
        kept: tensors of (tokens, size), one for each pass over media.
    """

    kept: list[torch.Tensor]

    @property
    @abstractmethod
    def are_missing(self) -> bool:
        """Whether states are not known yet, so that the rest of the prompt has to be prefilled
        within ``listening``."""

    @abstractmethod
    def listening(self, cache: OscarCache) -> AbstractContextManager[None]:
        """Within the block, collect the states of the next tokens that are read into a cache."""


class Voice(ABC):
    """The speech of one answer; the engine thread extends it by one frame at a time.

    Args:
        prompt: prompt of a single row, which begins an answer.
        words: ids of the answer's first tokens, if the prompt contains any.
        states: states of the prompt's media, as far as they are known.
        past: what the talker has heard of the chat; None outside of chats.

    Attributes:
        words: ids of the tokens to speak, as far as they are written.
        is_written: whether ``words`` is complete.
        ended: whether nothing more will be spoken.
        is_read: whether the question is in the cache.
        frames: number of frames generated so far.
        cache: keys and values of the talker; None before it begins.
        reservation: memory reservation, in effect while referenced.
        memory: memory report at the end; None before.
    """

    def __init__(
        self,
        prompt: Prompt,
        words: Sequence[int],
        states: MediaStates,
        past: Heard | None = None,
    ) -> None:
        self.prompt, self.words, self.states, self.past = prompt, list(words), states, past
        self.is_written = self.ended = self.is_read = False
        self.frames = 0
        self.cache: OscarCache | None = None
        self.reservation: object | None = None
        self.memory: MemoryReport | None = None

    @property
    def missing_states(self) -> MediaStates | None:
        """``states``, if some are not known yet; otherwise None."""
        return self.states if self.states.are_missing else None

    @property
    @abstractmethod
    def prompt_tokens(self) -> int:
        """Number of tokens that the talker reads before the first frame."""

    @abstractmethod
    def end(self, tokens: int) -> End:
        """Return where the question ends.

        Args:
            tokens: number of the chat's tokens up to the end of the prompt.
        """

    def heard(self, tokens: int) -> Heard:
        """Return what the talker has heard of the chat, with this question; see ``end``."""
        past = self.past or Heard()
        ends = (*past.ends, self.end(tokens))
        if self.is_read:
            return Heard(self.cache, ends)
        return Heard(past.cache, ends, (*past.unread, self), past.forgotten)

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
    def read(self, cache: OscarCache) -> Iterator[None]:
        """Prefill, with an iteration between two chunks, and choose the first code; needs a
        word."""

    def settle(self) -> None:
        """Release the memory, except for that of the questions of a chat; idempotent."""
        cache = self.cache
        if cache is not None and not cache.closed:
            if self.is_said and self.memory is None:
                cache.shrink()
                self.memory = cache.memory()
            if self.past is None or not self.is_read:
                cache.close()
            else:
                cache.crop(min(self.end(0).length - cache.get_seq_length(), 0))
                cache.shrink()
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
    def states(self, prompt: Prompt) -> MediaStates:
        """Return what collects the states of the media in questions, of which a prompt of a single
        row is a part."""

    @abstractmethod
    def voice(self, inputs: VoiceInputs) -> Voice:
        """Create the voice of an answer, whose speaker is one of ``speakers``.

        Raises:
            InputError: if the prompt does not begin an answer.
        """

    @abstractmethod
    def heard_span(self, ids: torch.Tensor, start: int, stop: int) -> tuple[int, int]:
        """Return which of the talker's tokens are the tokens ``start`` to ``stop - 1`` of a chat.

        Args:
            ids: (tokens,) ids of the chat.
            start, stop: a medium of a question.
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
