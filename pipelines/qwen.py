"""What Qwen's families share: how large a picture gets, and how a video is handed over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image
from qwen_vl_utils import smart_resize

from oscar_mm.media import Video


def image_tokens(image_processor: Any, image: Image.Image) -> int:
    """Tokens of an image in a prompt, told from its size alone."""
    side = image_processor.patch_size * image_processor.merge_size
    size = image_processor.size
    height, width = smart_resize(
        image.height,
        image.width,
        factor=side,
        min_pixels=size["shortest_edge"],
        max_pixels=size["longest_edge"],
    )
    return (height // side) * (width // side)


def video_arguments(video_processor: Any, videos: Sequence[Video]) -> dict[str, Any]:
    """Arguments of a processor for videos that are sampled already; it keeps their times."""
    return {
        "videos": [video.frames for video in videos],
        "video_metadata": [video.metadata for video in videos],
        "do_sample_frames": False,
        # What None means today; transformers warns that it will mean something else.
        "cap_pixels_per_frame": bool(video_processor.cap_pixels_per_frame),
    }
