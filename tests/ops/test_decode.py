"""decode by PyTorch operations, on tables made by hand, against float64 over the unpacked past."""

import pytest
import torch

from oscar_mm import KVPolicy
from oscar_mm.cache.layout import PageFormat
from oscar_mm.cache.stream import START
from oscar_mm.cache.tables import SECOND
from oscar_mm.ops.decode import decode
from oscar_mm.ops.decode_torch import decode_by_torch
from oscar_mm.ops.dequantize import unpack_by_torch
from oscar_mm.ops.formats import text_of
from oscar_mm.ops.samples import random_basis, random_pages, random_past
from oscar_mm.quant.basis import Basis
from tests.cache.invariants import plain_attention
from tests.test_attention import Largest

CPU = torch.device("cpu")
POLICIES = {name: KVPolicy.preset(name) for name in ("compact", "oscar", "kivi", "quarot")}


def past_of(
    row: int, pages, blocks, sigma, items, counts, formats, rotate: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a row, (1, KV heads, n, head_dim), entry by entry."""
    halves, in_pages = counts[row].tolist()
    sides = ([], [])
    for half, filled in items[row, :halves].tolist():
        for side, parts in enumerate(sides):
            start = half % 2 * 16
            parts.append(blocks[half // 2, side, :, start : start + filled])
    for slot, used in items[row, halves : halves + in_pages].tolist():
        number, used = divmod(used, SECOND)
        start, stop = divmod(used, START)
        basis = Basis(formats[0].head_dim, rotate, sigma)
        both = unpack_by_torch(pages[number][slot][None], formats[number], basis, torch.float32)
        for side, parts in zip(both, sides, strict=True):
            parts.append(side[0, :, start:stop])
    keys, values = (torch.cat(parts, dim=1)[None] for parts in sides)
    return keys, values


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("bits", [(2,), (4,), (2, 4)])
@pytest.mark.parametrize("name", POLICIES)
def test_equals_plain_attention(name: str, bits: tuple[int, ...], head_dim: int) -> None:
    policy = POLICIES[name]
    formats = [PageFormat.of(policy, one, 2, head_dim) for one in bits]
    states, *tables = random_past(formats, policy.rotate, torch.float32, CPU, 1)
    queries, _, _, pages, blocks, sigma = states
    scaling, texts = head_dim**-0.5, [text_of(one) for one in formats]
    found = decode(*states, *tables, scaling, texts, policy.rotate)
    assert found.transpose(1, 2).is_contiguous()
    for row in range(len(queries)):
        past = past_of(row, pages, blocks, sigma, *tables[:2], formats, policy.rotate)
        whole = (
            torch.cat([side, states[at][row : row + 1]], dim=2)
            for at, side in zip((1, 2), past, strict=True)
        )
        expected = plain_attention(queries[row : row + 1], *whole)
        torch.testing.assert_close(found[row : row + 1].double(), expected, rtol=1e-5, atol=1e-5)


def test_without_pages() -> None:
    """All in 16 bit: no formats, no pools."""
    formats = [PageFormat.of(POLICIES["compact"], 2, 2, 64)]
    states, items, counts, assignments = random_past(formats, True, torch.float32, CPU, 1)
    queries, keys, values, pages, blocks, sigma = states
    counts[:, 1] = 0
    tables = (items, counts, assignments)
    found = decode(queries, keys, values, [], blocks, None, *tables, 0.125, [], False)
    past = past_of(0, pages, blocks, sigma, items, counts, formats, True)
    whole = (torch.cat([x, y[:1]], dim=2) for x, y in zip(past, (keys, values), strict=True))
    expected = plain_attention(queries[:1], *whole)
    torch.testing.assert_close(found[:1].double(), expected, rtol=1e-5, atol=1e-5)
    expected = plain_attention(*(x[1:] for x in (queries, keys, values)))
    torch.testing.assert_close(found[1:].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["pages", "halves"])
def test_memory_does_not_grow_with_the_past(kind: str) -> None:
    page_format = PageFormat.of(POLICIES["compact"], 2, 1, 64)
    pages, basis = random_pages(8, page_format, CPU), random_basis(page_format, True, CPU)
    blocks = torch.randn(4, 2, 1, 32, 64)
    queries = torch.randn(1, 2, 1, 64)
    largest = []
    for tokens in (4096, 16384):
        count = tokens // (128 if kind == "pages" else 16)
        items = torch.zeros(1, count, 2, dtype=torch.int32)
        items[0, :, 0] = torch.arange(count) % 8
        items[0, :, 1] = 128 if kind == "pages" else 16
        counts = torch.tensor([[0, count] if kind == "pages" else [count, 0]])
        states = (queries, queries[:, :1], queries[:, :1], [pages], blocks, basis.sigma)
        with Largest(pages, blocks, items, queries) as counted:
            decode_by_torch(*states, items, counts, 0.125, [page_format], True)
        largest.append(counted.bytes)
    assert largest[0] == largest[1] <= 2 * 2048 * 64 * 4
