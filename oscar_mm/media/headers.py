"""Headers: sizes of media, read before anything is decoded.

Functions return None where a header does not say or something is wrong: decoding the medium reports
the error. Nothing is fetched from other machines.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image

from oscar_mm.media.audio import opened, promised_seconds, sound_file
from oscar_mm.media.image import Fit, drafted, fitting, lies, opened_image
from oscar_mm.media.limits import MediaLimits, PixelCount
from oscar_mm.media.mono import RATE, Audio
from oscar_mm.media.source import existing_file, is_address
from oscar_mm.media.video import Video, clip_seconds, kept_frames, kept_size, opened_video

T = TypeVar("T")

_SOURCE_FPS = 30.0
"""Assumed frames per second of a source whose frames are not read."""


class PictureSize(NamedTuple):
    """Width and height in pixels; stands for an image where only these count."""

    width: int
    height: int


def _or_none(read: Callable[..., T]) -> Callable[..., T | None]:
    @wraps(read)
    def guarded(*args: Any, **kwargs: Any) -> T | None:
        try:
            return read(*args, **kwargs)
        except Exception:  # any error of any parser: the bytes are not trusted
            return None

    return guarded


@_or_none
def image_size(
    source: Any, *, limits: MediaLimits, fit: Fit | None = None, count: PixelCount | None = None
) -> PictureSize | None:
    """Size of the image that ``load_image`` would return; ``count`` counts all its pixels."""
    if isinstance(source, np.ndarray | Image.Image):
        is_array = isinstance(source, np.ndarray)
        size = PictureSize(*source.shape[1::-1]) if is_array else _upright(source)
        _count(size, count)
        limits.check_frame(*size, "")
        return PictureSize(*fitting(*size, fit))
    with opened_image(_local(source)) as image:
        upright = _upright(image)
        _count(upright, count)
        used = drafted(image, fit, limits, "")
        limits.check_frame(*image.size, "")
    return PictureSize(*(used or fitting(*upright, fit)))


def _count(size: PictureSize, count: PixelCount | None) -> None:
    if count is not None:
        count.add(size.width * size.height, "")


@_or_none
def audio_outline(source: Any, *, limits: MediaLimits) -> Audio | None:
    """Silence as long as the recording that ``load_audio`` would read."""
    seconds = _seconds(source)
    limits.check_audio(seconds, "")
    return silence(seconds)


def _seconds(source: Any) -> float:
    if isinstance(source, tuple):
        samples, rate = source if isinstance(source[0], np.ndarray) else source[::-1]
        return max(samples.shape) / rate
    local = _local(source)
    local = local if isinstance(local, Path) else local.getvalue()
    if (file := sound_file(local, "")) is None:
        return _container_seconds(local)
    with file:
        return file.frames / file.samplerate


@_or_none
def video_outline(source: Any, *, fps: float, limits: MediaLimits, sound: bool) -> Video | None:
    """The video that ``load_video`` would make of a source, without its pixels.

    The outline of a file may have one frame less.
    """
    if isinstance(source, str | Path):
        path = _local(source)
        with opened_video(path, "") as (container, stream):
            seconds, size = clip_seconds(container, stream), (stream.width, stream.height)
            audio = silence(_container_seconds(path)) if sound and container.streams.audio else None
        limits.check_video(*size, seconds, "")
        video = sampled(seconds, size, fps, limits, audio)
        # Whether the last frame is kept depends on the times of the frames.
        count = max(2, len(video.frames) - 1)
        return replace(
            video, frames=video.frames[:count], frame_indices=video.frame_indices[:count]
        )
    first = source[0]
    height, width = first.size[::-1] if isinstance(first, Image.Image) else first.shape[:2]
    limits.check_video(width, height, len(source) / fps, "")
    return _frames(len(source), (width, height), 1 / fps, len(source) / fps, None)


def sampled(
    seconds: float, size: tuple[int, int], fps: float, limits: MediaLimits, sound: Audio | None
) -> Video:
    """The video that ``load_video`` keeps of a file, with frames on the device meta.

    Args:
        seconds: length of the file, above 0.
        size: width and height of the file's frames, in pixels.
        fps: frames per second to keep, if the limits allow it.
        limits: bounds on frames and pixels.
        sound: sound of the video, if that counts.
    """
    step, most = kept_frames(seconds, fps, limits)
    # Frames are kept at 0, step, 2 step, ... as long as the clip lasts.
    count = max(2, min(most, math.ceil(seconds / step - 1e-6)))
    return _frames(count, kept_size(*size, most, limits), step, seconds, sound)


def silence(seconds: float) -> Audio:
    """A silent recording of ``seconds``: a single sample, broadcast."""
    return Audio(np.broadcast_to(np.float32(0), round(seconds * RATE)), RATE, 1)


def _frames(
    count: int, size: tuple[int, int], step: float, seconds: float, sound: Audio | None
) -> Video:
    # Processors take tensors too, and work on their shapes alone on the device meta.
    count = max(2, count)
    frames: Any = torch.empty((count, *size[::-1], 3), dtype=torch.uint8, device="meta")
    return Video(
        frames=frames,
        seconds=seconds,
        source_fps=_SOURCE_FPS,
        source_frames=round(seconds * _SOURCE_FPS),
        frame_indices=tuple(round(index * step * _SOURCE_FPS) for index in range(count)),
        sound=sound,
    )


def _local(source: Any) -> Any:
    """A path or bytes that a parser can open; None, which no parser takes, for an address or a
    data URI."""
    if isinstance(source, bytes | bytearray | memoryview):
        return io.BytesIO(source)
    return None if is_address(source) else existing_file(source, "")


def _upright(image: Image.Image) -> PictureSize:
    # Where a PNG's header has no EXIF data, Pillow would decode the pixels to look for them; the
    # size of a TIFF is upright already.
    has_exif = image.format != "TIFF" and (image.format != "PNG" or "exif" in image.info)
    return PictureSize(*(image.size[::-1] if has_exif and lies(image) else image.size))


def _container_seconds(source: Path | bytes) -> float:
    """Length of the sound in a container that FFmpeg reads; 0 where the header does not say."""
    with opened(source, "") as container:
        return promised_seconds(container, container.streams.audio[0], source, "")
