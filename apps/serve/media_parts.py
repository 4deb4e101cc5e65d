"""Parts of messages: text and media as clients send them, and how the media are decoded.

A medium comes in the request, from an address where the server fetches, or from those that were
named before: a part whose medium is null, and which has a ``uuid``, shows the medium that came with
that ``uuid`` and the same ``cache_salt``, as in vLLM.
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
"""Characters that are decoded at once while other threads wait; a multiple of 4."""
NOT_FETCHED = "the {0} at this address cannot be fetched, is too large, or is no {0}"
"""All that a client learns about an address, which may be one of a private network."""
_NOUNS = {"image_url": "image", "video_url": "video", "audio_url": "recording"}
_EXAMPLES = {"image_url": "image/png", "video_url": "video/mp4", "audio_url": "audio/wav"}
_SOUND = "use_audio_in_video"
_HARMLESS = {"do_sample_frames": True, "do_resize": True, "truncation": False}
"""Arguments of processors that change nothing with these values."""
_log = logging.getLogger(__name__)


class StrictModel(BaseModel):
    """Values must have the protocol's types: no number is a text, no text a number."""

    model_config = ConfigDict(strict=True)


class MediaURL(StrictModel):
    """A medium as a data URI or, where the server fetches, as an http(s) address."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class InputAudio(StrictModel):
    """A sound file in base64."""

    data: str


class GivenFile(StrictModel):
    """A file of any kind of medium as a data URI."""

    file_data: str | None = None


def _as_url(given: Any) -> Any:
    return {"url": given} if isinstance(given, str) else given


URL = Annotated[MediaURL | None, BeforeValidator(_as_url)]


class GivenPart(StrictModel):
    """Text or a medium, with qwen-vl-utils' options of it beside it."""

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
        """The options of a medium.

        Raises:
            FieldError: options that its modality lacks, or with values that are not allowed.
        """
        url: MediaURL | None = getattr(self, self.type) if self.type.endswith("_url") else None
        given = {key: getattr(self, key, None) for key in (*NAMES, *ALIASES)}
        given["detail"] = None if url is None or url.detail == "original" else url.detail
        given = {key: value for key, value in given.items() if value is not None}
        known = OF_MODALITY[modality]
        if unknown := [key for key in given if ALIASES.get(key, key) not in known]:
            noun = modality.label
            raise FieldError(f"{', '.join(unknown)} is no option of {noun}: leave it out", name)
        return _options(given, name)


class WithMediaOptions(Protocol):
    """A body with vLLM's options of all media."""

    mm_processor_kwargs: dict[str, Any] | None
    media_io_kwargs: dict[str, dict[str, Any]] | None


class UsualOptions:
    """Options of a request's media that have none of their own, and whether videos are heard.

    Args:
        body: of the request.

    Raises:
        FieldError: an option that is not known, or a value that is not allowed.
    """

    def __init__(self, body: WithMediaOptions) -> None:
        given = {k: v for k, v in (body.mm_processor_kwargs or {}).items() if v is not None}
        self.sound = given.pop(_SOUND, False)
        if not isinstance(self.sound, bool):
            raise FieldError("must be true or false", f"mm_processor_kwargs.{_SOUND}")
        given = {k: v for k, v in given.items() if not (k in _HARMLESS and v == _HARMLESS[k])}
        self._of_all = _known_options(given, (*NAMES, *ALIASES), "mm_processor_kwargs")
        self._by_modality = dict[Modality, MediaOptions]()
        for kind, options in (body.media_io_kwargs or {}).items():
            field = f"media_io_kwargs.{kind}"
            if kind not in MEDIA:
                raise FieldError(f"must be one of {', '.join(MEDIA)}", field)
            known = OF_MODALITY[MEDIA[kind]]
            self._by_modality[MEDIA[kind]] = _known_options(options, known, field)

    @property
    def field(self) -> str:
        """The field that has the options."""
        return "media_io_kwargs" if self._by_modality else "mm_processor_kwargs"

    @property
    def given(self) -> dict[str, Any]:
        """All options that are given."""
        by_modality = [one.given for one in self._by_modality.values()]
        return {
            name: value for one in (self._of_all.given, *by_modality) for name, value in one.items()
        }

    def of(self, modality: Modality) -> MediaOptions:
        """Those of a modality."""
        own = self._by_modality.get(modality, MediaOptions())
        return own.over(self._of_all.of_modality(modality))


def _known_options(given: Mapping[str, Any], known: tuple[str, ...], field: str) -> MediaOptions:
    given = {name: value for name, value in given.items() if value is not None}
    if unknown := [name for name in given if name not in known]:
        choices = ", ".join(name for name in known if name not in ALIASES)
        raise FieldError(
            f"{', '.join(unknown)[:200]} is not supported: leave it out, or give one of {choices}",
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
    """Where the media of requests may come from.

    Attributes:
        limits: ``max_file_bytes`` bounds each medium.
        remote_bytes: bound on the bytes of all media of a request that are fetched from http(s)
            addresses; 0 refuses addresses.
        hosts: from which media may be fetched; None for all.
        known: media that were named before.
    """

    limits: MediaLimits
    remote_bytes: int = 0
    hosts: AllowedHosts | None = None
    known: KnownMedia | None = None


class MediaDecoder:
    """Decodes the media of one request, and fetches them where the server allows it.

    Args:
        source: where they may come from.
        salt: of the request.
        usual: options of media that have none of their own.
    """

    def __init__(self, source: MediaSource, salt: str, usual: UsualOptions) -> None:
        self._source, self._salt, self._usual = source, salt, usual
        self._remote_bytes, self._known_bytes = source.remote_bytes, MAX_BYTES
        self._named: dict[str, KnownMedium] = {}

    def decode(self, part: GivenPart, name: str) -> MediaPart | None:
        """The medium of a part; None for one that is null and has no uuid."""
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
        """Keep the media that have a uuid for later requests; call this once all are decoded."""
        if self._source.known is not None:
            for uuid, medium in self._named.items():
                self._source.known.add(self._salt, uuid, medium)

    def _sent(self, part: GivenPart, name: str) -> KnownMedium | None:
        """The medium that a part brings; None for one that is null."""
        limits = self._source.limits
        if part.type == "file":
            # Without its data a file may be named.
            return self._file(part.file, name, named=part.uuid is not None)
        if part.type == "input_audio":
            if part.input_audio is None:
                return None
            data = _decode_base64(part.input_audio.data, name, limits)
            return KnownMedium(Modality.AUDIO, data)
        address: MediaURL | None = getattr(part, part.type)
        if address is None:
            return None
        modality = MEDIA[part.type.removesuffix("_url")]
        return KnownMedium(modality, self._at(address.url, part.type, name))

    def _recall(self, uuid: str, kind: str, name: str) -> KnownMedium:
        """The medium that came with a uuid before."""
        found = self._named.get(uuid)
        if found is None and self._source.known is not None:
            found = self._source.known.get(self._salt, uuid)
        if found is None:
            raise FieldError(
                "no medium of this uuid and cache_salt is kept here (any more): send the medium "
                "with its uuid",
                name,
            )
        wanted = MEDIA.get("audio" if kind == "input_audio" else kind.removesuffix("_url"))
        if wanted not in (None, found.modality):
            raise FieldError(f"the medium of this uuid is of type {found.modality.label}", name)
        self._known_bytes -= len(found.data)
        if self._known_bytes < 0:
            raise FieldError(
                f"the media named by uuid have more than {MAX_BYTES:,} bytes: show fewer", name
            )
        return KnownMedium(found.modality, NamedBytes(found.data, name))

    def _at(self, url: str, field: str, name: str) -> NamedBytes:
        allow_remote = self._source.remote_bytes > 0
        if allow_remote and url[:5].lower() != "data:" and is_address(url):
            return self._fetch(url, field, name)
        # The server must not fetch an address or open a path that a stranger names.
        kind, data = _data_uri(url)
        if kind is None:
            or_address = " or an http(s) address" if allow_remote else ""
            example = _EXAMPLES[field]
            message = f"{field}.url must be a data URI, data:{example};base64,...{or_address}"
            raise FieldError(message, name)
        return _decode_base64(data, name, self._source.limits)

    def _file(self, file: GivenFile | None, name: str, *, named: bool) -> KnownMedium | None:
        if file is None or file.file_data is None:
            if named:
                return None
            raise FieldError("a file needs file_data; uploaded files are not kept here", name)
        kind, data = _data_uri(file.file_data)
        modality = MEDIA.get((kind or "").partition("/")[0])
        if modality is None:
            known = "an image, a video or a recording"
            raise FieldError(f"file.file_data must be a data URI of {known}", name)
        return KnownMedium(modality, _decode_base64(data, name, self._source.limits))

    def _fetch(self, url: str, field: str, name: str) -> NamedBytes:
        if self._remote_bytes <= 0:
            raise FieldError("the media at the addresses before have all bytes of a request", name)
        limits, hosts = self._source.limits, self._source.hosts
        limits = replace(limits, max_file_bytes=min(self._remote_bytes, limits.max_file_bytes))
        try:
            data = read_bytes(url, allow_remote=True, limits=limits, label=name, hosts=hosts)
            _check_kind(data, field)
        except Exception as error:  # of the address, or any error of any parser
            _log.warning("%r was not fetched: %r", url[:200], str(error)[:200])
            raise FieldError(NOT_FETCHED.format(_NOUNS[field]), name) from None
        self._remote_bytes -= len(data)
        return NamedBytes(data, name)


def _data_uri(text: str) -> tuple[str | None, str]:
    """The type and the base64 text of a data URI; None for what is no such URI."""
    head, comma, data = text.partition(",")
    if not comma or head[:5].lower() != "data:" or not head.lower().endswith(";base64"):
        return None, ""
    return head[5:].partition(";")[0].lower(), data


def _check_kind(data: bytes, field: str) -> None:
    """Raise an error of a parser if fetched bytes are not of the kind that was asked for."""
    if field == "image_url":
        with opened_image(io.BytesIO(data)):
            return
    with opened(data, "") as container:
        has_track = picture_track if field == "video_url" else sound_track
        if has_track(container) is None:
            raise InputError("has no such track")


def _decode_base64(text: str, name: str, limits: MediaLimits) -> NamedBytes:
    """Decode a medium in base64."""
    limits.check_bytes(len(text) * 3 // 4, name)
    try:
        if "=" in text[:-2]:
            raise binascii.Error("padding before the end")
        pieces = [
            binascii.a2b_base64(text[start : start + _BASE64_PIECE], strict_mode=True)
            for start in range(0, len(text), _BASE64_PIECE)
        ]
    except ValueError as error:  # binascii.Error, or characters that are not ASCII
        raise FieldError(f"the base64 text is damaged ({error})", name) from None
    if not pieces:
        raise FieldError("must be a file in base64, and is empty", name)
    return NamedBytes(b"".join(pieces), name)
