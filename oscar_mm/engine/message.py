"""Message: one message of a conversation, with texts and media in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from oscar_mm.errors import InputError
from oscar_mm.media.options import MediaOptions
from oscar_mm.media.part import MediaPart
from oscar_mm.modality import MEDIA, MediumSpan
from oscar_mm.tool_parsers.calls import ToolCall

Part = str | MediaPart


@dataclass(frozen=True)
class Message:
    """A message of a conversation.

    Attributes:
        role: "system", "user", "assistant" or "tool" (the result of a call).
        parts: texts and media in the order in which the chat template writes them. In the history
            of a chat, a media item is a ``MediumSpan``: the chat stores its tokens, not its source.
        place: argument that the message came from, such as messages[2].content, for error messages.
        tool_calls: tool calls of an assistant message.
        tool_call_id: id of the call that a tool message answers; None if the client omits it.
        name: name of the tool in a tool message; None if the client omits it.

    Raises:
        InputError: if a part is neither text nor a media item.
    """

    role: str
    parts: tuple[Part | MediumSpan, ...]
    place: str = field(default="prompt", compare=False)
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        for part in self.parts:
            if not isinstance(part, str | MediaPart | MediumSpan):
                raise InputError(f"{self.place} must be text, not {type(part).__name__}")

    @property
    def media(self) -> list[MediaPart]:
        """Images, videos and recordings that the model has not processed yet, in order."""
        return [part for part in self.parts if isinstance(part, MediaPart)]

    @property
    def spans(self) -> list[MediumSpan]:
        """Images, videos and recordings that are already part of a chat, in order."""
        return [part for part in self.parts if isinstance(part, MediumSpan)]

    def shifted(self, tokens: int) -> Message:
        """Return the message with its spans shifted by ``tokens``."""
        parts = (p.shifted(tokens) if isinstance(p, MediumSpan) else p for p in self.parts)
        return replace(self, parts=tuple(parts))

    @property
    def texts(self) -> list[str]:
        """The texts, in order."""
        return [part for part in self.parts if isinstance(part, str)]

    @property
    def text(self) -> str:
        """The texts for display, one per line."""
        return "\n".join(self.texts)

    @property
    def written(self) -> str:
        """The texts concatenated without separators, as in chat templates."""
        return "".join(self.texts)

    @property
    def runs(self) -> list[str]:
        """The texts as the chat template joins them: one string per run between two media."""
        groups = groupby(self.parts, lambda part: isinstance(part, str))
        return ["".join(map(str, run)) for is_text, run in groups if is_text]

    @property
    def labels(self) -> list[str]:
        """Texts other than the content that a chat template may write: ids and names of calls and
        tool results, and call arguments."""
        calls = [text for call in self.tool_calls for text in (call.id, call.name, call.unescaped)]
        return [*calls, *(text for text in (self.tool_call_id, self.name) if text is not None)]

    @property
    def is_empty(self) -> bool:
        """Whether the message has neither text nor media; a tool result is never empty."""
        return not (self.role == "tool" or self.media or self.text.strip())


def with_spans(messages: Iterable[Message], spans: Iterable[MediumSpan]) -> tuple[Message, ...]:
    """Replace the media of messages with their spans among a chat's tokens.

    Args:
        messages: messages with the sources of their media.
        spans: spans of all media; within each modality, in the order of the messages.
    """
    given = list(spans)
    left = {
        kind: iter([span for span in given if span.modality is kind]) for kind in MEDIA.values()
    }
    return tuple(
        replace(
            message,
            parts=tuple(
                next(left[part.modality]) if isinstance(part, MediaPart) else part
                for part in message.parts
            ),
        )
        for message in messages
    )


def with_options(messages: Iterable[Message], options: MediaOptions) -> list[Message]:
    """Apply the options of a request to media that do not set these options themselves.

    Raises:
        InputError: if the options of a media item contradict those of the request.
    """
    if not options.given:
        return list(messages)
    return [
        replace(message, parts=tuple(_with_options(part, options) for part in message.parts))
        for message in messages
    ]


def _with_options(part: Part | MediumSpan, options: MediaOptions) -> Part | MediumSpan:
    if not isinstance(part, MediaPart):
        return part
    try:
        return replace(part, options=part.options.over(options.of_modality(part.modality)))
    except InputError as error:
        raise InputError(f"{part.place}: {error}") from None


def user_message(prompt: str, media: Iterable[MediaPart] = ()) -> Message:
    """Return a user message: the media, then the prompt unless it is empty."""
    parts = tuple(media)
    alone = isinstance(prompt, str) and not prompt
    return Message("user", parts if parts and alone else (*parts, prompt))


def first_turn(
    prompt: str, media: Iterable[MediaPart] = (), system: str | None = None
) -> list[Message]:
    """Return the messages of a conversation's first turn, with media before the prompt."""
    return with_system(system, [user_message(prompt, media)])


def with_system(system: str | None, messages: Sequence[Message]) -> list[Message]:
    """Prepend a system prompt, if there is one, to the messages."""
    first = [] if system is None else [Message("system", (system,), "system")]
    return [*first, *messages]


ASKING = "user", "tool"
"""Roles that an assistant message may answer."""


def text_of(messages: Iterable[Message]) -> str:
    """Join the texts of all messages, for counting."""
    return "\n".join(message.text for message in messages)


def media_of(messages: Iterable[Message]) -> list[MediaPart]:
    """Return the media of all messages, in order."""
    return [part for message in messages for part in message.media]
