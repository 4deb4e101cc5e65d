"""Packing on a GPU: a prompt's keys and values of one layer to page bytes, against its floor.

python -m benchmarks.packing
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.record import Record, command, device_name, finish, parser, show
from benchmarks.timing import Timer, copy_bandwidth
from oscar_mm import KVPolicy
from oscar_mm.cache.layout import PAGE_TOKENS, PageFormat
from oscar_mm.ops.pack import pack
from oscar_mm.quant.basis import Basis

TOKENS, KV_HEADS, HEAD_DIM = 131_072, 8, 128
POLICIES = {
    "compact": KVPolicy.preset("compact"),
    "oscar": KVPolicy.preset("oscar"),
    "compact, 4 bit": KVPolicy.preset("compact", bits=4),
}
BOUND = 3.0
"""The project's own target: times the floor."""
NOTES = [
    f"{TOKENS:,} tokens, {KV_HEADS} KV heads of {HEAD_DIM}, bfloat16; cold L2. The check for "
    "values that no page can hold is included; it waits for the GPU.",
    "Floor: reading the 16-bit keys and values once and writing the pages, at the run's own copy "
    "bandwidth.",
]


def main(arguments: Sequence[str]) -> int:
    """Measure, print and record."""
    options = parser("benchmarks.packing", __doc__).parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.packing needs a CUDA device", file=sys.stderr)
        return 2
    bandwidth, timer = copy_bandwidth(), Timer()
    shape = (TOKENS // PAGE_TOKENS, KV_HEADS, PAGE_TOKENS, HEAD_DIM)
    keys, values = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rows = []
    for name, policy in POLICIES.items():
        page_format = PageFormat.of(policy, policy.bits.text, KV_HEADS, HEAD_DIM)
        basis = Basis(HEAD_DIM, policy.rotate)
        call = partial(pack, keys, values, page_format, policy, basis)
        moved = keys.nbytes + values.nbytes + call().nbytes
        floor = moved / bandwidth * 1e6
        found = timer.cold(call)
        rows.append({"policy": name, "us": found, "floor_us": floor, "times_floor": found / floor})
    show(
        "Packing, microseconds",
        ("policy", "time", "floor", "times the floor", f"at most {BOUND:g}"),
        (
            (
                row["policy"],
                f"{row['us']:.0f}",
                f"{row['floor_us']:.0f}",
                f"{row['times_floor']:.1f}",
                "met" if row["times_floor"] <= BOUND else "NOT met",
            )
            for row in rows
        ),
    )
    extra = {"copy_bandwidth_gb_s": bandwidth / 1e9, "bound_times_floor": BOUND}
    line = command("benchmarks.packing", arguments)
    finish(Record("packing", line, device_name("cuda"), rows, NOTES, extra), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
