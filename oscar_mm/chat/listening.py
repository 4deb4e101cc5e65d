"""Listening: reads a recording into a chat while it is being made."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Unpack

import numpy as np

from oscar_mm.cache.memory import MemoryReport
from oscar_mm.chat.history import PastTurn
from oscar_mm.chat.open_turn import OpenTurn, Recording
from oscar_mm.engine.answer import Answer, AnswerStream
from oscar_mm.engine.message import Message
from oscar_mm.engine.request_options import QuestionOptions
from oscar_mm.errors import InputError, shown
from oscar_mm.modality import Modality
from oscar_mm.tool_parsers.offer import ToolOffer

if TYPE_CHECKING:
    from oscar_mm.chat.chat import Chat


class Listening:
    """A recording that a chat reads while it is being made; created by ``Chat.listen``.

    A question is about all that was heard so far, and it ends a part of the recording: each part is
    one recording of the turn that asks about it, as if it had been passed as ``audio``. What is
    heard during an answer belongs to the next question, and is read after the answer. A question
    whose answer is cancelled before its first word is part of the next one.

    The tokens are those of the whole part, and so are their features, with one exception: sounds
    that are 80 dB below a louder sound which comes later keep their level. Attention to earlier
    blocks is to packed keys and values, as with ``prefill_chunk``: with policy "bf16" the same.

    Until a question, no more than 9 seconds wait to be read, and only their samples are stored. A
    part may have up to ``MediaLimits.max_audio_seconds``, and no more than fits into the context.
    Any thread may call the methods.

    Args:
        chat: chat that reads the recording.
        rate: samples per second of what is heard.
        label: name of the parts of the recording.
        speaker: voice of the answers, from ``Pipeline.check_speech``; None for answers in text.

    Attributes:
        speaker: see above; another voice may replace it, but not None.

    Raises:
        InputError: if the model does not support audio in blocks, or the rate is out of range.
    """

    def __init__(self, chat: Chat, rate: int, label: str, speaker: str | None = None) -> None:
        if type(rate) is not int:
            raise InputError(f"listen: rate must be a whole number, not {shown(rate)}")
        self._chat, self._rate, self._label = chat, rate, label
        self.speaker = speaker
        self._turn = self._new_turn()
        self._asked: OpenTurn | None = None
        """The turn whose answer may still run."""
        self._seconds, self._closed = 0.0, False
        self._lock = threading.RLock()
        self._new_recording()  # Raises the errors at once.

    def _new_turn(self) -> OpenTurn:
        return OpenTurn(keeps_states=self.speaker is not None)

    def _new_recording(self) -> Recording:
        pipe = self._chat.pipe
        return Recording(pipe.family, self._rate, pipe.media_reader.limits, self._label)

    def __enter__(self) -> Listening:
        """Return the object itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening."""
        self.close()

    @property
    def seconds(self) -> float:
        """Seconds that were heard so far, in all parts."""
        with self._lock:
            return self._seconds

    @property
    def is_recording(self) -> bool:
        """Whether something was heard since the last question or ``commit``."""
        with self._lock:
            return self._turn.going_on is not None

    @property
    def read_tokens(self) -> int:
        """Number of tokens of the next question that are in the cache already."""
        with self._lock:
            return self._turn.tokens

    @property
    def unread_bytes(self) -> int:
        """Number of bytes of the parts of the next question that are not in the cache."""
        with self._lock:
            return self._turn.unread_bytes

    @property
    def memory(self) -> MemoryReport:
        """Memory report of the chat, including what was read of the next question."""
        with self._lock:
            return self._chat.memory_with(self._turn)

    def hear(self, samples: np.ndarray, *, read: bool = True) -> None:
        """Add the next samples, and read the blocks that they complete.

        Args:
            samples: (n,) float32 from -1 to 1, or int16, mono; they are copied.
            read: whether to read complete blocks now, and not with ``catch_up``.

        Raises:
            InputError: if they are of another type or shape, NaN or infinite, or if the part is
                longer than ``MediaLimits.max_audio_seconds``.
            RequestTooLarge: if the part does not fit into the context, the budget or the GPU; then
                ``discard`` it, or free memory.
        """
        given = np.asarray(samples)
        if given.ndim != 1 or given.dtype not in (np.float32, np.float64, np.int16):
            raise InputError(
                f"hear: samples of shape {given.shape} and {given.dtype} are not supported; pass "
                "(n,) float32 from -1 to 1, or int16, of one channel"
            )
        if given.dtype == np.int16:
            given = given.astype(np.float32) / 2**15
        with self._lock:
            self._check_open()
            turn = self._turn
            if turn.going_on is None:
                turn.going_on = self._new_recording()
                turn.recordings.append(turn.going_on)
            turn.going_on.hear(given)
            self._seconds += len(given) / self._rate
            if read:
                self.catch_up()

    def catch_up(self) -> None:
        """Read the blocks that were complete during an answer, if it has ended.

        ``hear`` does so too.

        Raises:
            RequestTooLarge: see ``hear``.
        """
        with self._lock:
            if not self._chat.is_streaming:
                self._settle()
                if self._turn.has_new_blocks:
                    self._chat.read_open_turn(self._turn)

    def add(self, message: Message) -> None:
        """Add a message of texts and images to the next question, after what was heard so far.

        Raises:
            InputError: if it has other media, or the recording before it lasts less than 0.1
                seconds.
        """
        for medium in message.media:
            if medium.modality is not Modality.IMAGE:
                raise InputError(
                    f"{medium.label}: only images can be added to what is heard: pass samples to "
                    "hear()"
                )
        with self._lock:
            self._check_open()
            self.commit()
            self._turn.messages.append(message)

    def tell(self, answer: Message) -> None:
        """Answer the messages that were added, as in ``Chat.tell_all``.

        Raises:
            InputError: if a recording is among them or no message was added; see also
                ``Chat.tell_all``.
        """
        with self._lock:
            self._check_open()
            if self._turn.recordings or not self._turn.messages:
                raise InputError(f"{answer.place}: an answer must follow messages that were added")
            self._chat.tell_all([PastTurn(self._turn.messages, answer)])
            self._turn = self._new_turn()

    def commit(self) -> None:
        """End a part of the recording without a question.

        Raises:
            InputError: if the part has less than 0.1 seconds.
        """
        with self._lock:
            self._turn.commit()

    def discard(self) -> None:
        """Forget what was heard since the last question or ``commit``; do nothing if there is
        nothing."""
        with self._lock:
            self._chat.pipe.engine.call(self._turn.discard)

    def ask(self, prompt: str = "", **options: Unpack[QuestionOptions]) -> Answer:
        """Ask about all that was heard so far.

        Args:
            prompt: the question, which follows the recording; may be empty.
            options: see ``Chat.ask``.

        Raises:
            InputError: see ``Chat.ask``; also if nothing was heard and nothing is asked.
        """
        return self.stream(prompt, **options).complete()

    def stream(
        self,
        prompt: str = "",
        *,
        speak: bool = True,
        tools: ToolOffer | None = None,
        **options: Unpack[QuestionOptions],
    ) -> AnswerStream:
        """Ask like ``ask``, and stream the answer; see ``Chat.stream``.

        Args:
            prompt, options: see ``ask``.
            speak: whether the answer is spoken too, if there is a speaker.
            tools: see ``Chat.stream``.
        """
        with self._lock:
            self._check_open()
            self._chat.end_stream()
            self._settle()
            if not self._turn.asked(prompt):
                raise InputError("prompt is empty, and nothing was heard: add some text")
            turn = self._turn
            turn.commit(prompt)
            self._turn, self._asked = self._new_turn(), turn
            try:
                speaker = self.speaker if speak else None
                return self._chat.ask_open_turn(turn, speaker, tools, **options)
            except BaseException:
                self._settle()
                raise

    def _settle(self) -> None:
        """Continue the turn that was asked, if it was not answered."""
        asked, self._asked = self._asked, None
        if asked is not None and not asked.answered:
            asked.resume(self._turn)
            self._turn = asked

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("listening has ended: call chat.listen() again")

    def close(self) -> None:
        """Forget what was heard since the last question, and free its memory."""
        with self._lock:
            self._closed = True
            for turn in (self._turn, self._asked):
                if turn is not None:
                    self._chat.pipe.engine.call(turn.close)
            self._turn, self._asked = self._new_turn(), None
