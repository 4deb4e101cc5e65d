"""Family of Molmo 2: images in overlapping tiles and frames, all of which attend to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from oscar_mm.engine.input_layout import InputLayout
from oscar_mm.engine.message import Message
from oscar_mm.media.media import Medium
from oscar_mm.modality import Modality
from oscar_mm.pipelines.families.pictures import ClipFamily
from oscar_mm.pipelines.registry import register_family

_PLACES = "image_token_pooling"


@register_family
class Molmo2(ClipFamily):
    """Family of Molmo 2.

    The model's own arguments for videos cannot be combined with those for images. So the frames of
    a video are passed as images of a single tile, which the model computes in the same way.
    """

    model_types = ("molmo2",)
    name = "Molmo 2"
    since = "5.20"
    fast_layers = frozenset({"Molmo2DecoderLayer"})
    layout = InputLayout(
        per_medium={"image_grids": Modality.IMAGE, "image_num_crops": Modality.IMAGE},
        per_patch={
            "pixel_values": (Modality.IMAGE, "image_num_crops"),
            _PLACES: (Modality.IMAGE, "image_grids"),
        },
        places={_PLACES: "pixel_values"},
        frames_as_images=True,
        two_way="prompt",
    )

    @property
    def _begin(self) -> str:
        """Token that the processor writes before a text."""
        tokenizer = self.processor.tokenizer
        return tokenizer.bos_token or tokenizer.eos_token

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """See ``ChatFormat.render``; begins with the token that the processor writes first."""
        text = super().render(messages, **options)
        return text if text.startswith(self._begin) else self._begin + text

    def modalities_of(self, ids: torch.Tensor) -> torch.Tensor:
        """See ``Family.modalities_of``; ends of rows, images and frames are image tokens too."""
        of_images = torch.tensor(self.processor.image_token_ids)
        return torch.isin(ids.cpu(), of_images).to(torch.int8)

    def _read(self, medium: Medium) -> tuple[dict[str, torch.Tensor], str]:
        """See ``PictureFamily._read``."""
        found, expansion = super()._read(medium)
        return found, expansion.removeprefix(self._begin)

    def _shown(self, expansion: str) -> int:
        """See ``PictureFamily._shown``."""
        tokenizer = self.processor.tokenizer
        tokens = tokenizer.convert_ids_to_tokens(self.processor.image_token_ids)
        return sum(map(expansion.count, tokens))

    def arguments(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """See ``PictureFamily.arguments``."""
        if (grid := inputs.get("video_grids")) is None:
            found = super().arguments(inputs)
            return found | {"image_num_crops": found["image_num_crops"][:, None]}
        [(frames, *sides)] = grid.tolist()
        pixels = inputs["pixel_values_videos"]
        places = inputs["video_token_pooling"]
        return {
            "pixel_values": pixels,
            _PLACES: torch.where(places < 0, places, places % pixels.shape[1]),
            "image_grids": torch.tensor([[*sides, 0, 0]] * frames),
            "image_num_crops": torch.ones(frames, 1, dtype=torch.long),
        }

    def join_media(self, name: str, parts: Sequence[Any]) -> Any:
        """See ``Family.join_media``; rows are padded, since tokens of images and of frames pool
        different numbers of patches."""
        if name == _PLACES:
            most = max(part.shape[1] for part in parts)
            parts = [pad(part, (0, most - part.shape[1]), value=-1) for part in parts]
        return super().join_media(name, parts)
