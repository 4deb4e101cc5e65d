"""Query-key balancing changes no score and makes outlier channels harmless; Hadamard rotation."""

import pytest
import torch

from oscar_mm import KVPolicy, roundtrip
from oscar_mm.quant.basis import Basis, hadamard, rotation_blocks
from tests.quant.synthetic import attention, multimodal, relative_error, sigma_of


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("rotate", [True, False])
def test_scores_are_unchanged(head_dim: int, rotate: bool) -> None:
    queries, keys, values, _ = multimodal(0, kv_heads=2, group=3, tokens=96, head_dim=head_dim)
    basis = Basis(head_dim, rotate, sigma_of(queries, keys))
    stored = basis.keys_in(keys[0])
    grouped = queries[0].view(2, -1, head_dim)
    scores = basis.queries_in(grouped) @ stored.transpose(1, 2)
    assert relative_error(scores, grouped.double() @ keys[0].double().transpose(1, 2)) < 1e-6
    assert relative_error(basis.keys_out(stored), keys[0]) < 1e-6
    assert relative_error(basis.values_out(basis.values_in(values[0])), values[0]) < 1e-6


@pytest.mark.parametrize(("name", "seed"), [("channel", 0), ("oscar", 1)])
def test_scale_moved_between_queries_and_keys(name: str, seed: int) -> None:
    """A model can move scale from queries to keys for free; a balanced cache does not notice."""
    queries, keys, values, ids = multimodal(seed, tokens=512, kv_heads=2, outliers=1.0)
    factor = torch.ones(128)
    factor[[5, 5 + 64, 40, 40 + 64]] = 8
    moved = (queries / factor, keys * factor)
    exact = attention(queries, keys, values)
    assert relative_error(attention(*moved, values), exact) < 1e-6

    def packed(balance: str | None, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        policy = KVPolicy.preset(name, balance=balance)
        result = roundtrip(k, values, policy, ids, sigma=sigma_of(q, k))
        scores = q.unflatten(1, (2, -1)) @ result.k.transpose(2, 3)[:, :, None]
        return scores, attention(q, result.k, result.v)

    scores = queries.unflatten(1, (2, -1)) @ keys.transpose(2, 3)[:, :, None]
    balanced_scores, balanced = packed("weights", queries, keys)
    assert relative_error(packed("weights", *moved)[1], balanced) < 1e-5
    plain_scores, plain = packed(None, queries, keys)
    worse_scores, worse = packed(None, *moved)
    assert relative_error(worse_scores, scores) > 1.4 * relative_error(plain_scores, scores)
    assert relative_error(balanced_scores, scores) < 1.1 * relative_error(plain_scores, scores)
    assert relative_error(worse, exact) > 1.1 * relative_error(plain, exact)
    assert relative_error(worse, exact) > 1.05 * relative_error(balanced, exact)


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
