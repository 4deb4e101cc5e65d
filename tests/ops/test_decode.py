"""decode by compiled loops and by PyTorch operations, against float64 over the unpacked past."""

import pytest
import torch

from oscar_mm import KVPolicy
from oscar_mm.kernels.self_check import relative_error
from oscar_mm.ops import decode_numba
from oscar_mm.ops.decode import decode
from oscar_mm.ops.decode_tables import SECOND, START, DecodeArguments
from oscar_mm.ops.decode_torch import decode_by_torch
from oscar_mm.ops.library import numbers_of
from oscar_mm.ops.samples import random_basis, random_pages, random_past
from oscar_mm.pages.layout import PageFormat
from oscar_mm.pages.quantize import unpack_by_torch
from oscar_mm.policy import Bits
from oscar_mm.quant.basis import Basis
from tests.cache.invariants import plain_attention
from tests.ops.arguments import channel_policy, stream_policy
from tests.pairs import pairs
from tests.test_attention import Largest

CPU = torch.device("cpu")
POLICIES = {
    "channel": channel_policy(),
    "oscar": KVPolicy.preset("oscar"),
    "kivi": KVPolicy.preset("kivi"),
    "quarot": KVPolicy.preset("quarot"),
    "stream": stream_policy(),
}


def past_of(
    row: int, pages, recent, sigma, items, recents, counts, formats, rotate: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a row, (1, KV heads, n, head_dim), entry by entry."""
    in_16_bit, in_pages = counts[row].tolist()
    sides = ([], [])
    for slot in recents[row, :in_16_bit].tolist():
        for side, parts in enumerate(sides):
            parts.append(recent[slot, side][:, None])
    for slot, used in items[row, :in_pages].tolist():
        number, used = divmod(used, SECOND)
        start, stop = divmod(used, START)
        basis = Basis(formats[0].head_dim, rotate, sigma)
        both = unpack_by_torch(pages[number][slot][None], formats[number], basis, torch.float32)
        for side, parts in zip(both, sides, strict=True):
            parts.append(side[0, :, start:stop])
    keys, values = (torch.cat(parts, dim=1)[None] for parts in sides)
    return keys, values


@pytest.fixture(params=["on", "off"])
def kernels(request, monkeypatch) -> None:
    monkeypatch.setenv("OSCAR_MM_KERNELS", request.param)


@pytest.mark.parametrize(
    ("kernels", "name", "head_dim", "bits", "rows"),
    pairs(
        ("on", "off"),
        POLICIES,
        (64, 80, 128, 192, 256),
        (((2, 2),), ((4, 4),), ((2, 2), (4, 4)), ((3, 2), (2, 3))),
        ((), (2,)),
    ),
    indirect=["kernels"],
)
@pytest.mark.usefixtures("kernels")
def test_equals_plain_attention(
    rows: tuple[int, ...], name: str, bits: tuple[tuple[int, int], ...], head_dim: int
) -> None:
    policy = POLICIES[name]
    formats = [PageFormat.of(policy, Bits(*one), 2, head_dim) for one in sorted(bits)]
    states, *tables = random_past(formats, policy.rotate, torch.float32, CPU, 1)
    queries, _, _, pages, recent, _ = states
    sigma = random_basis(formats[0], policy.rotate, CPU, rows).sigma
    assert sigma is not None
    states = (*states[:-1], sigma)
    scaling, numbers = head_dim**-0.5, numbers_of(*formats)
    found = decode(*states, *tables, scaling, numbers, policy.rotate)
    assert found.transpose(1, 2).is_contiguous()
    for row in range(len(queries)):
        of_row = sigma[row] if rows else sigma
        past = past_of(row, pages, recent, of_row, *tables[:3], formats, policy.rotate)
        whole = (
            torch.cat([side, states[at][row : row + 1]], dim=2)
            for at, side in zip((1, 2), past, strict=True)
        )
        expected = plain_attention(queries[row : row + 1], *whole)
        torch.testing.assert_close(found[row : row + 1].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("head_dim", "group"),
    [
        *((128, group) for group in (1, 3, 5, 7, 16)),
        *((256, group) for group in (2, 4, 6, 8, 12)),
    ],
)
def test_any_number_of_query_heads(head_dim: int, group: int) -> None:
    page_format = PageFormat.of(POLICIES["stream"], Bits(3, 2), 2, head_dim)
    (_, *states), *tables = random_past([page_format], True, torch.float32, CPU, 1)
    queries = torch.randn(2, 2 * group, 3, head_dim)
    keys, values, pages, recent, sigma = states
    how = (*tables, head_dim**-0.5, numbers_of(page_format), True)
    found = decode(queries, *states, *how)
    for row in range(2):
        past = past_of(row, pages, recent, sigma, *tables[:3], [page_format], True)
        new = (side[row : row + 1] for side in (keys, values))
        whole = (torch.cat(both, dim=2) for both in zip(past, new, strict=True))
        expected = plain_attention(queries[row : row + 1], *whole)
        torch.testing.assert_close(found[row : row + 1].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("highest", [-2.0, 0.0, 60.0])
@pytest.mark.usefixtures("kernels")
def test_sinks_enlarge_the_denominator(highest: float) -> None:
    page_format = PageFormat.of(POLICIES["stream"], Bits(3, 2), 2, 64)
    states, *tables = random_past([page_format], True, torch.float32, CPU, 1)
    queries, keys, values, pages, recent, sigma = states
    sinks = torch.linspace(highest - 4, highest, queries.shape[1])
    found = decode(*states, *tables, 0.125, numbers_of(page_format), True, sinks)
    for row in range(len(queries)):
        past = past_of(row, pages, recent, sigma, *tables[:3], [page_format], True)
        new = (side[row : row + 1] for side in (keys, values))
        whole = (torch.cat(both, dim=2) for both in zip(past, new, strict=True))
        expected = plain_attention(queries[row : row + 1], *whole, sinks=sinks)
        torch.testing.assert_close(found[row : row + 1].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [(3, 2), (4, 4)])
def test_cpu_kernels_take_16_bit(bits: tuple[int, int], dtype: torch.dtype) -> None:
    page_format = PageFormat.of(POLICIES["stream"], Bits(*bits), 2, 128)
    states, *tables = random_past([page_format], True, dtype, CPU, 1)
    arguments = DecodeArguments(*states, *tables, 0.1, numbers_of(page_format), True)
    found, expected = decode(*arguments), decode_by_torch(arguments)
    assert found.dtype == dtype
    assert relative_error(found.float(), expected.float()) < 0.005


@pytest.mark.usefixtures("kernels")
def test_a_float32_model_has_tokens_in_bfloat16() -> None:
    page_format = PageFormat.of(POLICIES["stream"], Bits(3, 2), 2, 128)
    (queries, keys, values, pages, recent, sigma), *tables = random_past(
        [page_format], True, torch.float32, CPU, 1
    )
    how = (*tables, 0.1, numbers_of(page_format), True)
    found = decode(queries, keys, values, pages, recent.bfloat16(), sigma, *how)
    expected = decode(queries, keys, values, pages, recent.bfloat16().float(), sigma, *how)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [0x7FC00000, -1], ids=["usual", "all bits set"])
def test_cpu_kernels_do_not_lose_nan(bits: int) -> None:
    page_format = PageFormat.of(POLICIES["stream"], Bits(3, 2), 2, 64)
    states, *tables = random_past([page_format], True, torch.float32, CPU, 1)
    states[0].view(torch.int32)[0, 0, 0, 3] = bits
    found = decode(*states, *tables, 0.1, numbers_of(page_format), True)
    assert found[0, 0, 0].isnan().all() and found[1:].isfinite().all()


@pytest.mark.parametrize("threads", [2, 5])
def test_cpu_kernels_give_the_same_bits_with_any_number_of_threads(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_format = PageFormat.of(POLICIES["stream"], Bits(3, 2), 2, 64)
    states, *tables = random_past([page_format], True, torch.float32, CPU, 1)
    found = []
    for count in (1, threads):
        monkeypatch.setattr(decode_numba, "threads_for", lambda _, count=count: count)
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        found.append(decode(*states, *tables, 0.1, numbers_of(page_format), True))
    assert torch.equal(*found)


@pytest.mark.usefixtures("kernels")
def test_without_pages() -> None:
    """All in 16-bit precision: no formats, no pools."""
    formats = [PageFormat.of(POLICIES["channel"], Bits(2, 2), 2, 64)]
    states, items, recents, counts, assignments = random_past(formats, True, torch.float32, CPU, 1)
    queries, keys, values, pages, recent, sigma = states
    counts[:, 1] = 0
    tables = (items, recents, counts, assignments)
    found = decode(queries, keys, values, [], recent, None, *tables, 0.125, [], False)
    past = past_of(0, pages, recent, sigma, *tables[:3], formats, True)
    whole = (torch.cat([x, y[:1]], dim=2) for x, y in zip(past, (keys, values), strict=True))
    expected = plain_attention(queries[:1], *whole)
    torch.testing.assert_close(found[:1].double(), expected, rtol=1e-5, atol=1e-5)
    expected = plain_attention(*(x[1:] for x in (queries, keys, values)))
    torch.testing.assert_close(found[1:].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["pages", "16 bit"])
def test_memory_does_not_grow_with_the_past(kind: str) -> None:
    page_format = PageFormat.of(POLICIES["channel"], Bits(2, 2), 1, 64)
    pages, basis = random_pages(8, page_format, CPU), random_basis(page_format, True, CPU)
    recent = torch.randn(64, 2, 1, 64)
    queries = torch.randn(1, 2, 1, 64)
    largest = []
    for tokens in (4096, 16384):
        items = torch.zeros(1, tokens // 128, 2, dtype=torch.int32)
        items[0, :, 0], items[0, :, 1] = torch.arange(tokens // 128) % 8, 128
        recents = torch.arange(tokens, dtype=torch.int32)[None] % 64
        counts = torch.tensor([[0, tokens // 128] if kind == "pages" else [tokens, 0]])
        states = (queries, queries[:, :1], queries[:, :1], [pages], recent, basis.sigma)
        tables = (items, recents, counts)
        how = (torch.zeros(1, 16), 0.125, numbers_of(page_format), True)
        arguments = DecodeArguments(*states, *tables, *how)
        with Largest(pages, recent, *tables, queries) as counted:
            decode_by_torch(arguments)
        largest.append(counted.bytes)
    assert largest[0] == largest[1] <= 2 * 2048 * 64 * 4
