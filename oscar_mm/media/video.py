"""Decode videos to sampled RGB frames and their times, in bounded memory."""

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from av.error import FFmpegError
from PIL import Image

from oscar_mm.errors import InputError
from oscar_mm.media.audio import LENIENT, clip_sound, container_seconds, silence
from oscar_mm.media.frame_choice import FrameChoice, chosen_frames
from oscar_mm.media.image import load_image, scaled
from oscar_mm.media.limits import MIN_VIDEO_SIDE, MediaCount, MediaLimits
from oscar_mm.media.options import NO_OPTIONS, MediaOptions, SizeRule
from oscar_mm.media.resample import RATE, Audio
from oscar_mm.media.source import describe, existing_file, none_if_unreadable
from oscar_mm.media.timeline import (
    ROUNDING_S,
    Timeline,
    decoded,
    header_seconds,
    on_show,
    picture_rate,
    picture_track,
    sound_track,
    time_of,
)
from oscar_mm.media.truncation import check_whole

# Video formats that FFmpeg may read. Playlists (hls, concat, dash) are excluded: they open other
# files.
CONTAINERS = "mov,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,asf,ogg,gif,m4v,ivf,mxf"

_DEFAULTS = MediaLimits()


@dataclass(frozen=True, eq=False)
class Video:
    """Sampled frames of a clip.

    Attributes:
        frames: (T, H, W, 3) uint8, RGB, upright, T >= 2 (a single frame is repeated, because
            Qwen's processors join frames in pairs).
        seconds: length of the full clip in seconds.
        fps: frames per second. Unless ``chosen`` is set, frame i is what the clip shows i / fps
            seconds after its start.
        sound: audio of the part of the clip that is read, if it was requested and the file has an
            audio track.
        chosen: time of each frame, in seconds after the start of the clip, if options chose the
            frames; else None.
    """

    frames: np.ndarray
    seconds: float
    fps: float
    sound: Audio | None = None
    chosen: tuple[float, ...] | None = None

    @property
    def times(self) -> list[float]:
        """Time of each frame, in seconds after the start of the clip."""
        if self.chosen is not None:
            return [*self.chosen]
        return [index / self.fps for index in range(len(self.frames))]

    @property
    def metadata(self) -> dict[str, Any]:
        """Arguments for ``transformers.video_utils.VideoMetadata``, a new dict at each access.

        Processors divide the frame indices by the frame rate, and write the times into the prompt.
        Since they extend the list of indices in place, it must not be shared.
        """
        count, height, width = self.frames.shape[:3]
        uneven = self.chosen is not None
        return {
            "total_num_frames": count,
            "fps": 1.0 if uneven else self.fps,
            "width": width,
            "height": height,
            "duration": self.seconds,
            "video_backend": "pyav",
            "frames_indices": self.times if uneven else list(range(count)),
        }


VideoSource = str | Path | bytes | np.ndarray | Sequence[Image.Image | np.ndarray]


def load_video(
    source: VideoSource,
    *,
    limits: MediaLimits = _DEFAULTS,
    fps: float = 2.0,
    sound: bool = False,
    label: str | None = None,
    count: MediaCount | None = None,
    options: MediaOptions = NO_OPTIONS,
    sizes: SizeRule | None = None,
) -> Video:
    """Read frames, and optionally the audio, from a video.

    Args:
        source: path or bytes of a video file, an array (T, H, W, C) or a list of PIL images or
            arrays as in :func:`load_image`, all of one size.
        limits: media limits on length, frames and pixels; see :class:`MediaLimits`.
        fps: frames per second to keep from a file: fewer if there would be more than
            ``limits.max_video_frames``, more if only one frame would remain. For a list or an
            array, the rate at which its frames were taken; all frames are kept.
        sound: whether to read the file's audio too; lists of frames have none.
        label: name of the clip in error messages; by default the path.
        count: totals of the request that the clip belongs to.
        options: which frames to keep from a file, overriding ``fps``, and the size of the frames.
        sizes: the model's rule for sizes; with None, options for the size of frames are ignored.

    Returns:
        The sampled frames with their times, and the audio.

    Raises:
        InputError: if there is nothing to read; if the source is not a video or has no video
            stream; if the video is damaged, cut off or over a limit; if frames differ in size; or
            if ``fps`` is not a positive number.
    """
    if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps < math.inf:
        raise InputError(f"fps={fps!r}: must be a number of frames per second above 0, such as 2.0")
    name = label or describe(source, "video")
    if isinstance(source, (str, Path, bytes)):
        file = _file(source, name)
        if isinstance(file, bytes):
            limits.check_bytes(len(file), name)
        timeline = _timeline(file, limits, name)
        plan = _FramePlan(float(fps), options, limits, sizes, name)
        video, span = _from_file(file, timeline, plan)
        if not (sound and timeline.has_sound):
            return video
        heard = clip_sound(file, timeline.start, limits, name, count)
        return replace(video, sound=heard if span is None else _part_of(heard, *span))
    if isinstance(source, (list, tuple, np.ndarray)):
        rate = float(fps if options.fps is None else options.fps)
        return _from_frames(source, _FramePlan(rate, options, limits, sizes, name))
    raise InputError(
        f"{name}: {type(source).__name__} is not a video; pass the path or the bytes of a file, a "
        "list of frames or an array (T, H, W, C)"
    )


def _part_of(sound: Audio, start: float, end: float) -> Audio:
    """Return the audio between two times, in seconds."""
    samples = sound.samples[round(start * RATE) : round(end * RATE)]
    return replace(sound, samples=samples.copy())


@none_if_unreadable
def video_outline(
    source: Any,
    *,
    fps: float,
    limits: MediaLimits,
    sound: bool,
    options: MediaOptions = NO_OPTIONS,
    sizes: SizeRule | None = None,
) -> Video | None:
    """Return the video that ``load_video`` would return, but without pixels, from the header alone.

    The outline of a file may have one frame less.

    Returns:
        The outline; None if the header does not suffice, if the source is invalid, or if it is a
        URL.
    """
    if isinstance(source, str | Path | bytes):
        file = _file(source, "")
        with _opened_video(file, "") as (container, track):
            seconds, size = header_seconds(container, track), (track.width, track.height)
            file_rate = picture_rate(track)
            audio = silence(container_seconds(file)) if sound and sound_track(container) else None
        if not seconds:
            return None
        limits.check_video(*size, seconds, "")
        plan = _FramePlan(fps, options, limits, sizes, "")
        choice = plan.frames(seconds, file_rate)
        if audio is not None and choice.span is not None:
            start, end = choice.span
            audio = silence(max(0.0, min(audio.seconds, end) - start))
        # Timestamps in the file decide whether the last frame, or pair of frames, is kept.
        count = max(2, len(choice.times) - (2 if options.chooses_frames else 1))
        # The header does not say whether frames are rotated; the number of pixels is the same.
        kept = plan.size(*size, len(choice.times), turned=False)
        return _outline(count, kept, seconds, choice.fps, audio)
    first, count = source[0], max(2, len(source))
    height, width = first.size[::-1] if isinstance(first, Image.Image) else first.shape[:2]
    seconds = len(source) / (fps if options.fps is None else options.fps)
    limits.check_video(width, height, seconds, "")
    size = _FramePlan(fps, options, limits, sizes, "").listed_size(width, height, count)
    return _outline(count, size, seconds, count / seconds, None)


@none_if_unreadable
def frame_pixels(source: Any) -> int | None:
    """Return the number of pixels per frame of a video file, from its header; None if the header
    cannot be read."""
    with _opened_video(_file(source, ""), "") as (_, stream):
        return stream.width * stream.height


def sampled(
    seconds: float, size: tuple[int, int], fps: float, limits: MediaLimits, sound: Audio | None
) -> Video:
    """Return the video that ``load_video`` would return, with its frames on the meta device.

    Args:
        seconds: length of the file, above 0.
        size: width and height of the file's frames, in pixels.
        fps: frames per second to keep, if the limits allow it.
        limits: media limits on frames and pixels.
        sound: audio of the video, if it is used too.
    """
    count, rate = _kept_frames(seconds, fps, limits)
    return _outline(count, _kept_size(*size, count, limits), seconds, rate, sound)


def _outline(
    count: int, size: tuple[int, int], seconds: float, rate: float, sound: Audio | None
) -> Video:
    # Processors accept tensors too, and on the meta device they compute shapes only.
    frames: Any = torch.empty((count, *size[::-1], 3), dtype=torch.uint8, device="meta")
    return Video(frames, seconds, rate, sound)


@dataclass(frozen=True)
class _FramePlan:
    """Which frames of a clip to keep, and at what size.

    Attributes:
        fps: for a file, frames per second to keep unless options choose frames; for a list, the
            rate of its frames.
        options, limits, sizes, label: see ``load_video``.
    """

    fps: float
    options: MediaOptions
    limits: MediaLimits
    sizes: SizeRule | None
    label: str

    def frames(self, seconds: float, file_rate: float) -> FrameChoice:
        """Choose frames of a file, given its length in seconds and its frame rate."""
        if self.options.chooses_frames:
            how = self.fps, self.options, self.limits, self.label
            return chosen_frames(seconds, file_rate, *how)
        count, rate = _kept_frames(seconds, self.fps, self.limits)
        times = tuple(index / rate for index in range(count))
        return FrameChoice(times, times, rate)

    def size(self, width: int, height: int, frames: int, *, turned: bool) -> tuple[int, int]:
        """Return the width and height to scale a file's frames to, before they are rotated."""
        if self.sizes is None or not self.options.scales_frames:
            return _kept_size(width, height, frames, self.limits)
        limit = self.limits.max_video_pixels // frames
        minimum, given = self.options.min_pixels, self.options.max_pixels
        options = replace(
            self.options,
            min_pixels=None if minimum is None else min(minimum, limit),
            max_pixels=limit if given is None else min(given, limit),
        )
        upright = (height, width) if turned else (width, height)
        size = self.sizes.frame_size(*upright, frames, options)
        if options.resized is not None and size[0] * size[1] > limit:
            raise InputError(
                f"{self.label}: {frames} frames of {size[0]}x{size[1]} have more pixels than the "
                f"limit of {self.limits.max_video_pixels:,}; lower resized_width and "
                "resized_height, or keep fewer frames"
            )
        width, height = size
        return (height, width) if turned else (width, height)

    def listed_size(self, width: int, height: int, frames: int) -> tuple[int, int]:
        """Return the width and height to scale the frames of a list to; by default, their own."""
        if self.sizes is None or not self.options.scales_frames:
            return width, height
        return self.size(width, height, frames, turned=False)


def _from_frames(
    source: np.ndarray | Sequence[Image.Image | np.ndarray], plan: _FramePlan
) -> Video:
    fps, limits, label = plan.fps, plan.limits, plan.label
    if unused := plan.options.of_files:
        raise InputError(
            f"{label}: {', '.join(unused)} applies only to video files, since all frames of a list "
            "are kept; leave it out"
        )
    if isinstance(source, np.ndarray) and source.ndim != 4:
        raise InputError(
            f"{label}: the array has shape {source.shape}; a video must have shape (T, H, W, C)"
        )
    count = len(source)
    if count == 0:
        raise InputError(f"{label}: has no frames")
    if count > limits.max_video_frames:
        raise InputError(
            f"{label}: {count} frames are more than the limit of {limits.max_video_frames}; pass "
            "every n-th frame (and fps / n) or raise MediaLimits.max_video_frames"
        )
    images, first = [], None
    for index, frame in enumerate(source):
        part = f"{label}, frame {index}"
        if not isinstance(frame, (Image.Image, np.ndarray)):
            kind = type(frame).__name__
            raise InputError(f"{part}: {kind} is not a frame; pass PIL images or numpy arrays")
        image = load_image(frame, limits=limits, label=part)
        limits.check_video(*image.size, count / fps, part)
        if first is None:
            first, size = image.size, plan.listed_size(*image.size, max(2, count))
        if first != image.size:
            raise InputError(
                f"{part}: {image.width}x{image.height} pixels, but frame 0 has "
                f"{first[0]}x{first[1]}; all frames must have the same size"
            )
        images.append(np.asarray(scaled(image, size)))
    frames = np.stack(images)
    if count == 1:
        frames = np.repeat(frames, 2, axis=0)
    return Video(frames, count / fps, len(frames) / count * fps)


def _file(source: str | Path | bytes, label: str) -> Path | bytes:
    return source if isinstance(source, bytes) else existing_file(source, label)


@contextmanager
def _opened_video(file: Path | bytes, label: str) -> Iterator[tuple[Any, Any]]:
    """Open a file within the block as a PyAV container, with its video track.

    Raises:
        InputError: if the file has no video track or cannot be read; read errors within the block
            are converted too.
    """
    # "file:" keeps a colon in the name from being read as a protocol.
    where = io.BytesIO(file) if isinstance(file, bytes) else f"file:{file.absolute()}"
    options = {"protocol_whitelist": "file", "format_whitelist": CONTAINERS}
    try:
        with av.open(where, container_options=options, **LENIENT) as container:
            track = picture_track(container)
            if track is None:
                raise InputError(f"{label}: has no video stream; is it an audio file?")
            yield container, track
    except FFmpegError as error:
        raise InputError(
            f"{label}: is not a video that can be read, or is damaged; convert it to MP4 "
            f"({error.strerror})"
        ) from error


def _timeline(file: Path | bytes, limits: MediaLimits, label: str) -> Timeline:
    check_whole(file, label)
    with _opened_video(file, label) as (container, track):
        limits.check_video(track.width, track.height, header_seconds(container, track), label)
        return Timeline.of(container, partial(limits.check_seconds, label=label), label)


def _from_file(
    file: Path | bytes, timeline: Timeline, plan: _FramePlan
) -> tuple[Video, tuple[float, float] | None]:
    """Decode a clip frame by frame, storing only the kept frames.

    Returns:
        The video, and the start and end of the part that was read, in seconds; None if it was read
        in full.
    """
    label = plan.label
    kept: np.ndarray | None = None
    last, shown = None, None
    with _opened_video(file, label) as (container, track):
        track.thread_type = "AUTO"
        choice = plan.frames(timeline.seconds, picture_rate(track))
        count, pictures = len(choice.times), _pictures(container, track, timeline.start)
        for place, frame in enumerate(on_show(pictures, choice.due)):
            if kept is None:
                plan.limits.check_video(frame.width, frame.height, 0.0, label)
                matrix = _display_matrix(frame)
                size = plan.size(frame.width, frame.height, count, turned=_is_turned(matrix))
                # AREA interpolation cannot enlarge.
                grows = size[0] > frame.width or size[1] > frame.height
                how = {"format": "rgb24", "interpolation": "BICUBIC" if grows else "AREA"}
            if frame is not last:
                pixels = frame.reformat(*size, **how).to_ndarray()
                last, shown = frame, _displayed(pixels, matrix)
            if kept is None:
                kept = np.empty((count, *shown.shape), np.uint8)
            kept[place] = shown
    if kept is None:
        raise InputError(f"{label}: no frame of the video can be decoded; convert it to MP4")
    chosen = choice.times if plan.options.chooses_frames else None
    return Video(kept, timeline.seconds, choice.fps, chosen=chosen), choice.span


def _pictures(container: Any, track: Any, start: float) -> Iterator[tuple[float, Any]]:
    """Yield decoded frames with their times, in seconds after the start of the clip."""
    before = 0.0
    for index, frame in enumerate(decoded(container, track, track.decode)):
        time = time_of(frame, track)
        time = index / picture_rate(track) if time is None else time - start
        before = max(before, time)
        yield before, frame


def _display_matrix(frame: Any) -> tuple[int, int, int, int]:
    """Return a frame's display matrix (a, b, c, d): pixel (x, y) goes to (xa + yc, xb + yd)."""
    data = frame.side_data.get("DISPLAYMATRIX")
    if data is None or data.buffer_size < 36:
        return 1, 0, 0, 1
    a, b, _, c, d = np.frombuffer(bytes(data), np.int32)[:5].tolist()
    return a, b, c, d


def _displayed(pixels: np.ndarray, matrix: tuple[int, int, int, int]) -> np.ndarray:
    """Mirror (H, W, 3) pixels and rotate them by the multiple of 90 degrees that is closest to a
    display matrix."""
    a, b, c, d = matrix
    if _is_turned(matrix):
        pixels, a, d = pixels.swapaxes(0, 1), c, b
    return pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]


def _is_turned(matrix: tuple[int, int, int, int]) -> bool:
    """Whether a display matrix rotates frames by 90 or 270 degrees."""
    a, b, c, d = matrix
    return abs(b) + abs(c) > abs(a) + abs(d)


def _kept_frames(seconds: float, fps: float, limits: MediaLimits) -> tuple[int, float]:
    """Return how many frames of a clip to keep, and their rate in frames per second.

    Frames are kept at 0, 1 / rate, 2 / rate, ... seconds, up to the end of the clip.

    Args:
        seconds: length of the clip, above 0.
        fps: frames per second to keep, if the limits allow it.
    """
    limit = limits.max_video_frames
    rate = min(max(fps, 2 / seconds), limit / seconds)
    return max(2, min(limit, math.ceil((seconds - ROUNDING_S) * rate))), rate


def _kept_size(width: int, height: int, frames: int, limits: MediaLimits) -> tuple[int, int]:
    """Return the width and height to scale ``frames`` frames to, within the pixel limit."""
    scale = min(1.0, math.sqrt(limits.max_video_pixels / (width * height * frames)))
    width, height = (max(MIN_VIDEO_SIDE, int(side * scale)) for side in (width, height))
    return width, height
