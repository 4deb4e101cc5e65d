"""The tiny checkpoints load like real ones and behave enough like them to test a cache on."""

import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from oscar_mm.cache.cache import cache_of
from oscar_mm.media import load_video
from tests.checkpoints import build, build_decoder

DECODERS = ("llama", "mistral", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="module")
def processor(folder: Path) -> AutoProcessor:
    return AutoProcessor.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> AutoModelForImageTextToText:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def turn(*parts: dict[str, str]) -> list[dict[str, object]]:
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": list(parts)},
    ]


def generate(model, inputs, **options) -> list[int]:
    options = {"max_new_tokens": 16, "min_new_tokens": 16} | options
    out = model.generate(**inputs, do_sample=False, **options)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def test_template(processor) -> None:
    messages = turn({"type": "image"}, {"type": "video"}, {"type": "text", "text": "What?"})
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
        "<|vision_start|><|image_pad|><|vision_end|><|vision_start|><|video_pad|><|vision_end|>"
        "What?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_images_of_any_size(processor, model) -> None:
    sizes = [(90, 120), (30, 300), (1, 1), (1, 200), (400, 400)]
    images = [Image.fromarray(noise(*size)) for size in sizes]
    messages = turn(*[{"type": "image"}] * len(sizes), {"type": "text", "text": "Compare."})
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=[text], images=images, return_tensors="pt")
    tokens = inputs["image_grid_thw"].prod(1) // 4
    assert (inputs["input_ids"] == model.config.image_token_id).sum() == tokens.sum()
    assert tokens.min() == 1 and tokens.max() == 64
    answer = generate(model, inputs)
    assert len(answer) == 16 and len(set(answer)) > 4
    inputs["pixel_values"] = inputs["pixel_values"].flip(0)
    assert generate(model, inputs) != answer


def test_video_with_its_own_times(processor, model) -> None:
    video = load_video([noise(48, 64, seed) for seed in range(7)], fps=2)
    messages = turn({"type": "video"}, {"type": "text", "text": "What moves?"})
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = processor(
        text=[text],
        videos=[video.frames],
        video_metadata=[video.metadata],
        do_sample_frames=False,
        return_tensors="pt",
    )
    assert inputs["video_grid_thw"][0, 0] == 4
    read = processor.tokenizer.decode(inputs["input_ids"][0])
    for seconds in ("0.2", "1.2", "2.2", "3.0"):
        assert f"<{seconds} seconds>" in read
    assert len(generate(model, inputs)) == 16


def test_shortest_video(processor) -> None:
    video = load_video([noise(48, 64)], fps=1)
    inputs = processor(
        text=["<|video_pad|>"],
        videos=[video.frames],
        video_metadata=[video.metadata],
        do_sample_frames=False,
        return_tensors="pt",
    )
    assert inputs["video_grid_thw"][0, 0] == 1


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs", "Cn"))))
def test_tokenizer_round_trip(processor, text: str) -> None:
    ids = processor.tokenizer(text)["input_ids"]
    assert processor.tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


def test_special_tokens(processor, model) -> None:
    tokenizer = processor.tokenizer
    assert len(tokenizer("<|im_start|><|image_pad|><|im_end|>")["input_ids"]) == 3
    assert tokenizer.decode(tokenizer("a<|im_end|>")["input_ids"], skip_special_tokens=True) == "a"
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"


def test_same_seed_same_weights(tmp_path: Path, model) -> None:
    again = AutoModelForImageTextToText.from_pretrained(
        build("qwen3_vl", tmp_path / "again"), dtype=torch.float32
    )
    other = AutoModelForImageTextToText.from_pretrained(
        build("qwen3_vl", tmp_path / "other", seed=1), dtype=torch.float32
    )
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(other.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_overrides(tmp_path: Path, head_dim: int) -> None:
    path = build("qwen3_vl", tmp_path / "deep", num_hidden_layers=5, head_dim=head_dim)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    cache = cache_of(model(input_ids=torch.arange(9)[None], use_cache=True))
    assert len(cache.layers) == 5
    assert cache.layers[0].keys.shape == (1, 2, 9, head_dim)


@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str) -> None:
    model = build_decoder(name)
    ids = torch.randint(3, 300, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=True)
    cache = cache_of(out)
    assert model.dtype == torch.float32 and not model.training
    assert len(cache.layers) == 2 and cache.layers[0].keys.shape == (1, 2, 40, 64)
    best = out.logits[0].topk(2).values
    assert (best[:, 0] - best[:, 1]).median() > 0.3
    answer = generate(model, {"input_ids": ids}, pad_token_id=0)
    assert len(set(answer)) > 8
    # Qwen2's key biases are what makes its keys hard to quantize.
    assert (cache.layers[0].keys.std() > 5) == (name == "qwen2")
