"""Large pictures are kept at the size that the model uses, with the tokens that headers predict."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

from oscar_mm import OscarVLPipeline
from oscar_mm.errors import RequestTooLarge
from oscar_mm.media.image import PictureSize
from oscar_mm.media.media import Medium
from oscar_mm.pipelines.families.llava_next import LlavaNext
from oscar_mm.pipelines.families.qwen import image_tokens, largest_image
from tests.prompts import noise, prepare

SIDES = st.integers(300, 16_400)
RELEASED = {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096}
TINY = {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}


@settings(max_examples=200, deadline=None)
@given(SIDES, SIDES, st.sampled_from([RELEASED, TINY]))
@example(16_400, 300, TINY)
@example(1733, 9682, RELEASED)
def test_qwen_gets_the_same_grid(width: int, height: int, size: dict[str, int]) -> None:
    processor = SimpleNamespace(patch_size=16, merge_size=2, size=size, do_resize=True)
    used = largest_image(processor, width, height)
    assert used[0] <= width and used[1] <= height
    if used != (width, height):
        assert used[0] * used[1] <= size["longest_edge"] < width * height
    tokens = image_tokens(processor, PictureSize(width, height))
    assert image_tokens(processor, PictureSize(*used)) == tokens


@pytest.fixture(scope="module")
def released_llava() -> LlavaNext:
    family = LlavaNext.__new__(LlavaNext)
    tiles = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    processor = LlavaNextProcessor.__new__(LlavaNextProcessor)
    processor.image_processor = SimpleNamespace(
        image_grid_pinpoints=tiles, size={"shortest_edge": 336}
    )
    processor.patch_size, processor.num_additional_image_tokens = 14, 1
    processor.vision_feature_select_strategy = "default"
    processor._merge_kwargs = lambda **_: {"images_kwargs": {}}
    family.processor = processor
    return family


@settings(max_examples=200, deadline=None)
@given(width=SIDES, height=SIDES)
@example(width=16_320, height=12_240)
@example(width=4756, height=4062)
def test_llava_gets_the_same_tiles(released_llava: LlavaNext, width: int, height: int) -> None:
    used = released_llava.largest_image(width, height)
    assert used[0] <= width and used[1] <= height
    assert used == (width, height) or (max(used) <= 2 * 1008 + 64 and max(used) >= 2 * 672)
    count = released_llava._image_tokens
    assert count(*used) == count(width, height)


@pytest.mark.parametrize("family", ["qwen", "llava"])
def test_tokens_are_those_announced(family: str, request: pytest.FixtureRequest) -> None:
    """A photo and the same picture as an array have the same size and nearly the same pixels."""
    exact = request.getfixturevalue(family)
    photo = Image.fromarray(noise(40, 60)).resize((2700, 1800), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    photo.save(file, "JPEG", quality=95)
    media = exact.read_media([file.getvalue(), photo])
    pictures = [np.asarray(image, np.int16) for image in media.images]
    assert pictures[0].shape == pictures[1].shape < (1800, 2700, 3)
    assert np.abs(pictures[0] - pictures[1]).mean() < 5
    prompt = prepare(exact, "What is it?", media)
    pipe = OscarVLPipeline(exact.model, processor=exact.processor, max_context=9)
    with pytest.raises(RequestTooLarge) as found:
        pipe([file.getvalue(), photo], "What is it?", max_new_tokens=1)
    assert found.value.asked == prompt.tokens + 1
    # As many as plain transformers makes of the whole picture.
    assert prompt.media[0].tokens == exact.family.min_tokens(
        Medium(prompt.media[0].modality, photo, "a photo")
    )
