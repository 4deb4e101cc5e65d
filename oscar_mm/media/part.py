"""MediaPart: an image, a video or a recording as a user gave it, before it is decoded."""

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
    """An image, a video or a recording of a request, and where in the request it stands.

    Attributes:
        modality: IMAGE, VIDEO or AUDIO.
        source: what ``load_image``, ``load_video`` or ``load_audio`` takes.
        place: the argument that gave it, such as images[2]; names it in errors.
        sound: of a video: read its sound too.
        options: sizes, frames and rates with which it is read.
    """

    modality: Modality
    source: Any
    place: str
    sound: bool = False
    options: MediaOptions = NO_OPTIONS

    @property
    def described(self) -> str:
        """Its name in errors: the path or address, otherwise its place."""
        return describe(self.source, self.place)

    @property
    def samples(self) -> Any:
        """The source of a recording; a bare array comes with the rate from ``options``, in Hz."""
        rate = self.options.sampling_rate
        is_bare = isinstance(self.source, np.ndarray) and rate is not None
        return (self.source, rate) if is_bare else self.source

    @property
    def label(self) -> str:
        """Its name for people: the name of its file, otherwise as in errors."""
        source = self.source
        is_path = isinstance(source, str | Path) and not is_address(source)
        return Path(source).name if is_path else self.described


def media_parts(
    images: Any = None, videos: Any = None, audio: Any = None, *, sound: bool = False
) -> list[MediaPart]:
    """Parts of the media that a user gave by kind: the images, then the videos, then the audio.

    Args:
        images: None, one image or a list of them.
        videos: None, one video or a list of them; a list of frames is one video, and so is an
            array of shape (T, H, W, 3).
        audio: None, one recording or a list of them; a pair of samples and rate is one recording.
        sound: read the sound of the videos too.
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
