"""Conversion of a chat's turns and tools to JSON fields of its file and back.

The file is not trusted: all types are checked and all counts are bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oscar_mm.chat.conversation import Turn
from oscar_mm.engine.family import Family
from oscar_mm.engine.message import Message, user_message, with_spans
from oscar_mm.media.part import MediaPart
from oscar_mm.modality import MediumSpan, Modality
from oscar_mm.tool_parsers.calls import ToolCall
from oscar_mm.tool_parsers.offer import ToolOffer

MAX_TURNS = MAX_MEDIA = 1 << 15
MAX_PARTS = 1 << 17
"""Maximum number of messages, texts and calls in all turns, not counting media."""
MAX_POSITION = 1 << 31
_ROLES = "system", "user", "assistant", "tool"


def turn_fields(turn: Turn) -> dict[str, Any]:
    """Return a turn as JSON fields; message parts are texts or indices of the turn's media."""
    places = {span.start: place for place, span in enumerate(turn.media)}
    return {
        "messages": [_message_fields(message, places) for message in turn.messages],
        "answer": turn.answer,
        "finish_reason": turn.finish_reason,
        "media": [
            {
                "modality": span.modality,
                "label": span.label,
                "start": span.start,
                "stop": span.stop,
                "digest": span.digest,
            }
            for span in turn.media
        ],
        "forgotten": turn.forgotten,
        "start": turn.start,
        "stop": turn.stop,
        "position": turn.position,
        "pending": turn.pending,
        "reasoning": turn.reasoning,
        "tool_calls": [_call_fields(call) for call in turn.tool_calls],
    }


def check_counts(turns: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if there are more turns, media or parts than a file may contain."""
    media = sum(len(turn["media"]) for turn in turns)
    if len(turns) > MAX_TURNS or media > MAX_MEDIA:
        raise ValueError(
            f"{len(turns):,} turns and {media:,} media: at most {MAX_TURNS:,} of each are allowed"
        )
    messages = [message for turn in turns for message in turn.get("messages", ())]
    parts = sum(1 + len(one["parts"]) + len(one["tool_calls"]) for one in messages)
    parts += sum(len(turn.get("tool_calls", ())) for turn in turns)
    if parts > MAX_PARTS + MAX_MEDIA:
        raise ValueError(f"{parts:,} parts: at most {MAX_PARTS + MAX_MEDIA:,} are allowed")


def turn_of(fields: Mapping[str, Any], version: int, vocabulary: int) -> Turn:
    """Create a turn from its JSON fields, whose counts have been checked.

    Raises:
        LookupError, TypeError, ValueError: if fields are missing or have wrong types.
    """
    media = [_span(span) for span in fields["media"]]
    position = fields["position"]
    if type(position) not in (int, float) or not 0 <= position < MAX_POSITION:
        raise ValueError("a turn's position is out of range")
    messages = _question(fields, media) if version == 1 else _messages(fields, media)
    turn = Turn(
        messages=messages,
        answer=_text(fields["answer"]),
        finish_reason=_text(fields["finish_reason"]),
        forgotten=tuple(_flag(flag) for flag in fields["forgotten"]),
        start=_number(fields["start"]),
        stop=_number(fields["stop"]),
        position=position,
        pending=token_ids(fields["pending"], vocabulary),
        reasoning=_text_or_none(fields.get("reasoning")),
        tool_calls=tuple(_call(call) for call in fields.get("tool_calls", ())),
    )
    if turn.media != tuple(media):
        raise ValueError("a turn's media are not in the order of its messages")
    return turn


def token_ids(saved: Sequence[Any], vocabulary: int) -> tuple[int, ...]:
    """Return token ids from a file; raise ValueError if one is not in the vocabulary."""
    if not all(0 <= _number(token) < vocabulary for token in saved):
        raise ValueError("token ids are out of range")
    return tuple(saved)


def offer_fields(offer: ToolOffer | None) -> dict[str, Any] | None:
    """Return the tools of a chat as JSON fields; None without tools."""
    if offer is None:
        return None
    return {
        "definitions": offer.for_template(),
        "required": offer.required,
        "named": offer.named,
        "parallel": offer.parallel,
    }


def offer_of(fields: Mapping[str, Any] | None, family: Family) -> ToolOffer | None:
    """Create tools from their JSON fields and check them with ``Family.offer``.

    Raises:
        InputError: if the tools cannot be offered to the model.
        LookupError, TypeError, ValueError: if fields are missing or have wrong types.
    """
    if fields is None:
        return None
    named = _text_or_none(fields["named"])
    choice: Any = "required" if _flag(fields["required"]) else "auto"
    if named is not None:
        if choice == "required":
            raise ValueError(
                "the tool choice is both required and a named tool: only one of the two is allowed"
            )
        choice = {"type": "function", "function": {"name": named}}
    definitions = fields["definitions"]
    if not definitions:
        raise ValueError("its list of tools is empty")
    return family.offer(definitions, choice, parallel=_flag(fields["parallel"]))


def _message_fields(message: Message, places: Mapping[int, int]) -> dict[str, Any]:
    return {
        "role": message.role,
        "parts": [
            places[part.start] if isinstance(part, MediumSpan) else part for part in message.parts
        ],
        "tool_calls": [_call_fields(call) for call in message.tool_calls],
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }


def _call_fields(call: ToolCall) -> dict[str, str]:
    return {"id": call.id, "name": call.name, "arguments": call.arguments}


def _question(fields: Mapping[str, Any], media: list[MediumSpan]) -> tuple[Message, ...]:
    """Return the messages of a turn in format version 1, which stores only the question's text."""
    parts = [MediaPart(span.modality, None, span.label) for span in media]
    return with_spans([user_message(_text(fields["prompt"]), parts)], media)


def _messages(fields: Mapping[str, Any], media: list[MediumSpan]) -> tuple[Message, ...]:
    """Return the messages of a turn; raise ValueError unless each media item occurs once."""
    left = dict(enumerate(media))
    messages = tuple(_message(message, left) for message in fields["messages"])
    if left or not messages:
        raise ValueError("a turn has no messages, or its messages do not contain all of its media")
    return messages


def _message(fields: Mapping[str, Any], left: dict[int, MediumSpan]) -> Message:
    role = _text(fields["role"])
    if role not in _ROLES:
        raise ValueError(f"{role[:40]!r} is not the role of a message")
    return Message(
        role,
        tuple(_part(part, left) for part in fields["parts"]),
        tool_calls=tuple(_call(call) for call in fields["tool_calls"]),
        tool_call_id=_text_or_none(fields["tool_call_id"]),
        name=_text_or_none(fields["name"]),
    )


def _part(saved: Any, left: dict[int, MediumSpan]) -> str | MediumSpan:
    if isinstance(saved, str):
        return saved
    if (span := left.pop(_number(saved), None)) is None:
        raise ValueError(
            "messages contain a media item twice, or an item that the turn does not have"
        )
    return span


def _call(fields: Mapping[str, Any]) -> ToolCall:
    return ToolCall(_text(fields["id"]), _text(fields["name"]), _text(fields["arguments"]))


def _span(fields: Mapping[str, Any]) -> MediumSpan:
    return MediumSpan(
        modality=Modality(_number(fields["modality"])),
        label=_text(fields["label"]),
        start=_number(fields["start"]),
        stop=_number(fields["stop"]),
        digest=_text(fields["digest"]),
    )


def _number(saved: Any) -> int:
    if type(saved) is not int:
        raise ValueError("a field is not an integer")
    return saved


def _flag(saved: Any) -> bool:
    if type(saved) is not bool:
        raise ValueError("a field is not true or false")
    return saved


def _text(saved: Any) -> str:
    if not isinstance(saved, str):
        raise ValueError("a field is not a text")
    return saved


def _text_or_none(saved: Any) -> str | None:
    return None if saved is None else _text(saved)
