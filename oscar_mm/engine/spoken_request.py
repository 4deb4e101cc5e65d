"""SpokenRequest: a request whose answer is also spoken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from oscar_mm.cache.memory import MemoryReport
from oscar_mm.engine.answer import Answer
from oscar_mm.engine.request import Request
from oscar_mm.engine.speech import Speech, Talker, Voice
from oscar_mm.tool_parsers.offer import ToolOffer


class SpokenRequest(Request):
    """Request whose pieces also include ``Speech``; it is over when all words are spoken.

    Tool calls are not spoken, nor is what follows them.

    Args:
        talker: talker that speaks the answer.
        voice: speech of the answer, made by the talker.
        script: ids of the tokens to speak instead of an answer of the model, which then does
            not run; None to let the model answer.
        request, tools: arguments of ``Request``.
    """

    voice: Voice

    def __init__(
        self,
        *request: Any,
        talker: Talker,
        voice: Voice,
        script: Sequence[int] | None = None,
        tools: ToolOffer | None = None,
        **more: Any,
    ) -> None:
        super().__init__(*request, states=voice.missing_states, tools=tools, **more)
        self._call_tokens = self.engine.family.call_tokens(tools)
        self.talker, self.voice, self._spoken = talker, voice, list[np.ndarray]()
        self.script = script
        if script is not None:
            for token in script:
                self.write(token)
            self.ended = voice.is_written = True

    @property
    def is_over(self) -> bool:
        """Whether the request has ended, and all words are spoken."""
        return self.ended and self.voice.ended

    @property
    def output_tokens(self) -> int:
        """Number of tokens generated so far, with a token for each frame of speech."""
        return super().output_tokens + self.voice.frames

    def write(self, token: int) -> None:
        """Queue the pieces of a sampled token, and pass it to the voice."""
        super().write(token)
        if token in self._call_tokens:
            self.voice.is_written = True
        if not self.voice.is_written:
            self.voice.words.append(token)

    def say(self, samples: np.ndarray) -> None:
        """Queue the next (samples,) of the speech, in the engine thread."""
        if len(samples):
            self._spoken.append(samples)
            self.queue(Speech(samples, self.talker.sample_rate, self.voice.frames))

    def cancel(self) -> None:
        """See ``Request.cancel``."""
        if not self.is_over:
            self.voice.ended = self.cancelled = self.ended = True
            self.engine.abort()

    def fail(self, error: BaseException) -> None:
        """See ``Request.fail``."""
        super().fail(error)
        self.voice.ended = True

    def answer(self, memory: MemoryReport | None = None) -> Answer:
        """Return the answer so far, with its speech; see ``Request.answer``."""
        answer = super().answer(memory)
        spoken = self.engine.call(self._speech_memory) if memory is None else None
        return replace(
            answer,
            speech=np.concatenate([np.zeros(0, np.float32), *self._spoken]),
            sample_rate=self.talker.sample_rate,
            speech_tokens=self.voice.frames,
            memory=answer.memory if spoken is None else answer.memory.with_speech(spoken),
        )

    def _speech_memory(self) -> MemoryReport | None:
        """Return the memory of the speech so far, in the engine thread; None if there is none."""
        cache = self.voice.cache
        if self.voice.memory is not None or cache is None or cache.closed:
            return self.voice.memory
        return cache.memory()
