"""Released models as families that have shapes and no weights, made without the hub."""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoConfig,
    AutoProcessor,
    LlavaNextImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLVideoProcessor,
)

from oscar_mm.generation.family import Family
from oscar_mm.models.released import ReleasedModel
from oscar_mm.models.source import source_of
from oscar_mm.pipelines.llava_next import LlavaNext
from oscar_mm.pipelines.placement import on_meta
from oscar_mm.pipelines.qwen3_omni import Qwen3Omni
from oscar_mm.pipelines.qwen3_vl import Qwen3VL

_VIDEO_PIXELS = (4096, 25165824)
"""Least and most pixels of all frames of a video that Qwen3-VL reads."""
_SIBLINGS: dict[str, tuple[type[Family], str]] = {
    "llava_next": (LlavaNext, "pocket-llava"),
    "qwen3_vl": (Qwen3VL, "pocket-vl"),
    "qwen3_vl_moe": (Qwen3VL, "pocket-vl"),
    "qwen3_omni_moe": (Qwen3Omni, "pocket-omni"),
}
"""Family and bundled model of the same architecture, by ``config.model_type``."""
# One letter for a role is one token of the bundled tokenizers, as a role's name is in the released
# ones. Vicuna's and Yi's templates write some words more.
_QWEN_TEMPLATE = """\
{%- set marks = {'image': '<|vision_start|><|image_pad|><|vision_end|>', \
'video': '<|vision_start|><|video_pad|><|vision_end|>', \
'audio': '<|audio_start|><|audio_pad|><|audio_end|>'} -%}
{%- for message in messages -%}
{{ '<|im_start|>' ~ message.role[0] ~ '\n' }}
{%- for part in message.content -%}{{ marks.get(part.type, part.text) }}{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{{ '<|im_start|>a\n' }}"""
_LLAVA_TEMPLATE = """\
{%- for message in messages -%}{%- for part in message.content -%}
{{ '<image>\n' if part.type == 'image' else part.text }}
{%- endfor -%}{%- endfor -%}"""


def outline_released(released: ReleasedModel) -> Family:
    """A family of the released shapes; its model has no weights, its tokenizer is a bundled one.

    Media take as many tokens as with the released processor; the chat template's own text is
    counted to a few tokens.
    """
    family, sibling = _SIBLINGS[released.family]
    folder = source_of(sibling)
    fields: dict[str, Any] = AutoConfig.from_pretrained(folder).to_dict()
    del fields["model_type"]
    # The ids of the bundled tokenizer stay.
    inner = fields.get("thinker_config", fields)
    inner |= {"text_config": dict(released.text), "vision_config": dict(released.vision)}
    if released.audio:
        inner["audio_config"] = dict(released.audio)
    inner["tie_word_embeddings"] = released.text["tie_word_embeddings"]
    processor: Any = AutoProcessor.from_pretrained(folder)
    if family is LlavaNext:
        fields["image_grid_pinpoints"] = _read_tiles(processor, released.vision)
    else:
        least, most = released.pixels
        processor.image_processor.size = {"shortest_edge": least, "longest_edge": most}
        # Qwen3-Omni bounds the pixels of a frame, Qwen3-VL those of all frames.
        if family is Qwen3Omni:
            video, (least, most) = Qwen2VLVideoProcessor, released.pixels
        else:
            video, (least, most) = Qwen3VLVideoProcessor, _VIDEO_PIXELS
        processor.video_processor = video(
            patch_size=16, merge_size=2, size={"shortest_edge": least, "longest_edge": most}
        )
        # A word of the timestamps between frames, which the released tokenizers have.
        processor.tokenizer.add_tokens([" seconds"])
        processor.chat_template = _QWEN_TEMPLATE
    config = AutoConfig.for_model(released.family, **fields)
    return family(on_meta(family.auto_class, config).eval(), processor)


def _read_tiles(processor: Any, vision: dict[str, Any]) -> list[list[int]]:
    """Let LLaVA's processor cut images into the released tiles; return their grids, in pixels."""
    side = vision["image_size"]
    grids = [[side * rows, side * columns] for rows, columns in _GRIDS]
    processor.image_processor = LlavaNextImageProcessor(
        size={"shortest_edge": side},
        crop_size={"height": side, "width": side},
        image_grid_pinpoints=grids,
    )
    processor.patch_size = vision["patch_size"]
    processor.chat_template = _LLAVA_TEMPLATE
    return grids


_GRIDS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
"""Rows and columns of tiles."""
