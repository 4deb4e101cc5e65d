"""Time decode, store and unpack of a layer on a CPU: our kernels, PyTorch operations and SDPA.

python -m benchmarks.cpu [--threads 1]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.record import Record, command, device_name, finish, parser, show
from oscar_mm import KVPolicy
from oscar_mm.ops.decode_numba import decode_on_cpu
from oscar_mm.ops.decode_tables import FIELDS, DecodeArguments
from oscar_mm.ops.decode_torch import decode_by_torch
from oscar_mm.ops.library import numbers_of, recipe_numbers
from oscar_mm.ops.pages_numba import unpack_on_cpu
from oscar_mm.ops.samples import random_basis, random_pages
from oscar_mm.ops.store import whole_page_tables
from oscar_mm.ops.store_numba import store_on_cpu
from oscar_mm.ops.store_torch import HEAD, NOTHING, TILE, StoreArguments, store_by_torch
from oscar_mm.ops.unpack import UnpackArguments, slots_by_torch
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.pages.quantize import Recipe

_CPU = torch.device("cpu")
_ROUNDS = 9
_RECENT = 96
"""Number of tokens of a sequence that are not packed."""
NOTES = [
    "Milliseconds of one call on one layer: the least of 9 rounds, in which all ways take turns. "
    "Keys, values and queries are float32. Of each sequence 96 tokens are not packed.",
    "SDPA: torch's, on contiguous float32 keys and values as DynamicCache has them; in brackets of "
    "bfloat16 ones.",
    "Targets: decode of 2,400 tokens in the time of SDPA, of 32,768 in half of it.",
]


class Shape(NamedTuple):
    """Sizes of one layer's attention, and the policy of its cache."""

    policy: str
    head_dim: int
    kv_heads: int
    group: int
    rows: int
    tokens: int

    @property
    def page_format(self) -> PageFormat:
        """Format of the layer's pages."""
        policy = KVPolicy.preset(self.policy)
        return PageFormat.of(policy, policy.bits.text, self.kv_heads, self.head_dim)

    @property
    def label(self) -> str:
        """Label of the shape in tables."""
        heads = f"{self.kv_heads} x {self.group} heads of {self.head_dim}"
        return f"{self.policy}, {heads}, {self.rows} x {self.tokens:,}"


SHAPES = (
    Shape("standard", 64, 2, 2, 1, 300),
    Shape("standard", 64, 2, 2, 1, 2400),
    Shape("standard", 64, 2, 2, 16, 700),
    Shape("standard", 128, 8, 4, 1, 2400),
    Shape("standard", 128, 8, 4, 1, 32_768),
    Shape("compact", 128, 8, 4, 1, 32_768),
)
STORED = ((1, 1), (16, 1), (64, 1), (1, 2048))
"""Sizes of the store benchmark: number of rows, and tokens per row."""
UNPACKED = ((2, 64, 19), (8, 128, 19))
"""Sizes of the unpack benchmark: KV heads, head_dim and number of pages."""


def fastest(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Return the milliseconds of each call, as the minimum over several rounds."""
    best = [float("inf")] * len(calls)
    for call in calls:
        call()
    for _ in range(_ROUNDS):
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[index] = min(best[index], (time.perf_counter() - start) * 1e3)
    return best


def measure_decode(shape: Shape) -> dict[str, Any]:
    """Measure the time of attention with one new token per row."""
    policy, page_format = KVPolicy.preset(shape.policy), shape.page_format
    rows, heads, head_dim = shape.rows, shape.kv_heads, shape.head_dim
    count = max(1, (shape.tokens - _RECENT) // PAGE_TOKENS)
    items = torch.full((rows, count, 2), PAGE_TOKENS, dtype=torch.int32)
    items[..., 0] = torch.arange(rows * count).view(rows, count)
    recents = torch.arange(rows * _RECENT, dtype=torch.int32).view(rows, _RECENT)
    arguments = DecodeArguments(
        queries=torch.randn(rows, heads * shape.group, 1, head_dim),
        keys=torch.randn(rows, heads, 1, head_dim),
        values=torch.randn(rows, heads, 1, head_dim),
        pages=[random_pages(rows * count, page_format, _CPU)],
        recent=torch.randn(rows * _RECENT, 2, heads, head_dim),
        sigma=random_basis(page_format, policy.rotate, _CPU).sigma,
        items=items,
        recents=recents,
        counts=torch.tensor([[_RECENT, count]] * rows, dtype=torch.int32),
        assignments=torch.zeros(1, FIELDS, dtype=torch.int32),
        scaling=head_dim**-0.5,
        formats=numbers_of(page_format),
        rotate=policy.rotate,
    )
    sdpa = torch.nn.functional.scaled_dot_product_attention
    keys, values = torch.randn(2, rows, heads, shape.tokens, head_dim)
    in_bfloat16 = arguments.queries.bfloat16(), keys.bfloat16(), values.bfloat16()
    loops, by_torch, on_16_bit, on_bfloat16 = fastest(
        [
            lambda: decode_on_cpu(arguments),
            lambda: decode_by_torch(arguments),
            lambda: sdpa(arguments.queries, keys, values, enable_gqa=True),
            lambda: sdpa(*in_bfloat16, enable_gqa=True),
        ]
    )
    most = {2400: 1.0, 32_768: 0.5}.get(shape.tokens)
    return {
        "operation": "decode",
        "what": shape.label,
        "loops_ms": loops,
        "torch_ms": by_torch,
        "sdpa_ms": on_16_bit,
        "sdpa_bfloat16_ms": on_bfloat16,
        "of_sdpa": loops / on_16_bit,
        "at_most": most,
        "met": None if most is None else loops <= most * on_16_bit,
    }


def measure_store(rows: int, tokens: int) -> dict[str, Any]:
    """Measure the time to store each row's tokens in ``standard`` pages, with 2 KV heads of 64."""
    policy = KVPolicy.preset("standard")
    page_format = PageFormat.of(policy, policy.bits.text, 2, 64)
    if tokens == 1:
        jobs = torch.full((rows, HEAD + TILE), NOTHING, dtype=torch.int32)
        jobs[:, :HEAD] = 0
        jobs[:, 0] = torch.arange(rows)
        jobs[:, HEAD] = ~torch.arange(rows, dtype=torch.int32)
    else:
        jobs, _ = whole_page_tables(tokens // PAGE_TOKENS, _CPU)
        jobs[:, 2] = 0
        jobs[:, HEAD:] = ~torch.arange(tokens, dtype=torch.int32).view(-1, TILE)
    recent = torch.randn(rows * tokens, 2, 2, 64)
    none = recent.new_empty(1, 2, 0, 64)
    pages = int(jobs[:, 0].max()) + 1
    arguments = StoreArguments(
        *(none, none, recent, jobs, torch.zeros(0, HEAD + 32, dtype=torch.int32)),
        torch.zeros(pages, page_format.page_bytes, dtype=torch.uint8),
        torch.zeros(1, dtype=torch.int32),
        None,
        recipe_numbers(Recipe.of(page_format, policy)),
    )
    loops, by_torch = fastest([lambda: store_on_cpu(arguments), lambda: store_by_torch(arguments)])
    what = f"standard, 2 heads of 64, {rows} x {tokens:,}"
    return {"operation": "store", "what": what, "loops_ms": loops, "torch_ms": by_torch}


def measure_unpack(heads: int, head_dim: int, pages: int) -> dict[str, Any]:
    """Measure the time to unpack ``standard`` pages to float32, as for a later turn."""
    policy = KVPolicy.preset("standard")
    page_format = PageFormat.of(policy, policy.bits.text, heads, head_dim)
    arguments = UnpackArguments(
        *(random_pages(pages, page_format, _CPU), torch.arange(pages, dtype=torch.int32), None),
        *(numbers_of(page_format), policy.rotate, torch.float32),
    )
    loops, by_torch = fastest([lambda: unpack_on_cpu(arguments), lambda: slots_by_torch(arguments)])
    what = f"standard, {heads} heads of {head_dim}, 1 x {pages * PAGE_TOKENS:,}"
    return {"operation": "unpack", "what": what, "loops_ms": loops, "torch_ms": by_torch}


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark: measure, print and record; return the exit code."""
    asked = parser("benchmarks.cpu", __doc__)
    asked.add_argument(
        "--threads", type=int, default=1, help="threads of torch and of the CPU kernels"
    )
    options = asked.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = [measure_decode(shape) for shape in SHAPES]
    rows += [measure_store(*stored) for stored in STORED]
    rows += [measure_unpack(*unpacked) for unpacked in UNPACKED]

    def figure(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    show(
        f"One layer on a CPU, {options.threads} thread(s), milliseconds",
        ("operation", "what", "loops", "PyTorch", "SDPA (bf16)", "loops of SDPA", "at most", "met"),
        (
            (
                *(row["operation"], row["what"], figure(row["loops_ms"], 3)),
                figure(row["torch_ms"]),
                f"{figure(row.get('sdpa_ms'))} ({figure(row.get('sdpa_bfloat16_ms'))})",
                *(figure(row.get("of_sdpa")), figure(row.get("at_most"))),
                {None: "-", True: "met", False: "NOT met"}[row.get("met")],
            )
            for row in rows
        ),
    )
    record = Record("cpu", command("benchmarks.cpu", arguments), device_name("cpu"), rows, NOTES)
    record.extra["threads"] = options.threads
    finish(record, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
