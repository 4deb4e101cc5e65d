"""Qwen3-VL, dense and mixture of experts: images and videos with 3-D positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from oscar_mm.generation.family import Encoding, Family
from oscar_mm.media import Video
from oscar_mm.media.media import Medium
from oscar_mm.media.tower_inputs import in_bytes, scale_in_model
from oscar_mm.modality import Modality, token_modalities


def image_tokens(image_processor: Any, image: Image.Image) -> int:
    """Tokens of an image in a prompt, by its size alone."""
    width, height = _resized(image_processor, image.width, image.height)
    side = image_processor.patch_size * image_processor.merge_size
    return (height // side) * (width // side)


def largest_image(image_processor: Any, width: int, height: int) -> tuple[int, int]:
    """See ``Family.largest_image``: the size to which the processor resizes, if that is smaller."""
    if width * height <= image_processor.size["longest_edge"]:
        return width, height
    try:
        resized = _resized(image_processor, width, height)
        # The processor leaves a strip wider than its limit, and would resize it once more.
        return resized if _resized(image_processor, *resized) == resized else (width, height)
    except ValueError:  # a strip that is too long for the processor, which refuses it later
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
    """Arguments of a processor for sampled videos, whose times it keeps."""
    return {
        "videos": [video.frames for video in videos],
        "video_metadata": [video.metadata for video in videos],
        "do_sample_frames": False,
        # The present meaning of None, which transformers says will change.
        "cap_pixels_per_frame": bool(video_processor.cap_pixels_per_frame),
    }


_GRIDS = {Modality.IMAGE: "image_grid_thw", Modality.VIDEO: "video_grid_thw"}


class Qwen3VL(Family):
    """Qwen3-VL-2B to -235B-A22B, Instruct and Thinking.

    Loading teaches the model to take pixels as bytes, see ``oscar_mm.media.tower_inputs``.
    """

    model_types = ("qwen3_vl", "qwen3_vl_moe")
    name = "Qwen3-VL"
    reads = frozenset({Modality.IMAGE, Modality.VIDEO})

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(model, processor)
        scale_in_model(model, processor)

    def encode(self, text: str, media: Sequence[Medium]) -> Encoding:
        """See ``Family.encode``."""
        images = [medium.content for medium in media if medium.modality is Modality.IMAGE]
        videos = [medium.content for medium in media if medium.modality is Modality.VIDEO]
        reading = in_bytes(self.processor, self.model)
        if videos:
            # The models were trained with a pair of marks around each frame and none around the
            # video; transformers 5 writes the frames between the template's two marks.
            marks = self.processor.vision_start_token, self.processor.vision_end_token
            video = self.processor.video_token
            inputs = reading(
                text=[text.replace(video.join(marks), video)],
                images=images or None,
                **video_arguments(self.processor.video_processor, videos),
                **self.text_options(text),
                return_tensors="pt",
            )
        else:
            inputs = reading.image_processor(images, return_tensors="pt") if images else {}
        grids = {name: inputs[name] for name in _GRIDS.values() if name in inputs}
        merged = self.processor.image_processor.merge_size**2
        counts = {
            modality: (grids[name].prod(-1) // merged).tolist()
            for modality, name in _GRIDS.items()
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
            positions=self._positions(ids, grids),
            media_tokens=[counts[medium.modality].pop(0) for medium in media],
        )

    def largest_image(self, width: int, height: int) -> tuple[int, int]:
        """See ``Family.largest_image``."""
        return largest_image(self.processor.image_processor, width, height)

    def least_tokens(self, medium: Medium) -> int:
        """See ``Family.least_tokens``; videos are bounded by ``MediaLimits``."""
        if medium.modality is Modality.IMAGE:
            return image_tokens(self.processor.image_processor, medium.content)
        return 0

    def _positions(self, ids: torch.Tensor, grids: dict[str, torch.Tensor]) -> torch.Tensor:
        """(3, 1, tokens) int64 on the CPU.

        Never from the model's own rope_deltas: that is one number on the model, overwritten by
        whichever request comes next.
        """
        if not grids:
            return torch.arange(ids.shape[1]).expand(3, 1, -1)
        spatial, _ = self.model.model.get_rope_index(
            ids,
            mm_token_type_ids=token_modalities(ids, config=self.model.config).int(),
            attention_mask=torch.ones_like(ids),
            **grids,
        )
        return spatial.long()
