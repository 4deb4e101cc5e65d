"""Media in: pictures and clips from files, arrays and addresses, bounded and checked."""

from oscar_mm.media.image import load_image
from oscar_mm.media.limits import MediaLimits
from oscar_mm.media.video import Video, load_video

__all__ = ["MediaLimits", "Video", "load_image", "load_video"]
