"""Models of images by the uniform interface: prompts, logits and answers of plain transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from oscar_mm import InputError, OscarVLPipeline
from oscar_mm.admission.request_size import count_tokens
from oscar_mm.engine import prefill as prefill_module
from oscar_mm.engine.message import first_turn
from oscar_mm.engine.prefill import read_prompt
from oscar_mm.engine.prompt import Prompt, remaining
from oscar_mm.errors import RequestTooLarge
from oscar_mm.media import load_video
from oscar_mm.modality import Modality
from tests.prompts import clip, noise, prepare
from tests.recordings import write_clip
from tests.tiny_pictures import PICTURES, build_pictures

NEVER = 1 << 20
"""An end token that no model chooses."""
END = "<|im_end|>\n"
SHOWN = [noise(96, 70), noise(60, 200, 2), noise(150, 150, 3)]
IMAGE, VIDEO = Modality.IMAGE, Modality.VIDEO
CLIPS = sorted(
    {"internvl", "llava_onevision", "smolvlm", "glm4v", "glm4v_moe", "molmo2"} & PICTURES.keys()
)
"""Model types that also read videos."""


class Pictures:
    """A checkpoint in a pipeline that loses nothing, and in plain transformers."""

    def __init__(self, folder: Path) -> None:
        self.pipe = OscarVLPipeline(folder, policy="bf16", device="cpu")
        self.pipe.model.generation_config.eos_token_id = NEVER
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.processor: Any = AutoProcessor.from_pretrained(folder)
        self.is_molmo = self.model.config.model_type == "molmo2"
        if self.is_molmo:  # Nothing but this check refuses two videos of a prompt.
            self.processor.validate_inputs = lambda **_: None

    def inputs(
        self, text: str, images: Sequence[np.ndarray], videos: Sequence[np.ndarray] = ()
    ) -> dict[str, Any]:
        """All videos of a text have the same number of frames, at 2 a second."""
        shown: dict[str, Any] = {}
        if images:
            shown["images"] = [Image.fromarray(one) for one in images]
        if videos:
            loaded = [load_video(video, fps=2.0) for video in videos]
            shown["videos"] = [[video.frames for video in loaded]]
            shown["video_metadata"] = [video.metadata for video in loaded]
            shown["do_sample_frames"] = False
        return dict(self.processor(text=[text], **shown, return_tensors="pt"))

    def mixed(self, text: str, image: np.ndarray, video: np.ndarray) -> dict[str, Any]:
        """An image before a video, which some processors and models do not take together."""
        both = self.inputs(text, [image], [video])
        if self.is_molmo:
            return self.with_features(both)
        if self.pipe.model.config.model_type in ("internvl", "llava_onevision"):
            return both
        signs = {kind: sign for sign, kind in self.pipe.family.placeholders.items()}
        still, moving = self.inputs(signs[IMAGE], [image]), self.inputs(signs[VIDEO], [], [video])
        if self.pipe.model.config.model_type == "smolvlm":
            names = ("pixel_values", "pixel_attention_mask")
            return both | {name: torch.cat([still[name], moving[name]], 1) for name in names}
        [(pairs, *sides)] = moving["video_grid_thw"].tolist()
        return {
            "input_ids": both["input_ids"],
            "mm_token_type_ids": both["mm_token_type_ids"],
            "pixel_values": torch.cat([still["pixel_values"], moving["pixel_values_videos"]]),
            "image_grid_thw": torch.cat(
                [still["image_grid_thw"], torch.tensor([[1, *sides]] * pairs)]
            ),
        }

    def with_features(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Molmo 2's inputs with features of an image before those of a video, as it takes them."""
        names = ("input_ids", "attention_mask", "mm_token_type_ids")
        pixels, places, grids = ("pixel_values", "image_token_pooling", "image_grids")
        with torch.no_grad():
            still = self.model.get_image_features(*(inputs[x] for x in (pixels, places, grids)))
            moving = self.model.get_video_features(
                *(inputs[x] for x in (f"{pixels}_videos", "video_token_pooling", "video_grids"))
            )
        still.pooler_output = [*still.pooler_output, *moving.pooler_output]
        return {x: inputs[x] for x in names} | {"mm_encoder_outputs": {"image": still}}

    def asked(self, *parts: str | Modality) -> str:
        content = [
            {"type": one.label} if isinstance(one, Modality) else {"type": "text", "text": one}
            for one in parts
        ]
        return self.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )

    def greedy(self, inputs: dict[str, Any], answer: list[int]) -> list[int]:
        """The tokens after the inputs and after each token of an answer, by a pass over all tokens
        without a cache. They are the answer if and only if greedy decoding writes it."""
        ids = torch.cat([inputs["input_ids"], torch.tensor([answer[:-1]], dtype=torch.long)], 1)
        given = inputs | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "token_type_ids" in inputs:
            given["token_type_ids"] = (ids == self.model.config.image_token_id).int()
        if "mm_token_type_ids" in inputs:
            if self.is_molmo or "video_grid_thw" in inputs:
                kinds = torch.tensor(self.processor.create_mm_token_type_ids(ids.tolist()))
            else:
                kinds = (ids == self.model.config.image_token_id).int()
            given["mm_token_type_ids"] = kinds
        with torch.no_grad():
            logits = self.model(**given, use_cache=False).logits
        return logits[0, -len(answer) :].argmax(-1).tolist()


@pytest.fixture(scope="module", params=PICTURES)
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pictures:
    if request.param == "smolvlm":
        pytest.importorskip("num2words", reason="SmolVLM's processor needs num2words")
    return Pictures(build_pictures(request.param, tmp_path_factory.mktemp(request.param), seed=1))


def check_logits(one: Pictures, prompt, inputs, most: int, monkeypatch) -> None:
    """Logits of a prompt as by plain transformers: whole, and in chunks of 23 tokens with towers on
    ``most`` tokens at a time."""
    with torch.inference_mode():
        logits = one.model(**inputs).logits[:, -1]
    for at_once, chunk in ((prefill_module.MAX_TOKENS, None), (most, 23)):
        monkeypatch.setattr(prefill_module, "MAX_TOKENS", at_once)
        found = read_prompt(one.pipe.model, prompt, one.pipe.new_cache(), chunk)
        torch.testing.assert_close(found, logits, atol=2e-4, rtol=2e-4)
    monkeypatch.undo()


def test_answers_are_those_of_transformers(one: Pictures, monkeypatch) -> None:
    requests, expected = [], []
    for images in ([], SHOWN[:1], SHOWN):
        inputs = one.inputs(one.asked(*[IMAGE] * len(images), "What is it?"), images)
        media = one.pipe.read_media(images)
        prompt = one.pipe.family.prompt(first_turn("What is it?", media.parts), media)
        assert torch.equal(prompt.inputs["input_ids"], inputs["input_ids"])
        if hasattr(one.model.model, "get_rope_index"):
            positions = one.model.model.get_rope_index(
                inputs["input_ids"],
                mm_token_type_ids=inputs["mm_token_type_ids"],
                image_grid_thw=inputs.get("image_grid_thw"),
            )[0]
            assert torch.equal(prompt.positions[1:], positions)
        check_logits(one, prompt, inputs, 10, monkeypatch)  # Few images at a time.
        requests.append({"images": images, "prompt": "What is it?", "max_new_tokens": 6})
        expected.append(one.pipe(**requests[-1]).token_ids)
        assert len(expected[-1]) == 6 and expected[-1] == one.greedy(inputs, expected[-1])
    assert len({tuple(tokens) for tokens in expected}) > 1, "the images change nothing"
    answers = [made.answer for made in one.pipe.batch(requests)]
    assert [answer and answer.token_ids for answer in answers] == expected


def features(one: Pictures, prompt: Prompt) -> torch.Tensor:
    """What the tower makes of a prompt's images, row after row."""
    ignored = ("input_ids", "image_num_crops")
    tensors = {name: x for name, x in prompt.arguments().items() if name not in ignored}
    with torch.no_grad():
        made = one.model.model.get_image_features(**tensors).pooler_output
    return torch.cat([each.flatten(0, -2) for each in made])


def test_prompts_in_one_pass(one: Pictures) -> None:
    """Images of unequal sizes and numbers of tiles are joined, and have the same features."""
    rows = [prepare(one.pipe, "What?", one.pipe.read_media(x)) for x in (SHOWN[:1], SHOWN[1:])]
    joined = one.pipe.family.concatenate(rows)
    expected = [features(one, row) for row in rows]
    torch.testing.assert_close(features(one, joined), torch.cat(expected), atol=1e-5, rtol=1e-5)
    last = remaining(joined, rows[0].tokens)
    torch.testing.assert_close(features(one, last), expected[1], atol=1e-5, rtol=1e-5)


@pytest.mark.daily("llava_onevision", "mistral3", "glm4v_moe", "molmo2")
def test_images_between_texts(one: Pictures) -> None:
    text = one.asked("First: ", IMAGE, "Then: ", IMAGE, "Which one?")
    content = [
        {"type": "text", "text": "First: "},
        {"type": "image", "image": SHOWN[0]},
        {"type": "text", "text": "Then: "},
        {"type": "image", "image": SHOWN[1]},
        {"type": "text", "text": "Which one?"},
    ]
    turn = {"role": "user", "content": content}
    answer = one.pipe(messages=[turn], max_new_tokens=6).token_ids
    assert answer == one.greedy(one.inputs(text, SHOWN[:2]), answer)


@pytest.mark.daily("internvl", "gemma3", "smolvlm", "glm4v", "molmo2")
def test_turns_are_those_of_transformers(one: Pictures, tmp_path: Path) -> None:
    """Each after the tokens of all earlier turns; the last in a chat that was saved."""
    chat, ids, shown = one.pipe.chat(), list[torch.Tensor](), []
    [placeholder] = (x for x, kind in one.pipe.family.placeholders.items() if kind is IMAGE)
    # Molmo 2 has all images at the beginning.
    turns = [SHOWN, [], []] if one.is_molmo else [[image] for image in SHOWN]
    for turn, images in enumerate(turns):
        text = (END if turn else "") + one.asked(*[IMAGE] * len(images), "And this?")
        ids.append(one.inputs(text, images)["input_ids"])
        shown += images
        inputs = one.inputs(placeholder * len(shown), shown)
        inputs |= {"input_ids": torch.cat(ids, dim=1)}
        if turn == 2:
            chat.save(tmp_path / "chat.oscar")
            chat = one.pipe.load_chat(tmp_path / "chat.oscar")
        answer = chat.ask("And this?", images, max_new_tokens=4).token_ids
        assert answer == one.greedy(inputs, answer)
        ids.append(torch.tensor([answer]))


@pytest.mark.daily("internvl", "idefics3", "paddleocr_vl")
def test_forget_an_image(one: Pictures, tmp_path: Path) -> None:
    chat = one.pipe.chat()
    chat.ask("What is it?", SHOWN[:2], max_new_tokens=4)
    spans = [each for each in chat.segments if each.modality is Modality.IMAGE]
    shown = chat.ask("Why?", max_new_tokens=4).memory.tokens["image"]
    chat.forget(spans[0])
    chat.save(tmp_path / "chat.oscar")
    again = one.pipe.load_chat(tmp_path / "chat.oscar")
    answers = [each.ask("And now?", max_new_tokens=6) for each in (chat, again)]
    assert answers[0].token_ids == answers[1].token_ids
    assert 0 < answers[0].memory.tokens["image"] < shown


@pytest.mark.daily("internvl", "gemma3", "idefics3", "glm4v", "molmo2")
def test_questions_share_an_image(one: Pictures) -> None:
    pipe = OscarVLPipeline(
        one.pipe.model, processor=one.pipe.processor, policy="bf16", prefix_cache="100MB"
    )
    for number, question in enumerate(("What is it?", "How many are there?")):
        expected = one.pipe(SHOWN * 2, question, max_new_tokens=4).token_ids
        assert pipe(SHOWN * 2, question, max_new_tokens=4).token_ids == expected
        assert pipe.prefixes is not None
        assert (pipe.prefixes.tokens_saved > 0) == (number > 0)


@pytest.mark.daily("llava_onevision", "gemma3", "molmo2")
def test_packed_pages(one: Pictures) -> None:
    pipe = OscarVLPipeline(one.pipe.model, processor=one.pipe.processor, policy="compact")
    report = pipe(SHOWN * 4, "What is it?", max_new_tokens=6).memory
    assert report.kv_bytes < report.bf16_bytes


@pytest.mark.daily("internvl", "mistral3", "glm4v", "molmo2")
def test_tiny_images(one: Pictures) -> None:
    is_mistral = one.pipe.family.name == "Mistral 3"
    refused = {(1, 1): "1x1 pixels are too few.*than 28", (2, 400): "processor.*400x2 pixels; crop"}
    for size in ((1, 1), (2, 400), (30, 20)):
        ask: dict[str, Any] = {"images": [noise(*size)], "prompt": "What?", "max_new_tokens": 2}
        if is_mistral and size in refused:
            with pytest.raises(InputError, match=rf"images\[0\]: .*{refused[size]}"):
                one.pipe(**ask)
        else:
            assert len(one.pipe(**ask).token_ids) == 2


@pytest.mark.parametrize("one", sorted({*PICTURES} - {*CLIPS}), indirect=True)
def test_videos_are_refused(one: Pictures) -> None:
    with pytest.raises(InputError, match="does not support video; it supports image"):
        one.pipe(prompt="What?", videos=[clip(4)])


@pytest.mark.daily("odd", "two-internvl")
@pytest.mark.parametrize("one", CLIPS, indirect=True)
@pytest.mark.parametrize("videos", [[clip(5)], [clip(4), clip(4, 9)]], ids=["odd", "two"])
def test_videos_are_those_of_transformers(one: Pictures, videos: list, monkeypatch) -> None:
    inputs = one.inputs(one.asked(*[VIDEO] * len(videos), "What is it?"), [], videos)
    media = one.pipe.read_media(videos=videos)
    prompt = one.pipe.family.prompt(first_turn("What is it?", media.parts), media)
    assert torch.equal(prompt.inputs["input_ids"], inputs["input_ids"])
    assert {span.modality for span in prompt.media} == {VIDEO}
    counts = count_tokens(one.pipe.family, media)
    assert counts["video"] == int((prompt.modalities == VIDEO).sum()) > 0
    alone = one.pipe.family.prompt(first_turn("?", media.parts), media)
    assert sum(counts.values()) == alone.tokens
    if "video_grid_thw" in inputs:
        grid = inputs["video_grid_thw"]
        kinds = inputs["mm_token_type_ids"]
        assert torch.equal(prompt.modalities.long(), kinds.long())
        positions = one.model.model.get_rope_index(
            inputs["input_ids"], mm_token_type_ids=kinds, video_grid_thw=grid
        )[0]
        assert torch.equal(prompt.positions[1:], positions)
    check_logits(one, prompt, inputs, 1, monkeypatch)  # One frame at a time.
    answer = one.pipe(prompt="What is it?", videos=videos, max_new_tokens=6)
    assert answer.token_ids == one.greedy(inputs, answer.token_ids)


@pytest.mark.daily("internvl", "glm4v", "molmo2")
@pytest.mark.parametrize("one", CLIPS, indirect=True)
def test_videos_of_different_lengths(one: Pictures, monkeypatch) -> None:
    """Videos that no processor takes together share a pass, or have a pass each."""
    media = one.pipe.read_media(videos=[clip(3), clip(9, 9), clip(5, 2)])
    prompt = one.pipe.family.prompt(first_turn("What is it?", media.parts), media)
    found = [read_prompt(one.pipe.model, prompt, one.pipe.new_cache())]
    monkeypatch.setattr(prefill_module, "MAX_TOKENS", 1)
    found.append(read_prompt(one.pipe.model, prompt, one.pipe.new_cache(), 23))
    torch.testing.assert_close(found[0], found[1], atol=2e-4, rtol=2e-4)


@pytest.mark.daily("internvl", "glm4v", "molmo2")
@pytest.mark.parametrize("one", CLIPS, indirect=True)
def test_an_image_before_a_video(one: Pictures, tmp_path: Path) -> None:
    """An image and a video in one turn, then more turns, also of a saved chat."""
    video = clip(6)
    text = one.asked("First: ", IMAGE, "Then: ", VIDEO, "Which one?")
    content = [
        {"type": "text", "text": "First: "},
        {"type": "image", "image": SHOWN[0]},
        {"type": "text", "text": "Then: "},
        {"type": "video", "video": video},
        {"type": "text", "text": "Which one?"},
    ]
    turn = {"role": "user", "content": content}
    answer = one.pipe(messages=[turn], max_new_tokens=6).token_ids
    assert answer == one.greedy(one.mixed(text, SHOWN[0], video), answer)
    chat = one.pipe.chat()
    chat.ask("What is it?", SHOWN[:1], videos=[video], max_new_tokens=4)
    chat.save(tmp_path / "chat.oscar")
    again = one.pipe.load_chat(tmp_path / "chat.oscar")
    ask = {} if one.is_molmo else {"images": SHOWN[1:2], "videos": [clip(3, 7)]}
    answers = [each.ask("And this?", **ask, max_new_tokens=6) for each in (chat, again)]
    assert answers[0].token_ids == answers[1].token_ids
    asked = [(SHOWN[:1], [video]), (SHOWN[1:2], [clip(3, 7)])]
    short = {"prompt": "What?", "max_new_tokens": 8}
    whole = one.pipe.batch([{"images": x, "videos": y, **short} for x, y in asked])
    for (images, videos), made in zip(asked, whole, strict=True):
        alone = one.pipe(images, videos=videos, **short)
        assert made.answer and made.answer.token_ids == alone.token_ids


@pytest.mark.daily("internvl", "glm4v", "molmo2")
@pytest.mark.parametrize("one", CLIPS, indirect=True)
def test_questions_share_a_video(one: Pictures) -> None:
    pipe = OscarVLPipeline(
        one.pipe.model, processor=one.pipe.processor, policy="bf16", prefix_cache="100MB"
    )
    for number, question in enumerate(("What is it?", "How many are there?")):
        shown = {"images": SHOWN, "videos": [clip(40)], "max_new_tokens": 4}
        expected = one.pipe(prompt=question, **shown).token_ids
        assert pipe(prompt=question, **shown).token_ids == expected
        assert pipe.prefixes is not None
        assert (pipe.prefixes.tokens_saved > 0) == (number > 0)


@pytest.mark.daily("internvl", "glm4v", "molmo2")
@pytest.mark.parametrize("one", CLIPS, indirect=True)
def test_frames_of_files(one: Pictures, tmp_path: Path) -> None:
    """Options choose frames; a request's size is known before they are decoded."""
    write_clip(tmp_path / "a.mp4", [20 * i for i in range(9)], times=[0.5 * i for i in range(9)])
    ask: dict[str, Any] = {"prompt": "What?", "videos": [tmp_path / "a.mp4"], "max_new_tokens": 2}
    choices: list[dict[str, Any]] = [{}, {"num_frames": 4}, {"fps": 1.0}]
    tokens = [one.pipe(**ask, **chosen).memory.tokens["video"] for chosen in choices]
    assert tokens[0] > tokens[2] >= tokens[1] > 0
    with pytest.raises(InputError, match=r"max_pixels: .* does not support this option"):
        one.pipe(**ask, max_pixels=1 << 20)
    with pytest.raises(RequestTooLarge, match="video"):
        one.pipe(prompt="What?", videos=[clip(700)], max_new_tokens=4000)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("gemma3n", "layers that share keys and values"),
        ("gemma4", "embeddings of its own for each layer"),
        ("gemma4_unified", "two-way attention among tokens"),
        ("paligemma", "two-way attention among tokens"),
    ],
)
def test_other_attention_is_refused(name: str, what: str, tmp_path: Path) -> None:
    AutoConfig.for_model(name).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=f"{name} has {what}"):
        OscarVLPipeline(tmp_path, device="cpu")
