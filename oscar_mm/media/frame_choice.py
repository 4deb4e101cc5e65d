"""Which frames of a video file options choose: those that qwen-vl-utils chooses."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from oscar_mm.errors import InputError
from oscar_mm.media.limits import MediaLimits
from oscar_mm.media.options import MediaOptions

_PAIR = 2
"""The frames of a video are read in pairs."""
_USUAL_FEWEST = 4
_WITHIN = 0.25
"""Part of a frame's time after which it is on show in spite of rounding."""


class FrameChoice(NamedTuple):
    """Frames to keep of a video.

    Attributes:
        times: seconds after the start of the video at which each frame begins, ascending.
        due: seconds at which each is surely on show: times of files are rounded.
        fps: how many frames are kept of a second of what is read.
        span: seconds after the start of the video at which what is read begins and ends; None for
            all of it.
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
    """Choose frames of a video file.

    Args:
        seconds: length of the file, above 0.
        rate: frames per second of the file.
        usual_fps: frames per second to keep where options do not say.
        options: at least one of them chooses frames.
        limits: ``max_video_frames`` bounds the choice.
        label: name of the video in errors.

    Raises:
        InputError: the part that is to be read holds no two frames.
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
    """The first and the last frame of what is read."""
    start, end = options.video_start, options.video_end
    if start is None and end is None:
        return 0, total - 1
    length = total / rate
    first = 0 if start is None else math.ceil(min(start, length) * rate)
    last = total - 1 if end is None else min(math.floor(min(end, length) * rate), total - 1)
    if first >= last:
        raise InputError(
            f"{label}: from video_start={start or 0:g} s to video_end="
            f"{length if end is None else end:g} s there are no two frames of this video of "
            f"{length:.1f} s: give a longer part"
        )
    return first, last


def _kept(
    count: int, rate: float, usual_fps: float, options: MediaOptions, limits: MediaLimits
) -> int:
    """How many of ``count`` frames are kept, an even number; a single frame is given twice."""
    most = min(limits.max_video_frames, count)
    if options.num_frames is not None:
        kept = round(options.num_frames / _PAIR) * _PAIR
    else:
        fewest = _PAIR * math.ceil((options.min_frames or _USUAL_FEWEST) / _PAIR)
        largest = min(limits.max_video_frames, options.max_frames or count)
        wanted = count / rate * (usual_fps if options.fps is None else options.fps)
        kept = int(min(max(wanted, fewest), _PAIR * (largest // _PAIR)))
    return max(_PAIR, _PAIR * (min(kept, most) // _PAIR))
