"""Models by transformers' uniform interface; each family is declared in a few lines."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from PIL import Image

from oscar_mm.engine.family import Encoding, Family
from oscar_mm.engine.input_layout import InputLayout
from oscar_mm.errors import InputError
from oscar_mm.media.media import Medium
from oscar_mm.media.options import FRAMES
from oscar_mm.modality import Modality
from oscar_mm.pipelines.families.qwen import longer_sides, video_arguments
from oscar_mm.pipelines.registry import register_family
from oscar_mm.thread_pool import parallel_map

_SIZES = 1024
"""Number of image sizes whose tokens are remembered."""
_FRAMES = 32
"""Number of frames that the tower of LLaVA-OneVision takes at a time."""


class PictureFamily(Family):
    """Family of images, or of images and videos, whose processor and model need nothing special.

    A processor replaces placeholders in a text, and returns arguments of the model's forward, which
    ``layout`` says how to cut. Videos need a layout with ``frames_as_images`` or arguments of their
    own.
    """

    reads = frozenset({Modality.IMAGE})

    def encode(self, text: str, media: Sequence[Medium]) -> Encoding:
        """See ``Family.encode``."""
        for medium in media:
            self.min_tokens(medium)  # Refuses some sizes.
        read = [*parallel_map(self._read, media)]
        written = iter([expansion for _, expansion in read])
        pattern = "|".join(map(re.escape, self.placeholders))
        ids = self.tokenize(re.sub(pattern, lambda _: next(written), text))
        tensors: dict[str, torch.Tensor] = {}
        for name in sorted({name for found, _ in read for name in found}):
            parts = [found[name] for found, _ in read if name in found]
            tensors[name] = self.join_media(name, parts)
        counts = [self._shown(expansion) for _, expansion in read]
        return Encoding(ids, tensors, self.positions(ids, tensors), counts)

    def _read(self, medium: Medium) -> tuple[dict[str, torch.Tensor], str]:
        """Run the processor on a media item.

        Processors of several items may refuse videos of different lengths, or drop images beside a
        video.

        Returns:
            Arguments of the model, and the text that replaces the placeholder.
        """
        texts: list[str] = []

        def expanded(*given: Any, **named: Any) -> Any:
            found = self.processor.get_text_with_replacements(*given, **named)
            texts.extend(found[0])
            return found

        reading = copy(self.processor)
        reading.get_text_with_replacements = expanded
        [placeholder] = (x for x, kind in self.placeholders.items() if kind is medium.modality)
        if medium.modality is Modality.IMAGE:
            shown: dict[str, Any] = {"images": [[medium.content]]}
        else:
            shown = video_arguments(reading.video_processor, [medium.content])
            shown["videos"] = [shown["videos"]]  # SmolVLM2 up to transformers 5.17 needs it.
        inputs = reading(text=[placeholder], **shown, return_tensors="pt")
        return self.arguments(inputs), texts[0]

    def arguments(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the model's arguments for a media item, with the dimension that is cut in front.

        Args:
            inputs: what the processor returns for the item.
        """
        layout = self.layout
        names = {*layout.per_medium, *layout.per_patch, *layout.per_tile} & inputs.keys()
        return {name: inputs[name] for name in names}

    def _shown(self, expansion: str) -> int:
        """Return the number of tokens of a media item, from the text for its placeholder."""
        return sum(map(expansion.count, self.placeholders))

    def positions(self, ids: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the positions of a prompt, see ``Encoding``."""
        return torch.arange(ids.shape[1])[None]

    def min_tokens(self, medium: Medium) -> int:
        """See ``Family.min_tokens``: the tokens of a black image of the same size.

        Videos are bounded by ``MediaLimits``.

        Raises:
            InputError: if the processor refuses the size.
        """
        if medium.modality is not Modality.IMAGE:
            return 0
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

        def count(width: int, height: int) -> int:
            black = Medium(Modality.IMAGE, Image.new("RGB", (width, height)), "")
            return self._shown(self._read(black)[1])

        return lru_cache(_SIZES)(count)


class ClipFamily(PictureFamily):
    """Family of images and videos, whose frames can be chosen but not scaled by options."""

    reads = frozenset({Modality.IMAGE, Modality.VIDEO})
    media_options = frozenset({"detail", *FRAMES})


@register_family
class InternVL(ClipFamily):
    """Family of InternVL 3 and 3.5 in transformers' format: tiles of 448 x 448 pixels."""

    model_types = ("internvl",)
    name = "InternVL"
    layout = InputLayout(per_tile={"pixel_values": Modality.IMAGE}, frames_as_images=True)


@register_family
class Gemma3(PictureFamily):
    """Family of Gemma 3, 4B and larger: tokens of an image attend to all others of the image."""

    model_types = ("gemma3",)
    name = "Gemma 3"
    layout = InputLayout(per_tile={"pixel_values": Modality.IMAGE}, two_way="run")

    def _shown(self, expansion: str) -> int:
        """See ``PictureFamily._shown``; an image has other tokens than its placeholder."""
        return expansion.count(self.processor.tokenizer.image_token)


@register_family
class Gemma4(PictureFamily):
    """Family of Gemma 4 whose layers have keys and values of their own: 26B-A4B and 31B.

    Tokens of an image attend to all others of the image in layers with a sliding window.
    """

    model_types = ("gemma4",)
    name = "Gemma 4"
    layout = InputLayout(
        per_medium={"pixel_values": Modality.IMAGE, "image_position_ids": Modality.IMAGE},
        two_way="run",
    )

    def attends_two_way(self, attention: Any) -> bool:
        """See ``Family.attends_two_way``."""
        return attention.is_sliding and attention.config.use_bidirectional_attention == "vision"


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
class Idefics3(PictureFamily):
    """Family of SmolVLM and Idefics3: tiles, each between tokens that name its place."""

    model_types = ("idefics3",)
    name = "Idefics3"
    layout = InputLayout(
        per_tile={"pixel_values": Modality.IMAGE, "pixel_attention_mask": Modality.IMAGE},
        frames_as_images=True,
    )

    def arguments(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """See ``PictureFamily.arguments``; the model takes (samples, tiles, ...), in any shape."""
        found = super().arguments(inputs)
        return {name: tensor.transpose(0, 1) for name, tensor in found.items()}


@register_family
class SmolVLM(Idefics3, ClipFamily):
    """Family of SmolVLM2: also videos, with the time before each frame."""

    model_types = ("smolvlm",)
    name = "SmolVLM2"


@register_family
class LlavaOnevision(ClipFamily):
    """Family of LLaVA-OneVision: images in tiles, pooled frames.

    Each image is cut into tiles, as the processor does with a list of images. It does not cut
    images that are nested in a list; then later turns would change earlier images.
    """

    model_types = ("llava_onevision",)
    name = "LLaVA-OneVision"
    layout = InputLayout(
        per_medium={
            "pixel_values": Modality.IMAGE,
            "image_sizes": Modality.IMAGE,
            "pixel_values_videos": Modality.VIDEO,
        }
    )

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(model, processor)
        inner = model.model
        if not isinstance(inner.get_video_features, partial):  # Pipelines may share the model.
            inner.get_video_features = partial(_video_by_video, inner, inner.get_video_features)


def _video_by_video(inner: Any, read: Any, pixels: torch.Tensor, **options: Any) -> Any:
    """Return the features of videos of different lengths; the tower takes few frames at a time.

    Args:
        inner: the model with towers and decoder.
        read: its own method, for videos of one length.
        pixels: (videos, frames, channels, height, width); zeros follow the frames of short videos.
        options: further arguments of the method.

    Returns:
        The method's result; ``pooler_output`` is (1, tokens, channels).
    """
    vision = inner.config.vision_config
    each = math.ceil(vision.image_size // vision.patch_size / 2) ** 2
    newline = inner.image_newline[None, None]
    parts: list[torch.Tensor] = []
    for video in pixels:
        for frames in video[video.flatten(1).any(1)].split(_FRAMES):
            made = read(frames[None], **options)
            parts.append(made.pooler_output[:, : each * len(frames)])
        parts.append(newline.to(parts[-1]))
    if made.pooler_output.shape[1] == each * len(frames):
        parts.pop()  # Up to transformers 5.17, the model's forward method adds it to the last.
    made.pooler_output = torch.cat(parts, dim=1)
    return made


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
            mm_token_type_ids=self.modalities_of(ids).int(),
            image_grid_thw=tensors["image_grid_thw"],
            attention_mask=torch.ones_like(ids),
        )
        return spatial.long()

    def position_steps(self, modality: Modality, tokens: int) -> Sequence[int] | None:
        """See ``Family.position_steps``."""
        return [tokens] if modality is Modality.TEXT else longer_sides(tokens)


@register_family
class Glm4V(GridFamily, ClipFamily):
    """Family of GLM-4.1V and GLM-4.5V, dense and with experts.

    The model's own arguments for videos cannot be combined with those for images; pairs of frames
    are the same to it as images.
    """

    model_types = ("glm4v", "glm4v_moe")
    name = "GLM-4V"
    layout = replace(GridFamily.layout, frames_as_images=True)

    def arguments(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """See ``PictureFamily.arguments``."""
        if (grid := inputs.get("video_grid_thw")) is None:
            return super().arguments(inputs)
        pairs = grid.repeat_interleave(grid[:, 0], dim=0)
        pairs[:, 0] = 1
        return {"pixel_values": inputs["pixel_values_videos"], "image_grid_thw": pairs}


@register_family
class PaddleOCRVL(GridFamily):
    """Family of PaddleOCR-VL."""

    model_types = ("paddleocr_vl",)
    name = "PaddleOCR-VL"
