"""The Hadamard rotation."""

import pytest
import torch

from oscar_mm.quant.basis import hadamard, rotation_blocks

SIZES = [1, 2, 3, 7, 33, 64, 80, 96, 112, 127, 128, 256]


@pytest.mark.parametrize("size", SIZES)
def test_orthonormal_symmetric_and_its_own_inverse(size: int) -> None:
    matrix = hadamard(size)
    assert matrix.shape == (size, size) and matrix.dtype == torch.float32
    assert torch.equal(matrix, matrix.T)
    assert torch.allclose(matrix @ matrix, torch.eye(size), atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_blocks(size: int) -> None:
    blocks = rotation_blocks(size)
    assert sum(blocks) == size and list(blocks) == sorted(set(blocks), reverse=True)
    assert all(block & (block - 1) == 0 for block in blocks)
    # An outlier is spread evenly over its block and nowhere else.
    row, start = hadamard(size)[0], blocks[0]
    assert torch.allclose(row[:start].abs(), torch.full((start,), start**-0.5))
    assert not row[start:].any()


def test_sylvester_order() -> None:
    expected = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    assert torch.equal(hadamard(4), expected)


@pytest.mark.parametrize("size", [0, -64])
def test_no_channels(size: int) -> None:
    with pytest.raises(ValueError, match="head_dim"):
        rotation_blocks(size)


def test_made_in_inference_mode_and_used_with_gradients() -> None:
    hadamard.cache_clear()
    with torch.inference_mode():
        hadamard(16)
    x = torch.ones(3, 16, requires_grad=True)
    (x @ hadamard(16)).square().sum().backward()
    assert torch.allclose(x.grad, 2 * x.detach(), atol=1e-6)
