"""The prompt of Qwen3-VL: the processor's own ids, positions as the model makes them."""

import copy
import re

import pytest
import torch
from tokenizers import AddedToken
from transformers.models.qwen3_vl import video_processing_qwen3_vl

from oscar_mm import InputError, OscarVLPipeline
from oscar_mm.admission.request_size import count_tokens
from oscar_mm.engine.message import first_turn
from oscar_mm.engine.prompt import Prompt
from oscar_mm.media.encoder_inputs import scaled_inputs
from oscar_mm.modality import Modality
from tests.prompts import REQUESTS, Reference, Request, clip, noise, prepare
from tests.recordings import write_clip


@pytest.fixture(scope="module")
def pipe(qwen3_vl_folder) -> OscarVLPipeline:
    return OscarVLPipeline(qwen3_vl_folder, device="cpu")


def prompt(pipe: OscarVLPipeline, request: Request, system: str | None = None) -> Prompt:
    media = pipe.read_media(request.images, request.videos)
    return pipe.family.prompt(first_turn(request.prompt, media.parts, system), media)


@pytest.mark.parametrize("name", REQUESTS)
def test_prompt_is_that_of_transformers(pipe, qwen3_vl_folder, name: str) -> None:
    reference = Reference(qwen3_vl_folder)
    expected = reference.inputs([REQUESTS[name]])
    ours = prompt(pipe, REQUESTS[name])
    inputs = scaled_inputs(pipe.model, ours.inputs)
    for key in ("input_ids", "pixel_values", "image_grid_thw", "pixel_values_videos"):
        assert (key in ours.inputs) == (key in expected)
        if key in expected:
            assert torch.equal(inputs[key], expected[key])
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


def test_marks_are_around_each_frame_and_not_around_the_video(pipe) -> None:
    """What the released models were trained with, in a first turn and in a later one."""
    request = REQUESTS["image and video"]
    media = pipe.read_media(request.images, request.videos)
    messages = first_turn(request.prompt, media.parts)
    first = pipe.family.prompt(messages, media)
    later = pipe.family.continuation(messages, media, first.tokens, first.next_position)
    frame = f"<|vision_start|>{'<|video_pad|>' * 4}<|vision_end|>"
    turn = (
        f"<|im_start|>user\n<|vision_start|>{'<|image_pad|>' * 6}<|vision_end|>"
        f"<0.2 seconds>{frame}<1.2 seconds>{frame}<2.0 seconds>{frame}"
        "Where is the sign?<|im_end|>\n<|im_start|>assistant\n"
    )
    for ours, text in ((first, turn), (later, f"<|im_end|>\n{turn}")):
        assert pipe.processor.tokenizer.decode(ours.inputs["input_ids"][0]) == text
        assert ours.inputs["input_ids"].tolist() == pipe.family.tokenize(text).tolist()
    counted = sum(count_tokens(pipe.family, media).values())
    alone = pipe.family.prompt(first_turn("?", media.parts), media)
    assert counted == alone.tokens


def test_text_only(pipe) -> None:
    ours = prompt(pipe, REQUESTS["text"], system="Be brief.")
    assert torch.equal(ours.positions, torch.arange(ours.tokens).expand(4, 1, -1))
    assert ours.next_position.tolist() == [ours.tokens]
    assert set(ours.inputs) == {"input_ids"}


def test_media_come_before_the_question(pipe) -> None:
    media = pipe.read_media([noise(32, 32), noise(32, 64)], [clip(2)])
    messages = first_turn("Why?", media.parts, "Be brief.")
    assert [message.role for message in messages] == ["system", "user"]
    kinds = [part.modality.label for part in messages[1].media]
    assert kinds == ["image", "image", "video"] and messages[1].parts[-1] == "Why?"
    text = pipe.family.render(messages)
    assert text.index("video_pad") > text.rindex("image_pad") and text.index("Why?") > text.index(
        "video_pad"
    )


def test_media_of_a_prompt(pipe) -> None:
    request = REQUESTS["image and video"]
    ours = prompt(pipe, request)
    ids = ours.inputs["input_ids"][0].tolist()
    picture, video = ours.media
    assert (picture.modality, picture.label) == (Modality.IMAGE, "images[0]")
    assert (video.modality, video.label) == (Modality.VIDEO, "videos[0]")
    config = pipe.model.config
    assert set(ids[picture.start : picture.stop]) == {config.image_token_id}
    # Three pairs of frames, with times between them.
    run = ids[video.start : video.stop]
    assert run[0] == run[-1] == config.video_token_id
    assert video.tokens > run.count(config.video_token_id) == ids.count(config.video_token_id)
    assert "seconds>" in pipe.processor.tokenizer.decode(run)
    assert ids[video.start - 1] == config.vision_start_token_id == ids[picture.start - 1]
    assert ids[video.stop] == config.vision_end_token_id == ids[picture.stop]
    media = pipe.read_media(request.images, request.videos)
    assert [span.digest for span in ours.media] == [medium.digest for medium in media]
    assert picture.shifted(7).start == picture.start + 7 and picture.shifted(7).tokens == 6


def test_tokens_of_images_are_known_before(pipe) -> None:
    for size in ((90, 120), (30, 300), (400, 400), (333, 77), (1, 1), (1, 200)):
        media = pipe.read_media([noise(*size)])
        least = sum(pipe.family.min_tokens(medium) for medium in media)
        [span] = prepare(pipe, "What?", media).media
        # The processor blows up what is thinner than half a token beyond what is needed.
        assert least == span.tokens if min(size) > 16 else 1 <= least <= span.tokens


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


def test_control_tokens_that_the_tokenizer_only_adds(pipe) -> None:
    """Special ones that no map names, and what a Thinking template gives a meaning to."""
    processor = copy.deepcopy(pipe.processor)
    plain = ["<think>", "</think>", "<tool_call>", "\n\n"]
    added = [AddedToken("<|object_ref_start|>", special=True), *map(AddedToken, plain)]
    processor.tokenizer.add_tokens(added)
    processor.chat_template += "{# after </think>\n\n the answer to <think> #}"
    family = type(pipe.family)(pipe.model, processor)
    assert "<|object_ref_start|>" not in processor.tokenizer.all_special_tokens
    for token in ("<|object_ref_start|>", "<think>", "</think>"):
        with pytest.raises(
            InputError, match=f"prompt contains '{re.escape(token)}', a control token"
        ):
            family.refuse_control_tokens("prompt", f"x{token}")
    family.refuse_control_tokens("prompt", "a <tool_call>\n\nof no meaning here")


def test_end_tokens(pipe, monkeypatch) -> None:
    config, tokenizer = pipe.model.generation_config, pipe.processor.tokenizer
    for given, expected in ((7, {7}), ([7, 9], {7, 9}), (None, {tokenizer.eos_token_id})):
        monkeypatch.setattr(config, "eos_token_id", given)
        assert pipe.family.end_tokens() == expected


@pytest.mark.parametrize(("suffix", "codec"), [("mp4", "libx264"), ("mkv", "mpeg4")])
def test_times_in_the_prompt_are_those_of_the_clip(pipe, tmp_path, suffix: str, codec: str) -> None:
    """Each pair of frames has the mean of the seconds at which the clip shows them."""
    times = [0.5 * i for i in range(10)] + [60.0]
    path = tmp_path / f"a.{suffix}"
    write_clip(path, [20 * i for i in range(11)], times=times, codec=codec)
    ours = prompt(pipe, Request("Which slide?", videos=[path]))
    text = pipe.processor.tokenizer.decode(ours.inputs["input_ids"][0])
    shown = re.findall(r"<([\d.]+) seconds>", text)
    assert shown == [f"{i + 0.25:.1f}" for i in range(60)] + ["60.0"]
