"""Protocol: OpenAI's chat-completions requests, checked, and its answers."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oscar_mm.errors import InputError
from oscar_mm.media import MediaLimits
from oscar_mm.media.source import read_bytes

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    "stop": "stop",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
}
"""Fields of a request that say how to answer, and what they are called here."""
_REFUSED = {
    "n": (None, 1),
    "tools": (None, []),
    "functions": (None, []),
    "logprobs": (None, False),
    "audio": (None,),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
}
"""Fields that would change the answer and are not supported, and the values that change nothing."""


@dataclass(frozen=True)
class Said:
    """What a user said: text, encoded images, encoded recordings."""

    text: str
    images: tuple[bytes, ...] = ()
    audio: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Request:
    """A checked request.

    Attributes:
        model: name that the client asked for.
        system: system prompt, or None.
        past: what was said and answered before.
        asked: what is asked now.
        sampling: fields of ``Sampling``.
        stream: whether to answer piece by piece.
        usage: whether a stream ends with the usage.
    """

    model: str
    system: str | None
    past: tuple[tuple[Said, str], ...]
    asked: Said
    sampling: dict[str, Any] = field(default_factory=dict)
    stream: bool = False
    usage: bool = False


def read_request(body: Any, limits: MediaLimits) -> Request:
    """Check the JSON of a request.

    Args:
        body: decoded JSON.
        limits: ``max_file_bytes`` bounds each medium.

    Raises:
        InputError: names the field, what is wrong with it and what would be right.
    """
    if not isinstance(body, Mapping):
        raise InputError("the request must be a JSON object")
    for name, harmless in _REFUSED.items():
        if body.get(name) not in harmless:
            raise InputError(f"{name}: {body[name]!r} is not supported: leave it out")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InputError("messages must be a list of messages that is not empty")
    system, turns = _turns(messages, limits)
    sampling = {_SAMPLING[name]: body[name] for name in _SAMPLING if body.get(name) is not None}
    if "temperature" not in sampling:
        sampling["temperature"] = 0.0
    options = body.get("stream_options") or {}
    return Request(
        model=str(body.get("model", "")),
        system=system,
        past=tuple(turns[:-1]),
        asked=turns[-1][0],
        sampling=sampling,
        stream=bool(body.get("stream")),
        usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
    )


def _turns(messages: list, limits: MediaLimits) -> tuple[str | None, list[tuple[Said, str]]]:
    """System prompt, and pairs of a question and its answer; the last one has none."""
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(f"messages[{place}]: must be an object with role and content")
    system, first = None, 0
    if messages[0].get("role") in ("system", "developer"):
        system, first = _text(messages[0].get("content"), "messages[0]"), 1
    turns: list[tuple[Said, str]] = []
    for place, message in enumerate(messages[first:], first):
        wanted = ("user", "assistant")[(place - first) % 2]
        if message.get("role") != wanted:
            raise InputError(
                f"messages[{place}]: role is {message.get('role')!r}, here {wanted!r} is expected: "
                "after an optional system prompt, user and assistant take turns"
            )
        if wanted == "user":
            turns.append((_said(message.get("content"), f"messages[{place}]", limits), ""))
        else:
            turns[-1] = (turns[-1][0], _text(message.get("content"), f"messages[{place}]"))
    if (len(messages) - first) % 2 == 0:
        raise InputError("messages must end with one of role 'user'")
    return system, turns


def _parts(content: Any, where: str) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise InputError(f"{where}: content must be text or a list of parts")
    return content


def _text(content: Any, where: str) -> str:
    """The texts of a message that has nothing else."""
    texts = []
    for part in _parts(content, where):
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InputError(f"{where}: a {part.get('type')!r} part where only text can be")
        texts.append(part["text"])
    return "\n".join(texts)


def _said(content: Any, where: str, limits: MediaLimits) -> Said:
    texts: list[str] = []
    images: list[bytes] = []
    audio: list[bytes] = []
    for place, part in enumerate(_parts(content, where)):
        name = f"{where}.content[{place}]"
        kind = part.get("type")
        held = part.get(kind) if isinstance(kind, str) else None
        if kind == "text" and isinstance(held, str):
            texts.append(held)
        elif kind == "image_url" and isinstance(held, Mapping):
            images.append(_image(held.get("url"), name, limits))
        elif kind == "input_audio" and isinstance(held, Mapping):
            audio.append(_audio(held.get("data"), name, limits))
        else:
            raise InputError(f"{name}: must be of type text, image_url or input_audio")
    return Said("\n".join(texts), tuple(images), tuple(audio))


def _image(url: Any, name: str, limits: MediaLimits) -> bytes:
    # Never an address or a path: the server must not fetch or open what a stranger names.
    if not isinstance(url, str) or url[:5].lower() != "data:":
        raise InputError(f"{name}: image_url.url must be a data URI, data:image/png;base64,...")
    return read_bytes(url, allow_remote=False, limits=limits, label=name)


def _audio(data: Any, name: str, limits: MediaLimits) -> bytes:
    if not isinstance(data, str) or not data:
        raise InputError(f"{name}: input_audio.data must be a sound file in base64")
    limits.check_bytes(len(data) * 3 // 4, name)
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise InputError(f"{name}: the base64 text is damaged ({error})") from None


def completion(about: Mapping[str, Any], text: str, reason: str, usage: Any) -> dict[str, Any]:
    """A whole answer."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
    return {**about, "object": "chat.completion", "choices": [choice], "usage": usage}


def chunk(
    about: Mapping[str, Any], delta: dict[str, Any] | None, reason: str | None = None, **more: Any
) -> dict[str, Any]:
    """A piece of an answer; without ``delta`` the one that has only the usage."""
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": reason}]
    return {**about, "object": "chat.completion.chunk", "choices": choices, **more}


def heading(number: str, model: str) -> dict[str, Any]:
    """What all parts of an answer have in common."""
    return {"id": f"chatcmpl-{number}", "created": int(time.time()), "model": model}


def failure(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
