"""Compare pack, unpack and append of a layer's keys and values on a GPU with their floors.

python -m benchmarks.packing
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.profiling import Timer, copy_bandwidth
from benchmarks.record import Record, command, device_name, finish, parser, show
from oscar_mm import KVPolicy
from oscar_mm.ops.append import append
from oscar_mm.ops.library import numbers_of, recipe_numbers
from oscar_mm.ops.pack import pack_jobs
from oscar_mm.ops.store import store, whole_page_tables
from oscar_mm.ops.unpack import unpack_slots
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.pages.quantize import Recipe

TOKENS, KV_HEADS, HEAD_DIM = 131_072, 8, 128
BATCHES = (1, 8, 32)
POLICIES = {
    "standard": KVPolicy.preset("standard"),
    "compact": KVPolicy.preset("compact"),
    "channel": KVPolicy.preset("channel"),
    "channel, value scale plain": KVPolicy.preset("channel", value_scale="plain"),
    "oscar": KVPolicy.preset("oscar"),
    "channel, 4 bit": KVPolicy.preset("channel", bits=4),
}
MAX_FLOORS, MAX_APPEND_US = 3.0, 8.0
"""Targets: maximum time of pack relative to its floor, and maximum device time of append in a
layer, in microseconds."""
_VERDICTS = {None: "-", True: "met", False: "NOT met"}
NOTES = [
    f"pack, unpack: {TOKENS:,} tokens, {KV_HEADS} KV heads of {HEAD_DIM}, bfloat16, balanced; cold "
    "L2. append: one token a sequence, no packing; time of a call in a CUDA graph of 20.",
    "Floor: one read of all inputs and one write of all outputs at the copy bandwidth of the same "
    "run. That of append is nothing next to a launch.",
]


def _packing(name: str) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor], int]:
    """Return a call that packs all tokens, a call that unpacks them, and the bytes each moves."""
    policy = POLICIES[name]
    page_format = PageFormat.of(policy, policy.bits.text, KV_HEADS, HEAD_DIM)
    keys, values = (
        torch.randn(1, KV_HEADS, TOKENS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    recent = keys.new_empty(0, 2, KV_HEADS, HEAD_DIM)
    source = torch.arange(TOKENS, device="cuda", dtype=torch.int32).view(-1, PAGE_TOKENS)
    rows = torch.zeros(len(source), device="cuda", dtype=torch.int32)
    slots = torch.arange(len(source), device="cuda", dtype=torch.int32)
    pages = torch.zeros(len(source), page_format.page_bytes, dtype=torch.uint8, device="cuda")
    bad = torch.zeros(1, dtype=torch.int32, device="cuda")
    sigma = torch.ones(1, HEAD_DIM, device="cuda") if policy.balance else None
    moved = keys.nbytes + values.nbytes + pages.nbytes

    where = (pages, bad, sigma, recipe_numbers(Recipe.of(page_format, policy)))
    by_page = [x[0].unflatten(1, (-1, PAGE_TOKENS)).transpose(0, 1) for x in (keys, values)]
    jobs, begins = whole_page_tables(len(pages), pages.device)

    def pack() -> torch.Tensor:
        if page_format.codec.appends_tokens:
            store(*by_page, recent, jobs, begins, *where)
        else:
            pack_jobs(keys, values, recent, source, rows, slots, *where)
        return pages

    def unpack() -> torch.Tensor:
        form = numbers_of(page_format)
        return unpack_slots(pages, slots, sigma, form, policy.rotate, torch.bfloat16)[0]

    return pack, unpack, moved


def _appending(batch: int) -> Callable[[], torch.Tensor]:
    """Return a call that appends one token to each of ``batch`` sequences."""
    keys, values = (
        torch.randn(batch, KV_HEADS, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    recent = keys.new_zeros(batch, 2, KV_HEADS, HEAD_DIM)
    writes = torch.zeros(batch, 3, dtype=torch.int32, device="cuda")
    writes[:, 0] = writes[:, 2] = torch.arange(batch)
    bad = torch.zeros(1, dtype=torch.int32, device="cuda")

    def call() -> torch.Tensor:
        append(keys, values, recent, writes, bad)
        return recent.flatten()[:1]

    return call


def measure(timer: Timer, bandwidth: float) -> list[dict[str, Any]]:
    """Return a row for each operation and policy or batch."""
    rows: list[dict[str, Any]] = []
    row = partial(dict, floor_us=None, times_floor=None, at_most=None, met=None)
    for name in POLICIES:
        pack, unpack, moved = _packing(name)
        floor = moved / bandwidth * 1e6
        for operation, call in (("pack", pack), ("unpack", unpack)):
            us = timer.cold(call)
            figures = row(operation=operation, what=name, us=us, floor_us=floor)
            figures["times_floor"] = us / floor
            if operation == "pack":
                figures |= {"at_most": f"{MAX_FLOORS:g} floors", "met": us <= MAX_FLOORS * floor}
            rows.append(figures)
    for batch in BATCHES:
        us, why = timer.graph(_appending(batch))
        if us is None:
            raise RuntimeError(f"append could not be captured in a CUDA graph: {why}")
        figures = row(operation="append", what=f"batch {batch}", us=us)
        rows.append(figures | {"at_most": f"{MAX_APPEND_US:g} us", "met": us <= MAX_APPEND_US})
    return rows


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code, 2 without a CUDA device."""
    options = parser("benchmarks.packing", __doc__).parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.packing needs a CUDA device", file=sys.stderr)
        return 2
    bandwidth = copy_bandwidth()
    rows = measure(Timer(), bandwidth)

    def figure(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    show(
        "Moving keys and values, microseconds",
        ("operation", "what", "time", "floor", "times the floor", "at most", "verdict"),
        (
            (
                *(row["operation"], row["what"], figure(row["us"])),
                *(figure(row["floor_us"]), figure(row["times_floor"])),
                *(row["at_most"] or "-", _VERDICTS[row["met"]]),
            )
            for row in rows
        ),
    )
    line = command("benchmarks.packing", arguments)
    record = Record("packing", line, device_name("cuda"), rows, NOTES)
    record.extra["copy_bytes_per_second"] = bandwidth
    finish(record, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
