"""Qwen3-VL, dense and MoE: images and videos with 3-D positions and timestamps between frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from transformers import Qwen3VLVideoProcessor

from oscar_mm.modality import Modality
from oscar_mm.models import released
from oscar_mm.models.released import ReleasedModel
from oscar_mm.pipelines.families.qwen import QwenVL, limited, longer_sides
from oscar_mm.pipelines.registry import register_family

_VIDEO_PIXELS = (4096, 25165824)
"""Minimum and maximum total pixels of a video's frames."""


@register_family
class Qwen3VL(QwenVL):
    """Family of Qwen3-VL-2B to -235B-A22B, Instruct and Thinking."""

    model_types = ("qwen3_vl", "qwen3_vl_moe")
    name = "Qwen3-VL"
    layout = replace(QwenVL.layout, features={"deepstack_visual_embeds": "visual_pos_masks"})
    fast_layers = frozenset({"Qwen3VLTextDecoderLayer", "Qwen3VLMoeTextDecoderLayer"})
    fast_towers = frozenset({"Qwen3VLVisionModel", "Qwen3VLMoeVisionModel"})
    # The checkpoints store experts transposed; transformers up to 5.23 shards them wrongly.
    undivided = MappingProxyType({"qwen3_vl_moe": ".experts"})
    released = released.QWEN3_VL
    pocket = "pocket-vl"

    def video_text(self, text: str) -> str:
        """See ``QwenVL.video_text``.

        The models were trained with delimiters around each frame but not around the full video;
        transformers 5 inserts the frames between the template's two delimiters.
        """
        marks = self.processor.vision_start_token, self.processor.vision_end_token
        video = self.processor.video_token
        return text.replace(video.join(marks), video)

    def position_steps(self, modality: Modality, tokens: int) -> Sequence[int]:
        """See ``Family.position_steps``."""
        return [tokens] if modality is Modality.TEXT else longer_sides(tokens)

    @classmethod
    def as_released(cls, processor: Any, fields: dict[str, Any], model: ReleasedModel) -> Any:
        """See ``Family.as_released``."""
        super().as_released(processor, fields, model)
        processor.video_processor = limited(Qwen3VLVideoProcessor, model, _VIDEO_PIXELS)
        return processor
