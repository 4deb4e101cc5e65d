"""LLaVA-v1.6 (LLaVA-NeXT): images split into tiles; decoder Vicuna, Mistral, Yi or Llama 3."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlavaNextImageProcessor
from transformers.image_processing_utils import select_best_resolution

from oscar_mm.engine.family import Encoding, Family
from oscar_mm.engine.input_layout import InputLayout
from oscar_mm.media.media import Medium
from oscar_mm.modality import Modality
from oscar_mm.models import released
from oscar_mm.models.released import ReleasedModel
from oscar_mm.pipelines.registry import register_family

# The released templates of Vicuna and Yi add a few more words.
_TEMPLATE = """\
{%- for message in messages -%}{%- for part in message.content -%}
{{ '<image>\n' if part.type == 'image' else part.text }}
{%- endfor -%}{%- endfor -%}"""
_RELEASED_TILES = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
"""Tile grids of the released models, as (rows, columns)."""
_NEARBY = 64
"""Maximum number of widths to try when scaling an image down."""


@register_family
class LlavaNext(Family):
    """Family of llava-v1.6-vicuna-7b and -13b, -mistral-7b, -34b, and llama3-llava-next-8b.

    Older processors lack the patch size and the feature selection strategy of the vision tower;
    both are set from the model's configuration.
    """

    model_types = ("llava_next",)
    name = "LLaVA-NeXT"
    reads = frozenset({Modality.IMAGE})
    layout = InputLayout(per_medium={"pixel_values": Modality.IMAGE, "image_sizes": Modality.IMAGE})
    released = released.LLAVA_NEXT
    pocket = "pocket-llava"
    plain_template = _TEMPLATE

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(model, processor)
        if processor.patch_size is None:
            processor.patch_size = model.config.vision_config.patch_size
            # Such processors also do not count the class token, which CLIP has and SigLIP does not.
            has_class_token = "clip" in model.config.vision_config.model_type
            processor.num_additional_image_tokens = int(has_class_token)
        if processor.vision_feature_select_strategy is None:
            strategy = model.config.vision_feature_select_strategy
            processor.vision_feature_select_strategy = strategy

    def encode(self, text: str, media: Sequence[Medium]) -> Encoding:
        """See ``Family.encode``."""
        images = {"images": [medium.content for medium in media]} if media else {}
        inputs = self.processor(
            text=[text], **images, **self.text_options(text), return_tensors="pt"
        )
        ids = inputs["input_ids"]
        return Encoding(
            input_ids=ids,
            tensors={name: inputs[name] for name in ("pixel_values", "image_sizes") if media},
            positions=torch.arange(ids.shape[1])[None],
            media_tokens=[self.min_tokens(medium) for medium in media],
        )

    def largest_image(self, width: int, height: int) -> tuple[int, int]:
        """See ``Family.largest_image``: about twice the width and height of the image's tiles.

        The processor's rounding depends on the input size, so the result is the smallest size from
        there on that has the same number of tokens as the original image.
        """
        tiles = self.processor.image_processor.image_grid_pinpoints
        best_height, best_width = select_best_resolution((height, width), tiles)
        min_width = math.ceil(2 * min(best_width, width * best_height / height))
        tokens = self._image_tokens(width, height)
        for smaller in range(min_width, min(width, min_width + _NEARBY)):
            size = smaller, round(smaller * height / width)
            if self._image_tokens(*size) == tokens:
                return size
        return width, height

    def min_tokens(self, medium: Medium) -> int:
        """Return the number of tokens of an image.

        The tokens are those of the unpadded tiles, one line break per row, and the overview.
        """
        return self._image_tokens(medium.content.width, medium.content.height)

    def _image_tokens(self, width: int, height: int) -> int:
        [tokens] = self.processor._get_num_multimodal_tokens([(height, width)])["num_image_tokens"]
        return int(tokens)

    @classmethod
    def as_released(cls, processor: Any, fields: dict[str, Any], model: ReleasedModel) -> Any:
        """See ``Family.as_released``."""
        super().as_released(processor, fields, model)
        side = model.vision["image_size"]
        grids = [[side * rows, side * columns] for rows, columns in _RELEASED_TILES]
        fields["image_grid_pinpoints"] = grids
        processor.image_processor = LlavaNextImageProcessor(
            size={"shortest_edge": side},
            crop_size={"height": side, "width": side},
            image_grid_pinpoints=grids,
        )
        processor.patch_size = model.vision["patch_size"]
        return processor
