"""Models of images by transformers' uniform interface; each family is declared in a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
from PIL import Image

from oscar_mm.engine.family import Encoding, Family
from oscar_mm.engine.input_layout import InputLayout
from oscar_mm.errors import InputError
from oscar_mm.media.media import Medium
from oscar_mm.modality import Modality, token_modalities
from oscar_mm.pipelines.families.qwen import longer_sides
from oscar_mm.pipelines.registry import register_family

_SIZES = 1024
"""Number of image sizes whose tokens are remembered."""


class PictureFamily(Family):
    """Family of images whose processor and model need nothing special.

    A processor returns the ids of text and images, and arguments of the model's forward, which
    ``layout`` says how to cut. Videos are not supported.
    """

    reads = frozenset({Modality.IMAGE})

    def encode(self, text: str, media: Sequence[Medium]) -> Encoding:
        """See ``Family.encode``."""
        if not media:
            ids = self.tokenize(text)
            return Encoding(ids, {}, self.positions(ids, {}), [])
        counts = [self.min_tokens(medium) for medium in media]
        inputs = self._processed(text, [medium.content for medium in media])
        layout, ids = self.layout, inputs["input_ids"]
        names = {*layout.per_medium, *layout.per_patch, *layout.per_tile} & inputs.keys()
        tensors = {name: self.rows(name, inputs[name]) for name in sorted(names)}
        return Encoding(ids, tensors, self.positions(ids, tensors), counts)

    def _processed(self, text: str, images: Sequence[Any]) -> Any:
        """Run the processor on one text with its images."""
        options = self.text_options(text)
        return self.processor(text=[text], images=[[*images]], **options, return_tensors="pt")

    def rows(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return an argument of the model with the dimension that is cut in front."""
        return tensor

    def positions(self, ids: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the positions of a prompt, see ``Encoding``."""
        return torch.arange(ids.shape[1])[None]

    def min_tokens(self, medium: Medium) -> int:
        """See ``Family.min_tokens``: the tokens of a black image of the same size.

        Raises:
            InputError: if the processor refuses the size.
        """
        width, height = medium.content.width, medium.content.height
        try:
            return self._tokens_of(width, height)
        except ValueError as error:
            raise InputError(
                f"{medium.label}: the processor of {self.name} refuses {width}x{height} pixels; "
                "crop, tile or pad the image to a lower side ratio"
            ) from error

    @cached_property
    def _tokens_of(self) -> Any:
        """Function from width and height to the number of an image's tokens."""
        [placeholder] = self.placeholders

        def count(width: int, height: int) -> int:
            ids = self._processed(placeholder, [Image.new("RGB", (width, height))])["input_ids"]
            return int((token_modalities(ids, config=self.model.config) > 0).sum())

        return lru_cache(_SIZES)(count)


@register_family
class InternVL(PictureFamily):
    """Family of InternVL 3 and 3.5 in transformers' format: tiles of 448 x 448 pixels."""

    model_types = ("internvl",)
    name = "InternVL"
    layout = InputLayout(per_tile={"pixel_values": Modality.IMAGE})


@register_family
class Mistral3(PictureFamily):
    """Family of Mistral Small 3.1 and Ministral 3: images of any shape, a token ends each row."""

    model_types = ("mistral3",)
    name = "Mistral 3"
    layout = InputLayout(per_medium={"pixel_values": Modality.IMAGE, "image_sizes": Modality.IMAGE})

    def min_tokens(self, medium: Medium) -> int:
        """See ``PictureFamily.min_tokens``.

        Raises:
            InputError: also if the image is a single token, which the model's code cannot split.
        """
        if (tokens := super().min_tokens(medium)) > 1:
            return tokens
        side = self.processor.patch_size * self.processor.spatial_merge_size
        size = f"{medium.content.width}x{medium.content.height}"
        raise InputError(
            f"{medium.label}: {size} pixels are too few for {self.name}; scale the image up to "
            f"more than {side} pixels in width or height"
        )


@register_family
class SmolVLM(PictureFamily):
    """Family of SmolVLM, SmolVLM2 and Idefics3: tiles, each between tokens that name its place."""

    model_types = ("smolvlm", "idefics3")
    name = "SmolVLM"
    layout = InputLayout(
        per_tile={"pixel_values": Modality.IMAGE, "pixel_attention_mask": Modality.IMAGE}
    )

    def rows(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """See ``PictureFamily.rows``; the model takes (samples, tiles, ...), in any shape."""
        return tensor.transpose(0, 1)


class GridFamily(PictureFamily):
    """Family of images as patches with grids, and positions of time, height and width."""

    layout = InputLayout(
        per_medium={"image_grid_thw": Modality.IMAGE},
        per_patch={"pixel_values": (Modality.IMAGE, "image_grid_thw")},
    )

    def positions(self, ids: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """See ``PictureFamily.positions``; as the model counts them."""
        if not tensors:
            return torch.arange(ids.shape[1]).expand(3, 1, -1)
        spatial, _ = self.model.model.get_rope_index(
            ids,
            mm_token_type_ids=token_modalities(ids, config=self.model.config).int(),
            image_grid_thw=tensors["image_grid_thw"],
            attention_mask=torch.ones_like(ids),
        )
        return spatial.long()

    def position_steps(self, modality: Modality, tokens: int) -> Sequence[int] | None:
        """See ``Family.position_steps``."""
        return longer_sides(tokens) if modality is Modality.IMAGE else [tokens]


@register_family
class Glm4V(GridFamily):
    """Family of GLM-4.1V and GLM-4.5V, dense and with experts."""

    model_types = ("glm4v", "glm4v_moe")
    name = "GLM-4V"


@register_family
class PaddleOCRVL(GridFamily):
    """Family of PaddleOCR-VL."""

    model_types = ("paddleocr_vl",)
    name = "PaddleOCR-VL"
