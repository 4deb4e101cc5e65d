"""How far a kernel of linear is from PyTorch operations."""

from __future__ import annotations

from math import isnan

import pytest
import torch

from oscar_mm.fast_decode.linear import worst_error
from oscar_mm.fast_decode.linear_torch import LinearArguments, in_rows, linear_by_torch

PROBLEMS = ((3, 64, (5, 5)), (2, 96, (7, 7)))


@pytest.mark.parametrize("gated", [False, True])
def test_of_itself(gated: bool) -> None:
    error = worst_error(linear_by_torch, gated, torch.float32, torch.device("cpu"), PROBLEMS)
    assert error == 0


@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_one_wrong_row_of_one_problem_shows(value: float) -> None:
    def kernel(arguments: LinearArguments) -> torch.Tensor:
        output = linear_by_torch(arguments)
        if len(arguments.x) == 3:
            output[1] = value
        return output

    worst = worst_error(kernel, False, torch.float32, torch.device("cpu"), PROBLEMS)
    assert isnan(worst) if isnan(value) else worst == 1


@pytest.mark.parametrize(("gated", "total"), [(False, 12), (True, 6)])
def test_outputs_of_a_row(gated: bool, total: int) -> None:
    weights = [torch.zeros(6, 32)] * 2
    assert LinearArguments.of(torch.zeros(1, 32), weights, gated=gated).total == total


def test_rows_that_can_be_copied() -> None:
    whole = torch.zeros(8, 64, dtype=torch.bfloat16)
    assert in_rows(whole, whole[2:])
    assert not in_rows(whole, whole.t())
    assert not in_rows(whole.flatten()[1:])
