"""Decode attention on a GPU: a cache's layer against torch's 16-bit kernels and the memory floor.

python -m benchmarks.kernels [--quick] [--compare earlier.json]
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.bounds import MEASURES, MOST_ERROR, QUICK, SHAPES, Shape, check, rate, verdict
from benchmarks.feed import begin, filled
from benchmarks.record import Record, command, device_name, finish, parser, show
from benchmarks.reference import error_of, stored_pair
from benchmarks.timing import COLD_REPEATS, GRAPH_CALLS, Timer, copy_bandwidth
from oscar_mm import KVPolicy
from oscar_mm.cache.layer import OscarLayer
from oscar_mm.cache.pending import attend_stored
from oscar_mm.cache.step import Step
from oscar_mm.ops.decode import decode_kernel

POLICIES = {
    "compact": KVPolicy.preset("compact"),
    "standard": KVPolicy.preset("standard"),
    "standard, 2 bit": KVPolicy.preset("standard", bits=2),
    "standard, keys 4 bit": KVPolicy.preset("standard", bits=(4, 2)),
    "oscar": KVPolicy.preset("oscar"),
    "compact, 4 bit": KVPolicy.preset("compact", bits=4),
    "bf16": KVPolicy.preset("bf16"),
}
PEERS = {
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
}
_COLUMNS = (
    *("shape", "kernel", "cold", "graph", "host", "MB", "floor"),
    *("floor % cold", "graph", "x cold", "graph", "error"),
)
NOTES = [
    "Shapes: batch x query heads/KV heads x context; one new token, bfloat16, text and images.",
    f"cold: device time of one call after the L2 cache was flushed, median of {COLD_REPEATS}. "
    f"graph: per call in a CUDA graph of {GRAPH_CALLS}, with whatever the L2 cache holds. "
    "host: to enqueue a call, without the tables of the step, which all layers share.",
    "MB: what one call must read, full pages and the 16-bit tokens. Floor: these bytes at the "
    "run's own copy bandwidth. x: times as fast as the best SDPA by the same measure.",
    "Error: of the output of some heads against float64 attention over the unpacked keys and "
    "values (SDPA: over its own); outputs here are small, the mean of many random values.",
]


def bytes_read(layer: OscarLayer, step: Step) -> int:
    """Bytes of the past that a step attends to: pages, and 16-bit tokens outside of them."""
    token = 2 * layer.kv_heads * layer.head_dim * layer.dtype.itemsize
    streams = [stream for sequence in step.past for stream in sequence.streams.values()]
    packed = sum(
        len(stream.pages) * layer.formats[stream.bits].page_bytes
        for stream in streams
        if stream.pages
    )
    return packed + token * sum(len(stream.slots) for stream in streams)


class LayerCall:
    """One decode step of a filled cache: ``attend_stored`` of the same step, again and again."""

    def __init__(self, policy: KVPolicy, shape: Shape, generator: torch.Generator) -> None:
        past = (shape.batch, shape.kv_heads, shape.context - 1, shape.head_dim)
        self.cache = filled(policy, past, shape.query_heads, generator)
        self.queries, self.keys, self.values = _new_tokens(shape, generator)
        self.layer, self.step = begin(self.cache, self.keys, self.values)
        self.scaling = shape.head_dim**-0.5

    def __call__(self) -> torch.Tensor:
        """(batch, query heads, 1, head_dim)."""
        return attend_stored(
            self.layer, self.queries, self.keys, self.values, self.scaling, self.step
        )

    def error(self) -> float:
        """Relative error of a call."""

        def pair_of(row: int, heads: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
            past = stored_pair(self.layer, self.step.past[row], heads)
            new = (self.keys[row, heads].double(), self.values[row, heads].double())
            keys, values = (torch.cat(side, dim=1) for side in zip(past, new, strict=True))
            return keys, values

        return error_of(self(), self.queries, self.keys.shape[1], pair_of)


def _new_tokens(shape: Shape, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Query, key and value of one token."""
    return tuple(
        _normal((shape.batch, heads, 1, shape.head_dim), generator)
        for heads in (shape.query_heads, shape.kv_heads, shape.kv_heads)
    )


def _normal(size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(size, generator=generator, device=generator.device, dtype=torch.bfloat16)


def _timed(timer: Timer, call: Callable[[], torch.Tensor]) -> dict[str, Any]:
    cold, host = timer.cold(call), timer.host(call)
    graph, why = timer.graph(call)
    found: dict[str, Any] = {"us": {"cold": cold, "graph": graph}, "host_us": host}
    return found | ({"not_captured": why} if why else {})


def _ours(name: str, shape: Shape, timer: Timer, generator: torch.Generator) -> dict[str, Any]:
    call = LayerCall(POLICIES[name], shape, generator)
    size = bytes_read(call.layer, call.step)
    error = call.error()
    layer = call.layer
    formats = list(layer.formats.values())
    rotate = layer.basis.rotate
    columns = shape.query_heads // shape.kv_heads
    kernel = decode_kernel(formats, layer.head_dim, rotate, layer.dtype, columns, layer.device)
    path = "kernel" if kernel is not None else "PyTorch operations"
    return {"name": name, "bytes": size, "error": error, "path": path} | _timed(timer, call)


def _peers(shape: Shape, timer: Timer, generator: torch.Generator) -> list[dict[str, Any]]:
    query = _new_tokens(shape, generator)[0]
    size = (shape.batch, shape.kv_heads, shape.context, shape.head_dim)
    keys, values = _normal(size, generator), _normal(size, generator)

    def call() -> torch.Tensor:
        return scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    def pair_of(row: int, heads: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return keys[row, heads], values[row, heads]

    rows = []
    for name, backend in PEERS.items():
        with sdpa_kernel(backend):
            try:
                error = error_of(call(), query, shape.kv_heads, pair_of)
            except RuntimeError as refusal:
                print(f"{shape}: {name} refuses: {str(refusal).splitlines()[0]}")
                continue
            row = {"name": name, "bytes": keys.nbytes + values.nbytes, "error": error}
            rows.append(row | _timed(timer, call))
    return rows


def measure(
    shapes: Sequence[Shape], bandwidth: float, timer: Timer, generator: torch.Generator
) -> list[dict[str, Any]]:
    """Rows of all shapes, rated and checked; the generator's device does the work."""
    rows = []
    for shape in shapes:
        peers = _peers(shape, timer, generator)
        found = list(peers)
        for name in POLICIES:
            found.append(_ours(name, shape, timer, generator))
            gc.collect()
            torch.cuda.empty_cache()
        for row in found:
            rate(row, peers, bandwidth)
            rows.append({"shape": asdict(shape), **row, "bounds": check(shape, row)})
        print(f"{shape}: done", flush=True)
    return rows


def _figure(value: float | None, pattern: str = "{:.1f}") -> str:
    return "-" if value is None else pattern.format(value)


def _tables(rows: list[dict[str, Any]]) -> None:
    show(
        "Decode attention, microseconds",
        _COLUMNS,
        (
            (
                str(Shape(**row["shape"])),
                row["name"],
                *(_figure(row["us"][m]) for m in MEASURES),
                _figure(row["host_us"]),
                _figure(row["bytes"] / 1e6),
                _figure(row["floor_us"]),
                *(_figure(row["floor_share"][m], "{:.0%}") for m in MEASURES),
                *(_figure(row["speedup"][m], "{:.2f}") for m in MEASURES),
                f"{row['error']:.1e}",
            )
            for row in rows
        ),
    )
    slow = sorted({row["name"] for row in rows if row.get("path", "kernel") != "kernel"})
    if slow:
        print(f"NOT by the decode kernel, but by PyTorch operations: {', '.join(slow)}")
    for row in rows:
        if row["error"] > MOST_ERROR:
            shape = Shape(**row["shape"])
            print(
                f"error NOT met: {row['name']}, {shape}: {row['error']:.1e}, at most {MOST_ERROR:g}"
            )
    reasons = {f"{row['name']}: {row['not_captured']}" for row in rows if "not_captured" in row}
    for reason in sorted(reasons):
        print(f"not captured in a graph: {reason}")
    show(
        "Bounds",
        ("shape", "policy", "at least", "cold", "graph", "verdict"),
        (
            (
                str(Shape(**row["shape"])),
                row["name"],
                _bound(bound["least"], bound["figure"]),
                *(_bound(bound["found"][m], bound["figure"]) for m in MEASURES),
                verdict(bound["met"]),
            )
            for row in rows
            for bound in row["bounds"]
        ),
    )


def _bound(value: float | None, figure: str) -> str:
    return _figure(value, "{:.0%} of floor" if figure == "floor_share" else "{:.2f}x SDPA")


def compare(rows: list[dict[str, Any]], path: Path) -> None:
    """Print this run's times over those of an earlier record, where both have them."""
    earlier = Record.load(path)
    before = {(astuple(Shape(**row["shape"])), row["name"]): row["us"] for row in earlier.rows}
    lines = []
    for row in rows:
        shape = Shape(**row["shape"])
        if (us := before.get((astuple(shape), row["name"]))) is not None:
            ratios = (row["us"][m] / us[m] if row["us"][m] and us[m] else None for m in MEASURES)
            lines.append((str(shape), row["name"], *(_figure(r, "{:.3f}") for r in ratios)))
    title = f"Time over that of {earlier.date} on {earlier.device} (below 1 is faster)"
    show(title, ("shape", "kernel", *MEASURES), lines)


def main(arguments: Sequence[str]) -> int:
    """Measure, print and record. 2 without a CUDA device."""
    options = parser("benchmarks.kernels", __doc__)
    options.add_argument("--quick", action="store_true", help=f"only {len(QUICK)} shapes")
    options.add_argument("--compare", type=Path, metavar="FILE", help="an earlier run's JSON")
    options = options.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.kernels needs a CUDA device; there is none here", file=sys.stderr)
        return 2
    bandwidth = copy_bandwidth()
    # Its own generator: a failed graph capture leaves torch's default one unusable.
    generator = torch.Generator("cuda").manual_seed(0)
    rows = measure(QUICK if options.quick else SHAPES, bandwidth, Timer(), generator)
    _tables(rows)
    print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    if options.compare:
        compare(rows, options.compare)
    # A short run must not replace the record of a whole one.
    name = "kernels-quick" if options.quick else "kernels"
    line = command("benchmarks.kernels", arguments)
    record = Record(name, line, device_name("cuda"), rows, NOTES)
    record.extra["copy_bytes_per_second"] = bandwidth
    finish(record, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
