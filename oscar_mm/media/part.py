"""MediaPart: an image, video or recording as passed by the user, before decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from oscar_mm.errors import InputError
from oscar_mm.media.options import NO_OPTIONS, MediaOptions
from oscar_mm.media.source import describe, is_address
from oscar_mm.modality import Modality

_CHANNELS = (1, 3, 4)


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

    All sources may be as in ``as_source``.
    """
    kinds = (
        (Modality.IMAGE, "images", _listed(_as_sources(images, "images"))),
        (Modality.VIDEO, "videos", _listed_videos(_as_sources(videos, "videos"))),
        (Modality.AUDIO, "audio", _listed_audio(_as_sources(audio, "audio"))),
    )
    return [
        MediaPart(modality, source, f"{argument}[{index}]", sound and modality is Modality.VIDEO)
        for modality, argument, sources in kinds
        for index, source in enumerate(sources)
    ]


def as_source(given: Any, place: str) -> Any:
    """Convert tensors and the recordings of datasets to sources that media are read from.

    Args:
        given: a tensor on any device, which becomes an array: a picture (C, H, W), (H, W, C) or
            (H, W), a video with T before these axes, or samples (N,), (N, channels) or
            (channels, N); a dict with "array" (or "raw") and "sampling_rate" in Hz, which becomes a
            pair of samples and rate; any other source stays as it is.
        place: name of the argument, for error messages.

    Raises:
        InputError: if a tensor is sparse, quantized or without data.
    """
    if isinstance(given, Mapping):
        samples = given.get("array", given.get("raw"))
        is_recording = samples is not None and "sampling_rate" in given
        return (as_source(samples, place), given["sampling_rate"]) if is_recording else given
    if not isinstance(given, torch.Tensor):
        return given
    # Of tensors channels usually come first, of arrays last.
    first = given.ndim >= 3 and given.shape[-3] in _CHANNELS and given.shape[-1] not in _CHANNELS
    tensor = (given.movedim(-3, -1) if first else given).detach()
    try:
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()
    except (RuntimeError, TypeError) as error:  # sparse, quantized or without data
        raise InputError(
            f"{place}: a tensor of {given.dtype} on {given.device} cannot be read as media; pass "
            "a dense tensor of uint8 or floats"
        ) from error


def _as_sources(given: Any, place: str, levels: int = 2) -> Any:
    """Convert a source, a list of sources, or a list of pairs or of lists of frames."""
    if levels and isinstance(given, list | tuple):
        converted = [_as_sources(one, place, levels - 1) for one in given]
        return tuple(converted) if isinstance(given, tuple) else converted
    return as_source(given, place)


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
