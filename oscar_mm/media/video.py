"""Clips as sampled RGB frames with their times, in bounded memory."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from av.error import FFmpegError
from av.stream import Disposition
from PIL import Image

from oscar_mm.errors import InputError
from oscar_mm.media.audio import LENIENT, container_seconds, has_sound, load_audio, silence
from oscar_mm.media.image import load_image
from oscar_mm.media.limits import MIN_VIDEO_SIDE, MediaCount, MediaLimits
from oscar_mm.media.mono import LEAST_SHARE, Audio
from oscar_mm.media.source import describe, existing_file, local_source, none_if_unreadable
from oscar_mm.media.truncation import check_whole

# Formats of videos that FFmpeg may read, without playlists (hls, concat, dash): they open others.
CONTAINERS = "mov,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,asf,ogg,gif,m4v,ivf,mxf"

_SOURCE_FPS = 30.0
"""Assumed frames per second of a source whose frames are not read."""

_DEFAULTS = MediaLimits()


@dataclass(frozen=True, eq=False)
class Video:
    """Sampled frames of a clip.

    Attributes:
        frames: (T, H, W, 3) uint8, RGB, upright, T >= 2 (a lone frame is given twice, because
            Qwen's processors join frames in pairs).
        seconds: length of the whole clip.
        source_fps: frames per second of the source, in which ``frame_indices`` count.
        source_frames: number of frames of the source.
        frame_indices: T positions of ``frames`` in the source, ascending.
        sound: the sound, if it was requested and the file has an audio track.
    """

    frames: np.ndarray
    seconds: float
    source_fps: float
    source_frames: int
    frame_indices: tuple[int, ...]
    sound: Audio | None = None

    @property
    def fps(self) -> float:
        """Sampled frames per second."""
        return len(self.frames) / self.seconds

    @property
    def metadata(self) -> dict[str, Any]:
        """Arguments of ``transformers.video_utils.VideoMetadata``, new at each call.

        Processors lengthen the list of frame indices in place, so it must not be shared.
        """
        return {
            "total_num_frames": self.source_frames,
            "fps": self.source_fps,
            "width": self.frames.shape[2],
            "height": self.frames.shape[1],
            "duration": self.seconds,
            "video_backend": "pyav",
            "frames_indices": list(self.frame_indices),
        }


VideoSource = str | Path | np.ndarray | Sequence[Image.Image | np.ndarray]


def load_video(
    source: VideoSource,
    *,
    limits: MediaLimits = _DEFAULTS,
    fps: float = 2.0,
    sound: bool = False,
    label: str | None = None,
    count: MediaCount | None = None,
) -> Video:
    """Read one clip.

    Args:
        source: path of a video file, an array (T, H, W, C) or a list of PIL images or arrays as
            in :func:`load_image`, all of one size.
        limits: bounds on length, frames and pixels; see :class:`MediaLimits`.
        fps: frames per second to keep of a file; fewer where these would exceed
            ``limits.max_video_frames``, more where only one would remain. For a list or an array,
            the rate at which its frames were taken; all of them are kept.
        sound: read the sound of a file too; frames and silent files have none.
        label: name of the clip in error messages; by default the path.
        count: of the request that it is part of.

    Returns:
        The sampled frames with their times, and the sound.

    Raises:
        InputError: there is nothing to read, or no video, or no video stream; the video is
            damaged, cut off or over a limit; frames differ in size; or ``fps`` is unusable.
    """
    if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps < math.inf:
        raise InputError(f"fps: {fps!r} is not a rate; use frames per second above 0, such as 2.0")
    name = label or describe(source, "video")
    if isinstance(source, (str, Path)):
        path = existing_file(source, name)
        video = _from_file(path, float(fps), limits, name)
        if not (sound and has_sound(path, name)):
            return video
        return replace(video, sound=load_audio(path, limits=limits, label=name, count=count))
    if isinstance(source, (list, tuple, np.ndarray)):
        return _from_frames(source, float(fps), limits, name)
    raise InputError(
        f"{name}: {type(source).__name__} is not a video; pass the path of a file, a list of "
        "frames or an array (T, H, W, C)"
    )


@none_if_unreadable
def video_outline(source: Any, *, fps: float, limits: MediaLimits, sound: bool) -> Video | None:
    """The video that ``load_video`` would make of a source, without its pixels, by its header.

    The outline of a file may have one frame less. None where the header does not say, something is
    wrong, or the source is an address.
    """
    if isinstance(source, str | Path):
        path = local_source(source)
        with _opened_video(path, "") as (container, stream):
            seconds, size = _clip_seconds(container, stream), (stream.width, stream.height)
            audio = silence(container_seconds(path)) if sound and container.streams.audio else None
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
    return _outline(len(source), (width, height), 1 / fps, len(source) / fps, None)


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
    step, most = _kept_frames(seconds, fps, limits)
    # Frames are kept at 0, step, 2 step, ... as long as the clip lasts.
    count = max(2, min(most, math.ceil(seconds / step - 1e-6)))
    return _outline(count, _kept_size(*size, most, limits), step, seconds, sound)


def _outline(
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


def _from_frames(
    source: np.ndarray | Sequence[Image.Image | np.ndarray],
    fps: float,
    limits: MediaLimits,
    label: str,
) -> Video:
    if isinstance(source, np.ndarray) and source.ndim != 4:
        raise InputError(f"{label}: an array of shape {source.shape} is not (T, H, W, C)")
    count = len(source)
    if count == 0:
        raise InputError(f"{label}: has no frames")
    if count > limits.max_video_frames:
        raise InputError(
            f"{label}: {count} frames are more than the limit of {limits.max_video_frames}; pass "
            "every n-th frame (and fps / n) or raise MediaLimits.max_video_frames"
        )
    images = []
    for index, frame in enumerate(source):
        part = f"{label}, frame {index}"
        if not isinstance(frame, (Image.Image, np.ndarray)):
            kind = type(frame).__name__
            raise InputError(f"{part}: {kind} is not a frame; pass PIL images or numpy arrays")
        image = load_image(frame, limits=limits, label=part)
        limits.check_video(*image.size, count / fps, part)
        if images and images[0].shape[1::-1] != image.size:
            raise InputError(
                f"{part}: {image.width}x{image.height} pixels, but frame 0 has "
                f"{images[0].shape[1]}x{images[0].shape[0]}; all frames must have one size"
            )
        images.append(np.asarray(image))
    return _video(np.stack(images), list(range(count)), count / fps, fps, count)


def _video(
    frames: np.ndarray, indices: list[int], seconds: float, rate: float, count: int
) -> Video:
    if len(frames) == 1:
        frames, indices = np.repeat(frames, 2, axis=0), indices * 2
    return Video(frames, seconds, rate, count, tuple(indices))


def _from_file(path: Path, fps: float, limits: MediaLimits, label: str) -> Video:
    with _opened_video(path, label) as (container, stream):
        return _sample(container, stream, fps, limits, label)


@contextmanager
def _opened_video(path: Path, label: str) -> Iterator[tuple[Any, Any]]:
    """A PyAV container and its stream of pictures.

    Raises:
        InputError: the file has no such stream, or cannot be read, also inside the block.
    """
    check_whole(path, label)
    # "file:" keeps a colon in the name from being read as a protocol.
    options = {"protocol_whitelist": "file", "format_whitelist": CONTAINERS}
    try:
        with av.open(f"file:{path.absolute()}", options=options, **LENIENT) as container:
            streams = [
                stream
                for stream in container.streams.video
                if not stream.disposition & Disposition.attached_pic
            ]
            if not streams:
                raise InputError(f"{label}: has no video stream; is it a sound file?")
            yield container, streams[0]
    except FFmpegError as error:
        raise InputError(
            f"{label}: is not a video that can be read, or is damaged; convert it to MP4 "
            f"({error.strerror})"
        ) from error


def _clip_seconds(container: Any, stream: Any) -> float:
    """Length of an opened video by its header; 0 if the header does not say."""
    seconds = float(stream.duration * stream.time_base) if stream.duration else 0.0
    return seconds or (container.duration or 0) / 1e6


def _sample(container: Any, stream: Any, fps: float, limits: MediaLimits, label: str) -> Video:
    """Decode a stream frame by frame and keep those nearest to multiples of 1 / fps seconds.

    Only kept frames are in memory. If the header's length is too short and the buffer fills up,
    every second kept frame is dropped and the rate is halved, so memory is bounded in any case.
    """
    stream.thread_type = "AUTO"
    rate = float(stream.average_rate or stream.guessed_rate or 24)
    seconds = _clip_seconds(container, stream)
    limits.check_video(stream.width, stream.height, seconds, label)

    step, capacity = _kept_frames(seconds, fps, limits)
    buffer: np.ndarray | None = None
    indices: list[int] = []
    count, start, time, due = 0, 0.0, 0.0, 0.0
    for frame in container.decode(stream):
        if count == 0:
            start = frame.time or 0.0
        time = count / rate if frame.time is None else frame.time - start
        count += 1
        limits.check_seconds(time, label)
        if time < due - 0.5 / rate:
            continue
        if buffer is None:
            limits.check_video(frame.width, frame.height, 0.0, label)
            size = _kept_size(frame.width, frame.height, capacity, limits)
            quarter_turns = round(frame.rotation / 90)
            shape = size if quarter_turns % 2 else size[::-1]
            buffer = np.empty((capacity, *shape, 3), np.uint8)
        elif len(indices) == capacity:
            indices = indices[::2]
            buffer[: len(indices)] = buffer[::2]
            step *= 2
        scaled = frame.reformat(*size, format="rgb24", interpolation="AREA").to_ndarray()
        buffer[len(indices)] = np.rot90(scaled, quarter_turns)
        indices.append(round(time * rate))
        due = (math.floor(time / step + 0.5 / (rate * step)) + 1) * step
    if buffer is None:
        raise InputError(f"{label}: no frame of the video can be decoded; convert it to MP4")
    end = time + 1 / rate
    # Both must fall short: AVI counts dropped frames too, and a last slide may be held for long.
    if count < LEAST_SHARE * stream.frames and end < LEAST_SHARE * seconds:
        raise InputError(
            f"{label}: ends after {end:.1f} of {seconds:.1f} s; the file is cut off, copy or "
            "download it again"
        )
    total = max(count, indices[-1] + 1)
    return _video(buffer[: len(indices)], indices, end, rate, total)


def _kept_frames(seconds: float, fps: float, limits: MediaLimits) -> tuple[float, int]:
    """Seconds from one kept frame to the next, and the largest number of kept frames.

    Args:
        seconds: length of a file by its header; 0 if the header does not say.
        fps: frames per second to keep, if the limits allow it.
    """
    most = limits.max_video_frames
    if seconds <= 0:
        return 1 / fps, most
    step = max(min(1 / fps, seconds / 2), seconds / most)
    return step, min(most, math.ceil(seconds / step) + 1)


def _kept_size(width: int, height: int, frames: int, limits: MediaLimits) -> tuple[int, int]:
    """Width and height of kept frames in pixels, so that ``frames`` of them fit the limit."""
    scale = min(1.0, math.sqrt(limits.max_video_pixels / (width * height * frames)))
    width, height = (max(MIN_VIDEO_SIDE, int(side * scale)) for side in (width, height))
    return width, height
