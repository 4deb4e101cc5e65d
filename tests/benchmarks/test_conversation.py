"""Recorded passes repeat with any cache and join into one prompt."""

import pytest
import torch
from transformers import DynamicCache

from benchmarks.conversation import difference, join_calls, record_calls, replay, with_steps
from benchmarks.random_model import RELEASED, build
from oscar_mm import OscarCache, OscarVLPipeline
from tests.prompts import noise

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pipe() -> OscarVLPipeline:
    model, processor = build(RELEASED["qwen3-vl-8b"].tiny(), CPU, torch.float32)
    return OscarVLPipeline(model, processor=processor, policy="bf16")


def test_recorded_passes_repeat_and_join(pipe: OscarVLPipeline) -> None:
    pictures = [noise(64, 96, seed) for seed in range(3)]
    with pipe.chat() as chat, record_calls(pipe.model) as calls:
        answers = [
            chat.ask("What is it?", images=pictures[:1], max_new_tokens=3),
            chat.ask("And this?", images=pictures[1:], max_new_tokens=2),
        ]
        tokens = chat.memory.tokens
    prompts = calls
    calls = with_steps(prompts, [answer.token_ids for answer in answers])
    assert [call.tokens for call in calls][:3] == [answers[0].prompt_tokens, 1, 1]
    assert [call.tokens for call in prompts] == [answer.prompt_tokens for answer in answers]
    assert sum(call.tokens for call in calls) == sum(tokens.values())
    for cache in (OscarCache("bf16", model=pipe.model), DynamicCache()):
        seconds, again = replay(pipe.model, calls, cache)
        assert len(seconds) == len(calls) == len(again)
        assert difference(again[0], prompts[0]) < 1e-5
        assert difference(again[3], prompts[1]) < 1e-5
        choices = [int(call.logits.argmax()) for call in again]
        assert choices[:3] == answers[0].token_ids and choices[3:] == answers[1].token_ids
    _, [conversation] = replay(pipe.model, [join_calls(pipe.family, calls)], DynamicCache())
    assert int(conversation.logits.argmax()) == answers[1].token_ids[-1]
    _, [conversation] = replay(pipe.model, [join_calls(pipe.family, calls[:4])], DynamicCache())
    assert difference(conversation, prompts[1]) < 1e-5
    assert difference(prompts[0], prompts[1]) > 0.1, "logits depend on the conversation"
