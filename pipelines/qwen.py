"""What Qwen's families share: how large a picture gets, and how a video is handed over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from oscar_mm.media import Video


def image_tokens(image_processor: Any, image: Image.Image) -> int:
    """Tokens of an image in a prompt, told from its size alone."""
    width, height = _resized(image_processor, image.width, image.height)
    side = image_processor.patch_size * image_processor.merge_size
    return (height // side) * (width // side)


def largest_image(image_processor: Any, width: int, height: int) -> tuple[int, int]:
    """See ``Family.largest_image``: what the processor resizes it to, if that is smaller."""
    if width * height <= image_processor.size["longest_edge"]:
        return width, height
    try:
        resized = _resized(image_processor, width, height)
        # A strip is left wider than the limit allows, and would be resized once more.
        return resized if _resized(image_processor, *resized) == resized else (width, height)
    except ValueError:  # too long a strip for the processor, which says so when its turn comes
        return width, height


def _resized(image_processor: Any, width: int, height: int) -> tuple[int, int]:
    """Width and height to which the processor resizes an image."""
    size = image_processor.size
    height, width = smart_resize(
        height,
        width,
        factor=image_processor.patch_size * image_processor.merge_size,
        min_pixels=size["shortest_edge"],
        max_pixels=size["longest_edge"],
    )
    return width, height


def video_arguments(video_processor: Any, videos: Sequence[Video]) -> dict[str, Any]:
    """Arguments of a processor for videos that are sampled already; it keeps their times."""
    return {
        "videos": [video.frames for video in videos],
        "video_metadata": [video.metadata for video in videos],
        "do_sample_frames": False,
        # What None means today; transformers warns that it will mean something else.
        "cap_pixels_per_frame": bool(video_processor.cap_pixels_per_frame),
    }
