"""Load pictures, videos and recordings from files or memory, within limits.

Names are imported on first use (PEP 562), since pictures need no audio or video decoders, and the
help text of a command needs no decoder at all.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oscar_mm.media.audio import load_audio
    from oscar_mm.media.image import load_image
    from oscar_mm.media.limits import MediaLimits
    from oscar_mm.media.resample import Audio
    from oscar_mm.media.video import Video, load_video

__all__ = ["Audio", "MediaLimits", "Video", "load_audio", "load_image", "load_video"]

_HOME = {
    "Audio": "resample",
    "MediaLimits": "limits",
    "Video": "video",
    "load_audio": "audio",
    "load_image": "image",
    "load_video": "video",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
