"""Limits on the size of media, and the totals of a request."""

import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields

from oscar_mm.errors import Cancelled, InputError

# Minimum side of a video frame in pixels. Transformers may mistake a side of less than five pixels
# for an array's colour channels.
MIN_VIDEO_SIDE = 8

LARGE_PIXELS = 1 << 24
"""Number of pixels above which a request decodes its pictures one at a time."""
LARGE_BYTES = 1 << 24
"""Number of encoded bytes above which a request reads its files one at a time."""


@dataclass(frozen=True)
class MediaLimits:
    """Limits on untrusted media, checked against their headers before anything is decoded.

    Attributes:
        max_image_pixels: width x height of an image or a video frame at the size it is decoded.
        max_photo_pixels: width x height of a JPEG that is scaled down while it is decoded, because
            the model uses fewer pixels.
        small_image_pixels: width x height up to which an image keeps its size and is left to the
            model's processor to scale down. Larger images are scaled down as they are decoded, and
            so are all images of a request that takes more than ``max_decoding_bytes``.
        max_request_pixels: pixels per request, summed over its images and the kept frames of its
            videos.
        max_request_media: number of images, videos and recordings per request.
        max_image_side_ratio: long side / short side. Qwen's processors reject more than 200.
        max_file_bytes: encoded bytes of one source that is read into memory: an image file, an open
            file, ``bytes``, a data URI or a download. Video and audio files on disk are streamed
            and are not limited.
        max_video_seconds: length of a video.
        max_video_frames: number of frames to keep from a video, at least 2. A file with more is
            sampled at a lower rate; a list with more is rejected.
        max_video_pixels: number of pixels to keep from a video file, summed over its frames (3
            bytes each). If there are more, frames are scaled down as they are decoded.
        max_audio_seconds: length of a recording; each second takes 64 KB once decoded.
        max_decoding_bytes: memory for decoding in this process, for all requests together; further
            requests wait for memory, and a request that needs more than this by itself runs alone.
            Also limits the number of bytes that a request downloads.
        remote_timeout_s: maximum seconds for a download, and for each pause in it.

    Raises:
        InputError: if a limit is not a positive, finite number of the right type.
    """

    max_image_pixels: int = 50_000_000
    max_photo_pixels: int = 210_000_000
    small_image_pixels: int = 1 << 22
    max_request_pixels: int = 1_000_000_000
    max_request_media: int = 1024
    max_image_side_ratio: float = 200.0
    max_file_bytes: int = 256 * 2**20
    max_video_seconds: float = 3600.0
    max_video_frames: int = 768
    max_video_pixels: int = 256_000_000
    max_audio_seconds: float = 4 * 3600.0
    max_decoding_bytes: int = 2**30
    remote_timeout_s: float = 20.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kinds = (int,) if field.type is int else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds):
                noun = "a whole number" if field.type is int else "a number"
                raise InputError(f"MediaLimits.{field.name}={value!r}: must be {noun}")
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"MediaLimits.{field.name}={value!r}: must be above 0 and finite")
        if self.max_image_side_ratio < 1:
            raise InputError("MediaLimits.max_image_side_ratio: must be at least 1")
        if self.max_video_frames < 2:
            raise InputError("MediaLimits.max_video_frames: must be at least 2")

    def check_frame(self, width: int, height: int, label: str) -> None:
        """Reject a picture of ``width`` x ``height`` pixels that is empty, too large or too narrow.

        Raises:
            InputError: if it is rejected; the message names ``label``, size, limit and remedy.
        """
        self._check_pixels("max_image_pixels", width, height, label)
        if max(width, height) > self.max_image_side_ratio * min(width, height):
            raise InputError(
                f"{label}: {width}x{height} pixels have a side ratio of more than "
                f"{self.max_image_side_ratio:g}:1; crop, tile or pad it to a lower ratio"
            )

    def check_photo(self, width: int, height: int, label: str) -> None:
        """Reject a JPEG that is empty, or too large even to be scaled down while it is decoded.

        Raises:
            InputError: if it is rejected; the message names ``label``, size, limit and remedy.
        """
        self._check_pixels("max_photo_pixels", width, height, label)

    def check_count(self, count: int) -> None:
        """Reject a request with too many media items.

        Raises:
            InputError: if there are too many; the message names count and limit.
        """
        if count > self.max_request_media:
            raise InputError(
                f"{count:,} images, videos and recordings are more than the limit of "
                f"{self.max_request_media:,}; send fewer or raise MediaLimits.max_request_media"
            )

    def _check_pixels(self, name: str, width: int, height: int, label: str) -> None:
        if width < 1 or height < 1:
            raise InputError(f"{label}: is empty ({width}x{height} pixels)")
        if width * height > (limit := getattr(self, name)):
            raise InputError(
                f"{label}: {width}x{height} pixels are more than the limit of {limit:,}; scale it "
                f"down or raise MediaLimits.{name}"
            )

    def check_bytes(self, count: int, label: str) -> None:
        """Reject a source with too many encoded bytes.

        Raises:
            InputError: if it is rejected; the message names ``label``, count and limit.
        """
        if count > self.max_file_bytes:
            raise InputError(
                f"{label}: {count:,} bytes are more than the limit of {self.max_file_bytes:,}; "
                "use a smaller file or raise MediaLimits.max_file_bytes"
            )

    def check_video(self, width: int, height: int, seconds: float, label: str) -> None:
        """Reject a video that is too long or whose frames have an unusable size.

        Raises:
            InputError: if it is rejected; the message names ``label``, value, limit and remedy.
        """
        self.check_frame(width, height, label)
        if min(width, height) < MIN_VIDEO_SIDE:
            raise InputError(
                f"{label}: frames of {width}x{height} pixels are too small; "
                f"each side must be at least {MIN_VIDEO_SIDE}"
            )
        self.check_seconds(seconds, label)

    def check_seconds(self, seconds: float, label: str) -> None:
        """Reject a video that is too long.

        Raises:
            InputError: if it is rejected; the message names ``label``, length and limit.
        """
        if seconds > self.max_video_seconds:
            raise InputError(
                f"{label}: lasts {seconds:.1f} s, longer than the limit of "
                f"{self.max_video_seconds:g} s; shorten it or raise MediaLimits.max_video_seconds"
            )

    def check_audio(self, seconds: float, label: str) -> None:
        """Reject a recording that is too long.

        Raises:
            InputError: if it is rejected; the message names ``label``, length and limit.
        """
        if seconds > self.max_audio_seconds:
            raise InputError(
                f"{label}: lasts {seconds:.1f} s, longer than the limit of "
                f"{self.max_audio_seconds:g} s; shorten it or raise MediaLimits.max_audio_seconds"
            )


class MediaCount:
    """Thread-safe totals of the pixels and of the seconds of audio in a request's media.

    Pixels are added before decoding, audio while it is decoded. This class also contains the lock
    that makes a request decode its large media one at a time.

    Args:
        limits: media limits; ``max_request_pixels`` applies to the total number of pixels.
        max_seconds: maximum seconds of audio.
        cancelled: function that returns whether the request was cancelled.
    """

    def __init__(
        self,
        limits: MediaLimits,
        max_seconds: float = math.inf,
        cancelled: Callable[[], bool] = bool,
    ) -> None:
        self.limits, self.pixels, self.seconds = limits, 0, 0.0
        self._max_seconds, self._cancelled = max_seconds, cancelled
        self._guard, self._large = threading.Lock(), threading.RLock()

    def turn(self, *, large: bool) -> AbstractContextManager[object]:
        """Lock out other threads that decode large media of this request, until the block ends.

        Only large media wait for the lock, which is reentrant.

        Raises:
            Cancelled: if the request was cancelled.
        """
        self.check_wanted()
        return self._large if large else nullcontext()

    def add_sound(self, seconds: float, label: str) -> None:
        """Add seconds of audio to the total.

        Raises:
            InputError: if the total is too large; the message names ``label`` and the maximum.
            Cancelled: if the request was cancelled.
        """
        self.check_wanted()
        with self._guard:
            self.seconds += seconds
            if self.seconds > self._max_seconds:
                raise InputError(
                    f"{label}: the audio of the request is longer than the "
                    f"{self._max_seconds:,.0f} s that fit into the context; shorten it or send less"
                )

    def check_wanted(self) -> None:
        """Raise Cancelled if the request was cancelled."""
        if self._cancelled():
            raise Cancelled("the request was cancelled before its media were read")

    def add(self, pixels: int, label: str) -> None:
        """Add the pixels of a media item to the total.

        Raises:
            InputError: if the total is too large; the message names ``label``, total and limit.
        """
        with self._guard:
            self.pixels += pixels
            self.check(label)

    def check(self, label: str) -> None:
        """Reject the request if it has too many pixels so far.

        Raises:
            InputError: if it is rejected; the message names ``label``, total and limit.
        """
        if self.pixels > self.limits.max_request_pixels:
            raise InputError(
                f"{label}: the request has {self.pixels:,} pixels, more than the limit of "
                f"{self.limits.max_request_pixels:,}; send fewer or smaller images, or raise "
                "MediaLimits.max_request_pixels"
            )
