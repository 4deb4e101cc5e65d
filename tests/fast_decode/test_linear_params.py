"""The matrices of a launch of linear."""

import pytest
import torch

from oscar_mm.fast_decode import linear, linear_params, linear_rows


def test_addresses_and_sizes_are_those_of_the_tensors() -> None:
    weights = [torch.zeros(outputs, 256) for outputs in (4, 6, 2)]
    biases = [torch.zeros(4), None, torch.zeros(2)]
    residual, output = torch.zeros(3, 12), torch.zeros(3, 12)
    told = linear_params.matrices(weights, biases, residual, output)
    for launch in (linear.Params(1, 2, told, 0.5), linear_rows.Params(1, told, 3, 5, 7)):
        params = launch.matrices
        assert list(params.weights) == [weight.data_ptr() for weight in weights]
        assert list(params.biases) == [biases[0].data_ptr(), None, biases[2].data_ptr()]
        assert (params.residual, params.output) == (residual.data_ptr(), output.data_ptr())
        assert list(params.outputs) == [4, 6, 2]
        assert (params.total, params.width) == (12, 256)


def test_what_is_not_there_is_null() -> None:
    weights, output = [torch.zeros(4, 256)], torch.zeros(1, 4)
    params = linear_params.matrices(weights, [None], None, output)
    assert params.residual is None
    assert list(params.weights)[1:] == [None, None] and list(params.biases) == [None] * 3
    assert list(params.outputs) == [4, 0, 0]


@pytest.mark.parametrize(("gated", "total"), [(False, 12), (True, 6)])
def test_outputs_of_a_row(gated: bool, total: int) -> None:
    weights = [torch.zeros(6, 32)] * 2
    assert linear_params.total_outputs(weights, gated) == total
