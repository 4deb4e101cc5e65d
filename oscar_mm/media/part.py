"""MediaPart: an image, video or recording as passed by the user, before decoding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from oscar_mm.media.options import NO_OPTIONS, MediaOptions
from oscar_mm.media.source import describe, is_address
from oscar_mm.modality import Modality


@dataclass(frozen=True, eq=False)
class MediaPart:
    """An undecoded image, video or recording of a request.

    Attributes:
        modality: IMAGE, VIDEO or AUDIO.
        source: source for ``load_image``, ``load_video`` or ``load_audio``.
        place: argument and index of the media item in the request, such as images[2], for error
            messages.
        sound: whether to use the audio track of a video too.
        options: sizes, frames and rates for reading the media item.
    """

    modality: Modality
    source: Any
    place: str
    sound: bool = False
    options: MediaOptions = NO_OPTIONS

    @property
    def described(self) -> str:
        """Name in error messages: the path or URL if there is one, otherwise ``place``."""
        return describe(self.source, self.place)

    @property
    def samples(self) -> Any:
        """Source of a recording; a bare array is paired with its rate (Hz) from ``options``."""
        rate = self.options.sampling_rate
        is_bare = isinstance(self.source, np.ndarray) and rate is not None
        return (self.source, rate) if is_bare else self.source

    @property
    def label(self) -> str:
        """Name to display: the file's name if there is one, otherwise the name in error
        messages."""
        source = self.source
        is_path = isinstance(source, str | Path) and not is_address(source)
        return Path(source).name if is_path else self.described


def media_parts(
    images: Any = None, videos: Any = None, audio: Any = None, *, sound: bool = False
) -> list[MediaPart]:
    """Return the media of a request as a list of parts: images, then videos, then recordings.

    Args:
        images: an image, a list of images, or None.
        videos: a video, a list of videos, or None; a list of frames is one video, and so is an
            array of shape (T, H, W, 3).
        audio: a recording, a list of recordings, or None; a pair of samples and rate is one
            recording.
        sound: whether to use the audio tracks of the videos too.
    """
    kinds = (
        (Modality.IMAGE, "images", _listed(images)),
        (Modality.VIDEO, "videos", _listed_videos(videos)),
        (Modality.AUDIO, "audio", _listed_audio(audio)),
    )
    return [
        MediaPart(modality, source, f"{argument}[{index}]", sound and modality is Modality.VIDEO)
        for modality, argument, sources in kinds
        for index, source in enumerate(sources)
    ]


def _listed(sources: Any) -> list[Any]:
    if sources is None:
        return []
    return list(sources) if isinstance(sources, list | tuple) else [sources]


def _listed_audio(audio: Any) -> list[Any]:
    if isinstance(audio, tuple) and [isinstance(one, np.ndarray) for one in audio].count(True) == 1:
        return [audio] if len(audio) == 2 else list(audio)
    return _listed(audio)


def _listed_videos(videos: Any) -> list[Any]:
    if videos is None:
        return []
    if not isinstance(videos, list | tuple):
        return [videos]
    return [videos] if videos and all(map(_is_frame, videos)) else list(videos)


def _is_frame(one: Any) -> bool:
    return isinstance(one, Image.Image) or (isinstance(one, np.ndarray) and one.ndim < 4)
