"""Sampling: allowed values, and one-line errors for others."""

from typing import Any

import pytest
import torch

from oscar_mm import InputError
from oscar_mm.engine.sampling import SamplerGroup, Sampling, SamplingState

NAN, INFINITY = float("nan"), float("inf")

BAD = {
    "max_new_tokens": [0, -1, 1.0, "5", None, True, NAN],
    "temperature": [-0.1, 1e-40, "hot", None, NAN, INFINITY, True, 10**400],
    "top_p": [0, 0.0, -0.5, 1.1, "0.9", None, NAN],
    "top_k": [-1, 1.5, "5", None, False],
    "repetition_penalty": [0, 1e-300, 1e300, -1.0, NAN, INFINITY, "1", None],
    "seed": [-1, 1.5, "7", 1 << 63, True],
    "min_p": [-0.1, 1.1, "0.1", None, NAN],
    "presence_penalty": [-2.1, 3, "1", None, NAN, True],
    "frequency_penalty": [-2.1, 3, "1", None, INFINITY, True],
    "logit_bias": [
        *([], [(1, 2)], 5, "a", {"1": 5}, {-1: 5}, {1.0: 5}, {True: 5}, {1 << 31: 5}),
        *({1: 101}, {1: -101}, {1: NAN}, {1: None}, {1: "5"}, dict.fromkeys(range(1025), 1)),
    ],
    "bad_words": ["", " ", [""], ["a", 5], 5, b"a", ["a" * 257], ["a"] * 257, [["a"]]],
    "min_tokens": [-1, 1.0, "5", None, True, 1 << 63],
    "ignore_eos": [0, 1, "yes", None],
    "stop": ["", ["a", ""], 5, [5], b"end", {"a": 1}, [["a"]], 0, False],
    "stop_token_ids": ["5", [-1], [1.0], [True], [None], [1 << 31], list(range(257)), {5: 1}],
    "include_stop_str_in_output": [0, 1, "yes", None],
    "logprobs": [-1, 21, 1.0, "5", True],
}


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, some in BAD.items() for v in some])
def test_what_is_not_allowed(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"^{name}=.{{1,100}}: must be .+$") as caught:
        Sampling(**{name: value})
    assert "\n" not in str(caught.value)


def test_what_is_not_allowed_and_very_long() -> None:
    for digits in (4000, 5000):
        with pytest.raises(InputError) as caught:
            Sampling(seed=10**digits)
        assert len(str(caught.value)) < 200


def test_what_is_allowed() -> None:
    assert Sampling().stop == () and Sampling(stop=[]).stop == ()
    assert Sampling(stop="end").stop == ("end",) and Sampling(stop=["a", "b"]).stop == ("a", "b")
    Sampling(max_new_tokens=1, temperature=0, top_p=1, top_k=0, repetition_penalty=1, seed=0)
    Sampling(temperature=5, top_p=1e-9, top_k=10**9, repetition_penalty=0.1, seed=(1 << 63) - 1)
    Sampling(logit_bias=dict.fromkeys(range(1024), -100), bad_words=["a" * 256] * 256)
    Sampling(min_p=1, presence_penalty=-2, frequency_penalty=2.0, stop_token_ids=[0] * 256)
    assert Sampling(bad_words="x", stop_token_ids=5) == Sampling(
        bad_words=["x"], stop_token_ids=[5]
    )


def test_ids_that_a_model_does_not_have() -> None:
    fits = Sampling(logit_bias={9: 1}, stop_token_ids=[3, 9])
    fits.check_ids(10)
    Sampling().check_ids(1)
    for name in ("logit_bias", "stop_token_ids"):
        with pytest.raises(InputError, match=rf"^{name}=9: must be token ids below 9,"):
            Sampling(**{name: getattr(fits, name)}).check_ids(9)


def test_greedy_has_no_warpers_and_no_random_numbers() -> None:
    greedy = Sampling(top_p=0.5, top_k=3, seed=1)
    assert not greedy.processors()
    assert greedy.generator(torch.device("cpu")) is None
    assert not greedy.changes_logits


def test_order_is_that_of_transformers() -> None:
    names = [type(one).__name__ for one in Sampling(
        temperature=0.5, top_p=0.5, top_k=3, min_p=0.1
    ).processors()]  # fmt: skip
    assert names == [
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
    ]


def test_seed() -> None:
    def draw(seed: int) -> list[float]:
        generator = Sampling(temperature=1.0, seed=seed).generator(torch.device("cpu"))
        return torch.rand(4, generator=generator).tolist()

    assert draw(0) == draw(0) != draw(1)
    assert Sampling(temperature=1.0).generator(torch.device("cpu")) is None


def chooser(samplings: list[Sampling], seen: list[torch.Tensor]) -> SamplerGroup:
    rows = [SamplingState(*row) for row in zip(samplings, seen, strict=True)]
    return SamplerGroup(rows, torch.device("cpu"))


def test_a_row_is_chosen_by_itself() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    prompt = torch.tensor([3, 7])
    assert not Sampling(top_p=0.5, top_k=3, seed=1).changes_logits
    penalized = chooser([Sampling(repetition_penalty=1e6)], [prompt])
    chosen = [int(penalized.choose(row[None])) for row in logits.abs() + 1]
    assert len({*chosen, 3, 7}) == 7, "what was seen comes again"
    sampling = Sampling(temperature=1.0, seed=4)
    assert sampling.changes_logits
    one, other = (chooser([sampling], [prompt]) for _ in range(2))
    torch.manual_seed(0)
    first = [int(one.choose(row[None])) for row in logits]
    assert [int(other.choose(row[None])) for row in logits] == first


@pytest.mark.parametrize("rules", [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.8, "repetition_penalty": 1.5},
    {"temperature": 1.0, "min_p": 0.2, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"presence_penalty": 1.5, "frequency_penalty": -0.5, "logit_bias": {3: 2.0, 7: -1.0}},
    {"repetition_penalty": 3.0},
])  # fmt: skip
def test_rows_that_are_chosen_together_are_chosen_as_alone(rules: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(8, 3, 50, generator=generator)
    samplings = [Sampling(seed=seed, **rules) for seed in (5, None, 6)]
    prompts = [torch.randint(50, (n,), generator=generator) for n in (3, 4, 9)]
    together = chooser(samplings, prompts)
    found = torch.stack([together.choose(step) for step in logits])
    for row in range(3):
        if samplings[row].seed is None and rules.get("temperature"):
            continue
        alone = chooser([samplings[row]], [prompts[row]])
        expected = [int(alone.choose(step[None])) for step in logits[:, row]]
        assert found[:, row].tolist() == expected
    assert len(set(map(tuple, found.tolist()))) > 2


@pytest.mark.parametrize("seeded", [False, True])
def test_tokens_come_as_often_as_they_are_likely(seeded: bool) -> None:
    torch.manual_seed(0)
    rows, expected = 4000, torch.tensor([0.0, 0.1, 0.2, 0.7])
    samplings = [Sampling(temperature=1.0, seed=row if seeded else None) for row in range(rows)]
    choices = chooser(samplings, rows * [torch.tensor([0])])
    found = choices.choose(expected.log().expand(rows, -1)).bincount(minlength=4) / rows
    # Four standard deviations of the likeliest.
    assert (found - expected).abs().max() < 4 * (0.7 * 0.3 / rows) ** 0.5
    assert found[0] == 0
