"""A second pipeline of the same model: another cache format, one lock, one budget."""

import pytest

from oscar_mm import InputError, KVPolicy, OscarVLPipeline
from oscar_mm.policy import DEFAULT
from tests.pipelines.conftest import NEVER
from tests.prompts import noise

SHOWN = {"images": [noise(300, 300, seed) for seed in range(3)], "max_new_tokens": 4}


@pytest.fixture(scope="module")
def pipe(qwen3_vl_folder) -> OscarVLPipeline:
    made = OscarVLPipeline(qwen3_vl_folder, device="cpu", kv_budget="600kB", prefix_cache="600kB")
    made.model.generation_config.eos_token_id = NEVER
    return made


def test_both_are_of_one_checkpoint(qwen3_vl_folder) -> None:
    """That is worked out once, whichever is asked: it waits for each weight of a GPU."""
    pipe = OscarVLPipeline(qwen3_vl_folder, device="cpu")
    twin = pipe.with_policy("bf16")
    assert twin.fingerprint is pipe.fingerprint
    loaded = OscarVLPipeline(qwen3_vl_folder, device="cpu", policy="bf16")
    assert loaded.fingerprint == pipe.fingerprint


def test_it_answers_as_a_pipeline_loaded_with_the_policy(pipe, qwen3_vl_folder) -> None:
    twin = pipe.with_policy("bf16")
    assert (
        twin.model is pipe.model
        and twin.engine.thread is pipe.engine.thread
        and type(twin) is type(pipe)
    )
    assert twin.policy == KVPolicy.preset("bf16") and pipe.policy == KVPolicy.preset(DEFAULT)
    assert twin.prefixes is None and pipe.prefixes is not None
    loaded = OscarVLPipeline(qwen3_vl_folder, device="cpu", policy="bf16")
    loaded.model.generation_config.eos_token_id = NEVER
    answers = []
    for one in (twin, loaded):
        with one.chat() as chat:
            answers.append(chat.ask("What is it?", **SHOWN))
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].memory.by_kind["codes"] == 0
    with pytest.raises(InputError, match="unknown policy 'fine'"):
        pipe.with_policy("fine")


def test_the_budget_counts_both_and_either_gives_way(pipe) -> None:
    twin = pipe.with_policy("bf16")
    with pipe.chat() as packed, twin.chat() as plain:
        first = packed.ask("What is it?", **SHOWN).token_ids
        alone = pipe.budget.used_bytes
        plain.ask("What is it?", **SHOWN)
        used = [one.store.memory().used_bytes for one in (pipe, twin)]
        assert pipe.budget.used_bytes == sum(used) <= pipe.budget.limit
        assert used[0] < alone, "the chat that was used last gives way to the other"
        packed.ask("And now?", max_new_tokens=4)
        assert packed.memory.kv_bytes > 0 and packed.turns[0].answer and first
        assert pipe.budget.used_bytes <= pipe.budget.limit
