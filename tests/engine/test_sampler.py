"""Sampler: tokens depend only on a row's float32 logits and sampling, not on other rows."""

import pytest
import torch

from oscar_mm.engine.sampling import BROKEN, Sampler, SamplerGroup, Sampling, SamplingState
from oscar_mm.tensor_parallel import TPGroup

SEEN = torch.tensor([3, 8, 8])
SAMPLINGS = (
    Sampling(temperature=0.8, top_p=0.9, top_k=40, seed=5),
    Sampling(logprobs=3),
    Sampling(repetition_penalty=2.0),
    Sampling(presence_penalty=1.0, frequency_penalty=0.3, logit_bias={7: 2.0, 9: -100}),
    Sampling(temperature=1.0, min_p=0.05, seed=6, bad_words=["x"], min_tokens=12),
)
ROWS = len(SAMPLINGS)
WORDS = [(4,), (5, 6), (6, 5, 4)]


def samplers() -> list[SamplingState]:
    return [
        SamplingState(sampling, SEEN, frozenset([3, 8]), WORDS if sampling.bad_words else ())
        for sampling in SAMPLINGS
    ]


def choices(device: str = "cpu") -> Sampler:
    return Sampler(samplers(), torch.device(device), TPGroup())


def logits(seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return (rows, vocabulary) logits with several equal maxima."""
    found = 4 * torch.randn(ROWS, 600, generator=torch.Generator().manual_seed(seed))
    return found.clamp(max=6).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_row_by_its_sampling(dtype: torch.dtype) -> None:
    choose = choices()
    alone = {
        row: SamplerGroup([sampler], torch.device("cpu"))
        for row, sampler in enumerate(samplers())
        if sampler.sampling.changes_logits
    }
    for seed in range(20):
        given = logits(seed, dtype)
        choice = choose(given)
        assert torch.equal(given, logits(seed, dtype))
        expected = [
            int(alone[row].choose(one[None]) if row in alone else one.argmax())
            for row, one in enumerate(given.float())
        ]
        assert choice.tokens.tolist() == choice.listed() == expected


@pytest.mark.parametrize("row", range(ROWS))
def test_nan_is_reported_for_its_row(row: int) -> None:
    """Until NaN is reported, tokens are valid inputs of a step."""
    given = logits(1)
    given[row, 77] = float("nan")
    choice = choices()(given)
    assert all(0 <= token < 600 for token in choice.tokens.tolist())
    listed = choice.listed()
    assert [index for index, token in enumerate(listed) if token == BROKEN] == [row]


def test_rows_that_nobody_looks_at() -> None:
    """Padding rows do not change the tokens of other rows."""
    few = Sampler([None, *samplers(), None], torch.device("cpu"), TPGroup())
    for seed in range(5):
        given = logits(seed)
        beside = few(torch.cat([given[:1], given, given[:1]])).listed()
        assert beside[0] == beside[-1] == int(given[0].argmax())
    again, beside = choices(), Sampler([None, *samplers()], torch.device("cpu"), TPGroup())
    for seed in range(5):
        given = logits(seed)
        assert beside(torch.cat([given[:1], given])).listed()[1:] == again(given).listed()


def test_a_regrouped_row_goes_on() -> None:
    """Seeds and penalties continue when a row moves to another batch."""
    tokens: list[list[int]] = []
    for regroup in (False, True):
        rows, found = samplers(), []
        choose = Sampler(rows, torch.device("cpu"), TPGroup())
        for seed in range(8):
            if regroup and seed % 3 == 2:
                rows.reverse()
                choose = Sampler(rows, torch.device("cpu"), TPGroup())
            given = logits(seed)
            listed = choose(given if rows[0].sampling is SAMPLINGS[0] else given.flip(0)).listed()
            for row, token in zip(rows, listed, strict=True):
                row.note(token)
            found += listed if rows[0].sampling is SAMPLINGS[0] else listed[::-1]
        tokens.append(found)
    assert tokens[0] == tokens[1]


def test_all_ranks_take_what_the_first_one_chose() -> None:
    class Second(TPGroup):
        def broadcast(self, tensor: torch.Tensor) -> None:
            tensor.copy_(torch.tensor(said))

    for said in ([5, 6, 7], [5, -1, 7]):
        choice = Sampler([], torch.device("cpu"), Second(2, 1))(logits(2)[:3])
        assert choice.tokens.tolist() == [5, max(0, said[1]), 7]
        assert choice.listed() == said


@pytest.mark.gpu
def test_on_a_gpu_nothing_is_waited_for() -> None:
    given = logits(3).cuda()
    choose = choices("cuda")
    choose(given).listed()
    torch.cuda.set_sync_debug_mode("error")
    try:
        several = [choose(given) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for choice in several:
        listed = choice.listed()
        assert listed == choice.tokens.tolist()
        assert listed[1] == int(logits(3)[1].float().argmax())
