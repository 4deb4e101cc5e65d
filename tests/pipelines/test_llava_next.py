"""LLaVA-v1.6 against plain transformers: the same tokens, tiles, several images, odd processors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, LlavaNextImageProcessor

from oscar_mm import InputError, OscarVLPipeline
from oscar_mm.media.media import Media
from oscar_mm.modality import Modality
from tests.pipelines.conftest import NEVER
from tests.prompts import REQUESTS, Request, clip, noise, prepare

LLAVA_REQUESTS = {name: REQUESTS[name] for name in ("text", "image", "two images")} | {
    "tiles of every shape": Request(
        "Compare.", [noise(50, 50), noise(30, 200, 1), noise(200, 30, 2), noise(111, 112, 3)]
    ),
}


@pytest.fixture(params=["llava", "vicuna"])
def pipe(request) -> OscarVLPipeline:
    return request.getfixturevalue(request.param)


class Plain:
    """The same checkpoint in plain transformers: sdpa, DynamicCache, its own generate."""

    def __init__(self, folder: Path) -> None:
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    def inputs(self, request: Request, system: str | None = None) -> Any:
        parts = [{"type": "image"}] * len(request.images)
        turns = [{"role": "user", "content": [*parts, {"type": "text", "text": request.prompt}]}]
        if system:
            turns.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
        text = self.processor.apply_chat_template(turns, add_generation_prompt=True)
        images = list(request.images) or None
        return self.processor(text=text, images=images, return_tensors="pt")

    def answer(self, request: Request, count: int = 24) -> list[int]:
        inputs = self.inputs(request)
        output = self.model.generate(
            **inputs, max_new_tokens=count, do_sample=False, eos_token_id=NEVER
        )
        return output[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.fixture(scope="module")
def plain(llava_next_folder, llava_next_vicuna_folder) -> dict[str, Plain]:
    return {"mistral": Plain(llava_next_folder), "llama": Plain(llava_next_vicuna_folder)}


def text_model(pipe: OscarVLPipeline) -> str:
    return pipe.model.config.text_config.model_type


@pytest.mark.daily("vicuna-image", "llava-tiles of every shape")
@pytest.mark.parametrize("name", LLAVA_REQUESTS)
def test_16_bit_cache_is_plain_transformers(pipe, plain, name: str) -> None:
    request = LLAVA_REQUESTS[name]
    reference = plain[text_model(pipe)]
    answer = request.ask(pipe, max_new_tokens=24)
    assert answer.token_ids == reference.answer(request)
    inputs = reference.inputs(request)
    ours = prepare(pipe, request.prompt, pipe.read_media(request.images))
    for key in ("input_ids", "pixel_values", "image_sizes"):
        assert (key in ours.inputs) == (key in inputs)
        assert key not in inputs or torch.equal(ours.inputs[key], inputs[key])
    assert torch.equal(ours.positions, torch.arange(ours.tokens)[None])


def test_images_are_seen(pipe) -> None:
    """Logits, as untrained models can repeat themselves whatever they see."""
    logits = []
    for seed in (0, 1):
        prompt = prepare(pipe, "What is it?", pipe.read_media([noise(60, 60, seed)]))
        with torch.inference_mode():
            arguments = {**prompt.inputs, "position_ids": prompt.positions}
            logits.append(pipe.model(**arguments).logits[0, -1])
    assert (logits[0] - logits[1]).abs().max() > 0.01 * logits[0].abs().max()


def test_system_prompt_and_begin_token(pipe, plain) -> None:
    expected = plain[text_model(pipe)].inputs(LLAVA_REQUESTS["image"], "Be brief.")
    request = LLAVA_REQUESTS["image"]
    ours = prepare(pipe, request.prompt, pipe.read_media(request.images), "Be brief.")
    ids = ours.inputs["input_ids"]
    assert torch.equal(ids, expected["input_ids"])
    assert (ids == pipe.processor.tokenizer.bos_token_id).sum() == 1


def test_a_template_that_writes_the_begin_token(llava_next_folder) -> None:
    processor = AutoProcessor.from_pretrained(llava_next_folder)
    plain_pipe = OscarVLPipeline(llava_next_folder, processor=processor, device="cpu")
    processor.chat_template = "{{ bos_token }}" + processor.chat_template
    turn = {"role": "user", "content": [{"type": "text", "text": "What?"}]}
    expected = processor.apply_chat_template(
        [turn], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )["input_ids"]
    ours = prepare(plain_pipe, "What?", Media()).inputs["input_ids"]
    assert torch.equal(ours, expected)
    assert (ours == processor.tokenizer.bos_token_id).sum() == 1


def test_media_of_a_prompt(pipe) -> None:
    request = LLAVA_REQUESTS["tiles of every shape"]
    prompt = prepare(pipe, request.prompt, pipe.read_media(request.images))
    ids = prompt.inputs["input_ids"][0]
    is_image = ids == pipe.model.config.image_token_id
    assert [span.label for span in prompt.media] == [f"images[{index}]" for index in range(4)]
    assert sum(span.tokens for span in prompt.media) == int(is_image.sum())
    for span in prompt.media:
        assert span.modality is Modality.IMAGE
        assert is_image[span.start : span.stop].all()
        assert not is_image[span.start - 1] and not is_image[span.stop]
    # An overview of 4 x 4 patches, tiles of 4 x 4 with a line break a row, padding cut away.
    assert [span.tokens for span in prompt.media[::3]] == [16 + 4 * (4 + 1), 16 + 8 * (8 + 1)]


def test_chunks_are_exact_in_16_bit(llava) -> None:
    chunked = OscarVLPipeline(
        llava.model, processor=llava.processor, policy="bf16", prefill_chunk=33
    )
    request = LLAVA_REQUESTS["two images"]
    expected = request.ask(llava, max_new_tokens=12).token_ids
    assert request.ask(chunked, max_new_tokens=12).token_ids == expected


@pytest.mark.parametrize("policy", ["standard", "oscar"])
def test_packed_answers(llava, policy: str) -> None:
    packed = OscarVLPipeline(llava.model, processor=llava.processor, policy=policy)
    images = [noise(112, 112, seed) for seed in range(6)]
    answer = packed(images, "Compare.", max_new_tokens=12)
    assert len(answer.token_ids) == 12
    assert answer.memory.tokens["image"] == 6 * (16 + 8 * 9)
    assert packed(images, "Compare.", max_new_tokens=12).token_ids == answer.token_ids


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_weights(llava_next_folder, dtype: str) -> None:
    pipe = OscarVLPipeline(llava_next_folder, device="cpu", dtype=dtype)
    assert len(pipe([noise(50, 90)] * 2, "What?", max_new_tokens=4).token_ids) == 4


def test_an_old_processor(llava_next_folder, llava) -> None:
    """Processors of old checkpoints do not say how large a patch is, nor what is kept of them."""
    old = AutoProcessor.from_pretrained(llava_next_folder)
    old.patch_size = old.vision_feature_select_strategy = None
    old.num_additional_image_tokens = 0
    pipe = OscarVLPipeline(llava.model, processor=old, policy="bf16")
    request = LLAVA_REQUESTS["two images"]
    expected = request.ask(llava, max_new_tokens=8).token_ids
    assert request.ask(pipe, max_new_tokens=8).token_ids == expected


def test_bad_requests(llava) -> None:
    with pytest.raises(InputError, match=r"videos\[0\]: LLaVA-NeXT does not support video.*image"):
        llava(None, "What?", videos=[clip(3)])
    with pytest.raises(InputError, match="'<image>', a control token"):
        llava([noise(40, 40)], "Is <image> a cat?")
    tight = OscarVLPipeline(llava.model, processor=llava.processor, max_context=300)
    with pytest.raises(InputError, match=r"but only 300 fit: image 352 \(images\[0\]: 88"):
        tight([noise(112, 112)] * 4, "Compare.", max_new_tokens=1)


def test_the_template_decides_what_can_be_asked(llava_next_folder) -> None:
    processor = AutoProcessor.from_pretrained(llava_next_folder)
    pipe = OscarVLPipeline(llava_next_folder, processor=processor, device="cpu")
    processor.chat_template = "{{ raise_exception('no system prompts here') }}"
    with pytest.raises(InputError, match=r"template.*refuses.*no system prompts here"):
        pipe(None, "What?", system="Be brief.")
    processor.chat_template = "{% for m in messages %}{{ m.content[-1].text }}{% endfor %}"
    with pytest.raises(InputError, match="1 media items, 0 placeholders"):
        pipe(noise(40, 40), "What?")


def test_tower_attention(llava_next_folder) -> None:
    pipe = OscarVLPipeline(llava_next_folder, device="cpu", attn_implementation="eager")
    assert pipe.model.config.vision_config._attn_implementation == "eager"
    assert pipe.model.config.text_config._attn_implementation == "oscar"
    assert isinstance(pipe.processor.image_processor, LlavaNextImageProcessor)
    assert np.isfinite(pipe(noise(40, 40), "What?", max_new_tokens=2).timings.prefill_s)
