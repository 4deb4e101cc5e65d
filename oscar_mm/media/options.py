"""MediaOptions: sizes, frames and rates for reading an image, a video or a recording.

Names and meanings follow qwen-vl-utils, OpenAI's API (``detail``) and Hugging Face's processors
(``num_frames``, ``sampling_rate``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol, TypedDict

from oscar_mm.errors import InputError, shown
from oscar_mm.media.limits import MediaLimits
from oscar_mm.modality import Modality

_DETAILS = "auto", "low", "high"
LOW_PIXELS = 512 * 512
"""Maximum number of pixels in an image with ``detail="low"``, as in OpenAI's API."""
_SIZES = "min_pixels", "max_pixels", "resized_width", "resized_height"
FRAMES = "fps", "num_frames", "min_frames", "max_frames", "video_start", "video_end"
"""Names of the options that choose frames of a video."""
OF_MODALITY = {
    Modality.IMAGE: (*_SIZES, "detail"),
    Modality.VIDEO: (*_SIZES, "total_pixels", *FRAMES),
    Modality.AUDIO: ("sampling_rate",),
}
"""Names of the options for each modality."""
_NUMBERS = "fps", "video_start", "video_end"
_MAX_NUMBER = 1 << 63
"""Upper limit of numbers; a larger whole number might not convert to a float."""
ALIASES = {"nframes": "num_frames"}
"""Alternative names for options in message parts."""


class MediaOptionFields(TypedDict, total=False):
    """Keyword arguments of a request: fields of ``MediaOptions`` that apply to all of its media."""

    min_pixels: int | None
    max_pixels: int | None
    total_pixels: int | None
    resized_width: int | None
    resized_height: int | None
    detail: str | None
    fps: float | None
    num_frames: int | None
    min_frames: int | None
    max_frames: int | None
    video_start: float | None
    video_end: float | None
    sampling_rate: int | None


@dataclass(frozen=True)
class MediaOptions:
    """Options of a media item; None keeps the default of the pipeline or the checkpoint.

    Attributes:
        min_pixels, max_pixels: minimum and maximum number of pixels (width x height) to which an
            image, or each frame of a video, is resized.
        total_pixels: maximum number of pixels in all frames of a video together.
        resized_width, resized_height: size in pixels to which an image or each frame is resized,
            rounded to whole patches.
        detail: level of detail of an image: "low" means at most 512 x 512 pixels; "high" and "auto"
            have no effect.
        fps: for a video file, frames per second to keep; for a list of frames, their rate.
        num_frames: number of frames to keep from a video file, evenly spaced.
        min_frames, max_frames: minimum and maximum number of frames that ``fps`` keeps.
        video_start, video_end: start and end of the part of a video file to read, in seconds.
        sampling_rate: samples per second (Hz) of a recording that is passed as a bare array.

    Raises:
        InputError: if a value is not allowed, or two values contradict each other.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None
    resized_width: int | None = None
    resized_height: int | None = None
    detail: str | None = None
    fps: float | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    video_start: float | None = None
    video_end: float | None = None
    sampling_rate: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.given.items():
            _check(name, value)
            if name in _NUMBERS:
                object.__setattr__(self, name, float(value))
        if self.fps is not None and self.num_frames is not None:
            raise InputError("fps and num_frames: set only one of them")
        if (self.resized_width is None) != (self.resized_height is None):
            raise InputError("resized_width and resized_height: set both or neither")
        for low, high in (
            ("min_pixels", "max_pixels"),
            ("min_frames", "max_frames"),
            ("video_start", "video_end"),
        ):
            minimum, maximum = getattr(self, low), getattr(self, high)
            if minimum is not None and maximum is not None and minimum > maximum:
                raise InputError(f"{low}={minimum:g} must not be more than {high}={maximum:g}")

    @property
    def given(self) -> dict[str, Any]:
        """Options that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def resized(self) -> tuple[int, int] | None:
        """``resized_width`` and ``resized_height``, or None if they are not set."""
        if self.resized_width is None or self.resized_height is None:
            return None
        return self.resized_width, self.resized_height

    @property
    def scales_image(self) -> bool:
        """Whether the options set the size of an image."""
        return self.detail == "low" or any(getattr(self, name) is not None for name in _SIZES)

    @property
    def scales_frames(self) -> bool:
        """Whether the options set the size of a video's frames."""
        names = (*_SIZES, "total_pixels")
        return any(getattr(self, name) is not None for name in names)

    @property
    def chooses_frames(self) -> bool:
        """Whether the options choose which frames of a video file to keep."""
        return any(getattr(self, name) is not None for name in FRAMES)

    @property
    def of_files(self) -> list[str]:
        """Names of the given options that apply to a video file but not to a list of frames."""
        return [name for name in FRAMES if name != "fps" and getattr(self, name) is not None]

    def over(self, usual: MediaOptions) -> MediaOptions:
        """Return these options, falling back to ``usual`` for any that are not set.

        Raises:
            InputError: if options contradict each other.
        """
        kept = usual.given
        if self.fps is not None or self.num_frames is not None:
            kept = {name: x for name, x in kept.items() if name not in ("fps", "num_frames")}
        return replace(usual, **{**dict.fromkeys(usual.given), **kept, **self.given})

    def of_modality(self, modality: Modality) -> MediaOptions:
        """Return only those of these options that apply to a modality."""
        names = OF_MODALITY[modality]
        return MediaOptions(**{name: x for name, x in self.given.items() if name in names})

    def check_limits(self, limits: MediaLimits) -> None:
        """Reject values beyond the limits.

        Raises:
            InputError: if a value is too large; the message names option, limit and remedy.
        """
        if (sides := self.resized) and max(sides) > limits.max_image_side_ratio * min(sides):
            raise InputError(
                f"resized_width and resized_height: the sides of {sides[0]}x{sides[1]} have a "
                f"ratio of more than {limits.max_image_side_ratio:g}:1; choose a lower ratio"
            )
        area = math.prod(self.resized or (0, 0))
        for name, value, limit in (
            ("min_pixels", self.min_pixels, "max_image_pixels"),
            ("max_pixels", self.max_pixels, "max_image_pixels"),
            ("resized_width x resized_height", area, "max_image_pixels"),
            ("total_pixels", self.total_pixels, "max_video_pixels"),
            ("num_frames", self.num_frames, "max_video_frames"),
            ("min_frames", self.min_frames, "max_video_frames"),
            ("max_frames", self.max_frames, "max_video_frames"),
        ):
            maximum = getattr(limits, limit)
            if value is not None and value > maximum:
                raise InputError(
                    f"{name}={value:,} is more than the limit of {maximum:,}; lower it or raise "
                    f"MediaLimits.{limit}"
                )


NO_OPTIONS = MediaOptions()


def options_from(given: Mapping[str, Any]) -> MediaOptions:
    """Create options from a mapping from names, which may be aliases, to values.

    Raises:
        InputError: see ``MediaOptions``.
    """
    return MediaOptions(**{ALIASES.get(name, name): value for name, value in given.items()})


NAMES = tuple(field.name for field in fields(MediaOptions))


class SizeRule(Protocol):
    """How a model family converts options to sizes of images and frames."""

    media_options: ClassVar[frozenset[str]]
    """Names of the options that the family supports."""

    def image_size(self, width: int, height: int, options: MediaOptions) -> tuple[int, int]:
        """Return the width and height to resize an image to."""
        ...

    def frame_size(
        self, width: int, height: int, frames: int, options: MediaOptions
    ) -> tuple[int, int]:
        """Return the width and height to resize each frame of a video to.

        Args:
            width, height: size of a frame in pixels.
            frames: number of frames that are kept.
            options: options of the video.
        """
        ...


def _check(name: str, value: Any) -> None:
    if name == "detail":
        if value not in _DETAILS:
            raise InputError(f"detail={shown(value)}: must be one of {', '.join(_DETAILS)}")
        return
    is_number = name in _NUMBERS
    kinds = (int, float) if is_number else (int,)
    minimum = 2 if name == "num_frames" else 0 if name.startswith("video_") else 1
    if (
        isinstance(value, bool)
        or not isinstance(value, kinds)
        or not -_MAX_NUMBER < value < _MAX_NUMBER
    ):
        noun = "a number" if is_number else "a whole number"
        raise InputError(f"{name}={shown(value)}: must be {noun} below 2^63")
    if value < minimum and name != "fps":
        raise InputError(f"{name}={shown(value)}: must be at least {minimum}")
    if name == "fps" and value <= 0:
        raise InputError(f"fps={shown(value)}: must be a number of frames per second above 0")
