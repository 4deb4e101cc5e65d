"""Choices: the tokens that float32 logits and the rows' samplings give, whatever else is there."""

import pytest
import torch

from oscar_mm.generation.sampling import Choices, Chooser, Sampling
from oscar_mm.ranks import Ranks

SEEN = torch.tensor([3, 8, 8])
SAMPLINGS = (
    Sampling(temperature=0.8, top_p=0.9, top_k=40, seed=5),
    Sampling(),
    Sampling(repetition_penalty=2.0),
)


def choosers(device: str = "cpu") -> list[tuple[torch.Tensor, Chooser]]:
    """Of the rows that are not simply the likeliest."""
    return [
        (torch.tensor([row], device=device), Chooser([sampling], [SEEN.to(device)]))
        for row, sampling in enumerate(SAMPLINGS)
        if sampling.changes_logits
    ]


def logits(seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """(rows, vocabulary), of which the highest are several."""
    found = 4 * torch.randn(3, 600, generator=torch.Generator().manual_seed(seed))
    return found.clamp(max=6).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_row_by_its_sampling(dtype: torch.dtype) -> None:
    choose = Choices(choosers(), Ranks())
    alone = {int(row): chooser for row, chooser in choosers()}
    for seed in range(20):
        given = logits(seed, dtype)
        choice = choose(given)
        assert torch.equal(given, logits(seed, dtype))
        expected = [
            int(alone[row].choose(one[None]) if row in alone else one.argmax())
            for row, one in enumerate(given.float())
        ]
        assert choice.tokens.tolist() == choice.listed() == expected


@pytest.mark.parametrize("row", range(3))
def test_nan_is_told_when_tokens_are_asked_for(row: int) -> None:
    """Until then the tokens are such that a step can be fed with them."""
    given = logits(1)
    given[row, 77] = float("nan")
    choice = Choices(choosers(), Ranks())(given)
    assert all(0 <= token < 600 for token in choice.tokens.tolist())
    with pytest.raises(FloatingPointError, match="NaN"):
        choice.listed()


def test_all_ranks_take_what_the_first_one_chose() -> None:
    class Second(Ranks):
        def agree(self, tensor: torch.Tensor) -> None:
            tensor.copy_(torch.tensor(said))

    for said in ([5, 6, 7], [5, -1, 7]):
        choice = Choices([], Second(2, 1))(logits(2))
        assert choice.tokens.tolist() == [5, max(0, said[1]), 7]
        if min(said) < 0:
            with pytest.raises(FloatingPointError):
                choice.listed()
        else:
            assert choice.listed() == said


@pytest.mark.gpu
def test_on_a_gpu_nothing_is_waited_for() -> None:
    given = logits(3).cuda()
    choose = Choices(choosers("cuda"), Ranks())
    choose(given).listed()
    torch.cuda.set_sync_debug_mode("error")
    try:
        choices = [choose(given) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for choice in choices:
        listed = choice.listed()
        assert listed == choice.tokens.tolist()
        assert listed[1] == int(logits(3)[1].float().argmax())
