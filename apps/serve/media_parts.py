"""Message parts: text and media as clients send them, and the sources of media.

A media item is sent in the request, fetched from a URL if the server allows it, or reused: as in
vLLM, a part with a ``uuid`` and null or empty content refers to the media item that was sent with
the same ``uuid`` and ``cache_salt``.
"""

from __future__ import annotations

import binascii
import io
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from oscar_mm.apps.serve.field_error import FieldError
from oscar_mm.apps.serve.known_media import (
    MAX_BYTES,
    MAX_UUID_CHARACTERS,
    KnownMedia,
    KnownMedium,
)
from oscar_mm.errors import InputError
from oscar_mm.media.audio import opened
from oscar_mm.media.headers import opened_image
from oscar_mm.media.limits import MediaLimits
from oscar_mm.media.options import ALIASES, NAMES, OF_MODALITY, MediaOptions, options_from
from oscar_mm.media.part import MediaPart
from oscar_mm.media.source import AllowedHosts, NamedBytes, is_address, read_bytes
from oscar_mm.media.timeline import picture_track, sound_track
from oscar_mm.modality import MEDIA, Modality

_BASE64_PIECE = 4 << 20
"""Number of characters to decode at a time, holding the interpreter lock; a multiple of 4."""
NOT_FETCHED = "the {0} at this URL cannot be fetched, is too large, or is not a valid {0}"
"""The only error for URLs; anything more specific could tell clients about a private network."""
_NOUNS = {"image_url": "image", "video_url": "video", "audio_url": "recording"}
_EXAMPLES = {"image_url": "image/png", "video_url": "video/mp4", "audio_url": "audio/wav"}
_DATA = {"input_audio": "data", "file": "file_data"}
"""Name of the field with the data, for each type of part that has no URL."""
_SOUND = "use_audio_in_video"
_IGNORED_HOOKS = {"do_sample_frames": True, "do_resize": True, "truncation": False}
"""Processor arguments, each with the one value that is accepted, which has no effect."""
_log = logging.getLogger(__name__)


class StrictModel(BaseModel):
    """Base class of request models; values must have the API's types and are never converted."""

    model_config = ConfigDict(strict=True)


class MediaURL(StrictModel):
    """A media item, as a data URI or, with ``--allow-remote``, as an http(s) URL."""

    url: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None


class InputAudio(StrictModel):
    """An audio file in base64."""

    data: str | None = None


class GivenFile(StrictModel):
    """An image, a video or a recording as a data URI."""

    file_data: str | None = None


def _as_url(given: Any) -> Any:
    return {"url": given} if isinstance(given, str) else given


URL = Annotated[MediaURL | None, BeforeValidator(_as_url)]


class GivenPart(StrictModel):
    """A part of a message: text, or a media item with optional qwen-vl-utils options."""

    type: Literal["text", "image_url", "video_url", "audio_url", "input_audio", "file"]
    text: str | None = None
    image_url: URL = None
    video_url: URL = None
    audio_url: URL = None
    input_audio: InputAudio | None = None
    file: GivenFile | None = None
    uuid: Annotated[str, Field(min_length=1, max_length=MAX_UUID_CHARACTERS)] | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None
    resized_width: int | None = None
    resized_height: int | None = None
    fps: float | None = None
    nframes: int | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    video_start: float | None = None
    video_end: float | None = None

    def options(self, modality: Modality, name: str) -> MediaOptions:
        """Return the options of the part's media item.

        Args:
            modality: modality of the media item.
            name: name of the part, for error messages.

        Raises:
            FieldError: if an option does not apply to the modality, or a value is not allowed.
        """
        url: MediaURL | None = getattr(self, self.type) if self.type.endswith("_url") else None
        given = {key: getattr(self, key, None) for key in (*NAMES, *ALIASES)}
        given["detail"] = None if url is None or url.detail == "original" else url.detail
        given = {key: value for key, value in given.items() if value is not None}
        known = OF_MODALITY[modality]
        if unknown := [key for key in given if ALIASES.get(key, key) not in known]:
            noun = modality.label
            raise FieldError(f"{', '.join(unknown)} is not an option of {noun}: leave it out", name)
        return _options(given, name)


class WithMediaOptions(Protocol):
    """A request body that contains vLLM's options for all media of the request."""

    mm_processor_kwargs: dict[str, Any] | None
    media_io_kwargs: dict[str, dict[str, Any]] | None


class UsualOptions:
    """Request-wide media options, which apply to parts without their own options.

    Args:
        body: the body of the request; None if it has no such options.

    Attributes:
        sound: whether to use the audio tracks of videos too.

    Raises:
        FieldError: if an option is unknown, or a value is not allowed.
    """

    def __init__(self, body: WithMediaOptions | None = None) -> None:
        of_all = {} if body is None else body.mm_processor_kwargs or {}
        by_kind = {} if body is None else body.media_io_kwargs or {}
        given = {k: v for k, v in of_all.items() if v is not None}
        self.sound = given.pop(_SOUND, False)
        if not isinstance(self.sound, bool):
            raise FieldError("must be true or false", f"mm_processor_kwargs.{_SOUND}")
        given = {
            k: v for k, v in given.items() if not (k in _IGNORED_HOOKS and v == _IGNORED_HOOKS[k])
        }
        self._of_all = _known_options(given, (*NAMES, *ALIASES), "mm_processor_kwargs")
        self._by_modality = dict[Modality, MediaOptions]()
        for kind, options in by_kind.items():
            field = f"media_io_kwargs.{kind}"
            if kind not in MEDIA:
                raise FieldError(f"must be one of {', '.join(MEDIA)}", field)
            known = OF_MODALITY[MEDIA[kind]]
            self._by_modality[MEDIA[kind]] = _known_options(options, known, field)

    @property
    def field(self) -> str:
        """Name of the request field that contains the options."""
        return "media_io_kwargs" if self._by_modality else "mm_processor_kwargs"

    @property
    def given(self) -> dict[str, Any]:
        """All options that the request sets, by name."""
        by_modality = [one.given for one in self._by_modality.values()]
        return {
            name: value for one in (self._of_all.given, *by_modality) for name, value in one.items()
        }

    def of(self, modality: Modality) -> MediaOptions:
        """Return the request-wide options for media of one modality."""
        own = self._by_modality.get(modality, MediaOptions())
        return own.over(self._of_all.of_modality(modality))


def _known_options(given: Mapping[str, Any], known: tuple[str, ...], field: str) -> MediaOptions:
    given = {name: value for name, value in given.items() if value is not None}
    if unknown := [name for name in given if name not in known]:
        choices = ", ".join(name for name in known if name not in ALIASES)
        raise FieldError(
            f"{', '.join(unknown)[:200]} is not supported: leave it out, or use one of {choices}",
            field,
        )
    return _options(given, field)


def _options(given: Mapping[str, Any], name: str) -> MediaOptions:
    try:
        return options_from(given)
    except (InputError, TypeError) as error:
        raise FieldError(str(error), name) from None


@dataclass(frozen=True)
class MediaSource:
    """Allowed sources of media, and limits on them.

    Attributes:
        limits: limits on media; ``max_file_bytes`` applies to each item.
        remote_bytes: maximum total bytes to fetch from http(s) URLs per request; 0 to refuse URLs.
        hosts: hosts from which media may be fetched; None for all.
        known: stored media that clients can reuse by uuid, or None.
    """

    limits: MediaLimits
    remote_bytes: int = 0
    hosts: AllowedHosts | None = None
    known: KnownMedia | None = None


class MediaDecoder:
    """Decodes the media of one request, and fetches media if the server allows it.

    Args:
        source: allowed sources of the media.
        salt: ``cache_salt`` of the request.
        usual: request-wide options, for media without their own options.
    """

    def __init__(self, source: MediaSource, salt: str, usual: UsualOptions) -> None:
        self._source, self._salt, self._usual = source, salt, usual
        self._remote_bytes, self._known_bytes = source.remote_bytes, MAX_BYTES
        self._named: dict[str, KnownMedium] = {}

    def decode(self, part: GivenPart, name: str) -> MediaPart | None:
        """Return the media item of a part; None if the part has neither data nor a uuid."""
        found = self._sent(part, name)
        if found is None and part.uuid is None:
            return None
        if part.uuid is not None:
            if found is None:
                found = self._recall(part.uuid, part.type, name)
            self._named[part.uuid] = found
        assert found is not None
        modality, data = found
        options = part.options(modality, name)
        try:
            options = options.over(self._usual.of(modality))
        except InputError as error:
            raise FieldError(str(error), name) from None
        return MediaPart(
            modality, data, name, self._usual.sound and modality is Modality.VIDEO, options
        )

    def keep_named(self) -> None:
        """Store media with a uuid for later requests; call this after decoding all media."""
        if self._source.known is not None:
            for uuid, medium in self._named.items():
                self._source.known.add(self._salt, uuid, medium)

    def _sent(self, part: GivenPart, name: str) -> KnownMedium | None:
        """Return the media item that a part contains or links to; None if the part has no data."""
        field = _DATA.get(part.type, "url")
        sent = getattr(part, part.type)
        data: str | None = None if sent is None else getattr(sent, field)
        if data is None:
            if part.uuid is None:
                _check_null(part.type, field, sent, name)
            return None
        if part.type == "file":
            return self._file(data, name)
        if part.type == "input_audio":
            return KnownMedium(Modality.AUDIO, _decode_base64(data, name, self._source.limits))
        modality = MEDIA[part.type.removesuffix("_url")]
        return KnownMedium(modality, self._at(data, part.type, name))

    def _recall(self, uuid: str, kind: str, name: str) -> KnownMedium:
        """Return the media item stored with this uuid, checking its modality and size."""
        found = self._named.get(uuid)
        if found is None and self._source.known is not None:
            found = self._source.known.get(self._salt, uuid)
        if found is None:
            raise FieldError(
                "no media item is stored for this uuid and cache_salt (it may have been evicted): "
                "send it again with its uuid",
                name,
            )
        wanted = MEDIA.get("audio" if kind == "input_audio" else kind.removesuffix("_url"))
        if wanted not in (None, found.modality):
            raise FieldError(
                f"the media item stored with this uuid is of type {found.modality.label}", name
            )
        self._known_bytes -= len(found.data)
        if self._known_bytes < 0:
            raise FieldError(
                f"the media reused by uuid have more than {MAX_BYTES:,} bytes: reuse fewer",
                name,
            )
        return KnownMedium(found.modality, NamedBytes(found.data, name))

    def _at(self, url: str, field: str, name: str) -> NamedBytes:
        allow_remote = self._source.remote_bytes > 0
        if allow_remote and url[:5].lower() != "data:" and is_address(url):
            return self._fetch(url, field, name)
        # A client must not be able to make the server fetch a URL or open a path.
        kind, data = _data_uri(url)
        if kind is None:
            or_address = " or an http(s) URL" if allow_remote else ""
            example = _EXAMPLES[field]
            message = f"{field}.url must be a data URI, data:{example};base64,...{or_address}"
            raise FieldError(message, name)
        return _decode_base64(data, name, self._source.limits)

    def _file(self, uri: str, name: str) -> KnownMedium:
        kind, data = _data_uri(uri)
        modality = MEDIA.get((kind or "").partition("/")[0])
        if modality is None:
            known = "an image, a video or a recording"
            raise FieldError(f"file.file_data must be a data URI of {known}", name)
        return KnownMedium(modality, _decode_base64(data, name, self._source.limits))

    def _fetch(self, url: str, field: str, name: str) -> NamedBytes:
        if self._remote_bytes <= 0:
            raise FieldError(
                "the request's other media have used up its byte limit for URLs: use fewer URLs",
                name,
            )
        limits, hosts = self._source.limits, self._source.hosts
        limits = replace(limits, max_file_bytes=min(self._remote_bytes, limits.max_file_bytes))
        try:
            data = read_bytes(url, allow_remote=True, limits=limits, label=name, hosts=hosts)
            _check_kind(data, field)
        except Exception as error:  # A download or a parser may raise anything.
            _log.warning("%r was not fetched: %r", url[:200], str(error)[:200])
            raise FieldError(NOT_FETCHED.format(_NOUNS[field]), name) from None
        self._remote_bytes -= len(data)
        return NamedBytes(data, name)


def _check_null(kind: str, field: str, sent: object, name: str) -> None:
    """Refuse a part that has neither data nor a uuid, unless its entire media field is null."""
    if kind == "file":
        raise FieldError(
            "a file needs file_data, because this server does not store uploaded files", name
        )
    if sent is not None:
        raise FieldError("is missing", f"{name}.{kind}.{field}")


def _data_uri(text: str) -> tuple[str | None, str]:
    """Return the media type and base64 text of a data URI; None and "" if it is not a data URI."""
    head, comma, data = text.partition(",")
    if not comma or head[:5].lower() != "data:" or not head.lower().endswith(";base64"):
        return None, ""
    return head[5:].partition(";")[0].lower(), data


def _check_kind(data: bytes, field: str) -> None:
    """Raise an error if the fetched bytes are not the kind of media that the field requires."""
    if field == "image_url":
        with opened_image(io.BytesIO(data)):
            return
    with opened(data, "") as container:
        has_track = picture_track if field == "video_url" else sound_track
        if has_track(container) is None:
            raise InputError(f"the file has no {_NOUNS[field]} track")


def _decode_base64(text: str, name: str, limits: MediaLimits) -> NamedBytes:
    """Return the bytes of a base64-encoded media item."""
    limits.check_bytes(len(text) * 3 // 4, name)
    try:
        if "=" in text[:-2]:
            raise binascii.Error("padding before the end")
        pieces = [
            binascii.a2b_base64(text[start : start + _BASE64_PIECE], strict_mode=True)
            for start in range(0, len(text), _BASE64_PIECE)
        ]
    except ValueError as error:  # binascii.Error, or characters that are not ASCII
        raise FieldError(f"is not valid base64 ({error})", name) from None
    if not pieces:
        raise FieldError("must be a base64-encoded file, but is empty", name)
    return NamedBytes(b"".join(pieces), name)
