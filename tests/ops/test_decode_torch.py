"""Attention over parts in any order and of any size is attention over the whole."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_mm.ops import decode_torch
from oscar_mm.ops.decode_torch import MergedAttention
from oscar_mm.quant.basis import Basis
from tests.cache.invariants import chunk, plain_attention


def merged(queries, keys, values, past: int, cuts: list[tuple[int, int]]) -> torch.Tensor:
    state = MergedAttention(queries[:, :, past:], 0.125)
    for start, stop in cuts:
        state.add(keys[:, :, start:stop], values[:, :, start:stop])
    state.add(keys[:, :, past:], values[:, :, past:], causal=True)
    return state.output()


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(1, 40), st.integers(0, 90))
def test_parts(data: st.DataObject, tokens: int, past: int) -> None:
    queries, keys, values = chunk(0, past + tokens)
    bounds = sorted(data.draw(st.sets(st.integers(0, past))) | {0, past})
    cuts = data.draw(st.permutations(list(pairwise(bounds))))
    found = merged(queries, keys, values, past, cuts)
    expected = plain_attention(queries[:, :, past:], keys, values)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(1, 7), st.integers(1, 60))
def test_parts_in_two_coordinates(data: st.DataObject, tokens: int, past: int) -> None:
    """Some balanced and rotated, with queries of their own; the two are merged at the end."""
    queries, keys, values = chunk(0, past + tokens)
    queries = queries[:, :, past:]
    basis = Basis(64, True, torch.linspace(0.5, 2, 64)[None].expand(2, -1))
    turned = basis.queries_in(queries[0].reshape(2, -1, 64)).view_as(queries)
    plain, stored = MergedAttention(queries, 0.125), MergedAttention(turned, 0.125)
    plain.add(keys[:, :, past:], values[:, :, past:], causal=True)
    bounds = sorted(data.draw(st.sets(st.integers(0, past))) | {0, past})
    for start, stop in data.draw(st.permutations(list(pairwise(bounds)))):
        key, value = keys[:, :, start:stop], values[:, :, start:stop]
        if start == 0 or data.draw(st.booleans()):
            stored.add(basis.keys_in(key), basis.values_in(value))
        else:
            plain.add(key, value)
    plain.merge(basis.values_out(stored.output()), stored.total)
    expected = plain_attention(queries, keys, values)
    torch.testing.assert_close(plain.output().double(), expected, rtol=1e-5, atol=1e-5)


def test_no_part() -> None:
    state = MergedAttention(torch.zeros(1, 2, 3, 64), 0.125)
    for read in (state.output, lambda: state.total):
        with pytest.raises(RuntimeError, match="no keys and values were added"):
            read()


@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0])
def test_scores_of_any_size(scale: float) -> None:
    queries, keys, values = chunk(1, 50)
    found = merged(queries * scale, keys, values, 20, [(0, 7), (7, 20)])
    expected = plain_attention(queries[:, :, 20:] * scale, keys, values)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("elements", [1, 1000, 1 << 24])
def test_without_flash_attention(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_torch, "_SCORE_ELEMENTS", elements)
    monkeypatch.setattr(decode_torch, "_attention", decode_torch._without_flash)
    queries, keys, values = chunk(2, 70)
    found = merged(queries, keys, values, 40, [(3, 40), (0, 3)])
    expected = plain_attention(queries[:, :, 40:], keys, values)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_half_precision(head_dim: int, dtype: torch.dtype, device: str) -> None:
    shape = {"head_dim": head_dim, "group": 4, "batch": 2}
    whole = tuple(x.to(dtype) for x in chunk(3, 400, **shape))
    queries, keys, values = (x.to(device) for x in whole)
    state = MergedAttention(queries[:, :, 300:], head_dim**-0.5)
    for start in range(0, 300, 60):
        part = slice(start, start + 60)
        state.add(keys[:, :, part], values[:, :, part])
    state.add(keys[:, :, 300:], values[:, :, 300:], causal=True)
    found = state.output()
    assert found.dtype == dtype
    expected = plain_attention(whole[0][:, :, 300:], *whole[1:])
    error = (found.double().cpu() - expected).norm() / expected.norm()
    assert error < {torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    """Float32 has no flash attention there."""
    queries, keys, values = (x.to("cuda", dtype) for x in chunk(4, 1000, group=8))
    found = merged(queries, keys, values, 700, [(0, 128), (128, 700)])
    whole = (x.cpu() for x in (queries[:, :, 700:], keys, values))
    expected = plain_attention(*whole)
    error = (found.double().cpu() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 5e-3)
