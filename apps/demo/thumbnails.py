"""Thumbnails: a small picture of a medium as HTML that needs no further file."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

import numpy as np
from PIL import Image

from oscar_mm.media import MediaLimits, load_audio, load_image, load_video
from oscar_mm.media.image import eighth
from oscar_mm.modality import Modality

_SIZE = (144, 96)
_BARS = 28
_KINDS = {Modality.IMAGE: "picture", Modality.VIDEO: "video", Modality.AUDIO: "clip"}


@dataclass(frozen=True)
class Shown:
    """A medium of a message.

    Attributes:
        kind: "picture", "video" or "clip".
        name: of its file.
        path: of the file; None where only the name is known.
        html: the thumbnail, or "".
    """

    kind: str
    name: str
    path: Path | None = None
    html: str = ""

    @classmethod
    def named(cls, modality: Modality, name: str) -> Shown:
        """A medium whose file is not there."""
        return cls(_KINDS[modality], name)


def thumbnails(media: Mapping[str, list[Path]], limits: MediaLimits) -> list[Shown]:
    """Of the media of a message, in the order of its segments: images, videos, recordings.

    Raises:
        InputError: a file that cannot be read, or is over the limits.
    """
    two_frames = replace(limits, max_video_frames=2)
    shown = []
    for path in media["images"]:
        picture = load_image(path, limits=limits, label=path.name, fit=eighth)
        shown.append(Shown("picture", path.name, path, _picture(picture, path.name)))
    for path in media["videos"]:
        frames = load_video(path, limits=two_frames, label=path.name).frames
        picture = Image.fromarray(frames[0])
        shown.append(Shown("video", path.name, path, _picture(picture, path.name)))
    for path in media["audio"]:
        samples = load_audio(path, limits=limits, label=path.name).samples
        shown.append(Shown("clip", path.name, path, _waveform(samples, path.name)))
    return shown


def _picture(image: Image.Image, name: str) -> str:
    small = image.copy()
    small.thumbnail(_SIZE)
    target = io.BytesIO()
    small.save(target, "JPEG", quality=80)
    data = base64.b64encode(target.getvalue()).decode()
    width, height = small.size
    return (
        f'<img src="data:image/jpeg;base64,{data}" width="{width}" height="{height}" '
        f'alt="{escape(name)}">'
    )


def _waveform(samples: np.ndarray, name: str) -> str:
    peaks = [float(np.abs(part).max(initial=0)) for part in np.array_split(samples, _BARS)]
    highest = max(*peaks, 1e-6)
    bars = "".join(
        f'<rect x="{4 * place + 0.5:.1f}" y="{40 - 36 * peak / highest:.1f}" width="3" '
        f'height="{max(2.0, 72 * peak / highest):.1f}" rx="1.5"/>'
        for place, peak in enumerate(peaks)
    )
    return (
        f'<svg class="waveform" viewBox="0 0 {4 * _BARS} 80" role="img" '
        f'aria-label="waveform of {escape(name)}">{bars}</svg>'
    )
