"""Base classes of the Qwen families, with image sizes in patches and the options that set them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from transformers import Qwen2VLImageProcessor

from oscar_mm.engine.family import Encoding, Family
from oscar_mm.engine.input_layout import InputLayout
from oscar_mm.media import Video
from oscar_mm.media.encoder_inputs import (
    SizesKept,
    in_bytes,
    pixel_bounds,
    resized,
    scale_in_model,
)
from oscar_mm.media.media import Medium
from oscar_mm.media.options import LOW_PIXELS, OF_MODALITY, MediaOptions
from oscar_mm.modality import Modality
from oscar_mm.models.released import ReleasedModel

# Roles are single letters, because a letter is one token in the bundled tokenizers, as a role name
# is in the released tokenizers.
_TEMPLATE = """\
{%- set marks = {'image': '<|vision_start|><|image_pad|><|vision_end|>', \
'video': '<|vision_start|><|video_pad|><|vision_end|>', \
'audio': '<|audio_start|><|audio_pad|><|audio_end|>'} -%}
{%- for message in messages -%}
{{ '<|im_start|>' ~ message.role[0] ~ '\n' }}
{%- for part in message.content -%}{{ marks.get(part.type, part.text) }}{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{{ '<|im_start|>a\n' }}"""


def image_tokens(image_processor: Any, image: Image.Image, *, sized: bool = False) -> int:
    """Return the number of tokens of an image in a prompt.

    Args:
        image_processor: image processor of the family.
        image: the image.
        sized: whether the image already has its final size, so that the processor keeps it.
    """
    width, height = image.width, image.height
    if not sized:
        width, height = resized(image_processor, width, height)
    side = image_processor.patch_size * image_processor.merge_size
    return (height // side) * (width // side)


def largest_image(image_processor: Any, width: int, height: int) -> tuple[int, int]:
    """See ``Family.largest_image``: the size to which the processor resizes, if that is smaller."""
    if width * height <= pixel_bounds(image_processor)[1]:
        return width, height
    try:
        used = resized(image_processor, width, height)
        # After resizing, some long, narrow images still exceed the maximum number of pixels and
        # would be resized again. If an image is barely too large, rounding may enlarge a side.
        smaller = used[0] <= width and used[1] <= height
        return used if smaller and resized(image_processor, *used) == used else (width, height)
    except ValueError:  # Too long and narrow for the processor, which refuses it later.
        return width, height


def limited(kind: type[Any], model: ReleasedModel, pixels: tuple[int, int]) -> Any:
    """Create an image or video processor with a minimum and maximum number of pixels.

    Args:
        kind: processor class.
        model: released model, which determines the patch sizes.
        pixels: minimum and maximum number of pixels.
    """
    size = {"shortest_edge": pixels[0], "longest_edge": pixels[1]}
    side, merged = model.vision["patch_size"], model.vision["spatial_merge_size"]
    return kind(patch_size=side, merge_size=merged, size=size)


def longer_sides(tokens: int) -> list[int]:
    """Return the longer sides of all grids with this number of tokens, in ascending order."""
    sides = [side for side in range(1, math.isqrt(tokens) + 1) if tokens % side == 0]
    return [tokens // side for side in reversed(sides)]


def video_arguments(video_processor: Any, videos: Sequence[Video]) -> dict[str, Any]:
    """Return processor arguments for sampled videos that preserve their timestamps."""
    found = {
        "videos": [video.frames for video in videos],
        "video_metadata": [video.metadata for video in videos],
        "do_sample_frames": False,
    }
    if hasattr(video_processor, "cap_pixels_per_frame"):
        # None currently means this value, but transformers has announced a different default.
        found["cap_pixels_per_frame"] = bool(video_processor.cap_pixels_per_frame)
    return found


PICTURE_OPTIONS = frozenset({*OF_MODALITY[Modality.IMAGE], *OF_MODALITY[Modality.VIDEO]})
_FEWEST_TOKENS, _MAX_TOKENS = 4, 16384
"""Minimum and maximum tokens of an image whose size is set by options, as in qwen-vl-utils. No
option can exceed the maximum, because a tower's time grows quadratically with an image's tokens."""
_FRAME_TOKENS = 128, 768
"""Minimum and maximum tokens of a video frame, as in qwen-vl-utils."""
_VIDEO_TOKENS = 115_200
"""Maximum tokens of a video, as in qwen-vl-utils."""


def image_size(
    image_processor: Any, width: int, height: int, options: MediaOptions
) -> tuple[int, int]:
    """See ``Family.image_size``; without options, the processor's own limits apply."""
    factor = image_processor.patch_size * image_processor.merge_size
    if options.resized is not None:
        bounds = _FEWEST_TOKENS * factor**2, _MAX_TOKENS * factor**2
        return _resized(options.resized, factor, *bounds)
    min_pixels, max_pixels = pixel_bounds(image_processor)
    largest = max(max_pixels, _MAX_TOKENS * factor**2)
    if options.max_pixels is not None:
        max_pixels = min(options.max_pixels, largest)
    elif options.detail == "low":
        max_pixels = min(max_pixels, LOW_PIXELS)
    if options.min_pixels is not None:
        min_pixels = min(options.min_pixels, largest)
        max_pixels = max(max_pixels, min_pixels)
    return _resized((width, height), factor, min(min_pixels, max_pixels), max_pixels)


def frame_size(
    video_processor: Any, width: int, height: int, frames: int, options: MediaOptions
) -> tuple[int, int]:
    """See ``Family.frame_size``; without options, the limits of qwen-vl-utils apply."""
    factor = video_processor.patch_size * video_processor.merge_size
    if options.resized is not None:
        bounds = _FEWEST_TOKENS * factor**2, _MAX_TOKENS * factor**2
        return _resized(options.resized, factor, *bounds)
    low, high = (tokens * factor**2 for tokens in _FRAME_TOKENS)
    min_pixels = low if options.min_pixels is None else options.min_pixels
    total = _VIDEO_TOKENS * factor**2 if options.total_pixels is None else options.total_pixels
    share = total / frames * video_processor.temporal_patch_size
    max_pixels = min(max(min(high, share), int(min_pixels * 1.05)), _MAX_TOKENS * factor**2)
    if options.max_pixels is not None:
        max_pixels = min(max_pixels, options.max_pixels)
    return _resized((width, height), factor, min(min_pixels, max_pixels), max_pixels)


def _resized(
    size: tuple[int, int], factor: int, min_pixels: Any, max_pixels: Any
) -> tuple[int, int]:
    """Return a width and height, in pixels, that fill complete patches within the pixel limits."""
    from qwen_vl_utils.vision_process import smart_resize  # Slow to import.

    width, height = size
    height, width = smart_resize(
        height, width, factor, min_pixels=min_pixels, max_pixels=max_pixels
    )
    return max(factor, width), max(
        factor, height
    )  # smart_resize rounds the short side of long, narrow images to 0.


class QwenFamily(Family):
    """Family with Qwen's image and video processors, whose sizes can be set by options."""

    media_options = PICTURE_OPTIONS
    plain_template = _TEMPLATE

    def largest_image(self, width: int, height: int) -> tuple[int, int]:
        """See ``Family.largest_image``."""
        return largest_image(self.processor.image_processor, width, height)

    def image_size(self, width: int, height: int, options: MediaOptions) -> tuple[int, int]:
        """See ``Family.image_size``."""
        return image_size(self.processor.image_processor, width, height, options)

    def frame_size(
        self, width: int, height: int, frames: int, options: MediaOptions
    ) -> tuple[int, int]:
        """See ``Family.frame_size``."""
        return frame_size(self.processor.video_processor, width, height, frames, options)

    @classmethod
    def as_released(cls, processor: Any, fields: dict[str, Any], model: ReleasedModel) -> Any:
        """See ``Family.as_released``."""
        super().as_released(processor, fields, model)
        processor.image_processor = limited(Qwen2VLImageProcessor, model, model.pixels)
        # This word occurs in the timestamps between frames; released tokenizers encode it as one
        # token.
        processor.tokenizer.add_tokens([" seconds"])
        return processor


GRIDS = {Modality.IMAGE: "image_grid_thw", Modality.VIDEO: "video_grid_thw"}
"""Names of the arguments with the media's grids: numbers of frame pairs, patch rows and patch
columns."""
PATCHES = {
    "pixel_values": (Modality.IMAGE, "image_grid_thw"),
    "pixel_values_videos": (Modality.VIDEO, "video_grid_thw"),
}
"""Names of the arguments that contain patches, for ``InputLayout.per_patch``."""


class QwenVL(QwenFamily):
    """Family that processes images and videos in one call of Qwen's processor.

    Loading makes the model accept pixels as bytes, see ``oscar_mm.media.encoder_inputs``.
    """

    reads = frozenset({Modality.IMAGE, Modality.VIDEO})
    layout = InputLayout(
        per_medium={name: modality for modality, name in GRIDS.items()},
        per_patch=PATCHES,
        video_grids="video_grid_thw",
    )

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(model, processor)
        scale_in_model(model, processor)

    def encode(self, text: str, media: Sequence[Medium]) -> Encoding:
        """See ``Family.encode``."""
        pictures = [medium for medium in media if medium.modality is Modality.IMAGE]
        clips = [medium for medium in media if medium.modality is Modality.VIDEO]
        images, videos = ([medium.content for medium in some] for some in (pictures, clips))
        reading = in_bytes(self.processor, self.model)
        for part, some in (("image_processor", pictures), ("video_processor", clips)):
            if any(sized := [medium.sized for medium in some]):
                setattr(reading, part, SizesKept(getattr(reading, part), sized))
        if videos:
            inputs = reading(
                text=[self.video_text(text)],
                images=images or None,
                **video_arguments(self.processor.video_processor, videos),
                **self.text_options(text),
                return_tensors="pt",
            )
        else:
            inputs = reading.image_processor(images, return_tensors="pt") if images else {}
        grids = {name: inputs[name] for name in GRIDS.values() if name in inputs}
        merged = self.processor.image_processor.merge_size**2
        counts = {
            modality: (grids[name].prod(-1) // merged).tolist()
            for modality, name in GRIDS.items()
            if name in grids
        }
        if videos:
            ids = inputs["input_ids"]
        else:
            ids = self.tokenize_media(text, Modality.IMAGE, counts.get(Modality.IMAGE, []))
        tensors = {name: inputs[name] for name in inputs if name.startswith("pixel_values")}
        return Encoding(
            input_ids=ids,
            tensors=tensors | grids,
            positions=self.spatial(ids, grids, videos),
            media_tokens=[counts[medium.modality].pop(0) for medium in media],
        )

    def min_tokens(self, medium: Medium) -> int:
        """See ``Family.min_tokens``; videos are bounded by ``MediaLimits``."""
        if medium.modality is Modality.IMAGE:
            processor = self.processor.image_processor
            return image_tokens(processor, medium.content, sized=medium.sized)
        return 0

    def video_text(self, text: str) -> str:
        """Return rendered text with video placeholders as the processor expects them."""
        return text

    def spatial(
        self, ids: torch.Tensor, grids: dict[str, torch.Tensor], videos: Sequence[Video]
    ) -> torch.Tensor:
        """Compute (3, 1, tokens) int64 positions on the CPU.

        The model's own rope_deltas are not used, because the model stores only one value, which
        each request overwrites.
        """
        if not grids:
            return torch.arange(ids.shape[1]).expand(3, 1, -1)
        spatial, _ = self.model.model.get_rope_index(
            ids,
            mm_token_type_ids=self.modalities_of(ids).int(),
            attention_mask=torch.ones_like(ids),
            **grids,
        )
        return spatial.long()
