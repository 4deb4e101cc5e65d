"""Running attention: blocks in any order and any size give one softmax."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_mm.ops import running_attention
from oscar_mm.ops.running_attention import RunningAttention
from oscar_mm.quant.basis import Basis
from tests.cache.invariants import chunk, plain_attention


def running(
    queries: torch.Tensor, blocks: list[tuple[int, int, bool]], past: int, keys, values
) -> torch.Tensor:
    """Attention with the past in these blocks (start, stop, stored), then the new tokens."""
    sigma = torch.linspace(0.5, 2, 64)[None].expand(2, -1)
    basis = Basis(64, True, sigma)
    state = RunningAttention(queries[0], 2, 0.125, basis)
    for start, stop, stored in blocks:
        key, value = keys[0, :, start:stop], values[0, :, start:stop]
        if stored:
            key, value = basis.keys_in(key), basis.values_in(value)
        state.add(key, value, stored=stored)
    state.add(keys[0, :, past:], values[0, :, past:], stored=False, first_query=0)
    return state.output()[None]


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 7), st.integers(0, 60), st.integers(1, 300))
def test_blocks(data: st.DataObject, tokens: int, past: int, elements: int) -> None:
    queries, keys, values = chunk(0, past + tokens)
    queries = queries[:, :, past:]
    cuts = data.draw(st.sets(st.integers(0, past))) | {0, past}
    bounds = sorted(cuts)
    blocks = [(start, stop, data.draw(st.booleans())) for start, stop in pairwise(bounds)]
    blocks = data.draw(st.permutations(blocks))
    before = running_attention._SCORE_ELEMENTS
    running_attention._SCORE_ELEMENTS = elements
    try:
        found = running(queries, blocks, past, keys, values)
    finally:
        running_attention._SCORE_ELEMENTS = before
    expected = plain_attention(queries, keys, values)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0])
def test_scores_of_any_size(scale: float) -> None:
    queries, keys, values = chunk(1, 50)
    queries = queries * scale
    found = running(queries[:, :, 40:], [(0, 7, True), (7, 40, False)], 40, keys, values)
    expected = plain_attention(queries[:, :, 40:], keys, values)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


def test_long_new_chunk_in_several_blocks() -> None:
    queries, keys, values = chunk(2, 100)
    state = RunningAttention(queries[0], 2, 0.125, None)
    for start in range(0, 100, 32):
        block = slice(start, start + 32)
        state.add(keys[0, :, block], values[0, :, block], stored=False, first_query=start)
    expected = plain_attention(queries, keys, values)
    torch.testing.assert_close(state.output()[None].double(), expected, rtol=1e-5, atol=1e-5)
