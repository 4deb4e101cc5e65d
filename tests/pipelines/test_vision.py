"""OscarVLPipeline against plain transformers: the same tokens, and memory by modality."""

from pathlib import Path

import numpy as np
import pytest
import torch

from oscar_mm import OscarVLPipeline
from oscar_mm.policy import KVPolicy
from tests.pipelines.conftest import NEVER, exact
from tests.prompts import REQUESTS, Reference, Request, noise


def plain(folder: Path) -> Reference:
    reference = Reference(folder)
    reference.model.generation_config.eos_token_id = NEVER
    return reference


@pytest.fixture(scope="module")
def reference(qwen3_vl_folder: Path) -> Reference:
    return plain(qwen3_vl_folder)


@pytest.fixture(scope="module")
def pipe(qwen3_vl_folder: Path) -> OscarVLPipeline:
    return OscarVLPipeline(qwen3_vl_folder, device="cpu")


def check_same_tokens(pipe: OscarVLPipeline, reference: Reference, name: str) -> None:
    [expected] = reference.generate(reference.inputs([REQUESTS[name]]))
    answer = REQUESTS[name].ask(pipe, max_new_tokens=64)
    assert answer.token_ids == expected
    assert len(expected) == 64 and len(set(expected)) > 12
    assert answer.text == reference.processor.decode(expected, skip_special_tokens=True)


@pytest.mark.daily("image and video")
@pytest.mark.parametrize("name", REQUESTS)
def test_16_bit_cache_is_plain_transformers(qwen, reference, name: str) -> None:
    check_same_tokens(qwen, reference, name)


@pytest.mark.slow
def test_experts_with_a_16_bit_cache_are_plain_transformers(qwen3_vl_moe_folder) -> None:
    pipe, reference = exact(OscarVLPipeline, qwen3_vl_moe_folder), plain(qwen3_vl_moe_folder)
    for name in REQUESTS:
        check_same_tokens(pipe, reference, name)


def test_order_of_requests_does_not_matter(qwen) -> None:
    first = {name: one.ask(qwen, max_new_tokens=8).text for name, one in REQUESTS.items()}
    for name, one in reversed(REQUESTS.items()):
        assert one.ask(qwen, max_new_tokens=8).text == first[name]


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_penalty_is_that_of_transformers(qwen, reference, penalty: float) -> None:
    request = REQUESTS["two images"]
    options = {"repetition_penalty": penalty, "max_new_tokens": 48}
    [expected] = reference.generate(reference.inputs([request]), **options)
    assert request.ask(qwen, **options).token_ids == expected


def test_a_single_candidate_is_greedy(qwen) -> None:
    request = REQUESTS["image"]
    greedy = request.ask(qwen, max_new_tokens=16)
    for options in ({"top_k": 1, "temperature": 2.0}, {"top_p": 1e-6, "temperature": 0.7}):
        assert request.ask(qwen, max_new_tokens=16, **options).token_ids == greedy.token_ids


def test_system_prompt_is_read(qwen) -> None:
    request = REQUESTS["image"]
    plain = request.ask(qwen, max_new_tokens=8)
    ruled = request.ask(qwen, max_new_tokens=8, system="Be brief.")
    assert ruled.prompt_tokens > plain.prompt_tokens
    assert ruled.token_ids != plain.token_ids


def test_end_token_ends_the_answer_and_is_not_part_of_it(qwen3_vl_folder) -> None:
    pipe = OscarVLPipeline(qwen3_vl_folder, policy="bf16", device="cpu")
    request = REQUESTS["text"]
    whole = request.ask(pipe, max_new_tokens=24)
    assert whole.finish_reason == "length" and len(whole.token_ids) == 24
    end = next(token for token in whole.token_ids[5:] if token not in whole.token_ids[:5])
    place = whole.token_ids.index(end)
    for ids in (end, [end, 3]):
        pipe.model.generation_config.eos_token_id = ids
        answer = request.ask(pipe, max_new_tokens=24)
        assert answer.finish_reason == "stop"
        assert answer.token_ids == whole.token_ids[:place]
    # Room for exactly the tokens before the end token: it is not reached.
    assert request.ask(pipe, max_new_tokens=place).finish_reason == "length"
    pipe.model.generation_config.eos_token_id = whole.token_ids[0]
    empty = request.ask(pipe, max_new_tokens=24)
    assert (empty.text, empty.token_ids, empty.finish_reason) == ("", [], "stop")
    assert empty.timings.decode_s == empty.timings.tokens_per_s == 0


@pytest.mark.daily("oscar")
@pytest.mark.parametrize("policy", KVPolicy.preset_names())
def test_every_preset_answers(qwen3_vl_folder, policy: str) -> None:
    pipe = OscarVLPipeline(qwen3_vl_folder, policy=policy, device="cpu")
    images = [noise(256, 256, seed) for seed in range(3)]
    request = Request("Compare.", images, REQUESTS["video"].videos)
    answer = request.ask(pipe, max_new_tokens=40)
    assert answer.finish_reason == "length" and len(answer.token_ids) == 40
    again = request.ask(pipe, max_new_tokens=40)
    assert again.token_ids == answer.token_ids and again.memory == answer.memory


def test_memory_counts_the_tokens_of_each_modality(pipe) -> None:
    request = REQUESTS["image and video"]
    answer = request.ask(pipe, max_new_tokens=7)
    video_tokens = 3 * (48 // 32 + 1) * (64 // 32)
    image_tokens = 3 * 2
    assert answer.memory.tokens == {
        "text": answer.prompt_tokens - image_tokens - video_tokens + 6,
        "image": image_tokens,
        "video": video_tokens,
        "audio": 0,
    }
    assert answer.memory.by_modality["image"] > 0 < answer.memory.by_modality["video"]
    assert answer.memory.by_modality["audio"] == 0
    assert sum(answer.memory.by_modality.values()) == answer.memory.kv_bytes
    text_only = REQUESTS["text"].ask(pipe, max_new_tokens=3).memory
    assert text_only.tokens["image"] == text_only.by_modality["image"] == 0


@pytest.mark.parametrize("name", REQUESTS)
def test_counts_are_those_of_the_placeholders(qwen, reference, name: str) -> None:
    ids = reference.inputs([REQUESTS[name]])["input_ids"]
    answer = REQUESTS[name].ask(qwen, max_new_tokens=1)
    config = reference.model.config
    assert answer.prompt_tokens == ids.shape[1]
    assert answer.memory.tokens["image"] == int((ids == config.image_token_id).sum())
    assert answer.memory.tokens["video"] == int((ids == config.video_token_id).sum())


@pytest.mark.slow
def test_many_images_take_a_fraction_of_16_bit(qwen3_vl_folder, pipe) -> None:
    request = Request("Which one is red?", [noise(256, 256, seed) for seed in range(24)])
    held = {}
    for policy in ("compact", "bf16"):
        one = OscarVLPipeline(pipe.model, processor=pipe.processor, policy=policy)
        held[policy] = request.ask(one, max_new_tokens=4).memory
        assert held[policy].tokens["image"] == 24 * 64
    assert held["compact"].kv_bytes < held["bf16"].kv_bytes / 4
    half = OscarVLPipeline(qwen3_vl_folder, device="cpu", dtype="bfloat16")
    memory = request.ask(half, max_new_tokens=4).memory
    assert memory.ratio > 3
    assert "image" in str(memory) and "1,536" in str(memory)


def test_answer_is_complete(pipe) -> None:
    answer = REQUESTS["image"].ask(pipe, max_new_tokens=12)
    assert str(answer) == answer.text
    assert answer.timings.prefill_s > 0 and answer.timings.decode_s > 0
    assert np.isclose(answer.timings.tokens_per_s, 11 / answer.timings.decode_s)


def test_16_bit_weights_on_a_cpu(qwen3_vl_folder) -> None:
    for dtype in ("bfloat16", torch.bfloat16, "float16"):
        pipe = OscarVLPipeline(qwen3_vl_folder, device="cpu", dtype=dtype)
        assert pipe.model.dtype in (torch.bfloat16, torch.float16)
        assert len(REQUESTS["image"].ask(pipe, max_new_tokens=6).token_ids) == 6


@pytest.mark.slow
def test_prefill_chunk_is_exact_in_16_bit(qwen3_vl_folder) -> None:
    whole = OscarVLPipeline(qwen3_vl_folder, policy="bf16", device="cpu")
    answers = [request.ask(whole, max_new_tokens=12).token_ids for request in REQUESTS.values()]
    for chunk in (5, 32):
        pipe = OscarVLPipeline(
            whole.model, processor=whole.processor, policy="bf16", prefill_chunk=chunk
        )
        for request, expected in zip(REQUESTS.values(), answers, strict=True):
            assert request.ask(pipe, max_new_tokens=12).token_ids == expected


def test_tower_attention(qwen3_vl_folder) -> None:
    request = REQUESTS["two images"]
    plain = OscarVLPipeline(qwen3_vl_folder, device="cpu")
    eager = OscarVLPipeline(qwen3_vl_folder, device="cpu", attn_implementation="eager")
    config = eager.model.config
    assert config.vision_config._attn_implementation == "eager"
    assert config.text_config._attn_implementation == "oscar"
    assert plain.model.config.vision_config._attn_implementation == "sdpa"
    expected = request.ask(plain, max_new_tokens=16).token_ids
    assert request.ask(eager, max_new_tokens=16).token_ids == expected
