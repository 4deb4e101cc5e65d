"""The decode kernel against float64 attention over exactly the unpacked values. Needs a GPU."""

import logging
from itertools import product
from pathlib import Path

import pytest
import torch

from oscar_mm import KVPolicy, OscarCache
from oscar_mm.cache.paged_attention import attend_stored
from oscar_mm.kernels.launch import SWITCH, multiprocessors
from oscar_mm.kernels.self_check import CheckedKernels
from oscar_mm.modality import PADDING
from oscar_mm.ops import decode_tables
from oscar_mm.ops.append import append
from oscar_mm.ops.decode import BlockShape, DecodeKernel, Specialization, decode_kernel
from oscar_mm.ops.decode_tables import (
    MANY_SEGMENTS,
    DecodeArguments,
    StoredTokens,
    assign,
    tables_of,
)
from oscar_mm.ops.library import numbers_of
from oscar_mm.ops.samples import random_past
from tests.cache.invariants import Chunk, announce, chunk, plain_attention
from tests.ops.arguments import channel_policy, page_format, stream_policy
from tests.pairs import pairs

pytestmark = pytest.mark.gpu

MIXED = channel_policy(bits={"text": 4, "audio": 16})
STREAM = stream_policy()
STREAM_2 = stream_policy((2, 2))
STREAM_MIXED = stream_policy({"text": (4, 2), "image": (3, 2), "video": (3, 2), "audio": 16})
COMPACT = channel_policy()
BOUNDS = {torch.bfloat16: 3e-3, torch.float16: 1.5e-3}
"""Rounding the output alone costs 1.7e-3 and 2e-4; the rest is that of queries and weights."""


def filled(
    policy: str | KVPolicy, ids: torch.Tensor, dtype: torch.dtype = torch.bfloat16, **shape: int
) -> OscarCache:
    """A layer on the GPU that holds random keys and values of these modalities (batch, tokens)."""
    cache = OscarCache(policy)
    _, keys, values = (x.to("cuda", dtype) for x in chunk(0, ids.shape[1], **shape))
    cache.expect(ids)
    cache.update(keys, values, 0)
    return cache


def attention(
    cache: OscarCache, new: Chunk, real: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of a further chunk, which is not stored: by the cache, and in float64 over
    the unpacked cache."""
    queries, keys, values = new
    layer, batch, tokens = cache.layers[0], keys.shape[0], keys.shape[2]
    stored = cache.unpacked(0, torch.float32)
    announce(cache, batch, tokens, None)
    step = cache.kv_manager.advance(cache._expected.take(batch, tokens))
    output = attend_stored(layer, queries, keys, values, queries.shape[-1] ** -0.5, step)
    everything = (
        torch.cat([past, x], dim=2).cpu() for past, x in zip(stored, new[1:], strict=True)
    )
    if real is not None:
        real = torch.cat([real, torch.ones(batch, tokens, dtype=torch.bool)], dim=1)
    return output, plain_attention(queries.cpu(), *everything, real)


def on_gpu(tokens: int, dtype: torch.dtype = torch.bfloat16, **shape: int) -> Chunk:
    return tuple(x.to("cuda", dtype) for x in chunk(1, tokens, **shape))


def kernel_of(cache: OscarCache, columns: int = 4) -> DecodeKernel | None:
    """What the operation uses for the cache's first layer."""
    layer = cache.layers[0]
    formats = tuple(layer.formats.values())
    rotate = cache.policy.rotate
    return decode_kernel(formats, layer.head_dim, rotate, layer.dtype, columns, layer.device)


def error_of(output: torch.Tensor, expected: torch.Tensor) -> float:
    return float((output.double().cpu() - expected).norm() / expected.norm())


def images_and_text(tokens: int, batch: int = 1) -> torch.Tensor:
    return (torch.arange(tokens) // 37 % 3 == 1).to(torch.int64).expand(batch, tokens)


@pytest.mark.parametrize("switch", ["auto", "no-bulk"])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize(
    "policy",
    [
        *(COMPACT, "oscar", "kivi", "quarot", "bf16", channel_policy(bits=4), MIXED),
        *(stream_policy(bits) for bits in product((2, 3, 4), repeat=2)),
        *(STREAM_MIXED, stream_policy(value_group=32), stream_policy(rotate=False, center=False)),
    ],
)
def test_policies(
    policy: str | KVPolicy, head_dim: int, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, switch)
    shape = {"kv_heads": 2, "group": 4, "head_dim": head_dim}
    cache = filled(policy, images_and_text(1500), **shape)
    output, expected = attention(cache, on_gpu(1, **shape))
    by_token = cache.policy.key_axis == "token" or not cache.policy.packs
    few_groups = not cache.policy.packs or head_dim <= 4 * cache.policy.value_group
    fits = few_groups and (head_dim <= 128 or by_token)
    assert (kernel_of(cache) is not None) == fits
    assert error_of(output, expected) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize(
    ("tokens", "group", "dtype", "policy"),
    pairs((1, 2, 5, 16), (1, 3, 4, 8, 16), BOUNDS, (COMPACT, STREAM, STREAM_MIXED)),
)
def test_queries(tokens: int, group: int, dtype: torch.dtype, policy: KVPolicy) -> None:
    shape = {"batch": 2, "kv_heads": 2, "group": group, "head_dim": 128}
    cache = filled(policy, images_and_text(700, 2), dtype, **shape)
    output, expected = attention(cache, on_gpu(tokens, dtype, **shape))
    assert kernel_of(cache, tokens * group) is not None
    assert error_of(output, expected) < BOUNDS[dtype]


@pytest.mark.parametrize("tokens", [1, 4, 5, 15, 31, 36, 37, 127, 164, 165, 292, 4099, 70_000])
@pytest.mark.parametrize("policy", [COMPACT, STREAM])
def test_lengths(policy: KVPolicy, tokens: int) -> None:
    shape = {"kv_heads": 2, "group": 4, "head_dim": 128}
    cache = filled(policy, images_and_text(tokens), **shape)
    output, expected = attention(cache, on_gpu(1, **shape))
    assert error_of(output, expected) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("switch", ["auto", "no-bulk"])
@pytest.mark.parametrize(
    ("policy", "buffers"), [(channel_policy(key_group=64), 7), (MIXED, 4), (STREAM, 5)]
)
def test_fewer_buffers_than_warps(
    policy: KVPolicy, buffers: int, switch: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on GPUs with 99 KiB of shared memory; every warp has several pages."""
    monkeypatch.setenv(SWITCH, switch)
    monkeypatch.setenv("OSCAR_MM_CACHE", str(tmp_path))
    monkeypatch.setattr(Specialization, "shape", lambda self, limit: BlockShape(8, buffers, 0))
    fresh = CheckedKernels("decode", DecodeKernel, DecodeKernel.disagreement, 0.02)
    monkeypatch.setattr(DecodeKernel, "checked", fresh)
    shape = {"kv_heads": 4, "group": 4, "head_dim": 128}
    cache = filled(policy, images_and_text(70_000), **shape)
    output, expected = attention(cache, on_gpu(1, **shape))
    assert kernel_of(cache) is not None
    assert error_of(output, expected) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("policy", [COMPACT, STREAM])
def test_unequal_rows_and_padding(policy: KVPolicy) -> None:
    ids = torch.zeros(5, 900, dtype=torch.int64)
    for row, pads in enumerate((0, 899, 500, 33, 800)):
        ids[row, :pads] = PADDING
    shape = {"batch": 5, "kv_heads": 2, "group": 4, "head_dim": 128}
    cache = filled(policy, ids, **shape)
    output, expected = attention(cache, on_gpu(1, **shape), ids != PADDING)
    assert error_of(output, expected) < BOUNDS[torch.bfloat16]


def test_a_long_row_among_many() -> None:
    """More rows than thread blocks: these continue row to row, and many share the long one."""
    rows, tokens = 160, 6000
    ids = torch.full((rows, tokens), PADDING)
    ids[:, -20:] = 0
    ids[rows // 2] = 0
    shape = {"batch": rows, "kv_heads": 1, "group": 4, "head_dim": 64}
    cache = filled("channel", ids, **shape)
    output, expected = attention(cache, on_gpu(1, **shape), ids != PADDING)
    assert error_of(output, expected) < BOUNDS[torch.bfloat16]
    assert error_of(output[rows // 2], expected[rows // 2]) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("switch", ["auto", "no-bulk"])
@pytest.mark.parametrize(("group", "tokens"), [(1, 1), (4, 1), (8, 1), (5, 3)])
@pytest.mark.parametrize("policy", [STREAM, STREAM_2, COMPACT])
def test_many_rows(
    policy: KVPolicy, group: int, tokens: int, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of unequal lengths, so many that each warp has segments of its own."""
    monkeypatch.setenv(SWITCH, switch)
    most, rows = 400, MANY_SEGMENTS * multiprocessors(torch.device("cuda:0")) // 3 + 1
    ids = images_and_text(most, rows).clone()
    for row in range(rows):
        ids[row, : row * most // (rows - 1)] = PADDING
    shape = {"batch": rows, "kv_heads": 3, "group": group, "head_dim": 128}
    cache = filled(policy, ids, **shape)
    output, expected = attention(cache, on_gpu(tokens, **shape), ids != PADDING)
    errors = [error_of(*one) for one in zip(output, expected, strict=True)]
    assert max(errors) < 2 * BOUNDS[torch.bfloat16]


def test_many_rows_beside_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The long row is divided among many warps; thread blocks get the same result."""
    shape = {"kv_heads": 4, "group": 4, "head_dim": 64}
    cache = filled(STREAM, images_and_text(60_000), **shape)
    layer, (queries, keys, values) = cache.layers[0], on_gpu(1, batch=100, **shape)
    pages, slots = cache.kv_manager.sequences[0].entries((*cache.policy.packed_bits, None))
    # The others share its first pages and tokens.
    rows = [(pages[: 2 * (row % 4)], slots[: 5 * row % len(slots)]) for row in range(100)]
    rows[50] = pages, slots
    formats = tuple(layer.formats.values())
    kernel = kernel_of(cache)
    assert kernel is not None

    def run() -> torch.Tensor:
        assign.cache_clear()
        stored = StoredTokens.of(rows)
        tables = tables_of(stored, 4, 4, multiprocessors(layer.device), layer.device)
        assert (
            tables.assignments[:, 14] == decode_tables.by_warps(400, multiprocessors(layer.device))
        ).all()
        pages = [layer.pages[one.bits].storage for one in formats]
        states = (queries, keys, values, pages, layer.recent.storage, layer.sigma)
        numbers = numbers_of(*formats)
        return kernel(DecodeArguments(*states, *tables.of_past, 0.1, numbers, True))

    of_warps = [run() for _ in range(3)]
    assert all(torch.equal(one, of_warps[0]) for one in of_warps)
    monkeypatch.setattr(decode_tables, "by_warps", lambda *_: False)
    of_blocks = run().double().cpu()
    for one, other in zip(of_warps[0], of_blocks, strict=True):
        assert error_of(one, other) < BOUNDS[torch.bfloat16]


def test_a_row_that_has_ended_is_zero() -> None:
    shape = {"batch": 2, "kv_heads": 2, "group": 4, "head_dim": 128}
    cache = filled("channel", torch.zeros(2, 300, dtype=torch.int64), **shape)
    queries, keys, values = on_gpu(1, **shape)
    cache.expect(torch.tensor([[PADDING], [0]]))
    step = cache.kv_manager.advance(cache._expected.take(2, 1))
    output = attend_stored(cache.layers[0], queries, keys, values, 0.1, step)
    assert not output[0].any() and output[1].abs().sum() > 0


@pytest.mark.parametrize("policy", [COMPACT, STREAM, STREAM_2])
def test_scores_of_any_size(policy: KVPolicy) -> None:
    """Scores from 1 to 1,000; token norms over four decades, a few huge channels, 200 random pasts.

    Stream pages read queries of 16 bits, others of 22; this shows where two tokens nearly tie.
    """
    errors = {seed: error_at(10 ** (seed / 199 * 3), seed, policy) for seed in range(200)}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < (BOUNDS[torch.bfloat16] if policy is COMPACT else 5e-3), worst
    assert sorted(errors.values())[-5] < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize(
    ("policy", "group", "dtype"),
    pairs(
        (COMPACT, "oscar", "kivi", channel_policy(bits=4), MIXED, STREAM, STREAM_2, STREAM_MIXED),
        (4, 5, 8),
        BOUNDS,
    ),
)
def test_large_scores(policy: str | KVPolicy, group: int, dtype: torch.dtype) -> None:
    for seed, size in enumerate((1, 10, 30, 100, 300, 1000)):
        assert error_at(size, seed, policy, group, dtype) < BOUNDS[dtype], size


def error_at(
    size: float,
    seed: int,
    policy: str | KVPolicy,
    group: int = 4,
    dtype: torch.dtype = torch.bfloat16,
) -> float:
    """Where the largest score is of this size: queries against keys that few of them single out."""
    shape = {"kv_heads": 2, "group": group, "head_dim": 128}
    generator = torch.Generator().manual_seed(seed)
    cache = OscarCache(policy)
    _, keys, values = chunk(seed, 2000, **shape)
    keys *= torch.logspace(-2, 2, 2000)[torch.randperm(2000, generator=generator)][:, None]
    keys[..., 5] *= 50
    values *= torch.logspace(-1, 1, 2000).flip(0)[:, None]
    cache.expect(images_and_text(2000))
    cache.update(keys.to("cuda", dtype), values.to("cuda", dtype), 0)
    queries, *rest = on_gpu(1, dtype, **shape)
    past = cache.unpacked(0, torch.float32)[0].repeat_interleave(group, dim=1)
    scores = queries.float() @ past.transpose(2, 3) * 128**-0.5
    queries = (queries * (size / scores.abs().amax(dim=(2, 3), keepdim=True))).to(dtype)
    return error_of(*attention(cache, (queries, *rest)))


@pytest.mark.parametrize("policy", [COMPACT, STREAM])
def test_memory_that_was_never_written_is_not_used(policy: KVPolicy) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        shape = {"kv_heads": 2, "group": 4, "head_dim": 128}
        cache = filled(policy, images_and_text(777), **shape)
        output, expected = attention(cache, on_gpu(3, **shape))
        assert error_of(output, expected) < BOUNDS[torch.bfloat16]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("policy", [COMPACT, STREAM])
def test_deterministic_on_any_stream_and_in_a_graph(policy: KVPolicy) -> None:
    shape = {"kv_heads": 4, "group": 4, "head_dim": 128}
    cache = filled(policy, images_and_text(9000), **shape)
    layer, (queries, keys, values) = cache.layers[0], on_gpu(1, **shape)
    step = cache.kv_manager.advance(cache._expected.take(1, 1))

    def run() -> torch.Tensor:
        return attend_stored(layer, queries, keys, values, 0.1, step)

    first = run().clone()
    assert all(torch.equal(run(), first) for _ in range(20))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        other = run()
    stream.synchronize()
    assert torch.equal(other, first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run()
    for _ in range(3):
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, first)


def test_with_other_launches() -> None:
    """In a graph in which each launch writes what the next one reads: as if each waited."""
    device, dtype, rounds = torch.device("cuda:0"), torch.bfloat16, 40
    made = page_format((3, 2), 128, stream_policy())
    states, *tables = random_past((made,), True, dtype, device, multiprocessors(device))
    queries, keys, values, pages, recent, sigma = states
    rows, slots = len(keys), len(recent)
    recent = torch.cat([recent, torch.zeros_like(recent[:rows])])
    kernel = decode_kernel((made,), 128, True, dtype, queries.shape[1] // 2 * 3, device)
    assert kernel is not None
    writes = torch.tensor([[row, 0, slots + row] for row in range(rows)])
    writes = writes.to(device, torch.int32)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    arguments = DecodeArguments(
        *(queries, keys, values, pages, recent, sigma, *tables, 0.1, numbers_of(made), True)
    )
    come = torch.randn(rounds, *queries.shape, device=device, dtype=dtype)

    def run(overlap: bool) -> list[torch.Tensor]:
        found = []
        for new in come:
            queries.copy_(new)
            keys.copy_(new[:, : keys.shape[1]])
            values.copy_(new[:, -keys.shape[1] :])
            output = kernel(arguments, early=overlap)
            append(keys, values, recent, writes, flag, overlap)
            found += [output.clone(), recent[slots:].clone()]
        return found

    expected = run(overlap=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(overlap=True)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        for found, right in zip(captured, expected, strict=True):
            assert torch.equal(found, right)
            found.zero_()


@pytest.mark.parametrize("writes", [[[0, 0, -1]], [[0, 0, 3]]])
def test_waiting_for_append_is_waiting_for_decode(writes: list[list[int]]) -> None:
    """Also where no token is written."""
    device, dtype = torch.device("cuda:0"), torch.bfloat16
    shape = {"kv_heads": 8, "group": 4, "head_dim": 128}
    cache = filled(STREAM, images_and_text(60_000), **shape)
    layer, (queries, keys, values) = cache.layers[0], on_gpu(1, **shape)
    step = cache.kv_manager.advance(cache._expected.take(1, 1))
    right = attend_stored(layer, queries, keys, values, 0.1, step)
    recent = torch.zeros(4, 2, 8, 128, device=device, dtype=dtype)
    table = torch.tensor(writes, dtype=torch.int32, device=device)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    for _ in range(20):
        output = attend_stored(layer, queries, keys, values, 0.1, step)
        append(keys, values, recent, table, flag, True)
        assert torch.equal(output.clone(), right)
        output.zero_()


def test_a_kernel_that_disagrees_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = DecodeKernel.__call__

    def wrong(kernel: DecodeKernel, arguments: DecodeArguments) -> torch.Tensor:
        return right(kernel, arguments).roll(1, dims=1)

    monkeypatch.setenv("OSCAR_MM_CACHE", str(tmp_path))
    monkeypatch.setattr(DecodeKernel, "__call__", wrong)
    fresh = CheckedKernels("decode", DecodeKernel, DecodeKernel.disagreement, 0.02)
    monkeypatch.setattr(DecodeKernel, "checked", fresh)
    shape = {"kv_heads": 2, "group": 4, "head_dim": 128}
    with caplog.at_level(logging.ERROR):
        cache = filled("channel", images_and_text(700), **shape)
        output, expected = attention(cache, on_gpu(1, **shape))
    assert error_of(output, expected) < BOUNDS[torch.bfloat16]
    assert kernel_of(cache) is None
    assert "decode kernel disagrees" in caplog.text


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("policy", [COMPACT, "oscar", "bf16", MIXED, STREAM])
@pytest.mark.parametrize("past", [100, 700, 20_000])
def test_later_turn(past: int, policy: str | KVPolicy, dtype: torch.dtype) -> None:
    """More new tokens than the kernel takes: the past is unpacked, piece by piece."""
    shape = {"kv_heads": 2, "group": 4, "head_dim": 128}
    cache = filled(policy, images_and_text(past), dtype, **shape)
    output, expected = attention(cache, on_gpu(90, dtype, **shape))
    # Each piece's output and the unpacked keys and values are rounded to 16 bit.
    assert error_of(output, expected) < 3 * BOUNDS[dtype]


def test_later_turn_with_padding() -> None:
    ids = torch.zeros(3, 900, dtype=torch.int64)
    for row, pads in enumerate((0, 899, 500)):
        ids[row, :pads] = PADDING
    shape = {"batch": 3, "kv_heads": 2, "group": 4, "head_dim": 128}
    cache = filled("channel", ids, **shape)
    new = torch.zeros(3, 40, dtype=torch.int64)
    new[1, :30] = PADDING
    stored, (queries, keys, values) = cache.unpacked(0, torch.float32), on_gpu(40, **shape)
    cache.expect(new)
    step = cache.kv_manager.advance(cache._expected.take(3, 40))
    output = attend_stored(cache.layers[0], queries, keys, values, 128**-0.5, step)
    whole = (torch.cat([x, y], dim=2).cpu() for x, y in zip(stored, (keys, values), strict=True))
    real = torch.cat([ids, new], dim=1) != PADDING
    assert error_of(output, plain_attention(queries.cpu(), *whole, real)) < 1e-2
    assert not output[1, :, :30].any()


@pytest.mark.parametrize(
    ("policy", "head_dim", "dtype"),
    [
        (stream_policy(key_group=64), 128, torch.bfloat16),
        (STREAM, 96, torch.bfloat16),
        ("channel", 128, torch.float32),
    ],
)
def test_what_the_kernel_does_not_take(
    policy: str | KVPolicy, head_dim: int, dtype: torch.dtype
) -> None:
    shape = {"kv_heads": 1, "group": 2, "head_dim": head_dim}
    cache = filled(policy, images_and_text(300), dtype, **shape)
    assert kernel_of(cache) is None
    output, expected = attention(cache, on_gpu(1, dtype, **shape))
    assert error_of(output, expected) < 5e-3
