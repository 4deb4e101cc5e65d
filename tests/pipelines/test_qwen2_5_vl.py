"""Qwen2.5-VL: prompts, positions and answers of plain transformers."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, BatchFeature

from oscar_mm import OscarCache, OscarVLPipeline
from oscar_mm.admission.request_size import count_tokens
from oscar_mm.engine import prefill as prefill_module
from oscar_mm.engine.message import first_turn
from oscar_mm.engine.prefill import read_prompt
from oscar_mm.engine.prompt import Prompt
from oscar_mm.fast_decode.decoder import supports
from oscar_mm.media import load_video
from oscar_mm.media.encoder_inputs import scaled_inputs
from oscar_mm.media.media import Media
from oscar_mm.media.options import MediaOptions
from oscar_mm.modality import Modality
from oscar_mm.pipelines.plan import Session, plan
from tests.prompts import REQUESTS, Request, clip, noise, prepare
from tests.recordings import write_clip

TOKENS = 24


@pytest.fixture(scope="module")
def pipe(qwen2_5_vl_folder: Path) -> OscarVLPipeline:
    return OscarVLPipeline(qwen2_5_vl_folder, policy="bf16", device="cpu")


class Plain:
    """The same checkpoint in plain transformers."""

    def __init__(self, folder: Path) -> None:
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    def inputs(self, request: Request, fps: float = 2.0) -> BatchFeature:
        kinds = ["image"] * len(request.images) + ["video"] * len(request.videos)
        content = [*({"type": kind} for kind in kinds), {"type": "text", "text": request.prompt}]
        turn = [{"role": "user", "content": content}]
        text = self.processor.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        videos = [load_video(video, fps=fps) for video in request.videos]
        media: dict[str, Any] = {"images": list(request.images)} if request.images else {}
        if videos:
            media["videos"] = [video.frames for video in videos]
            media["video_metadata"] = [video.metadata for video in videos]
            media["do_sample_frames"] = False
        return self.processor(text=[text], **media, return_tensors="pt")

    def positions(self, inputs: BatchFeature) -> torch.Tensor:
        names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "attention_mask")
        given = {name: inputs[name] for name in names if name in inputs}
        types = inputs["mm_token_type_ids"]
        return self.model.model.get_rope_index(
            inputs["input_ids"], mm_token_type_ids=types, **given
        )[0]


@pytest.fixture(scope="module")
def plain(qwen2_5_vl_folder: Path) -> Plain:
    return Plain(qwen2_5_vl_folder)


def prompt_of(pipe: OscarVLPipeline, request: Request) -> Prompt:
    media = pipe.read_media(request.images, request.videos)
    return pipe.family.prompt(first_turn(request.prompt, media.parts), media)


@pytest.mark.parametrize("name", REQUESTS)
def test_prompt_is_that_of_transformers(pipe, plain: Plain, name: str) -> None:
    ours, expected = prompt_of(pipe, REQUESTS[name]), plain.inputs(REQUESTS[name])
    inputs = scaled_inputs(pipe.model, ours.inputs)
    for key in ("input_ids", "pixel_values", "image_grid_thw", "pixel_values_videos"):
        assert (key in inputs) == (key in expected)
        if key in expected:
            assert torch.equal(inputs[key], expected[key]), key
    assert torch.equal(ours.modalities.long(), expected["mm_token_type_ids"].long())
    assert torch.equal(ours.positions[0, 0], torch.arange(ours.tokens))
    assert torch.equal(ours.positions[1:], plain.positions(expected))
    assert int(ours.next_position) == int(ours.positions[1:].max()) + 1


@pytest.mark.parametrize("name", REQUESTS)
def test_logits_are_those_of_transformers(pipe, plain: Plain, name: str) -> None:
    with torch.inference_mode():
        expected = plain.model(**plain.inputs(REQUESTS[name])).logits[:, -1]
    found = read_prompt(pipe.model, prompt_of(pipe, REQUESTS[name]), pipe.new_cache())
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.daily("two images", "image and video")
@pytest.mark.parametrize("name", REQUESTS)
def test_answers_are_those_of_transformers(pipe, plain: Plain, name: str) -> None:
    """By the fast decoder's arithmetic, after a prompt in 3-D positions."""
    inputs = plain.inputs(REQUESTS[name])
    made = plain.model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    expected = made[0, inputs["input_ids"].shape[1] :].tolist()
    answer = REQUESTS[name].ask(pipe, max_new_tokens=TOKENS)
    assert supports(pipe.model)
    assert answer.text == pipe.processor.tokenizer.decode(expected, skip_special_tokens=True)
    assert answer.token_ids == expected


@pytest.mark.parametrize(("fps", "step"), [(1.0, 4), (2.0, 2), (4.0, 1), (3.0, 4 / 3), (8.0, 0.5)])
def test_times_of_pairs_of_frames(pipe, fps: float, step: float) -> None:
    """Two positions a second, whatever the rate of the frames."""
    media = Media(videos=[load_video(clip(4)), load_video(clip(9), fps=fps)])
    ours = pipe.family.prompt(first_turn("What?", media.parts), media)
    span = ours.media[1]
    times, down = (ours.positions[axis, 0, span.start : span.stop] for axis in (1, 2))
    pairs, each = 5, span.tokens // 5
    expected = [int(pair * step) for pair in range(pairs) for _ in range(each)]
    assert (times - times[0]).tolist() == expected
    assert times[0] == down[0] > 0


def test_times_of_chosen_frames(pipe, tmp_path: Path) -> None:
    """Frames that options choose have the rate of the part that is read."""
    write_clip(tmp_path / "a.mp4", [20 * i for i in range(9)], times=[0.5 * i for i in range(9)])
    chosen = load_video(tmp_path / "a.mp4", options=MediaOptions(num_frames=4))
    media = Media(videos=[chosen])
    ours = pipe.family.prompt(first_turn("What?", media.parts), media)
    [span] = ours.media
    times = ours.positions[1, 0, span.start : span.stop]
    assert len(chosen.frames) == 4 and chosen.chosen
    assert int(times[-1] - times[0]) == int(2 * 2 / chosen.fps) == 4


def test_long_prompts_are_cut_at_frames_and_images(
    pipe, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request("What is it?", [noise(96, 70), noise(250, 120, 2)], [clip(6), clip(4, 9)])
    prompt, inputs = prompt_of(pipe, request), plain.inputs(request)
    with torch.inference_mode():
        expected = plain.model(**inputs).logits[:, -1]
    monkeypatch.setattr(prefill_module, "MAX_TOKENS", 10)
    monkeypatch.setattr(prefill_module, "MAX_PATCHES", 16)
    sizes: list[int] = []
    tower = pipe.model.get_encoder(modality="image")
    hook = tower.patch_embed.register_forward_hook(lambda _, args, __: sizes.append(len(args[0])))
    for chunk in (None, 7, 64):
        sizes.clear()
        found = read_prompt(pipe.model, prompt, pipe.new_cache(), chunk)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
        assert len(sizes) > 6
    hook.remove()


def test_tokens_are_known_before(pipe) -> None:
    request = REQUESTS["image and video"]
    media = pipe.read_media(request.images, request.videos)
    alone = pipe.family.prompt(first_turn("?", media.parts), media)
    assert sum(count_tokens(pipe.family, media).values()) == alone.tokens
    for size in ((90, 120), (30, 300), (400, 400), (333, 77)):
        [medium] = pictures = pipe.read_media([noise(*size)])
        [span] = prepare(pipe, "What?", pictures).media
        assert span.modality is Modality.IMAGE
        assert pipe.family.min_tokens(medium) == span.tokens


def test_a_chat_with_packed_pages(qwen2_5_vl_folder: Path, pipe) -> None:
    """Later turns follow the positions of a video, also in a chat that was saved."""
    request = REQUESTS["image and video"]
    chat = pipe.chat()
    for one in (request, Request("Which one?")):
        chat.ask(one.prompt, list(one.images), videos=list(one.videos), max_new_tokens=5)
    path = qwen2_5_vl_folder.parent / "chat.oscar"
    chat.save(path)
    again = pipe.load_chat(path)
    picture = [noise(64, 90, 7)]
    last = {one.ask("And this?", picture, max_new_tokens=9).text for one in (chat, again)}
    assert len(last) == 1
    packed = OscarVLPipeline(pipe.model, processor=pipe.processor)
    report = request.ask(packed, max_new_tokens=40).memory
    assert report.kv_bytes < report.bf16_bytes


def test_questions_share_a_video(qwen2_5_vl_folder: Path, pipe) -> None:
    """Tokens after a known beginning keep its positions; another rate is another video."""
    sharing = OscarVLPipeline(
        pipe.model, processor=pipe.processor, policy="bf16", prefix_cache="1GB"
    )
    shown = {"images": [noise(220, 220), noise(224, 210, 1)], "videos": [clip(6)]}
    saved = []
    for number, question in enumerate(("What is it?", "How many are there?", "Why?")):
        ask = {"prompt": question, "max_new_tokens": 6} | shown
        ask |= {"fps": 8.0} if number == 2 else {}
        before = sharing.prefixes.tokens_saved
        assert sharing(**ask).token_ids == pipe(**ask).token_ids
        # The images are the same, the tokens of the video are not.
        saved.append(sharing.prefixes.tokens_saved - before)
    assert saved[0] == 0 < saved[2] < saved[1]


def test_released_shapes() -> None:
    """Parameters as the hub counts them."""
    for name, millions in (("3b", 3754.6), ("7b", 8292.2), ("32b", 33452.7), ("72b", 73410.8)):
        made = plan(f"qwen2.5-vl-{name}", Session(images=1, image_size=(1288, 952), video_s=8))
        assert made.shape.parameters / 1e6 == pytest.approx(millions, abs=0.1)
        assert made.family == "Qwen2.5-VL" and made.context == 128000
        assert made.tokens["image"] == 46 * 34 and made.tokens["video"] == 8 * 46 * 26


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["image", "video"])
def test_captured_steps_have_the_logits_of_transformers(
    qwen2_5_vl_folder: Path, plain: Plain, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fast decoder has the biases of queries, keys and values, and positions of three axes."""
    replays, replayed = [], OscarCache.replayed
    monkeypatch.setattr(
        OscarCache, "replayed", lambda *step: (replays.append(step), replayed(*step))[1]
    )
    pipe = OscarVLPipeline(qwen2_5_vl_folder, policy="bf16", device="cuda", dtype="bfloat16")
    request = REQUESTS[name]
    asked = {"images": request.images, "videos": request.videos, "ignore_eos": True}
    answer = pipe(prompt=request.prompt, max_new_tokens=TOKENS, temperature=0, logprobs=0, **asked)
    assert len(replays) >= TOKENS // 2
    inputs = plain.inputs(request)
    said = torch.tensor([answer.token_ids])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], said], 1)
    for key in ("attention_mask", "mm_token_type_ids"):
        inputs[key] = torch.nn.functional.pad(inputs[key], (0, TOKENS), value=key[0] == "a")

    def logprobs(model: torch.nn.Module, **moved: Any) -> torch.Tensor:
        with torch.no_grad():
            logits = model(**inputs.to(**moved)).logits[0, -TOKENS - 1 : -1].float().cpu()
        return logits.log_softmax(-1).gather(1, said[0, :, None])[:, 0]

    expected = logprobs(plain.model)
    found = torch.tensor([one.logprob for one in answer.logprobs or ()])
    rounded = deepcopy(plain.model).to("cuda", torch.bfloat16)
    usual = (logprobs(rounded, device="cuda", dtype=torch.bfloat16) - expected).abs()
    error = (found - expected).abs()
    assert error.mean() < 2 * usual.mean() + 0.01, (error, usual)
