"""The prompt of Qwen3-VL: the processor's own ids, positions as the model makes them."""

import pytest
import torch
from PIL import Image
from transformers.models.qwen3_vl import video_processing_qwen3_vl

from oscar_mm import InputError, OscarVLPipeline
from oscar_mm.decoding import Prompt
from oscar_mm.media import load_video
from tests.prompts import REQUESTS, Reference, Request


@pytest.fixture(scope="module")
def pipe(qwen3_vl_folder) -> OscarVLPipeline:
    return OscarVLPipeline(qwen3_vl_folder, device="cpu")


def prompt(pipe: OscarVLPipeline, request: Request, system: str | None = None) -> Prompt:
    family = pipe.family
    messages = family.messages(request.prompt, system, len(request.images), len(request.videos))
    images = [Image.fromarray(image) for image in request.images]
    return family.prompt(messages, images, [load_video(video) for video in request.videos])


@pytest.mark.parametrize("name", REQUESTS)
def test_prompt_is_that_of_transformers(pipe, qwen3_vl_folder, name: str) -> None:
    reference = Reference(qwen3_vl_folder)
    expected = reference.inputs([REQUESTS[name]])
    ours = prompt(pipe, REQUESTS[name])
    for key in ("input_ids", "pixel_values", "image_grid_thw", "pixel_values_videos"):
        assert (key in ours.inputs) == (key in expected)
        if key in expected:
            assert torch.equal(ours.inputs[key], expected[key])
    assert "attention_mask" not in ours.inputs
    assert torch.equal(ours.modalities.long(), expected["mm_token_type_ids"].long())
    assert ours.tokens == expected["input_ids"].shape[1]
    by_hand = reference.prompt([REQUESTS[name]])
    assert torch.equal(ours.positions, by_hand.positions)
    assert torch.equal(ours.next_position, by_hand.next_position)
    assert ours.positions.shape == (4, 1, ours.tokens)


def test_positions_are_those_that_the_model_makes(pipe) -> None:
    request = REQUESTS["image and video"]
    ours = prompt(pipe, request)
    grids = {name: value for name, value in ours.inputs.items() if name.endswith("grid_thw")}
    expected, deltas = pipe.model.model.get_rope_index(
        ours.inputs["input_ids"],
        mm_token_type_ids=ours.modalities.int(),
        attention_mask=torch.ones_like(ours.inputs["input_ids"]),
        **grids,
    )
    assert torch.equal(ours.positions[1:], expected)
    assert ours.next_position.item() == ours.tokens + deltas.item()
    assert ours.next_position.item() < ours.tokens


def test_text_only(pipe) -> None:
    ours = prompt(pipe, REQUESTS["text"], system="Be brief.")
    assert torch.equal(ours.positions, torch.arange(ours.tokens).expand(4, 1, -1))
    assert ours.next_position.tolist() == [ours.tokens]
    assert set(ours.inputs) == {"input_ids"}


def test_media_come_before_the_question(pipe) -> None:
    messages = pipe.family.messages("Why?", "Be brief.", images=2, videos=1)
    assert [turn["role"] for turn in messages] == ["system", "user"]
    kinds = [part["type"] for part in messages[1]["content"]]
    assert kinds == ["image", "image", "video", "text"]
    assert len(pipe.family.messages("Why?", None, images=0, videos=0)) == 1


@pytest.mark.parametrize("cap", [None, False, True])
def test_the_cap_on_video_frames_is_said(pipe, monkeypatch, cap: bool | None) -> None:
    """Left unsaid, it means another thing in a later version of transformers."""
    logger = video_processing_qwen3_vl.logger
    monkeypatch.setattr(logger, "warning_once", lambda message: pytest.fail(message))
    processor = pipe.processor.video_processor
    monkeypatch.setattr(processor, "cap_pixels_per_frame", cap)
    seen = []
    resize = type(processor).resize
    monkeypatch.setattr(
        type(processor),
        "resize",
        lambda self, *args, **kwargs: (
            seen.append(kwargs["cap_pixels_per_frame"]) or resize(self, *args, **kwargs)
        ),
    )
    prompt(pipe, REQUESTS["video"])
    assert seen == [bool(cap)]


def test_control_tokens_of_the_tokenizer(pipe) -> None:
    tokenizer = pipe.processor.tokenizer
    for token in tokenizer.all_special_tokens:
        with pytest.raises(InputError, match="control token"):
            pipe.family.refuse_control_tokens("prompt", f"x{token}")
    pipe.family.refuse_control_tokens("prompt", "<im_end> <|image pad|> <think>")
    assert len(tokenizer.all_special_tokens) == 8


def test_end_tokens(pipe, monkeypatch) -> None:
    config, tokenizer = pipe.model.generation_config, pipe.processor.tokenizer
    for given, expected in ((7, {7}), ([7, 9], {7, 9}), (None, {tokenizer.eos_token_id})):
        monkeypatch.setattr(config, "eos_token_id", given)
        assert pipe.family.end_tokens() == expected
