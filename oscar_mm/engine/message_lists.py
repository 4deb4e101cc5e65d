"""Parsing of messages from lists of dicts, in the formats of Hugging Face and OpenAI."""

from __future__ import annotations

import binascii
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from PIL import Image

from oscar_mm.engine.message import (
    ASKING,
    Message,
    Part,
    first_turn,
    user_message,
    with_options,
    with_system,
)
from oscar_mm.errors import InputError, shown
from oscar_mm.media.options import ALIASES, NO_OPTIONS, OF_MODALITY, MediaOptions, options_from
from oscar_mm.media.part import MediaPart, as_source, media_parts
from oscar_mm.modality import MEDIA, Modality
from oscar_mm.tool_parsers.calls import ToolCall

_ROLES = {"developer": "system"} | {role: role for role in ("system", *ASKING, "assistant")}
_TYPES = MEDIA | {f"{name}_url": kind for name, kind in MEDIA.items()}
"""Part type -> modality; OpenAI's input_audio is handled separately."""
_FIELDS = {"assistant": ("tool_calls",), "tool": ("tool_call_id", "name")}
"""Role -> allowed fields other than role and content."""
_SOURCES = ("url", "path", "base64")
"""Keys, other than the part's type, that may contain a source, as in Hugging Face processors."""


def messages_from(
    given: Sequence[Any],
    images: Any = None,
    videos: Any = None,
    audio: Any = None,
    *,
    sound: bool = False,
    open_end: bool = False,
) -> list[Message]:
    """Read a conversation from a list of messages.

    ::

        [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Before:"},
                    {"type": "image", "image": "a.png"},
                    {"type": "text", "text": "after:"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}},
                ],
            },
        ]

    Args:
        given: dicts with a "role" and a "content", which is a string or a list as in
            ``parts_from``; or ``Message`` objects. An assistant message may have "tool_calls", in
            the Hugging Face or OpenAI format; a tool message may have a "tool_call_id" and a
            "name".
        images, videos, audio: media for parts without their own source, in order.
        sound: whether to also use the audio tracks of videos.
        open_end: whether the last message may have any role; see
            ``TemplateOptions.takes_any_end``.

    Raises:
        InputError: if an entry is not a valid message; states what would be valid.
    """
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence) or not given:
        raise InputError(
            "messages must be a non-empty list such as [{'role': 'user', 'content': 'Hello'}]"
        )
    loose = _Loose(images, videos, audio, sound)
    messages = [
        message if isinstance(message, Message) else _message(message, f"messages[{index}]", loose)
        for index, message in enumerate(given)
    ]
    loose.check_used()
    if messages[-1].role == "assistant" and not open_end:
        raise InputError("messages must end with a message to answer, not an assistant message")
    return messages


def parts_from(
    given: Sequence[Any],
    images: Any = None,
    videos: Any = None,
    audio: Any = None,
    *,
    sound: bool = False,
    place: str = "parts",
) -> tuple[Part, ...]:
    """Read texts and media from a list, in order.

    Args:
        given: items, each of which is a string, a PIL image, a ``MediaPart`` or a dict: ``{"type":
            "text", "text": "..."}``, ``{"type": "image", "image": source}`` (also "video" and
            "audio"; the source may be under "url", "path" or "base64", or left out), ``{"type":
            "image_url", "image_url": {"url": "..."}}`` (also "video_url" and "audio_url") or
            ``{"type": "input_audio", "input_audio": {"data": base64}}``. A source is anything that
            the pipeline accepts. A part may also have the fields of
            ``oscar_mm.media.options.MediaOptions`` (and "nframes").
        images, videos, audio: media for parts without their own source, in order.
        sound: whether to also use the audio tracks of videos.
        place: name of the argument, for error messages.

    Raises:
        InputError: if an item is not a valid part; states what would be valid.
    """
    loose = _Loose(images, videos, audio, sound)
    parts = tuple(_parts(given, place, loose))
    loose.check_used()
    return parts


def asked_from(
    prompt: str,
    media: tuple[Any, Any, Any],
    parts: Sequence[Any] | None,
    messages: Sequence[Any] | None,
    *,
    sound: bool,
    options: MediaOptions = NO_OPTIONS,
) -> list[Message]:
    """Read the input of a chat turn: media and then a prompt, parts of one message, or messages.

    Args:
        prompt: text of the user, after the media.
        media: images, videos and audio.
        parts: parts of one message, in order.
        messages: list of messages.
        sound: whether to also use the audio tracks of videos.
        options: media options of the request.

    Raises:
        InputError: see ``parts_from`` and ``messages_from``; also if more than one of prompt, parts
            and messages is passed.
    """
    if (bool(prompt), parts is not None, messages is not None).count(True) > 1:
        raise InputError("pass only one of prompt, parts and messages")
    if messages is not None:
        asked = messages_from(messages, *media, sound=sound)
    elif parts is not None:
        asked = [Message("user", parts_from(parts, *media, sound=sound), "parts")]
    else:
        asked = [user_message(prompt, media_parts(*media, sound=sound))]
    return with_options(asked, options)


def conversation_from(
    prompt: str,
    media: tuple[Any, Any, Any],
    messages: Sequence[Any] | None,
    system: str | None,
    *,
    sound: bool = False,
    options: MediaOptions = NO_OPTIONS,
    open_end: bool = False,
) -> list[Message]:
    """Read a conversation: media (images, videos, audio) and a prompt, or a list of messages.

    Raises:
        InputError: see ``messages_from``; also if both a prompt and messages are passed.
    """
    if messages is None:
        if isinstance(prompt, str) and not prompt.strip():
            swapped = not prompt and isinstance(media[0], str)
            raise InputError(
                "prompt is missing: the first argument is images; pass the question as prompt=..."
                if swapped
                else "prompt is empty: add some text"
            )
        return with_options(first_turn(prompt, media_parts(*media, sound=sound), system), options)
    if prompt:
        raise InputError("pass a prompt or messages, not both: the last message is the question")
    asked = messages_from(messages, *media, sound=sound, open_end=open_end)
    return with_system(system, with_options(asked, options))


class _Loose:
    """Media for parts without a source, consumed in order within each modality."""

    def __init__(self, images: Any, videos: Any, audio: Any, sound: bool) -> None:
        self.sound = sound
        parts = media_parts(images, videos, audio, sound=sound)
        self._left = {kind: [p for p in parts if p.modality is kind] for kind in MEDIA.values()}

    def next(self, kind: Modality, place: str) -> MediaPart:
        if not self._left[kind]:
            raise InputError(f"{place} has no source: add one under {kind.label!r}")
        return self._left[kind].pop(0)

    def check_used(self) -> None:
        for kind, left in self._left.items():
            if left:
                raise InputError(
                    f"{left[0].place} was passed, but every part of type {kind.label!r} already "
                    "specifies a source; remove one of them"
                )


def _message(given: Any, place: str, loose: _Loose) -> Message:
    if not isinstance(given, Mapping):
        raise InputError(f"{place} must be a dict with role and content, not {_type(given)}")
    role = given.get("role")
    if role not in _ROLES:
        raise InputError(f"{place}: role must be one of {', '.join(_ROLES)}, not {shown(role)}")
    known = {"role", "content", *_FIELDS.get(role, ())}
    if unknown := sorted(map(str, given.keys() - known)):
        raise InputError(f"{place}: unsupported fields ({', '.join(unknown)}); leave them out")
    content, name = given.get("content"), f"{place}.content"
    content = [content] if isinstance(content, str) else [] if content is None else content
    parts = tuple(_parts(content, name, loose))
    if role not in ASKING and any(isinstance(part, MediaPart) for part in parts):
        raise InputError(f"{name}: only user and tool messages may contain media, not {role!r}")
    calls = tuple(_call(call, place) for call in given.get("tool_calls") or ())
    result = [given.get(key) for key in _FIELDS["tool"]]
    if not all(isinstance(text, str | None) for text in result):
        raise InputError(f"{place}: {' and '.join(_FIELDS['tool'])} must be text")
    return Message(_ROLES[role], parts, name, calls, *result)


def _call(given: Any, place: str) -> ToolCall:
    function = given.get("function", given) if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise InputError(
            f'{place}: each of tool_calls must be a dict whose "function" has a "name"'
        )
    arguments = function.get("arguments", {})
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(dict(arguments))
    except (TypeError, ValueError):
        raise InputError(f"{place}: the arguments of {name!r} must be a dict or JSON") from None
    return ToolCall(str(given.get("id", "")), name, text)


def _parts(given: Any, place: str, loose: _Loose) -> Iterator[Part]:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        raise InputError(f"{place} must be a list of texts and media, not {_type(given)}")
    for index, part in enumerate(given):
        here = f"{place}[{index}]"
        if isinstance(part, str | MediaPart):
            yield part
        elif isinstance(part, Image.Image):
            yield MediaPart(Modality.IMAGE, part, here)
        elif isinstance(part, Mapping):
            yield _part(part, here, loose)
        else:
            raise InputError(f"{here} must be a string, a dict or a PIL image, not {_type(part)}")


def _part(given: Mapping[str, Any], place: str, loose: _Loose) -> Part:
    kind = given.get("type")
    if kind == "text":
        _check_keys(given, ("text",), place)
        text = given.get("text", "")
        if not isinstance(text, str):
            raise InputError(f"{place}: text must be a string, not {_type(text)}")
        return text
    if kind == "input_audio":
        _check_keys(given, (kind,), place)
        sound = given.get(kind)
        data = sound.get("data") if isinstance(sound, Mapping) else None
        return MediaPart(Modality.AUDIO, _from_base64(data, place), place)
    if kind not in _TYPES:
        known = ", ".join(["text", *_TYPES, "input_audio"])
        raise InputError(f"{place}: type must be one of {known}, not {shown(kind)}")
    modality, keys = _TYPES[kind], (kind,) if kind.endswith("_url") else (kind, *_SOURCES)
    chosen = {name: given[name] for name in (*OF_MODALITY[modality], *ALIASES) if name in given}
    _check_keys(given, (*keys, *chosen), place)
    named = [key for key in keys if given.get(key) is not None]
    if not named:
        return replace(loose.next(modality, place), options=_options(chosen, place))
    source = given[named[0]]
    if kind.endswith("_url") and isinstance(source, Mapping):
        chosen |= {"detail": source["detail"]} if source.get("detail") is not None else {}
        source = source.get("url")
    source = _from_base64(source, place) if named[0] == "base64" else _as_source(source, place)
    sound, options = loose.sound and modality is Modality.VIDEO, _options(chosen, place)
    return MediaPart(modality, source, place, sound, options)


def _options(given: Mapping[str, Any], place: str) -> MediaOptions:
    try:
        return options_from(given)
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def _check_keys(given: Mapping[str, Any], known: tuple[str, ...], place: str) -> None:
    if unknown := sorted(map(str, given.keys() - {"type", *known})):
        raise InputError(f"{place}: unsupported fields ({', '.join(unknown)}); leave them out")


def _as_source(source: Any, place: str) -> Any:
    """Convert a source in the Hugging Face or Qwen format to a source that the pipeline accepts."""
    if isinstance(source, str) and source[:7].lower() == "file://":
        return url2pathname(urlsplit(source).path)
    return as_source(source, place)


def _from_base64(text: Any, place: str) -> bytes:
    if not isinstance(text, str):
        raise InputError(f"{place} must be a base64-encoded file, not {_type(text)}")
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise InputError(f"{place} is not valid base64 ({error})") from None


def _type(value: object) -> str:
    return type(value).__name__
