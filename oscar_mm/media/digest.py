"""SHA-256 of the decoded content of media, whatever files they come from."""

import hashlib

import numpy as np
from PIL import Image

from oscar_mm.media.mono import RATE, Audio
from oscar_mm.media.video import Video


def media_digest(medium: Image.Image | Video | Audio) -> str:
    """Digest of an image's pixels, a video's frames, times and sound, or a recording's samples.

    The digest covers sizes, modes and rates too, so that media of different shapes never hash the
    same bytes.

    Returns:
        64 hexadecimal digits.
    """
    if isinstance(medium, Image.Image):
        return _sha256(f"image {medium.mode} {medium.width}x{medium.height}", medium.tobytes())
    if isinstance(medium, Audio):
        return _sha256(f"audio {RATE} {len(medium.samples)}", _bytes(medium.samples))
    times = (medium.seconds, medium.source_fps, medium.source_frames, medium.frame_indices)
    sound = media_digest(medium.sound) if medium.sound is not None else None
    return _sha256(f"video {medium.frames.shape} {times} {sound}", _bytes(medium.frames))


def _sha256(header: str, content: bytes | memoryview) -> str:
    digest = hashlib.sha256(header.encode() + b"\n")
    digest.update(content)
    return digest.hexdigest()


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B")
