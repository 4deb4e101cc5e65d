"""Scoring: log-likelihoods over a prompt's pages are those of whole texts."""

import pytest
import torch

from oscar_mm import OscarVLPipeline
from oscar_mm.engine.prefill import read_prompt
from oscar_mm.engine.prompt import Prompt, forward
from oscar_mm.pipelines.shared_media import log_likelihoods

CHOICES = [[[5, 9], [5], [5, 9, 11, 40]], [[33]]]
END = [2, 7]


def total(steps: torch.Tensor, choice: list[int]) -> float:
    """Return the log-likelihood of a choice from next-token logits (tokens + 1, vocabulary)."""
    steps = steps.log_softmax(-1)
    chosen = sum(float(steps[place, token]) for place, token in enumerate(choice))
    return chosen + float(steps[-1, END].logsumexp(-1))


def text(ids: list[int], start: int = 0) -> Prompt:
    place = torch.arange(start, start + len(ids))
    return Prompt(
        inputs={"input_ids": torch.tensor([ids])},
        positions=place.expand(4, 1, -1),
        next_position=torch.tensor([start + len(ids)]),
        modalities=torch.zeros(1, len(ids), dtype=torch.int8),
    )


@pytest.mark.daily("bf16-qwen3_5", "compact-qwen3_vl")
@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("policy", ["bf16", "compact"])
@torch.inference_mode()
def test_likelihoods_are_those_of_whole_texts(policy, kind, request, monkeypatch) -> None:
    folder = request.getfixturevalue(f"{kind}_folder")
    pipe = OscarVLPipeline(folder, policy=policy, device="cpu")
    monkeypatch.setattr(pipe.model.generation_config, "eos_token_id", END)
    generator = torch.Generator().manual_seed(0)
    prompts = [text(torch.randint(8, 300, (n,), generator=generator).tolist()) for n in (300, 260)]
    caches = [pipe.new_cache() for _ in prompts]
    found = log_likelihoods(pipe.engine.reader, prompts, caches, CHOICES)
    assert [cache.get_seq_length() for cache in caches] == [300, 260]
    used = pipe.store.memory().used_bytes
    for prompt, several, scores, cache in zip(prompts, CHOICES, found, caches, strict=True):
        own = pipe.new_cache()
        first = read_prompt(pipe.model, prompt, own)[0]
        for choice, score in zip(several, scores, strict=True):
            steps, fork = [first], cache.fork()
            for index, token in enumerate(choice):
                one = text([token], prompt.tokens + index)
                steps.append(forward(pipe.model, one, fork)[0])
            fork.close()
            assert score == pytest.approx(total(torch.stack(steps), choice), abs=2e-3)
            ids = prompt.inputs["input_ids"][0].tolist() + choice
            whole = text(ids)
            logits = pipe.model(input_ids=whole.inputs["input_ids"], position_ids=whole.positions)
            exact = total(logits.logits[0, -len(choice) - 1 :], choice)
            # With packed pages it is near, but not the same.
            assert (score == pytest.approx(exact, abs=1e-3)) is (policy == "bf16")
        own.close()
    assert pipe.store.memory().used_bytes == used


def test_broken_weights(qwen3_vl_folder) -> None:
    pipe = OscarVLPipeline(qwen3_vl_folder, policy="bf16", device="cpu")
    with torch.no_grad():
        pipe.model.get_output_embeddings().weight[40] = torch.nan
    with pytest.raises(FloatingPointError, match="NaN"):
        log_likelihoods(pipe.engine.reader, [text([5, 6, 7])], [pipe.new_cache()], [[[5]]])
