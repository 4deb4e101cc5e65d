"""Qwen3-VL, dense and mixture of experts: images and videos with 3-D positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from oscar_mm.decoding import Prompt
from oscar_mm.media import Video
from oscar_mm.modality import token_modalities
from oscar_mm.pipelines.base import Family

_GRIDS = ("image_grid_thw", "video_grid_thw")


class Qwen3VL(Family):
    """Qwen3-VL-2B to -235B-A22B, Instruct and Thinking."""

    model_types = ("qwen3_vl", "qwen3_vl_moe")

    def messages(
        self, prompt: str, system: str | None, images: int, videos: int
    ) -> list[dict[str, Any]]:
        """Images, then videos, then the question, in one user turn."""
        parts = [{"type": "image"}] * images + [{"type": "video"}] * videos
        turns = [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}]
        if system:
            turns.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
        return turns

    def prompt(
        self,
        messages: Sequence[dict[str, Any]],
        images: Sequence[Image.Image],
        videos: Sequence[Video],
    ) -> Prompt:
        """See ``Family.prompt``. Positions are (4, batch, tokens): text, time, height, width."""
        text = self.processor.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        media: dict[str, Any] = {"images": list(images)} if images else {}
        if videos:
            media["videos"] = [video.frames for video in videos]
            media["video_metadata"] = [video.metadata for video in videos]
            media["do_sample_frames"] = False
            # What None means today; transformers warns that it will mean something else.
            media["cap_pixels_per_frame"] = bool(
                self.processor.video_processor.cap_pixels_per_frame
            )
        inputs = self.processor(
            text=[text], **media, return_mm_token_type_ids=True, return_tensors="pt"
        )
        types, mask = inputs.pop("mm_token_type_ids"), inputs.pop("attention_mask")
        modalities = token_modalities(
            inputs["input_ids"], mm_token_type_ids=types, attention_mask=mask
        )
        positions = self._positions(inputs, types, mask)
        tensors = {
            name: value.to(self.device)
            for name, value in inputs.items()
            if isinstance(value, torch.Tensor)
        }
        return Prompt(
            inputs=tensors,
            positions=positions.to(self.device),
            next_position=(positions[1:].amax(dim=(0, 2)) + 1).to(self.device),
            modalities=modalities,
        )

    def _positions(
        self, inputs: dict[str, torch.Tensor], types: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """(4, 1, tokens) int64 on the CPU.

        Never from the model's own rope_deltas: that is one number on the model, overwritten by
        whichever request comes next.
        """
        text = (mask.cumsum(-1) - 1).clamp(min=0)
        grids = {name: inputs[name] for name in _GRIDS if name in inputs}
        if not grids:
            return text.expand(4, -1, -1)
        spatial, _ = self.model.model.get_rope_index(
            inputs["input_ids"], mm_token_type_ids=types, attention_mask=mask, **grids
        )
        return torch.cat([text[None], spatial.to(text.dtype)])
