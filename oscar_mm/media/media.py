"""Decode the images, videos and recordings of a turn (MediaReader) and store them (Media)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from PIL import Image

from oscar_mm.errors import InputError
from oscar_mm.media import MediaLimits, load_audio, load_image, load_video
from oscar_mm.media.audio import AudioSource, audio_outline
from oscar_mm.media.image import Exactly, Fit, ImageOutline, ImageSource, image_outline
from oscar_mm.media.limits import LARGE_BYTES, MediaCount
from oscar_mm.media.memory import decoding_memory
from oscar_mm.media.options import SizeRule
from oscar_mm.media.part import MediaPart
from oscar_mm.media.resample import RATE, Audio
from oscar_mm.media.source import NamedBytes, is_address, is_open_file, read_bytes, read_file
from oscar_mm.media.video import Video, VideoSource, frame_pixels, video_outline
from oscar_mm.modality import Modality
from oscar_mm.thread_pool import parallel_map, thread_count

ImageInput = ImageSource | torch.Tensor | IO[bytes]
VideoInput = VideoSource | torch.Tensor | Sequence[torch.Tensor] | IO[bytes]
AudioInput = AudioSource | tuple[torch.Tensor, int] | Mapping[str, Any] | IO[bytes]
"""Sources that requests accept, beyond those of the ``load_`` functions; see ``as_source``."""
_KINDS = Modality.IMAGE, Modality.VIDEO, Modality.AUDIO
_BLOCK_BYTES = 1 << 24
"""Number of bytes of samples or frames that one thread hashes at a time; four minutes of audio."""

_IMAGE_BYTES = 8
"""Memory in bytes per pixel of a picture, including the processor's, until the prompt is
complete."""
_FRAME_BYTES = 9
"""Memory per pixel of a video's kept frames, including the processor's, in bytes."""
_DECODER_BYTES = 48
"""Memory that a video decoder takes per pixel of a frame, in bytes: it buffers some 20 frames."""
_SECOND_BYTES = 300_000
"""Memory per second of audio, including its features, in bytes."""
_SOUND_BYTES = 1 << 25
"""Memory that every recording takes, however short it is, in bytes."""


def media_digest(medium: Image.Image | Video | Audio, *, sized: bool = False) -> str:
    """Hash an image's pixels, a video's frames, times and audio, or a recording's samples.

    Sizes, modes and rates are hashed too, so that media of different shapes never hash the same
    bytes. The digest of a recording or video of more than one 16-MiB block is the hash of the
    blocks' digests, which several threads compute.

    Args:
        medium: decoded media item.
        sized: whether the model reads the item at its current size, without resizing.

    Returns:
        64 hexadecimal digits.
    """
    how = " sized" if sized else ""
    if isinstance(medium, Image.Image):
        size = f"{medium.width}x{medium.height}{how}"
        return _sha256(f"image {medium.mode} {size}", [medium.tobytes()])
    if isinstance(medium, Audio):
        return _sha256(f"audio {RATE} {len(medium.samples)}", _blocks(medium.samples))
    times = (medium.seconds, medium.fps, *(medium.chosen or ()))
    sound = media_digest(medium.sound) if medium.sound is not None else None
    return _sha256(f"video {medium.frames.shape} {times} {sound}{how}", _blocks(medium.frames))


def _sha256(header: str, blocks: Sequence[bytes | memoryview]) -> str:
    digest = hashlib.sha256(header.encode() + b"\n")
    several = len(blocks) > 1
    for content in parallel_map(_block_digest, blocks) if several else blocks:
        digest.update(content)
    return digest.hexdigest()


def _block_digest(block: bytes | memoryview) -> bytes:
    return hashlib.sha256(block).digest()


def _blocks(array: np.ndarray) -> list[memoryview]:
    content = np.ascontiguousarray(array).data.cast("B")
    return [content[start : start + _BLOCK_BYTES] for start in range(0, len(content), _BLOCK_BYTES)]


@dataclass(frozen=True, eq=False)
class Medium:
    """A decoded media item.

    Attributes:
        modality: IMAGE, VIDEO or AUDIO.
        content: a PIL image in mode RGB, a ``Video`` or an ``Audio``.
        label: name to display: the file's name, or the item's argument and index, as in images[2].
        sized: whether options set the size of the image or frames, which the processor then keeps.
    """

    modality: Modality
    content: Any
    label: str
    sized: bool = False

    @property
    def in_blocks(self) -> bool:
        """Whether several threads compute the digest."""
        if isinstance(self.content, Image.Image):
            return False
        array = self.content.samples if isinstance(self.content, Audio) else self.content.frames
        return array.nbytes > _BLOCK_BYTES

    @property
    def digest(self) -> str:
        """SHA-256 of the content, see ``media_digest``; computed once."""
        # cached_property of Python 3.11 has one lock for all instances.
        known = vars(self)
        if "digest" not in known:
            known["digest"] = media_digest(self.content, sized=self.sized)
        return known["digest"]


@dataclass(frozen=True, eq=False)
class Media:
    """Decoded images, videos (with ``sound``, if the model uses it) and recordings of a turn.

    Attributes:
        images: PIL images in mode RGB.
        videos: videos.
        audio: recordings.
        labels: names of the images, then of the videos, then of the recordings; by default each
            item's argument and index, as in images[2].
        sized: for each item in the same order, whether options set the size of the image or frames;
            by default False.
    """

    images: Sequence[Image.Image] = ()
    videos: Sequence[Video] = ()
    audio: Sequence[Audio] = ()
    labels: Sequence[str] = ()
    sized: Sequence[bool] = ()

    @cached_property
    def _listed(self) -> list[Medium]:
        kinds = (
            (Modality.IMAGE, "images", self.images),
            (Modality.VIDEO, "videos", self.videos),
            (Modality.AUDIO, "audio", self.audio),
        )
        media = [
            Medium(modality, content, f"{argument}[{index}]")
            for modality, argument, contents in kinds
            for index, content in enumerate(contents)
        ]
        labels = self.labels or [medium.label for medium in media]
        sized = self.sized or [False] * len(media)
        return [
            Medium(medium.modality, medium.content, label, keeps)
            for medium, label, keeps in zip(media, labels, sized, strict=True)
        ]

    def __iter__(self) -> Iterator[Medium]:
        """Iterate over images, then videos, then recordings."""
        return iter(self._listed)

    def __len__(self) -> int:
        """Return the number of media items."""
        return len(self._listed)

    @property
    def parts(self) -> list[MediaPart]:
        """The decoded media as parts of a message, in the same order."""
        return [MediaPart(one.modality, one.content, one.label) for one in self]

    def __add__(self, later: Media) -> Media:
        """Return the media of this turn and a later turn; of each kind, this turn's come first."""
        both = {
            name: [*getattr(self, name), *getattr(later, name)]
            for name in ("images", "videos", "audio")
        }
        media = [one for kind in _KINDS for one in (*self, *later) if one.modality is kind]
        how = {"labels": [one.label for one in media], "sized": [one.sized for one in media]}
        return Media(**both, **how)


@dataclass(frozen=True, eq=False)
class Outline(Media):
    """Media of known size before decoding.

    Attributes:
        decoding_bytes: memory that all media of the request, including those of unknown size, take
            from decoding until the prompt is complete.
        limits: media limits to apply while decoding.
    """

    decoding_bytes: int = 0
    limits: MediaLimits = field(default_factory=MediaLimits)


@dataclass
class MediaReader:
    """Decodes the images, videos and recordings of requests.

    Attributes:
        limits: limits on media.
        allow_remote: whether media may be http(s) URLs.
        video_fps: frames per second to sample from videos.
        fit: function that computes the image size that the model uses, see ``load_image``.
        sizes: the model's rule for media options; None if it supports no options.
        max_seconds: maximum total length of the audio in a request, in seconds.

    Raises:
        InputError: if ``limits`` or ``video_fps`` is invalid.
    """

    limits: MediaLimits
    allow_remote: bool = False
    video_fps: float = 2.0
    fit: Fit | None = None
    max_seconds: float = math.inf
    sizes: SizeRule | None = None

    def __post_init__(self) -> None:
        fps = self.video_fps
        is_number = isinstance(fps, int | float) and not isinstance(fps, bool)
        if not (is_number and 0 < fps < math.inf):
            raise InputError(f"video_fps={fps!r}: must be a number of frames per second above 0")
        if not isinstance(self.limits, MediaLimits):
            kind = type(self.limits).__name__
            raise InputError(f"limits: must be MediaLimits or None, not {kind}")

    def read(
        self,
        parts: Sequence[MediaPart],
        *,
        fits: Callable[[Media], None] | None = None,
        cancelled: Callable[[], bool] = bool,
    ) -> Media:
        """Decode media as ``reading`` does, but reserve memory for them only while decoding.

        Args:
            parts, fits, cancelled: see ``reading``.

        Raises:
            InputError: see ``reading``.
            Cancelled: see ``reading``.
        """
        with self.reading(parts, fits=fits, cancelled=cancelled) as media:
            return media

    @contextmanager
    def reading(
        self,
        parts: Sequence[MediaPart],
        *,
        fits: Callable[[Media], None] | None = None,
        cancelled: Callable[[], bool] = bool,
    ) -> Iterator[Media]:
        """Decode the media of a request, and reserve memory for them until the block ends.

        All requests of this process together reserve at most ``limits.max_decoding_bytes``; a
        request waits for memory before it decodes. Images and recordings are decoded in several
        threads. In addition to the results, at most one picture of up to 16 megapixels per thread
        and one larger picture are in memory.

        Args:
            parts: media of the request.
            fits: function that raises if media of the given sizes do not fit. It is called before
                decoding with the media whose headers give their sizes. If some headers do not, it
                is called again after decoding, with all media.
            cancelled: function that returns whether the request was cancelled.

        Yields:
            The decoded media.

        Raises:
            InputError: if a media item cannot be read (the message names the first such item), or
                if the media together exceed a limit.
            Cancelled: if the request was cancelled.
        """
        count = MediaCount(self.limits, self.max_seconds, cancelled)
        self.limits.check_count(len(parts))
        self._check_options(parts)
        parts = self._fetched(parts)
        outline = self.outline(parts) if fits else self._outline(parts)
        if fits and outline:
            fits(outline)
        limit = self.limits.max_decoding_bytes
        with decoding_memory.taken(outline.decoding_bytes, limit, count.check_wanted):
            media = self._decoded(parts, count, outline.limits)
            if fits and len(media) > len(outline):
                fits(media)
            yield media

    def _check_options(self, parts: Sequence[MediaPart]) -> None:
        """Reject options that the model does not support, and values beyond the limits.

        Raises:
            InputError: if an option is rejected. The message names the media item and the option.
        """
        known = self._options
        for part in parts:
            given = part.options.given
            if unknown := [name for name in given if name not in known]:
                has = ", ".join(sorted(known)) or "none"
                raise InputError(
                    f"{part.described}: this model does not support {', '.join(unknown)}; leave it "
                    f"out, or use one of: {has}"
                )
            try:
                part.options.check_limits(self.limits)
            except InputError as error:
                raise InputError(f"{part.described}: {error}") from None

    def _fit(self, part: MediaPart) -> Fit | None:
        """Return the function that computes the size of a part's image."""
        sizes = self.sizes
        if sizes is None or not self._is_sized(part):
            return self.fit
        return Exactly(lambda width, height: sizes.image_size(width, height, part.options))

    def _is_sized(self, part: MediaPart) -> bool:
        """Whether options set the size of a part's pictures."""
        if part.modality is Modality.IMAGE and "max_pixels" in self._options:
            return part.options.scales_image
        return part.modality is Modality.VIDEO and part.options.scales_frames

    @property
    def _options(self) -> frozenset[str]:
        return frozenset() if self.sizes is None else self.sizes.media_options

    def _decoded(self, parts: Sequence[MediaPart], count: MediaCount, limits: MediaLimits) -> Media:
        def picture(part: MediaPart) -> Image.Image:
            with count.turn(large=_file_bytes(part.source) > LARGE_BYTES):
                how: dict[str, Any] = {"fit": self._fit(part), "limits": limits, "count": count}
                return load_image(part.source, label=part.described, **how)

        def clip(part: MediaPart) -> Video:
            count.check_wanted()
            how = self._clip_options(part) | {"limits": limits, "count": count}
            video = load_video(part.source, label=part.described, **how)
            count.add(math.prod(video.frames.shape[:3]), part.described)
            return video

        def recording(part: MediaPart) -> Audio:
            how: dict[str, Any] = {"limits": limits, "count": count}
            return load_audio(part.samples, label=part.described, **how)

        images, videos, audio = (_of_kind(parts, kind) for kind in _KINDS)
        return Media(
            images=[*_reading(images)(picture, images)],
            # One after the other: FFmpeg uses several threads for each video.
            videos=[*map(clip, videos)],
            audio=[*_reading(audio)(recording, audio)],
            labels=[part.label for part in (*images, *videos, *audio)],
            sized=[self._is_sized(part) for part in (*images, *videos, *audio)],
        )

    def _clip_options(self, part: MediaPart) -> dict[str, Any]:
        """Return the arguments for reading a video."""
        how = {"fps": self.video_fps, "sound": part.sound}
        return how | {"options": part.options, "sizes": self.sizes}

    def outline(self, parts: Sequence[MediaPart]) -> Outline:
        """Read the sizes of media from their headers, without decoding anything.

        Media whose headers do not give their size are left out.

        Args:
            parts: media of the request.

        Raises:
            InputError: if there are too many media, or the images have too many pixels.
        """
        self.limits.check_count(len(parts))
        count = MediaCount(self.limits)
        outline = self._outline(parts, count)
        count.check("images")
        return outline

    def _outline(self, parts: Sequence[MediaPart], count: MediaCount | None = None) -> Outline:
        limits = self.limits
        pictures, clips, recordings = (_of_kind(parts, kind) for kind in _KINDS)
        images = self._image_outlines(pictures, limits, count)
        if _picture_bytes(images) > limits.max_decoding_bytes:
            limits = replace(limits, small_image_pixels=1)
            images = self._image_outlines(pictures, limits)
        kinds: dict[str, list[Any]] = {
            "images": [None if image is None else image.size for image in images],
            "videos": [
                video_outline(part.source, limits=limits, **self._clip_options(part))
                for part in clips
            ],
            "audio": [audio_outline(part.samples, limits=limits) for part in recordings],
        }
        have_sizes = [size is not None for sizes in kinds.values() for size in sizes]
        known_parts = [*compress((*pictures, *clips, *recordings), have_sizes)]
        names = {
            "labels": [part.label for part in known_parts],
            "sized": [self._is_sized(part) for part in known_parts],
        }
        known = {kind: [x for x in sizes if x is not None] for kind, sizes in kinds.items()}
        taken = [
            _picture_bytes(images),
            *map(self._clip_bytes, clips, kinds["videos"]),
            *map(self._sound_bytes, kinds["audio"]),
        ]
        return Outline(**known, **names, decoding_bytes=sum(taken), limits=limits)

    def _image_outlines(
        self, parts: Sequence[MediaPart], limits: MediaLimits, count: MediaCount | None = None
    ) -> list[ImageOutline | None]:
        how: dict[str, Any] = {"limits": limits, "count": count}
        return [image_outline(part.source, fit=self._fit(part), **how) for part in parts]

    def _clip_bytes(self, part: MediaPart, outline: Video | None) -> int:
        """Return the memory that a video takes, in bytes; without an outline, the maximum that the
        limits allow."""
        limit = self.limits.max_video_pixels
        kept = limit if outline is None else math.prod(outline.frames.shape[:3])
        taken = _FRAME_BYTES * kept + _DECODER_BYTES * (frame_pixels(part.source) or 0)
        sound = None if outline is None else outline.sound
        return taken if sound is None else taken + self._sound_bytes(sound)

    def _sound_bytes(self, outline: Audio | None) -> int:
        limit = min(self.limits.max_audio_seconds, self.max_seconds)
        seconds = limit if outline is None else outline.seconds
        return _SOUND_BYTES + int(_SECOND_BYTES * min(seconds, limit))

    def _fetched(self, parts: Sequence[MediaPart]) -> list[MediaPart]:
        """Download the parts that are URLs, read those that are open files, and replace each by its
        bytes.

        Downloads run one after the other in the calling thread: a thread of the shared pool must
        not wait for a remote server.
        """
        fetched, left = list[MediaPart](), self.limits.max_decoding_bytes
        for part in parts:
            limits = replace(self.limits, max_file_bytes=min(left, self.limits.max_file_bytes))
            name, data = part.described, None
            if is_address(part.source):
                how: dict[str, Any] = {"limits": limits, "label": name}
                data = read_bytes(part.source, allow_remote=self.allow_remote, **how)
            elif is_open_file(part.source):
                data = read_file(part.source, limits, name)
            if data is not None:
                left = max(1, left - len(data))
                part = replace(part, source=NamedBytes(data, name))
            fetched.append(part)
        return fetched


def _of_kind(parts: Sequence[MediaPart], kind: Modality) -> list[MediaPart]:
    return [part for part in parts if part.modality is kind]


def _picture_bytes(outlines: Sequence[ImageOutline | None]) -> int:
    """Return the memory that pictures take, in bytes: all results, and the decoding of the pictures
    that are decoded at the same time."""
    images = [image for image in outlines if image is not None]
    results = sum(image.size.width * image.size.height for image in images)
    small = sorted(image.decoding_bytes for image in images if not image.large)
    large = max((image.decoding_bytes for image in images if image.large), default=0)
    return _IMAGE_BYTES * results + large + sum(small[-thread_count() :])


def _reading(parts: Sequence[MediaPart]) -> Callable[..., Iterable[Any]]:
    """Return a parallel or a sequential map for reading parts.

    Parts that include PIL images or arrays are read one after the other: a PIL image may not be
    loaded yet and may occur twice, and copies of several large arrays would be in memory at once.
    """
    alone = any(isinstance(part.source, Image.Image | np.ndarray) for part in parts)
    return map if alone else parallel_map


def _file_bytes(source: Any) -> int:
    """Return the size of a file; 0 for any other source, and for a file that cannot be read."""
    try:
        is_path = isinstance(source, str | Path) and not is_address(source)
        return Path(source).stat().st_size if is_path else 0
    except (OSError, ValueError):
        return 0
