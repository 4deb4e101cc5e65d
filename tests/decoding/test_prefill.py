"""Prefill in chunks: the logits of the whole prompt, wherever a chunk ends."""

import pytest
import torch

from oscar_mm import OscarCache
from oscar_mm.decoding.loop import decode
from oscar_mm.decoding.prefill import prefill_in_chunks
from oscar_mm.decoding.prompt import Prompt
from oscar_mm.decoding.sampling import Sampling
from tests.prompts import REQUESTS, Reference

BATCH = [REQUESTS[name] for name in ("two images", "text", "image and video")]


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_vl_moe"])
def reference(request: pytest.FixtureRequest) -> Reference:
    folder = request.getfixturevalue(f"{request.param}_folder")
    return Reference(folder, attention={"text_config": "oscar"})


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to the rounding of float32: 1e-5 of the largest logit, which is about 15."""
    torch.testing.assert_close(actual, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


def logits(reference: Reference, prompt: Prompt, chunk: int | None, policy: str) -> torch.Tensor:
    cache = OscarCache(policy)
    cache.expect(prompt.modalities)
    inputs = {**prompt.inputs, "position_ids": prompt.positions}
    with torch.inference_mode():
        if chunk is not None:
            return prefill_in_chunks(reference.model, inputs, cache, chunk)
        return reference.model(**inputs, past_key_values=cache, use_cache=True).logits[:, -1]


@pytest.mark.parametrize("name", ["text", "two images", "video", "image and video"])
def test_16_bit_chunks_give_the_logits_of_the_whole(reference, name: str) -> None:
    prompt = reference.prompt([REQUESTS[name]])
    expected = logits(reference, prompt, None, "bf16")
    for chunk in (3, 10, prompt.tokens - 1, prompt.tokens, prompt.tokens + 1):
        same(logits(reference, prompt, chunk, "bf16"), expected)


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


def test_packed_history_is_close(reference) -> None:
    request = REQUESTS["two images"]
    long = type(request)("Compare. " * 150, request.images, REQUESTS["video"].videos)
    prompt = reference.prompt([long])
    assert prompt.tokens > 400
    exact = logits(reference, prompt, None, "bf16")
    # Attention over an unchunked prompt is exact, whatever the policy.
    torch.testing.assert_close(logits(reference, prompt, None, "compact"), exact)
    for chunk in (100, 256):
        chunked = logits(reference, prompt, chunk, "compact")
        assert not torch.equal(chunked, exact)
        assert torch.nn.functional.cosine_similarity(chunked, exact).item() > 0.85


def test_the_hook_is_gone_afterwards(reference) -> None:
    prompt = reference.prompt([REQUESTS["image"]])
    decoder = reference.model.get_decoder()
    list(decode(reference.model, prompt, OscarCache("bf16"), Sampling(max_new_tokens=2),
                end_tokens=frozenset(), prefill_chunk=8))  # fmt: skip
    assert not decoder._forward_pre_hooks
    broken = dict(prompt.inputs, pixel_values=prompt.inputs["pixel_values"][:-4])
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        prefill_in_chunks(reference.model, broken, OscarCache("bf16"), 8)
    assert not decoder._forward_pre_hooks
