"""Sampling: what is allowed, and the one line that tells what is not."""

from typing import Any

import pytest
import torch

from oscar_mm import InputError
from oscar_mm.decoding.sampling import Chooser, Sampling

NAN, INFINITY = float("nan"), float("inf")

BAD = {
    "max_new_tokens": [0, -1, 1.0, "5", None, True, NAN],
    "temperature": [-0.1, 1e-40, "hot", None, NAN, INFINITY, True],
    "top_p": [0, 0.0, -0.5, 1.1, "0.9", None, NAN],
    "top_k": [-1, 1.5, "5", None, False],
    "repetition_penalty": [0, -1.0, NAN, INFINITY, "1", None],
    "seed": [-1, 1.5, "7", 1 << 63, True],
    "stop": ["", ["a", ""], 5, [5], b"end", {"a": 1}, [["a"]], 0, False],
}


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, some in BAD.items() for v in some])
def test_what_is_not_allowed(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"^{name}=.*must be .+$") as caught:
        Sampling(**{name: value})
    assert "\n" not in str(caught.value)


def test_what_is_allowed() -> None:
    assert Sampling().stop == () and Sampling(stop=[]).stop == ()
    assert Sampling(stop="end").stop == ("end",) and Sampling(stop=["a", "b"]).stop == ("a", "b")
    Sampling(max_new_tokens=1, temperature=0, top_p=1, top_k=0, repetition_penalty=1, seed=0)
    Sampling(temperature=5, top_p=1e-9, top_k=10**9, repetition_penalty=0.1, seed=(1 << 63) - 1)


def test_greedy_has_no_warpers_and_no_random_numbers() -> None:
    greedy = Sampling(top_p=0.5, top_k=3, seed=1)
    assert not greedy.processors()
    assert greedy.generator(torch.device("cpu")) is None
    assert len(Sampling(repetition_penalty=1.1).processors()) == 1


def test_order_is_that_of_transformers() -> None:
    names = [type(one).__name__ for one in Sampling(
        temperature=0.5, top_p=0.5, top_k=3, repetition_penalty=1.5
    ).processors()]  # fmt: skip
    assert names == [
        "RepetitionPenaltyLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
    ]


def test_seed() -> None:
    def draw(seed: int) -> list[float]:
        generator = Sampling(temperature=1.0, seed=seed).generator(torch.device("cpu"))
        return torch.rand(4, generator=generator).tolist()

    assert draw(0) == draw(0) != draw(1)
    assert Sampling(temperature=1.0).generator(torch.device("cpu")) is None


def test_a_row_is_chosen_by_itself() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    prompt = torch.tensor([3, 7])
    assert not Sampling(top_p=0.5, top_k=3, seed=1).changes_logits
    penalized = Chooser(Sampling(repetition_penalty=1e6), prompt)
    chosen = [int(penalized.choose(row)) for row in logits.abs() + 1]
    assert len({*chosen, 3, 7}) == 7, "what was seen comes again"
    sampling = Sampling(temperature=1.0, seed=4)
    assert sampling.changes_logits
    one, other = Chooser(sampling, prompt), Chooser(sampling, prompt)
    torch.manual_seed(0)
    first = [int(one.choose(row)) for row in logits]
    assert [int(other.choose(row)) for row in logits] == first
