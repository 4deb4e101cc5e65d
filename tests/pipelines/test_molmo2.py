"""Molmo 2: what differs from other models of images, because all its media tokens attend to each
other and its chat template writes media first."""

import json
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from oscar_mm import InputError, OscarCache, OscarVLPipeline
from oscar_mm.engine.message import first_turn
from oscar_mm.engine.prefill import read_prompt
from oscar_mm.fast_decode.decoder import FastDecoder, supports
from oscar_mm.fast_decode.prompt_layers import PromptLayers
from oscar_mm.pipelines import registry
from oscar_mm.pipelines.families.molmo2 import Molmo2
from tests.pipelines.test_pictures import IMAGE, SHOWN, Pictures
from tests.prompts import clip
from tests.tiny_pictures import build_pictures


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Pictures:
    if "molmo2" not in CONFIG_MAPPING:
        pytest.skip("needs transformers 5.20")
    return Pictures(build_pictures("molmo2", tmp_path_factory.mktemp("molmo2"), seed=1))


def test_older_transformers_are_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(registry._FAMILIES, "newer_model", Molmo2)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "newer_model"}))
    with pytest.raises(InputError, match=r"newer_model needs transformers 5\.20 or newer, not 5"):
        OscarVLPipeline(tmp_path, device="cpu")


@torch.inference_mode()
def test_fused_layers(one: Pictures) -> None:
    """A prompt with images, and then a token, as by transformers' modules."""
    model, media = one.pipe.model, one.pipe.read_media(SHOWN[:2])
    prompt = one.pipe.family.prompt(first_turn("What is it?", media.parts), media)
    caches = [OscarCache("bf16", model=model) for _ in range(2)]
    expected = read_prompt(model, prompt, caches[0])
    with PromptLayers(model, 64).reading(caches[1]):
        found = read_prompt(model, prompt, caches[1])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    ids = expected.argmax(-1, keepdim=True)
    plain = dict(one.inputs(one.asked(IMAGE, IMAGE, "What is it?"), SHOWN[:2]))
    plain |= {"input_ids": torch.cat([plain["input_ids"], ids], dim=1)}
    kinds = plain["mm_token_type_ids"]
    plain |= {"mm_token_type_ids": torch.cat([kinds, torch.zeros_like(ids)], dim=1)}
    del plain["attention_mask"]
    caches[1].expect(torch.zeros_like(ids))
    found = FastDecoder(model)(ids, torch.tensor([[prompt.tokens]]), caches[1])
    expected = one.model(**plain).logits[:, -1]
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)  # The cache has 16 bits.


def test_layers_of_olmo(tmp_path: Path, one: Pictures) -> None:
    """Norms after the blocks and over all heads, scaled RoPE in some layers, as in Molmo 2 O-7B."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    fields = {
        "qk_norm_type": "olmo",
        "norm_after": True,
        "rope_scaling_layers": [1],
        "rope_parameters": rope | {"original_max_position_embeddings": 1024},
    }
    olmo = Pictures(build_pictures("molmo2", tmp_path, seed=1, **fields))
    inputs = olmo.inputs(olmo.asked(IMAGE, IMAGE, "What is it?"), SHOWN[:2])
    answer = olmo.pipe(SHOWN[:2], "What is it?", max_new_tokens=6).token_ids
    assert answer == olmo.greedy(inputs, answer) != one.greedy(inputs, answer)
    assert [supports(each.pipe.model) for each in (one, olmo)] == [True, False]


def test_images_of_several_turns_in_one_prompt(one: Pictures) -> None:
    """The template writes the images of all turns before the first turn."""
    messages, plain = [], []
    for image, answer in zip(SHOWN[:2], ("A street.", None), strict=True):
        ask = {"type": "text", "text": "What is it?"}
        messages.append({"role": "user", "content": [ask, {"type": "image", "image": image}]})
        plain.append({"role": "user", "content": [ask, {"type": "image"}]})
        if answer:
            messages.append({"role": "assistant", "content": answer})
            plain.append({"role": "assistant", "content": answer})
    text = one.processor.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    answer = one.pipe(messages=messages, max_new_tokens=6).token_ids
    assert answer == one.greedy(one.inputs(text, SHOWN[:2]), answer)


def test_media_in_later_turns_are_refused(one: Pictures) -> None:
    chat = one.pipe.chat()
    chat.ask("What is it?", SHOWN[:1], max_new_tokens=2)
    for later in ({"images": SHOWN[1:2]}, {"videos": [clip(3)]}):
        with pytest.raises(InputError, match=r"all media at the beginning.*first turn.*messages"):
            chat.ask("And this?", **later, max_new_tokens=2)
    chat.undo()
    again = chat.ask("What are they?", SHOWN[:2], max_new_tokens=4)
    assert again.token_ids == one.pipe(SHOWN[:2], "What are they?", max_new_tokens=4).token_ids


def test_prompts_share_all_of_their_media_or_none(one: Pictures) -> None:
    """The first images attend to a later one, so that they cannot be shared without it."""
    pipe = OscarVLPipeline(
        one.pipe.model, processor=one.pipe.processor, policy="bf16", prefix_cache="100MB"
    )
    assert pipe.prefixes is not None
    for images, shares in ((SHOWN[:2], False), (SHOWN, False), (SHOWN[:2], True), (SHOWN, True)):
        before = pipe.prefixes.tokens_saved
        expected = one.pipe(images, "What is it?", max_new_tokens=4).token_ids
        assert pipe(images, "What is it?", max_new_tokens=4).token_ids == expected
        assert (pipe.prefixes.tokens_saved > before) == shares


def test_a_template_that_writes_the_first_token(one: Pictures) -> None:
    """The processor writes the token before a text unless the text begins with it."""
    media = one.pipe.read_media(SHOWN[:1])
    turn = first_turn("What is it?", media.parts)
    expected = one.inputs(one.asked(IMAGE, "What is it?"), SHOWN[:1])["input_ids"]
    template = one.pipe.processor.chat_template
    try:
        one.pipe.processor.chat_template = "{{ bos_token }}" + template
        assert torch.equal(one.pipe.family.prompt(turn, media).ids, expected)
    finally:
        one.pipe.processor.chat_template = template
    assert torch.equal(one.pipe.family.prompt(turn, media).ids, expected)


def test_tokens_of_images(one: Pictures) -> None:
    """Ends of rows and images are image tokens, as to the processor, and not part of a text."""
    media = one.pipe.read_media(SHOWN)
    prompt = one.pipe.family.prompt(first_turn("What is it?", media.parts), media)
    inputs = one.inputs(one.asked(*[IMAGE] * 3, "What is it?"), SHOWN)
    assert torch.equal(prompt.modalities.int(), inputs["mm_token_type_ids"].int())
    for token in ("<im_patch>", "<im_col>", "<low_res_im_start>"):
        with pytest.raises(InputError, match="control token"):
            one.pipe(prompt=f"What is {token}?", max_new_tokens=2)
        found = one.processor.tokenizer.convert_tokens_to_ids(token)
        with pytest.raises(InputError, match="prompt"):
            one.pipe.family.check_ids("prompt", [found])
