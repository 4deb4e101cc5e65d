"""Qwen3.5 and Qwen3-Next, with states in most layers: prompts and answers of plain transformers."""

from pathlib import Path

import pytest
import torch

from oscar_mm import OscarVLPipeline
from oscar_mm.cache.cache import as_argument
from oscar_mm.engine import prefill as prefill_module
from oscar_mm.engine.decode_runner import decode
from oscar_mm.engine.message import first_turn
from oscar_mm.engine.prefill import read_prompt
from oscar_mm.engine.prompt import Prompt
from oscar_mm.engine.sampling import Sampling
from oscar_mm.fast_decode.decoder import supports
from oscar_mm.media.encoder_inputs import scaled_inputs
from tests.pipelines.conftest import NEVER, exact
from tests.prompts import REQUESTS, Reference, Request, clip, noise

TOKENS = 24
KINDS = ("qwen3_5", "qwen3_5_moe")


class Both:
    """A checkpoint in a pipeline that loses nothing, and in plain transformers."""

    def __init__(self, folder: Path) -> None:
        self.pipe, self.plain = exact(OscarVLPipeline, folder), Reference(folder)
        self.plain.model.generation_config.eos_token_id = NEVER

    def prompt(self, request: Request) -> Prompt:
        media = self.pipe.read_media(request.images, request.videos)
        return self.pipe.family.prompt(first_turn(request.prompt, media.parts), media)

    def logits(self, request: Request) -> torch.Tensor:
        with torch.inference_mode():
            return self.plain.model(**self.plain.inputs([request])).logits[:, -1]

    def answer(self, request: Request, tokens: int = TOKENS) -> list[int]:
        [answer] = self.plain.generate(self.plain.inputs([request]), max_new_tokens=tokens)
        return answer


@pytest.fixture(scope="module")
def both(qwen3_5_folder: Path, qwen3_5_moe_folder: Path) -> dict[str, Both]:
    return {"qwen3_5": Both(qwen3_5_folder), "qwen3_5_moe": Both(qwen3_5_moe_folder)}


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", REQUESTS)
def test_prompt_is_that_of_transformers(both, name: str) -> None:
    one, request = both["qwen3_5"], REQUESTS[name]
    ours, expected = one.prompt(request), one.plain.inputs([request])
    inputs = scaled_inputs(one.pipe.model, ours.inputs)
    for key in ("input_ids", "pixel_values", "image_grid_thw", "pixel_values_videos"):
        assert (key in inputs) == (key in expected)
        if key in expected:
            assert torch.equal(inputs[key], expected[key]), key
    by_hand = one.plain.prompt([request])
    assert torch.equal(ours.modalities, by_hand.modalities)
    assert torch.equal(ours.positions, by_hand.positions)
    assert torch.equal(ours.next_position, by_hand.next_position)


@pytest.mark.daily("qwen3_5_moe-video", "qwen3_5-image and video")
@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_transformers(both, kind: str, name: str) -> None:
    one, request = both[kind], REQUESTS[name]
    assert supports(one.pipe.model)
    found = read_prompt(one.pipe.model, one.prompt(request), one.pipe.new_cache())
    assert_near(found, one.logits(request))
    assert request.ask(one.pipe, max_new_tokens=TOKENS).token_ids == one.answer(request)


@pytest.mark.slow
def test_long_prompts_are_read_in_parts(both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part goes on from the states of the one before it."""
    one = both["qwen3_5"]
    request = Request("What is it?", [noise(96, 70), noise(250, 120, 2)], [clip(6), clip(4, 9)])
    expected = one.logits(request)
    monkeypatch.setattr(prefill_module, "MAX_TOKENS", 10)
    monkeypatch.setattr(prefill_module, "MAX_PATCHES", 16)
    for chunk in (None, 1, 7, 64):
        found = read_prompt(one.pipe.model, one.prompt(request), one.pipe.new_cache(), chunk)
        assert_near(found, expected)


def test_padded_rows(both) -> None:
    """Padding on the left changes no state; rows of a batch answer as they do alone."""
    one, requests = both["qwen3_5"], list(REQUESTS.values())
    prompt = one.plain.prompt(requests)
    assert (prompt.modalities < 0).any()
    sampling = Sampling(max_new_tokens=9, temperature=0)
    steps = decode(one.pipe.model, prompt, one.pipe.new_cache(), sampling, end_tokens=frozenset())
    rows = [[*row] for row in zip(*steps, strict=True)]
    assert rows == [one.answer(request, 9) for request in requests]


@pytest.mark.parametrize("policy", ["compact", "oscar"])
def test_packed_pages_are_read_like_their_copy(both, policy: str) -> None:
    """A prompt is read exactly; steps read packed pages as transformers reads the unpacked copy."""
    one, request = both["qwen3_5"], Request("What did the user ask about the sign? " * 30)
    model = one.pipe.model
    pipe = OscarVLPipeline(model, processor=one.pipe.processor, policy=policy)
    cache, prompt = pipe.new_cache(), one.prompt(request)
    cache.sigmas = pipe.engine.reader.sigmas
    assert_near(read_prompt(model, prompt, cache), one.logits(request))
    twin, text = cache.fork(), torch.tensor([[7], [9], [11]])
    assert cache.memory().by_kind["codes"] > 0
    try:
        for number, ids in enumerate(text):
            found = []
            for attention, held in (("oscar", cache), ("sdpa", twin)):
                model.set_attn_implementation({"text_config": attention})
                positions = torch.full((4, 1, 1), prompt.tokens + number)
                with torch.inference_mode():
                    given = {"input_ids": ids[None], "position_ids": positions, "use_cache": True}
                    found.append(model(**given, **as_argument(held)).logits)
            torch.testing.assert_close(*found, rtol=2e-3, atol=2e-3)
    finally:
        model.set_attn_implementation({"text_config": "oscar"})
