"""Choose which frames of a video file to keep, as qwen-vl-utils does."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from oscar_mm.errors import InputError
from oscar_mm.media.limits import MediaLimits
from oscar_mm.media.options import MediaOptions

_PAIR = 2
"""Number of video frames that models read together."""
_USUAL_FEWEST = 4
_WITHIN = 0.25
"""Fraction of a frame's duration after which it is certainly shown despite rounded timestamps."""


class FrameChoice(NamedTuple):
    """Frames to keep from a video.

    Attributes:
        times: time at which each frame begins, in seconds after the start of the video, ascending.
        due: time in seconds at which each frame is certainly shown, even with rounded timestamps.
        fps: number of frames to keep per second of the part that is read.
        span: start and end of the part that is read, in seconds after the start of the video; None
            for the full video.
    """

    times: tuple[float, ...]
    due: tuple[float, ...]
    fps: float
    span: tuple[float, float] | None = None


def chosen_frames(
    seconds: float,
    rate: float,
    usual_fps: float,
    options: MediaOptions,
    limits: MediaLimits,
    label: str,
) -> FrameChoice:
    """Choose frames from a video file.

    Args:
        seconds: length of the file, above 0.
        rate: frames per second of the file.
        usual_fps: frames per second to keep unless options set another number.
        options: media options, at least one of which chooses frames.
        limits: media limits; at most ``max_video_frames`` frames are chosen.
        label: name of the video in error messages.

    Raises:
        InputError: if the part to be read has fewer than two frames.
    """
    total = max(1, round(seconds * rate))
    first, last = _range(total, rate, options, label)
    count = last - first + 1
    kept = _kept(count, rate, usual_fps, options, limits)
    places = np.linspace(first, last, kept).round().astype(int).tolist()
    whole = options.video_start is None and options.video_end is None
    return FrameChoice(
        times=tuple(place / rate for place in places),
        due=tuple((place + _WITHIN) / rate for place in places),
        fps=kept / count * rate,
        span=None if whole else (first / rate, (last + 1) / rate),
    )


def _range(total: int, rate: float, options: MediaOptions, label: str) -> tuple[int, int]:
    """Return the indices of the first and last frame in the part that is read."""
    start, end = options.video_start, options.video_end
    if start is None and end is None:
        return 0, total - 1
    length = total / rate
    first = 0 if start is None else math.ceil(min(start, length) * rate)
    last = total - 1 if end is None else min(math.floor(min(end, length) * rate), total - 1)
    if first >= last:
        raise InputError(
            f"{label}: this video of {length:.1f} s has fewer than two frames between "
            f"video_start={start or 0:g} s and video_end={length if end is None else end:g} s: "
            "choose a longer part"
        )
    return first, last


def _kept(
    count: int, rate: float, usual_fps: float, options: MediaOptions, limits: MediaLimits
) -> int:
    """Return how many of ``count`` frames to keep, an even number (a single frame is kept
    twice)."""
    max_frames = min(limits.max_video_frames, count)
    if options.num_frames is not None:
        kept = round(options.num_frames / _PAIR) * _PAIR
    else:
        fewest = _PAIR * math.ceil((options.min_frames or _USUAL_FEWEST) / _PAIR)
        largest = min(limits.max_video_frames, options.max_frames or count)
        wanted = count / rate * (usual_fps if options.fps is None else options.fps)
        kept = int(min(max(wanted, fewest), _PAIR * (largest // _PAIR)))
    return max(_PAIR, _PAIR * (min(kept, max_frames) // _PAIR))
