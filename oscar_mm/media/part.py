"""MediaPart: an image, a video or a recording as passed by the user, before decoding."""

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
    """An undecoded image, video or recording, and its place in the request.

    Attributes:
        modality: IMAGE, VIDEO or AUDIO.
        source: source for ``load_image``, ``load_video`` or ``load_audio``.
        place: argument that the medium was passed in, such as images[2], for error messages.
        sound: whether to read the sound of a video too.
        options: sizes, frames and rates to read the medium with.
    """

    modality: Modality
    source: Any
    place: str
    sound: bool = False
    options: MediaOptions = NO_OPTIONS

    @property
    def described(self) -> str:
        """Name in error messages: the path or address, otherwise the place."""
        return describe(self.source, self.place)

    @property
    def samples(self) -> Any:
        """Source of a recording; a bare array is paired with the rate (Hz) from ``options``."""
        rate = self.options.sampling_rate
        is_bare = isinstance(self.source, np.ndarray) and rate is not None
        return (self.source, rate) if is_bare else self.source

    @property
    def label(self) -> str:
        """Name to display: the name of the file, otherwise the name in error messages."""
        source = self.source
        is_path = isinstance(source, str | Path) and not is_address(source)
        return Path(source).name if is_path else self.described


def media_parts(
    images: Any = None, videos: Any = None, audio: Any = None, *, sound: bool = False
) -> list[MediaPart]:
    """List media that were passed by kind: images, then videos, then recordings.

    Args:
        images: None, an image or a list of images.
        videos: None, a video or a list of videos; a list of frames is one video, and so is an
            array of shape (T, H, W, 3).
        audio: None, a recording or a list of recordings; a pair of samples and rate is one
            recording.
        sound: whether to read the sound of the videos too.
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
