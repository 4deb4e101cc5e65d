"""Qwen2.5-VL: images and videos with 3-D positions; the first axis is time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Qwen2_5_VLProcessor, Qwen2VLVideoProcessor

from oscar_mm.media import Video
from oscar_mm.modality import Modality, spans_of
from oscar_mm.models import released
from oscar_mm.models.released import ReleasedModel
from oscar_mm.pipelines.families.qwen import QwenVL, limited, longer_sides
from oscar_mm.pipelines.registry import register_family


@register_family
class Qwen2_5VL(QwenVL):
    """Family of Qwen2.5-VL Instruct, 3B to 72B."""

    model_types = ("qwen2_5_vl",)
    name = "Qwen2.5-VL"
    fast_layers = frozenset({"Qwen2_5_VLDecoderLayer"})
    released = released.QWEN2_5_VL
    pocket = "pocket-vl"

    def spatial(
        self, ids: torch.Tensor, grids: dict[str, torch.Tensor], videos: Sequence[Video]
    ) -> torch.Tensor:
        """See ``QwenVL.spatial``; frame pairs have times in fractions of a second.

        The model also accepts seconds per frame pair, but older versions of transformers truncate
        them to an integer: above 2 frames per second, all frames would have the same time.
        """
        spatial = super().spatial(ids, grids, videos)
        kinds = self.modalities_of(ids)[0].tolist()
        runs = [span for span in spans_of(kinds) if span.modality is Modality.VIDEO]
        rate = self.model.config.vision_config.tokens_per_second
        frames = self.processor.video_processor.temporal_patch_size
        for run, video in zip(runs, videos, strict=True):
            times = spatial[0, 0, run.start : run.stop]
            start = int(times[0])
            # Without seconds per pair, the model assumes one second, which is ``rate`` positions.
            pairs = (times - start) // rate
            times.copy_(start + (pairs * (rate * torch.tensor(frames / video.fps))).long())
        return spatial

    def position_steps(self, modality: Modality, tokens: int) -> Sequence[int] | None:
        """See ``Family.position_steps``; a video's positions depend on its timestamps."""
        if modality is Modality.VIDEO:
            return None
        return longer_sides(tokens) if modality is Modality.IMAGE else [tokens]

    @classmethod
    def as_released(cls, processor: Any, fields: dict[str, Any], model: ReleasedModel) -> Any:
        """See ``Family.as_released``; images have the same limits as frames."""
        processor = super().as_released(processor, fields, model)
        return Qwen2_5_VLProcessor(
            image_processor=processor.image_processor,
            tokenizer=processor.tokenizer,
            video_processor=limited(Qwen2VLVideoProcessor, model, model.pixels),
            chat_template=processor.chat_template,
        )
