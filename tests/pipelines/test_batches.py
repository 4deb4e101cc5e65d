"""Which requests run together."""

from types import SimpleNamespace

import pytest
import torch

from oscar_mm import InputError
from oscar_mm.generation.prompt import Prompt
from oscar_mm.generation.sampling import Sampling
from oscar_mm.pipelines.batch import Batching, BatchRequest


def lengths(batching: Batching, tokens: list[int], answers: dict[int, int]) -> list[list[int]]:
    """Batches of requests of so many tokens; ``answers`` are lengths of answers, else 10."""
    requests = [
        SimpleNamespace(
            tokens=one, sampling=Sampling(max_new_tokens=answers.get(one, 10)), past=None
        )
        for one in tokens
    ]
    return [[one.tokens for one in batch] for batch in batching.batches(requests)]


@pytest.mark.parametrize(
    ("options", "answers", "expected"),
    [
        ({}, {}, [[100, 90, 60], [40, 30, 20], [5]]),
        ({"batch_size": 2}, {}, [[100, 90], [60, 40], [30, 20], [5]]),
        ({"max_padding": 0.0}, {}, [[100], [90], [60], [40], [30], [20], [5]]),
        ({"max_padding": 1.0}, {}, [[100, 90, 60, 40, 30, 20, 5]]),
        # Three rows of 100 and room for 10 tokens each.
        ({"max_padding": 1.0, "max_tokens": 330}, {}, [[100, 90, 60], [40, 30, 20, 5]]),
        ({"max_padding": 1.0, "max_tokens": 329}, {}, [[100, 90], [60, 40, 30, 20], [5]]),
        ({"max_tokens": 330}, {90: 200}, [[100], [90], [60, 40, 30], [20], [5]]),
        ({"max_tokens": 1}, {}, [[100], [90], [60], [40], [30], [20], [5]]),
    ],
)
def test_batches(options, answers, expected) -> None:
    assert lengths(Batching(**options), [5, 40, 100, 20, 90, 30, 60], answers) == expected


@pytest.mark.parametrize("name", ["batch_size", "max_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", None])
def test_bounds(name, value) -> None:
    with pytest.raises(InputError, match=f"{name}=.*whole number, at least 1"):
        Batching(**{name: value})


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), True, "half", None])
def test_padding_is_a_share(value) -> None:
    with pytest.raises(InputError, match=r"max_padding=.*from 0 to 1"):
        Batching(max_padding=value)


def test_bytes_of_a_request() -> None:
    inputs = {"input_ids": torch.zeros(1, 7).long(), "pixel_values": torch.zeros(3, 5)}
    prompt = Prompt(inputs, torch.zeros(1, 7), torch.ones(1), torch.zeros(1, 7).char())
    one = BatchRequest(0, prompt, Sampling(), 0.1)
    assert (one.tokens, one.nbytes) == (7, 7 * 8 + 15 * 4)
