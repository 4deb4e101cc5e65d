"""Prefill in chunks gives the logits of the whole prompt, wherever a chunk ends."""

from dataclasses import replace

import pytest
import torch

from benchmarks.random_model import RELEASED, build
from oscar_mm import OscarCache, OscarVLPipeline
from oscar_mm.cache.cache import as_argument
from oscar_mm.engine import prefill as prefill_module
from oscar_mm.engine.prefill import prefill, read_prompt
from oscar_mm.engine.prompt import Prompt
from tests.live_bytes import LiveBytes
from tests.prompts import REQUESTS, Reference, noise, prepare

BATCH = [REQUESTS[name] for name in ("two images", "text", "image and video")]


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_vl_moe"])
def reference(request: pytest.FixtureRequest) -> Reference:
    folder = request.getfixturevalue(f"{request.param}_folder")
    return Reference(folder, attention={"text_config": "oscar"})


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare up to float32 rounding: 1e-5 of the largest logit, which is about 15."""
    torch.testing.assert_close(actual, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


def logits(reference: Reference, prompt: Prompt, chunk: int | None, policy: str) -> torch.Tensor:
    cache = OscarCache(policy)
    cache.expect(prompt.modalities)
    inputs = {**prompt.inputs, "position_ids": prompt.positions}
    with torch.inference_mode():
        if chunk is not None:
            return prefill(reference.model, prompt, cache, chunk)
        return reference.model(**inputs, **as_argument(cache), use_cache=True).logits[:, -1]


@pytest.mark.daily("qwen3_vl-text", "qwen3_vl-image and video", "qwen3_vl_moe-two images")
@pytest.mark.parametrize("name", ["text", "two images", "video", "image and video"])
def test_16_bit_chunks_give_the_logits_of_the_whole(reference, name: str) -> None:
    prompt = reference.prompt([REQUESTS[name]])
    expected = logits(reference, prompt, None, "bf16")
    for chunk in (3, 10, prompt.tokens - 1, prompt.tokens, prompt.tokens + 1):
        same(logits(reference, prompt, chunk, "bf16"), expected)


@pytest.mark.daily("qwen3_vl")
def test_every_border_within_an_image(reference) -> None:
    prompt = reference.prompt([REQUESTS["image"]])
    expected = logits(reference, prompt, None, "bf16")
    places = (prompt.modalities[0] == 1).nonzero()[:, 0].tolist()
    for chunk in range(places[0], places[-1] + 2):
        same(logits(reference, prompt, chunk, "bf16"), expected)


def test_batch_of_unequal_prompts(reference) -> None:
    prompt = reference.prompt(BATCH)
    assert (prompt.modalities == -1).any()
    expected = logits(reference, prompt, None, "bf16")
    alone = [logits(reference, reference.prompt([one]), None, "bf16") for one in BATCH]
    same(expected, torch.cat(alone))
    # The first chunks of a short row are padding only.
    for chunk in (4, 25):
        same(logits(reference, prompt, chunk, "bf16"), expected)


def test_batch_of_unequal_prompts_after_a_past(reference) -> None:
    prompt = reference.prompt(BATCH)
    cache = OscarCache("bf16")
    read_prompt(reference.model, reference.prompt([REQUESTS["text"]] * 3), cache)
    expected = read_prompt(reference.model, prompt, cache.fork())
    for chunk in (4, 25):
        same(read_prompt(reference.model, prompt, cache.fork(), chunk), expected)


@pytest.mark.daily("qwen3_vl")
def test_packed_history_is_close(reference) -> None:
    request = REQUESTS["two images"]
    long = type(request)("Compare. " * 150, request.images, REQUESTS["video"].videos)
    prompt = reference.prompt([long])
    assert prompt.tokens > 400
    exact = logits(reference, prompt, None, "bf16")
    # Attention over an unchunked prompt is exact, whatever the policy.
    torch.testing.assert_close(logits(reference, prompt, None, "channel"), exact)
    for chunk in (100, 256):
        chunked = logits(reference, prompt, chunk, "channel")
        assert not torch.equal(chunked, exact)
        assert torch.nn.functional.cosine_similarity(chunked, exact).item() > 0.85


def test_the_hook_is_gone_afterwards(reference) -> None:
    prompt = reference.prompt([REQUESTS["image"]])
    decoder = reference.model.get_decoder()
    read_prompt(reference.model, prompt, OscarCache("bf16"), 8)
    assert not decoder._forward_pre_hooks
    broken = dict(prompt.inputs, pixel_values=prompt.inputs["pixel_values"][:-4])
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        prefill(reference.model, replace(prompt, inputs=broken), OscarCache("bf16"), 8)
    assert not decoder._forward_pre_hooks


@pytest.fixture(scope="module")
def pipe() -> OscarVLPipeline:
    """Pipeline of a model with the width ratios of Qwen3-VL-8B."""
    released = RELEASED["qwen3-vl-8b"].tiny()
    text = released.text | {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
    }
    text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": [6, 5, 5]}
    indexes = {"depth": 4, "deepstack_visual_indexes": [0, 1, 2], "out_hidden_size": 128}
    released = replace(released, text=text, vision=released.vision | indexes)
    model, processor = build(released, torch.device("cpu"), torch.float32)
    return OscarVLPipeline(model, processor=processor)


def activations(pipe: OscarVLPipeline, prompt: Prompt, chunk: int | None) -> int:
    """Return the peak bytes alive during a prefill, including keys and values but not pixels."""
    with LiveBytes() as live:
        read_prompt(pipe.model, prompt, OscarCache("channel", model=pipe.model), chunk)
    return live.peak


@pytest.mark.daily("None-10.5")
@pytest.mark.parametrize(("chunk", "most"), [(None, 10.5), (128, 0.7)])
def test_activations_of_a_token(
    pipe: OscarVLPipeline, chunk: int | None, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token takes less than 10 hidden states at once, and none in chunks but its cache."""
    monkeypatch.setattr(prefill_module, "MAX_TOKENS", 128)
    monkeypatch.setattr(prefill_module, "MAX_RECORDED", 128)
    monkeypatch.setattr(prefill_module, "MAX_PATCHES", 512)
    picture = noise(256, 256)
    fewer, more = (prepare(pipe, "What?", pipe.read_media([picture] * count)) for count in (10, 25))
    grown = activations(pipe, more, chunk) - activations(pipe, fewer, chunk)
    states = grown / (more.tokens - fewer.tokens) / (128 * 4)
    assert states < most, f"{states:.1f} hidden states of each token"
