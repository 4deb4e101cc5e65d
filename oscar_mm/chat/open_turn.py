"""OpenTurn: a question whose recordings are read while they are being made."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from oscar_mm.cache.cache import OscarCache
from oscar_mm.chat.conversation import Turn
from oscar_mm.engine.family import Family
from oscar_mm.engine.message import Message, user_message
from oscar_mm.engine.prompt import Prompt, beginning, remaining
from oscar_mm.engine.sound_blocks import SoundBlock
from oscar_mm.errors import InputError
from oscar_mm.media.limits import MediaLimits
from oscar_mm.media.part import MediaPart
from oscar_mm.media.resample import RATE, Mono
from oscar_mm.modality import MediumSpan, Modality

_STAND_IN = np.linspace(-0.5, 0.5, RATE // 10, dtype=np.float32), RATE
"""Recording that stands for one that is being made, to render and count everything else."""


class Recording:
    """A recording that is being made.

    Args:
        family: model family that reads it.
        rate: samples per second of what is heard.
        limits: media limits; ``max_audio_seconds`` bounds the recording.
        label: name of the recording.

    Attributes:
        blocks: its blocks so far; those that were read have no inputs.

    Raises:
        InputError: if the family does not support recordings in blocks, or the rate is out of
            range.
    """

    def __init__(self, family: Family, rate: int, limits: MediaLimits, label: str) -> None:
        self.part = MediaPart(Modality.AUDIO, _STAND_IN, label)
        family.check_reads([self.part])
        sound = family.sound_blocks()
        if sound is None:
            raise InputError(
                f"{label}: {family.name} reads recordings only as a whole: pass it as audio"
            )
        self._sound, self._mono = sound, Mono(rate, 1, limits, label)
        self._digest, self.blocks = hashlib.sha256(), list[SoundBlock]()

    @property
    def seconds(self) -> float:
        """Seconds that were heard so far."""
        return self._mono.seconds

    @property
    def tokens(self) -> int:
        """Number of tokens of the blocks."""
        return sum(block.tokens for block in self.blocks)

    def hear(self, samples: np.ndarray) -> None:
        """Add (n,) float32 samples, which may change afterwards.

        Raises:
            InputError: if they are NaN or infinite, or the recording is too long now.
        """
        self._mono.push(np.array(samples, np.float32)[:, None])
        self._add(self._mono.take())

    def finish(self) -> None:
        """End the recording.

        Raises:
            InputError: if it is too short.
        """
        self._add(self._mono.finish(0.0).samples)
        if (rest := self._sound.rest()) is not None:
            self.blocks.append(rest)
        del self._sound  # It has the last samples.

    def _add(self, samples: np.ndarray) -> None:
        self._digest.update(samples.tobytes())
        self.blocks += self._sound.push(samples)

    def forget_inputs(self) -> None:
        """Drop the inputs of all blocks, which are in the cache now."""
        self.blocks = [block._replace(inputs={}) for block in self.blocks]

    def span(self, start: int) -> MediumSpan:
        """Return the span of its tokens from an index."""
        digest = self._digest.hexdigest()
        return MediumSpan(Modality.AUDIO, self.part.label, start, start + self.tokens, digest)


@dataclass(eq=False)
class OpenTurn:
    """A question that is not complete, whose beginning may be in the cache.

    Attributes:
        messages: complete messages, whose recordings are ``recordings`` and whose other media are
            images.
        recordings: all recordings, in order.
        going_on: the last recording while it is being made; then no message has it yet.
        cache: cache of the chat's past and of the beginning of the turn; None before that.
        read: ids, positions and modalities of the beginning; None before that.
        keeps_states: whether a talker will read the turn.
        states: states of its media, for the talker; see ``MediaStates.kept``.
        past: turns of the chat that the cache contains.
        answered: whether it is a turn of the chat now.
    """

    keeps_states: bool = False
    messages: list[Message] = field(default_factory=list)
    recordings: list[Recording] = field(default_factory=list)
    going_on: Recording | None = None
    cache: OscarCache | None = None
    read: Prompt | None = None
    states: list[torch.Tensor] = field(default_factory=list)
    past: tuple[Turn, ...] = ()
    answered: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens of the turn in the cache."""
        return 0 if self.read is None else self.read.tokens

    @property
    def unread_bytes(self) -> int:
        """Number of bytes of the inputs of recordings that are not in the cache."""
        blocks = (block for one in self.recordings for block in one.blocks)
        return sum(given.nbytes for block in blocks for given in block.inputs.values())

    @property
    def has_new_blocks(self) -> bool:
        """Whether the recording that is being made has blocks that are not in the cache."""
        return self.going_on is not None and any(one.inputs for one in self.going_on.blocks)

    def asked(self, text: str) -> list[Message]:
        """Return the messages, the last of which ends with the recording and a text."""
        shown = [] if self.going_on is None else [self.going_on.part]
        return [*self.messages, *([user_message(text, shown)] if text or shown else [])]

    def commit(self, text: str = "") -> None:
        """End the recording, and complete the message that it is in.

        Raises:
            InputError: if the recording is too short.
        """
        if self.going_on is not None:
            self.going_on.finish()
        self.messages, self.going_on = self.asked(text), None

    def parts(self, family: Family, prompt: Prompt) -> list[Prompt]:
        """Return the parts of the turn's prompt that can be read one after the other.

        Args:
            family: model family.
            prompt: prompt of ``asked`` with the stand-ins of the recordings.
        """
        parts, start, moved = list[Prompt](), 0, 0
        heard = [span for span in prompt.media if span.modality is Modality.AUDIO]
        for span, recording in zip(heard, self.recordings, strict=True):
            text = remaining(beginning(prompt, span.start), start)
            parts.append(_moved(text, moved))
            parts += _blocks(prompt, span, parts[-1], recording)
            moved += recording.tokens - span.tokens
            start = span.stop
        parts.append(_moved(remaining(prompt, start), moved))
        return [replace(part, layout=family.layout) for part in parts]

    def whole(self, family: Family, parts: Sequence[Prompt]) -> Prompt:
        """Return the whole prompt, without the inputs of its media.

        Raises:
            InputError: if it does not begin with what is in the cache.
        """
        prompt = plain(family, parts)
        if self.read is not None:
            ids = prompt.inputs["input_ids"][:, : self.tokens]
            if not torch.equal(ids, self.read.inputs["input_ids"]):
                raise InputError(
                    "the chat template of this checkpoint changes what precedes a recording, so "
                    "it cannot be read while it is being made: pass it as audio"
                )
        return replace(prompt, media=tuple(self._spans(parts)))

    def _spans(self, parts: Sequence[Prompt]) -> Iterator[MediumSpan]:
        place, left = 0, iter(self.recordings)
        inside = False
        for part in parts:
            is_block = any(span.modality is Modality.AUDIO for span in part.media)
            if not is_block:
                yield from (span.shifted(place) for span in part.media)
            elif not inside:
                yield next(left).span(place)
            inside = is_block
            place += part.tokens

    def unread(self, family: Family, parts: Sequence[Prompt]) -> Prompt:
        """Return the parts that are not in the cache, with the inputs of their media."""
        before, left = self.tokens, list(parts)
        while before >= left[0].tokens:
            before -= left.pop(0).tokens
        if before:
            left[0] = remaining(left[0], before)
        return family.concatenate(left)

    def took(self, cache: OscarCache, read: Prompt, states: Iterable[torch.Tensor]) -> None:
        """Note that the beginning of the turn is in a new cache; call it in the engine thread."""
        if self.cache is not None:
            self.cache.close()
        self.cache, self.read, self.states = cache, read, [*self.states, *states]
        for recording in self.recordings:
            recording.forget_inputs()

    def discard(self) -> None:
        """Forget the recording that is being made, if there is one; call it in the engine thread.

        What precedes it in its message is forgotten too, since another message may follow.
        """
        if self.going_on is None:
            return
        read = sum(block.tokens for block in self.going_on.blocks if not block.inputs)
        self.recordings.remove(self.going_on)
        self.going_on = None
        if not read or self.cache is None or self.read is None:
            return
        media = (self.read.modalities[0] != Modality.TEXT).nonzero()[:, 0].tolist()
        count = len(media) - read
        if count == 0:
            self.close()
            self.read, self.states = None, []
            return
        kept = media[count - 1] + 1
        cache = self.cache.fork()
        cache.crop(kept - self.tokens)
        states = [torch.cat(self.states)[:count]] if self.states else []
        self.cache.close()
        self.cache, self.read, self.states = cache, beginning(self.read, kept), states

    def resume(self, later: OpenTurn) -> None:
        """Add what came after this turn was asked, since it was not answered."""
        self.messages += later.messages
        self.recordings += later.recordings
        self.going_on = later.going_on

    def close(self) -> None:
        """Release the cache; call it in the engine thread."""
        if self.cache is not None:
            self.cache.close()
        self.cache = None


def plain(family: Family, prompts: Sequence[Prompt]) -> Prompt:
    """Return prompts one after the other in a row, without inputs of media."""
    return family.concatenate(
        [
            replace(one, inputs={"input_ids": one.inputs["input_ids"].cpu()}, media=())
            for one in prompts
        ]
    )


def _moved(prompt: Prompt, by: int) -> Prompt:
    """Return a prompt whose positions are moved by a number of tokens."""
    return replace(prompt, positions=prompt.positions + by, next_position=prompt.next_position + by)


def _blocks(
    prompt: Prompt, span: MediumSpan, before: Prompt, recording: Recording
) -> Iterator[Prompt]:
    """Yield a prompt for each block of a recording, whose tokens take one position each.

    Args:
        prompt: prompt with a stand-in.
        span: tokens of the stand-in.
        before: the prompt that precedes the recording.
        recording: the recording.
    """
    token = prompt.inputs["input_ids"][:, span.start : span.start + 1]
    place = before.positions[..., -1:] + 1
    for block in recording.blocks:
        positions = place + torch.arange(block.tokens)
        place = positions[..., -1:] + 1
        medium = MediumSpan(Modality.AUDIO, span.label, 0, block.tokens, "")
        yield Prompt(
            inputs={"input_ids": token.expand(-1, block.tokens)} | block.inputs,
            positions=positions,
            next_position=place.reshape(-1)[-1:].to(prompt.next_position.dtype),
            modalities=torch.full((1, block.tokens), int(Modality.AUDIO), dtype=torch.int8),
            media=(medium,),
        )
