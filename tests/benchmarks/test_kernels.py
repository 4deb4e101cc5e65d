"""The benchmark of decode attention on small sizes; timing itself needs a GPU."""

import re
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import pytest
import torch

from benchmarks import kernels
from benchmarks.kernels import (
    BOUNDS,
    HEAD_64,
    QWEN_BATCH,
    QWEN_SHORT,
    SHAPES,
    Shape,
    check,
    error_of,
    rate,
    stored_pair,
    verdict,
)
from benchmarks.record import Record
from oscar_mm.policy import Bits

SMALL = Shape(2, 4, 2, 800)


class HostTimer:
    """The interface of ``profiling.Timer`` on a CPU, where nothing is captured."""

    def cold(self, call: Callable[[], torch.Tensor]) -> float:
        start = perf_counter()
        call()
        return 1e6 * (perf_counter() - start)

    host = cold

    def graph(self, call: Callable[[], torch.Tensor]) -> tuple[None, str]:
        return None, "no GPU"


@pytest.mark.parametrize("name", kernels.POLICIES)
def test_reference_reads_what_the_cache_unpacks(name: str, generator: torch.Generator) -> None:
    call = kernels.LayerCall(kernels.POLICIES[name], SMALL, generator)
    layer, step = call.layer, call.step
    past = SMALL.context - 1
    unpacked = layer.unpacked(step.past, past)
    for row, sequence in enumerate(step.past):
        order = [torch.from_numpy(sequence.positions(code)) for code in sequence.streams]
        places = [where[where < past] for where in order]
        for side, pair in zip(stored_pair(layer, sequence, [1]), unpacked, strict=True):
            assert torch.equal(side.bfloat16(), pair[row, [1]][:, torch.cat(places)])
    # Keys and values as the model made them differ from what is stored; attention must not.
    assert call.error() < 4e-3


def test_bytes_read_are_pages_and_tokens_in_16_bit(generator: torch.Generator) -> None:
    token = 2 * SMALL.kv_heads * SMALL.head_dim * 2
    plain = kernels.LayerCall(kernels.POLICIES["bf16"], SMALL, generator)
    assert kernels.bytes_read(plain.layer, plain.step) == 2 * (SMALL.context - 1) * token
    channel = kernels.LayerCall(kernels.POLICIES["channel"], SMALL, generator)
    two = Bits(2, 2)
    partial = sum(len(pack_job.pages) for pack_job in channel.step.pack_jobs)
    full = channel.cache.kv_manager.allocators[two].used - partial
    in_16_bit = 2 * (SMALL.context - 1) - 128 * full
    pages = full * channel.layer.formats[two].page_bytes
    assert full and kernels.bytes_read(channel.layer, channel.step) == pages + in_16_bit * token


def test_an_error_is_seen() -> None:
    keys, values, queries = torch.randn(3, 2, 4, 50, 16).unbind()
    pair = lambda row, heads: (keys[row, heads], values[row, heads])  # noqa: E731
    last = queries[:, :, :1]
    output = torch.nn.functional.scaled_dot_product_attention(last, keys, values)
    assert error_of(output, last, 4, pair) < 1e-6
    output[1, 3] *= 1.5
    assert 0.1 < error_of(output, last, 4, pair) < 0.5


def test_kernel_rows_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], generator: torch.Generator
) -> None:
    rows = kernels.measure([SMALL], 1e9, HostTimer(), generator)
    names = [row["name"] for row in rows]
    assert names[-len(kernels.POLICIES) :] == list(kernels.POLICIES)
    for row in rows:
        assert row["floor_share"]["cold"] == pytest.approx(row["bytes"] / 1e3 / row["us"]["cold"])
        assert row["us"]["graph"] is row["speedup"]["graph"] is row["floor_share"]["graph"] is None
        assert row["error"] < 1e-2 and row["bounds"] == []
    path = Record("kernels", "none", "cpu", rows, []).write(tmp_path)
    capsys.readouterr()
    kernels._tables(rows)
    kernels.compare(rows, path)
    text = capsys.readouterr().out
    assert "NOT by the decode kernel, but by PyTorch operations: bf16, channel" in text
    assert "not captured in a graph: compact: no GPU" in text
    assert text.count("1.000") == len(rows)


def test_bounds_are_judged_by_both_measures() -> None:
    peers = [{"us": {"cold": us, "graph": us / 2}} for us in (300.0, 260.0)]
    row = {"name": "channel", "bytes": 155_000_000, "us": {"cold": 45.0, "graph": 60.0}}
    rate(row, peers, bandwidth=4.3e12)
    floor, speed = check(QWEN_BATCH, row)
    assert floor["found"]["cold"] == pytest.approx(155e6 / 4.3e12 * 1e6 / 45)
    assert floor["met"] == {"cold": True, "graph": False}
    assert speed["found"] == {"cold": pytest.approx(260 / 45), "graph": pytest.approx(130 / 60)}
    assert verdict(floor["met"]) == "NOT met (graph)"
    assert verdict({"cold": True, "graph": None}) == "met (graph not measured)"
    assert verdict({"cold": True, "graph": True}) == "met"
    assert [bound["least"] for bound in check(QWEN_SHORT, row | {"name": "compact"})] == [2.0]
    assert check(HEAD_64, row) == []
    assert {bound.policy for bound in BOUNDS} <= set(kernels.POLICIES)
    assert all(shape in SHAPES for bound in BOUNDS for shape in bound.shapes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_kernels_need_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(["--quick"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and re.fullmatch(r"[^\n]*CUDA[^\n]*\n", printed.err)
