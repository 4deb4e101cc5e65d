"""Answers of page formats, decoded token by token, against plain transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, Cache, DynamicCache

from oscar_mm import KVPolicy, OscarCache, OscarVLPipeline
from oscar_mm.cache.cache import as_argument
from oscar_mm.compare.decoded_answers import AnswerComparison
from oscar_mm.compare.methods import REFERENCE
from oscar_mm.engine.message import first_turn
from oscar_mm.engine.prompt import Prompt
from oscar_mm.errors import InputError
from oscar_mm.fast_decode.graph_runner import GraphRunner
from oscar_mm.media.part import media_parts
from oscar_mm.models import SAMPLES
from oscar_mm.pipelines.pipeline import Pipeline

CARDS = sorted(map(str, (SAMPLES / "cards").glob("*.png")))
TOKENS = 60


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    """A model that is unsure of long lists, so that answers of formats differ."""
    return OscarVLPipeline("pocket-llava", policy="bf16", device="cpu")


def asked(pipe: Pipeline, question: str, pictures: int) -> Prompt:
    turn = first_turn(question, media_parts(images=CARDS[:pictures]))
    return pipe.read_request(turn, TOKENS)


@torch.no_grad()
def stepped(folder: Path, prompt: Prompt, cache: Cache, tokens: list[int]) -> Tensor:
    """Log-probabilities in float64 after the prompt and after each token, with sdpa over what the
    cache returns: for an OscarCache, a copy of past keys and values that it unpacks."""
    plain = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa").eval()
    if isinstance(cache, OscarCache):
        cache.expect(prompt.modalities)
    call = partial(plain, **as_argument(cache), use_cache=True)
    logits = [call(**prompt.arguments(), position_ids=prompt.positions).logits[0, -1:]]
    for place, token in enumerate(tokens):
        position = prompt.next_position[None] + place
        logits.append(call(input_ids=torch.tensor([[token]]), position_ids=position).logits[0])
    return torch.cat(logits).double().log_softmax(-1)


@pytest.mark.daily("changes1")
@pytest.mark.parametrize("changes", [{"window": 8}, {"bits": (3, 2), "window": 64}])
def test_the_numbers_are_those_of_plain_transformers(llava_next_folder, changes) -> None:
    """With random weights, whose distributions do not turn on one code that is rounded otherwise.

    Without balancing, so that attention over an unpacked copy needs nothing of ours.
    """
    pipe = OscarVLPipeline(llava_next_folder, policy="bf16", device="cpu")
    policy = KVPolicy.preset("compact", balance=None, **changes)
    prompt = asked(pipe, "What is in this picture, and in the next? " * 12, 3)
    comparison = AnswerComparison(pipe, {"packed": policy}, TOKENS)
    found = comparison.add(prompt)
    tokens = found[REFERENCE].answer.token_ids
    exact = stepped(llava_next_folder, prompt, DynamicCache(), tokens)
    # The 16-bit answer is the greedy one of plain transformers.
    assert len(tokens) == TOKENS and tokens == exact[:-1].argmax(-1).tolist()
    packed, exact = stepped(llava_next_folder, prompt, OscarCache(policy), tokens)[1:], exact[1:]
    divergence = (exact.exp() * (exact - packed)).sum(-1)
    assert torch.allclose(found["packed"].steps[:, 0], divergence, rtol=0.1, atol=2e-4)
    row = comparison.rows()[1]
    assert row["kl"] == pytest.approx(divergence.mean().item(), rel=0.02) and row["kl"] > 1e-4
    agreed = (exact.argmax(-1) == packed.argmax(-1)).double().mean().item()
    assert row["agreement"] == pytest.approx(agreed, abs=1.01 / TOKENS)
    rise = (exact - packed).gather(1, exact.argmax(-1, keepdim=True)).mean().exp().item()
    assert row["perplexity_ratio"] == pytest.approx(rise, abs=1e-3)
    assert row["tokens"] == TOKENS == len(found["packed"].steps)


class Replayed:
    """Stands in for CUDA graphs: each replay writes its output over that of the last one."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, function: Callable[[], tuple], _: torch.device) -> Callable[[], tuple]:
        first: list[Tensor] = []

        def replay() -> tuple:
            self.replays += 1
            output = function()
            first[:] = first or output
            return tuple(old.copy_(new) for old, new in zip(first, output, strict=True))

        return replay


@pytest.mark.slow
def test_captured_steps_give_the_same_numbers(
    qwen3_vl_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = OscarVLPipeline(qwen3_vl_folder, policy="bf16", device="cpu")
    policies = {name: KVPolicy.preset(name) for name in ("standard", "kivi")}
    prompt = asked(pipe, "What is in this picture, and in the next? " * 12, 3)
    eager = AnswerComparison(pipe, policies, 24).add(prompt)
    replayed = Replayed()
    captured = partial(GraphRunner, capture=replayed)
    monkeypatch.setattr("oscar_mm.compare.decoded_answers.GraphRunner", captured)
    found = AnswerComparison(pipe, policies, 24).add(prompt)
    assert replayed.replays > 24
    for name, judged in found.items():
        assert torch.allclose(judged.steps, eager[name].steps, rtol=1e-3, atol=1e-5), name
        assert len(judged.steps) == 24 and (name == REFERENCE or judged.steps[:, 0].max() > 1e-3)


@pytest.mark.slow
def test_rows_sum_up_answers(pipe: Pipeline) -> None:
    """Free answers are the pipeline's own; rates and errors come from those of each prompt."""
    comparison = AnswerComparison(pipe, {"quarot": KVPolicy.preset("quarot")}, 20)
    assert comparison.rows() == []
    prompts = [asked(pipe, "Write all codes.", 14), asked(pipe, "What is the code?", 1)]
    found = [comparison.add(prompts[0]), comparison.add(prompts[1], "7KQ2".__eq__)]
    exact, row = comparison.rows()
    assert (exact["kl"], exact["agreement"], exact["perplexity_ratio"]) == (0, 1, 1)
    assert (exact["exact"], exact["right"], exact["prompts"]) == (1, 1, 2)
    packed = pipe.with_policy("quarot")(CARDS[:14], "Write all codes.", max_new_tokens=20)
    answers = [one["quarot"] for one in found]
    assert answers[0].answer.token_ids == packed.token_ids
    expected = found[0][REFERENCE].answer.token_ids
    same = next((i for i, token in enumerate(packed.token_ids) if token != expected[i]), 20)
    assert answers[0].same == same and answers[0].exact == (same == 20)
    assert answers[0].right is None and answers[1].right is True and row["right"] == 1
    assert row["same"] == (same + answers[1].same) / 2
    steps = torch.cat([one.steps for one in answers])
    assert len(steps) == row["tokens"] == 20 + len(found[1][REFERENCE].answer.token_ids)
    assert row["kl"] == pytest.approx(steps[:, 0].mean().item()) and row["kl_error"] > 0
    memory = [one.answer.memory for one in answers]
    assert row["kv_bytes"] == sum(report.kv_bytes for report in memory) // 2
    ratio = sum(report.bf16_bytes for report in memory) / sum(x.kv_bytes for x in memory)
    assert row["memory_ratio"] == pytest.approx(ratio) and ratio > 2 > 1 > exact["memory_ratio"]
    # All slots have gone back, also those of the caches that were fed an answer.
    assert all(
        sum(one.store.bytes_by_modality().values()) == 0 for one in comparison.pipes.values()
    )


def test_speeds_are_of_whole_answers(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """An end token ends none of them; the warm-up is left out of the range."""
    comparison = AnswerComparison(pipe, {"compact": KVPolicy()}, 12)
    prompt, seen = asked(pipe, "What is the code?", 1), []
    answer = OscarVLPipeline.answer

    def noted(self: Pipeline, *arguments):
        stream = answer(self, *arguments)
        complete = stream.complete
        stream.complete = lambda: seen.append(complete()) or seen[-1]
        return stream

    monkeypatch.setattr(OscarVLPipeline, "answer", noted)
    calls = []
    speeds = comparison.speeds(prompt, 3, lambda: calls.append(0))
    assert len(seen) == len(calls) == 8 and {len(one.token_ids) for one in seen} == {12}
    for place, name in enumerate((REFERENCE, "compact")):
        rates = sorted(one.timings.tokens_per_s for one in seen[place::2][1:])
        keys = ("tokens_per_s_low", "tokens_per_s", "tokens_per_s_high")
        assert [speeds[name][key] for key in keys] == rates
        firsts = sorted(one.timings.prefill_s for one in seen[place::2][1:])
        assert speeds[name]["first_token_s"] == firsts[1] > 0


def test_an_empty_answer_and_a_broken_format_count_for_nothing(pipe: Pipeline) -> None:
    comparison = AnswerComparison(pipe, {"compact": KVPolicy()}, 8)
    prompt = asked(pipe, "What is the code?", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipe.family, "end_tokens", lambda: frozenset(range(10_000)))
        with pytest.raises(InputError, match="16-bit answer is empty"):
            comparison.add(prompt)
    with pytest.MonkeyPatch.context() as patch:
        name = "oscar_mm.compare.decoded_answers.kl_divergence"
        patch.setattr(name, lambda exact, _: exact[0] * torch.nan)
        with pytest.raises(FloatingPointError):
            comparison.add(prompt)
    assert comparison.rows() == []
    comparison.add(prompt)
    assert [row["prompts"] for row in comparison.rows()] == [1, 1]
