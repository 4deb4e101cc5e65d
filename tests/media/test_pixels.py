"""Pixels as bytes: what a model makes of them is what the processor would have made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, Qwen2VLImageProcessor

from oscar_mm import OscarVLPipeline
from oscar_mm.media import pixels
from oscar_mm.media.pixels import PixelScale, in_bytes, scale_in_model
from tests.prompts import clip, noise

SIZES = ((90, 120), (64, 64), (300, 40), (64, 64), (257, 129), (33, 31))


class Model(torch.nn.Module):
    """Returns the pixels that it is given."""

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return inputs


@pytest.fixture
def processor(qwen3_vl_folder) -> Any:
    return AutoProcessor.from_pretrained(qwen3_vl_folder)


@pytest.mark.parametrize("batch", [1, 20_000, 1 << 21])
def test_pictures(processor, monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    monkeypatch.setattr(pixels, "_BATCH_PIXELS", batch)
    model = Model()
    scale_in_model(model, processor)
    images = [Image.fromarray(noise(*size)) for size in SIZES]
    found = in_bytes(processor, model).image_processor(images, return_tensors="pt")
    expected = processor.image_processor(images, return_tensors="pt")
    assert torch.equal(found["image_grid_thw"], expected["image_grid_thw"])
    assert found["pixel_values"].dtype == torch.uint8
    assert 8 * found["pixel_values"].nbytes == expected["pixel_values"].nbytes
    assert torch.equal(model(**found)["pixel_values"], expected["pixel_values"])


def test_videos(processor) -> None:
    model = Model()
    scale_in_model(model, processor)
    arguments = {"do_sample_frames": False, "cap_pixels_per_frame": False, "return_tensors": "pt"}
    found = in_bytes(processor, model).video_processor([clip(5)], **arguments)
    expected = processor.video_processor([clip(5)], **arguments)
    assert found["pixel_values_videos"].dtype == torch.uint8
    assert torch.equal(found["video_grid_thw"], expected["video_grid_thw"])
    given = model(pixel_values_videos=found["pixel_values_videos"])
    assert torch.equal(given["pixel_values_videos"], expected["pixel_values_videos"])


def test_the_model_scales_as_it_reads(qwen3_vl_folder) -> None:
    pipe = OscarVLPipeline(qwen3_vl_folder, device="cpu")
    images = [Image.fromarray(noise(*size)) for size in SIZES]
    seen: list[torch.Tensor] = []
    tower = pipe.model.get_encoder(modality="image")
    hook = tower.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    pipe(images, "What is it?", max_new_tokens=1)
    hook.remove()
    expected = pipe.processor.image_processor(images, return_tensors="pt")["pixel_values"]
    assert torch.equal(torch.cat(seen), expected)


def test_other_processors_keep_their_pixels(processor) -> None:
    model = Model()
    scale_in_model(model, processor)
    kept = processor.image_processor
    assert in_bytes(processor, model).image_processor is not kept
    for name, value in (("image_mean", [0.4, 0.5, 0.5]), ("do_normalize", False)):
        before = getattr(kept, name)
        setattr(kept, name, value)
        assert in_bytes(processor, model).image_processor is kept, name
        setattr(kept, name, before)
    assert PixelScale.of(SimpleNamespace(backend="pil")) is None
    # Of the first processor.
    scale_in_model(model, SimpleNamespace(image_processor=None, video_processor=None))
    assert len(model._forward_pre_hooks) == 1


@pytest.mark.gpu
def test_a_gpu_scales_as_a_cpu() -> None:
    processor = Qwen2VLImageProcessor(patch_size=16, merge_size=2)
    scale = PixelScale.of(processor)
    assert scale is not None
    patches = torch.randint(0, 256, (640, 768), dtype=torch.uint8)
    found, expected = scale.scaled(processor, patches.cuda()), scale.scaled(processor, patches)
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)


def test_a_mean_for_all_channels_is_left_to_the_processor(processor) -> None:
    assert PixelScale.of(processor.image_processor) is not None
    processor.image_processor.image_mean = 0.5
    assert PixelScale.of(processor.image_processor) is None
