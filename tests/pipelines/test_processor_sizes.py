"""What a user sets on a processor holds, exactly as in plain transformers."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoProcessor

from oscar_mm import OscarOmniPipeline, OscarVLPipeline
from oscar_mm.admission.request_size import count_tokens
from oscar_mm.engine.family import Family
from oscar_mm.engine.message import first_turn
from oscar_mm.media.encoder_inputs import scaled_inputs
from oscar_mm.media.media import Media
from oscar_mm.pipelines.families.qwen import largest_image, video_arguments
from tests.prompts import clip, noise, prepare

PICTURES = [noise(300, 500), noise(31, 40, 1), noise(200, 1400, 2)]
SIZES = {"shortest_edge": 96 * 96, "longest_edge": 160 * 160}


def settings_of(part: str, size: dict[str, int]) -> list[tuple[str, dict[str, Any]]]:
    least, most = size.values()
    return [
        (part, {"max_pixels": most}),
        (part, {"min_pixels": least}),
        (part, {"min_pixels": least, "max_pixels": most}),
        (part, {"size": dict(size)}),
        (part, {"size": dict(size), "max_pixels": 2 * most}),
    ]


def with_settings(pipe: Any, part: str, values: dict[str, Any]) -> Any:
    """The pipeline's model with a processor on which these were set."""
    processor = copy.deepcopy(pipe.processor)
    for name, value in values.items():
        setattr(getattr(processor, part), name, value)
    return type(pipe)(pipe.family.outer_model, processor=processor)


def pixels(family: Family, media: Media) -> dict[str, Any]:
    prompt = family.prompt(first_turn("?", media.parts), media)
    assert sum(count_tokens(family, media).values()) == prompt.tokens
    return scaled_inputs(family.model, prompt.inputs)


def plainly(pipe: Any, media: Media) -> dict[str, Any]:
    """What the whole processor makes of them in plain transformers."""
    videos = video_arguments(pipe.processor.video_processor, media.videos) if media.videos else {}
    opening, closing = "<|vision_start|>", "<|vision_end|>"
    texts = ["<|image_pad|>"] * len(media.images) + ["<|video_pad|>"] * len(media.videos)
    if videos and pipe.name == "OscarOmniPipeline":
        videos["fps"] = media.videos[0].fps
    return pipe.processor(
        text=["".join(f"{opening}{text}{closing}" for text in texts)],
        images=list(media.images) or None,
        return_tensors="pt",
        **videos,
    )


@pytest.mark.filterwarnings("ignore:Passing `min_pixels` and `max_pixels`:FutureWarning")
@pytest.mark.parametrize(("part", "values"), settings_of("image_processor", SIZES))
def test_pictures(qwen: OscarVLPipeline, part: str, values: dict[str, Any]) -> None:
    pipe = with_settings(qwen, part, values)
    media = pipe.read_media(PICTURES)
    made = pixels(pipe.family, media)
    plain = plainly(pipe, media)
    for name in ("pixel_values", "image_grid_thw"):
        assert torch.equal(made[name], plain[name])
    grids = plain["image_grid_thw"]
    assert [pipe.family.min_tokens(one) for one in media] == (grids.prod(-1) // 4).tolist()
    used = largest_image(pipe.processor.image_processor, 4000, 3000)
    large = pipe.processor.image_processor([noise(3000, 4000)], return_tensors="pt")
    assert [side // 16 for side in used[::-1]] == large["image_grid_thw"][0, 1:].tolist()


@pytest.mark.filterwarnings("ignore:Passing `min_pixels` and `max_pixels`:FutureWarning")
@pytest.mark.parametrize("family", ["vl", "omni"])
@pytest.mark.parametrize("number", range(5))
def test_videos(family: str, number: int, request: pytest.FixtureRequest) -> None:
    known = request.getfixturevalue({"vl": "qwen", "omni": "omni"}[family])
    size = {"shortest_edge": 8 * 64 * 96, "longest_edge": 8 * 96 * 128}
    pipe = with_settings(known, *settings_of("video_processor", size)[number])
    media = pipe.read_media(videos=[clip(6), clip(3, 5)])
    made, plain = pixels(pipe.family, media), plainly(pipe, media)
    for name in ("pixel_values_videos", "video_grid_thw"):
        assert torch.equal(made[name], plain[name])


@pytest.mark.filterwarnings("ignore:Passing `min_pixels` and `max_pixels`:FutureWarning")
def test_pictures_of_omni_and_of_the_processors_arguments(
    omni: OscarOmniPipeline, qwen: OscarVLPipeline, qwen3_vl_folder
) -> None:
    given = AutoProcessor.from_pretrained(qwen3_vl_folder, max_pixels=160 * 160)
    pipes = [
        with_settings(omni, "image_processor", {"max_pixels": 160 * 160, "min_pixels": 32 * 32}),
        OscarVLPipeline(qwen.model, processor=given),
    ]
    for pipe in pipes:
        media = pipe.read_media(PICTURES)
        plain = plainly(pipe, media)
        assert torch.equal(pixels(pipe.family, media)["image_grid_thw"], plain["image_grid_thw"])
    whole = with_settings(qwen, "image_processor", {"do_resize": False})
    media = whole.read_media([noise(320, 512)])
    assert pixels(whole.family, media)["image_grid_thw"].tolist() == [[1, 20, 32]]


def test_llava(llava: OscarVLPipeline) -> None:
    side = llava.processor.image_processor.size["shortest_edge"]
    for values in (
        {"size": {"height": side, "width": side}},
        {"crop_size": {"height": side, "width": side}, "size": {"shortest_edge": side}},
        {"do_center_crop": False},
    ):
        pipe = with_settings(llava, "image_processor", values)
        media = pipe.read_media(PICTURES)
        prompt = prepare(pipe, "?", media)
        assert sum(count_tokens(pipe.family, media).values()) == prompt.tokens
        plain = pipe.processor.image_processor(list(media.images), return_tensors="pt")
        assert torch.equal(prompt.inputs["pixel_values"], plain["pixel_values"])
