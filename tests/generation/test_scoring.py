"""Scoring: log-likelihoods on a shared cache are those of whole texts."""

import pytest
import torch

from oscar_mm import OscarCache
from oscar_mm.generation.scoring import log_likelihoods
from tests.checkpoints import build_decoder

END = frozenset({2, 7})
CHOICES = [[[5, 9], [5], [5, 9, 11, 40]], [[33]]]


def total(steps: torch.Tensor, choice: list[int]) -> float:
    """Of (tokens + 1, vocabulary) logits, each of what comes next."""
    steps = steps.log_softmax(-1)
    said = sum(float(steps[place, token]) for place, token in enumerate(choice))
    return said + float(steps[-1, sorted(END)].logsumexp(-1))


def token_by_token(model, cache, row: int, first: torch.Tensor, choice: list[int]) -> float:
    """The same on a fork that reads one token after the other."""
    fork = cache.fork()
    fork.batch_select_indices(torch.tensor([row]))
    steps = [first]
    for index, token in enumerate(choice):
        place = torch.tensor([[300 + index]])
        output = model(input_ids=torch.tensor([[token]]), position_ids=place, past_key_values=fork)
        steps.append(output.logits[0, -1])
    return total(torch.stack(steps), choice)


@pytest.mark.parametrize("policy", ["bf16", "compact"])
@torch.inference_mode()
def test_likelihoods_are_those_of_whole_texts(policy) -> None:
    model = build_decoder("qwen3")
    model.set_attn_implementation("oscar")
    prompts = torch.randint(8, 300, (2, 300), generator=torch.Generator().manual_seed(0))
    cache = OscarCache(policy)
    cache.expect(torch.zeros_like(prompts))
    logits = model(input_ids=prompts, past_key_values=cache).logits[:, -1]
    held = cache.store.memory().used_bytes
    place = torch.full((2, 1), 300)
    found = log_likelihoods(model, cache, logits, place, CHOICES, END)
    assert (cache.get_seq_length(), cache.store.memory().used_bytes) == (300, held)
    for row, several in enumerate(CHOICES):
        for choice, score in zip(several, found[row], strict=True):
            alone = token_by_token(model, cache, row, logits[row], choice)
            assert score == pytest.approx(alone, abs=1e-3)
            whole = torch.cat([prompts[row], torch.tensor(choice)])[None]
            exact = total(model(input_ids=whole).logits[0, -len(choice) - 1 :], choice)
            # With packed pages it is near, but not the same.
            assert (score == pytest.approx(exact, abs=1e-3)) is (policy == "bf16")
    with pytest.raises(FloatingPointError, match="NaN"):
        log_likelihoods(model, cache, logits * torch.nan, place, CHOICES, END)
