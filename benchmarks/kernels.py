"""Compare decode attention over packed pages on a GPU with torch's 16-bit kernels and a floor.

python -m benchmarks.kernels [--quick] [--compare earlier.json]
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.profiling import COLD_REPEATS, GRAPH_CALLS, Timer, copy_bandwidth
from benchmarks.random_model import begin_step, synthetic_cache
from benchmarks.record import Record, command, device_name, finish, parser, show
from oscar_mm import KVPolicy
from oscar_mm.cache.block_table import SequenceTable
from oscar_mm.cache.layer import OscarLayer, TokenPlaces
from oscar_mm.cache.paged_attention import attend_stored
from oscar_mm.cache.step_plan import StepPlan
from oscar_mm.ops.decode import decode_kernel

MEASURES = ("cold", "graph")
MAX_ERROR = 2e-3
"""Maximum relative error of an output in bfloat16; the rounding error of bfloat16 is 1.7e-3."""
POLICIES = {
    "standard": KVPolicy.preset("standard"),
    "compact": KVPolicy.preset("compact"),
    "standard, keys 4 bit": KVPolicy.preset("standard", bits=(4, 2)),
    "oscar": KVPolicy.preset("oscar"),
    "channel": KVPolicy.preset("channel"),
    "channel, 4 bit": KVPolicy.preset("channel", bits=4),
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
    f"cold: device time of one call after a flush of the L2 cache, median of {COLD_REPEATS}. "
    f"graph: time of a call in a CUDA graph of {GRAPH_CALLS}, with whatever the L2 cache holds. "
    "host: time to enqueue a call, without the tables of the step, which all layers share.",
    "MB: bytes that one call must read, full pages and the 16-bit tokens. Floor: these bytes at "
    "the copy bandwidth of the same run. x: times as fast as the best SDPA by the same measure.",
    "Error: relative error of the output of some heads against float64 attention over the unpacked "
    "keys and values (SDPA: over its own). Outputs are small here, the mean of many random values.",
]


@dataclass(frozen=True)
class Shape:
    """Shape of decode attention with one new token, which ``context`` includes."""

    batch: int
    query_heads: int
    kv_heads: int
    context: int
    head_dim: int = 128

    def __str__(self) -> str:
        heads = f"{self.query_heads}/{self.kv_heads}"
        wide = "" if self.head_dim == 128 else f" d{self.head_dim}"
        return f"{self.batch} x {heads} x {self.context:,}{wide}"


QWEN_BATCH = Shape(8, 32, 8, 32768)
QWEN_MANY = Shape(64, 32, 8, 32768)
OMNI_BATCH = Shape(16, 32, 4, 32768)
LLAVA_BATCH = Shape(4, 32, 32, 16384)
QWEN_LONG = Shape(1, 32, 8, 131072)
OMNI_LONG = Shape(1, 32, 4, 131072)
QWEN_SHORT = Shape(1, 32, 8, 8192)
QWEN_ROWS = Shape(256, 32, 8, 700)
QWEN_FEWER_ROWS = Shape(64, 32, 8, 2200)
HEAD_64 = Shape(8, 32, 8, 32768, head_dim=64)
HEAD_256 = Shape(8, 16, 4, 32768, head_dim=256)
SHAPES = (
    *(QWEN_LONG, QWEN_BATCH, QWEN_MANY, QWEN_SHORT, QWEN_ROWS, QWEN_FEWER_ROWS),
    *(LLAVA_BATCH, OMNI_LONG, OMNI_BATCH, HEAD_64, HEAD_256),
)
QUICK = (QWEN_BATCH, QWEN_SHORT)
_LARGE = (QWEN_BATCH, QWEN_MANY, OMNI_BATCH, LLAVA_BATCH)


@dataclass(frozen=True)
class Bound:
    """Minimum value of a figure ("floor_share" or "speedup") that a policy must reach on shapes."""

    policy: str
    figure: str
    least: float
    shapes: tuple[Shape, ...]


BOUNDS = (
    Bound("channel", "floor_share", 0.7, _LARGE),
    Bound("channel", "speedup", 5.0, (*_LARGE, QWEN_LONG)),
    Bound("standard", "floor_share", 0.85, (*_LARGE, HEAD_256)),
    Bound("standard", "speedup", 4.0, (*_LARGE, HEAD_256, QWEN_LONG)),
    Bound("compact", "floor_share", 0.85, _LARGE),
    Bound("compact", "speedup", 5.0, (*_LARGE, QWEN_LONG)),
    Bound("compact", "speedup", 4.0, (OMNI_LONG,)),
    Bound("compact", "speedup", 2.0, (QWEN_SHORT,)),
    # General requirement for the kernels, on the shapes for which 2 bits must reach 5x.
    Bound("oscar", "speedup", 4.0, (*_LARGE, QWEN_LONG)),
    Bound("channel, 4 bit", "speedup", 2.5, (*_LARGE, QWEN_LONG)),
)


def rate(row: dict[str, Any], peers: list[dict[str, Any]], bandwidth: float) -> None:
    """Add three figures to a row: floor, share of the floor, and speedup over the best peer.

    Args:
        row: row that contains "bytes", the bytes that a call must read, and "us", a dict from
            measure to microseconds, or to None.
        peers: rows of the 16-bit kernels with the same shape.
        bandwidth: bytes per second of a copy in the same run.
    """
    row["floor_us"] = row["bytes"] / bandwidth * 1e6
    row["floor_share"], row["speedup"] = {}, {}
    for measure in MEASURES:
        us = row["us"][measure]
        best = min((p["us"][measure] for p in peers if p["us"][measure]), default=None)
        row["floor_share"][measure] = row["floor_us"] / us if us else None
        row["speedup"][measure] = best / us if us and best else None


def check(shape: Shape, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the bounds of a rated row, each with the values by measure and whether it is met."""
    checks = []
    for bound in BOUNDS:
        if bound.policy == row["name"] and shape in bound.shapes:
            values = row[bound.figure]
            met = {m: None if values[m] is None else values[m] >= bound.least for m in MEASURES}
            checks.append(
                {"figure": bound.figure, "least": bound.least, "found": values, "met": met}
            )
    return checks


def verdict(met: dict[str, bool | None]) -> str:
    """Return a verdict: "met", or else the measures that fail the bound or were not measured.

    Args:
        met: whether each measure meets the bound; None if it was not measured.
    """
    missed = [measure for measure in MEASURES if met[measure] is False]
    if missed:
        return f"NOT met ({', '.join(missed)})"
    missing = [measure for measure in MEASURES if met[measure] is None]
    if len(missing) == len(MEASURES):
        return "not measured"
    return f"met ({missing[0]} not measured)" if missing else "met"


def bytes_read(layer: OscarLayer, step: StepPlan) -> int:
    """Return the bytes of past keys and values that a step reads: pages and 16-bit tokens."""
    token = 2 * layer.kv_heads * layer.head_dim * layer.dtype.itemsize
    streams = [stream for sequence in step.past for stream in sequence.streams.values()]
    page_bytes = sum(
        len(stream.pages) * layer.formats[stream.bits].page_bytes
        for stream in streams
        if stream.pages
    )
    return page_bytes + token * sum(len(stream.slots) for stream in streams)


def stored_pair(
    layer: OscarLayer, sequence: SequenceTable, heads: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of some KV heads, unpacked to (heads, tokens, head_dim) float64.

    Tokens are ordered by stream, not by position, which makes no difference to the attention of the
    last token.
    """
    sides: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for stream in sequence.streams.values():
        # Unpacking to float32 adds no rounding error.
        for pair in layer.parts(TokenPlaces.of([stream], layer.device), torch.float32):
            for parts, side in zip(sides, pair, strict=True):
                parts.append(side[heads].double())
    keys, values = (torch.cat(parts, dim=1) for parts in sides)
    return keys, values


def exact(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Compute exact attention in float64.

    Args:
        queries: (KV heads, query heads per KV head, head_dim).
        keys, values: (KV heads, tokens, head_dim).
    """
    scores = queries.double() @ keys.double().transpose(1, 2) * keys.shape[-1] ** -0.5
    return scores.softmax(-1) @ values.double()


def error_of(
    output: torch.Tensor,
    queries: torch.Tensor,
    kv_heads: int,
    pair_of: Callable[[int, list[int]], tuple[torch.Tensor, torch.Tensor]],
) -> float:
    """Return the relative error of the first and the last KV head of the first and the last row.

    Args:
        output, queries: (batch, query heads, 1, head_dim).
        kv_heads: number of KV heads.
        pair_of: function that returns the keys and values, (heads, tokens, head_dim), of a row and
            a list of KV heads.
    """
    heads = sorted({0, kv_heads - 1})
    wrong = norm = 0.0
    for row in sorted({0, len(output) - 1}):
        outputs, own = (x[row, :, 0].unflatten(0, (kv_heads, -1))[heads] for x in (output, queries))
        expected = exact(own, *pair_of(row, heads))
        wrong += float((outputs.double() - expected).square().sum())
        norm += float(expected.square().sum())
    return (wrong / norm) ** 0.5


class LayerCall:
    """Callable decode step of a synthetic cache; each call repeats the same step's attention."""

    def __init__(self, policy: KVPolicy, shape: Shape, generator: torch.Generator) -> None:
        past = (shape.batch, shape.kv_heads, shape.context - 1, shape.head_dim)
        self.cache = synthetic_cache(policy, past, generator)
        self.queries, self.keys, self.values = _new_tokens(shape, generator)
        self.layer, self.step = begin_step(self.cache, self.keys, self.values)
        self.scaling = shape.head_dim**-0.5

    def __call__(self) -> torch.Tensor:
        """Return the attention output, (batch, query heads, 1, head_dim)."""
        return attend_stored(
            self.layer, self.queries, self.keys, self.values, self.scaling, self.step
        )

    def error(self) -> float:
        """Return the relative error of a call, compared with exact attention."""

        def pair_of(row: int, heads: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
            past = stored_pair(self.layer, self.step.past[row], heads)
            new = (self.keys[row, heads].double(), self.values[row, heads].double())
            keys, values = (torch.cat(side, dim=1) for side in zip(past, new, strict=True))
            return keys, values

        return error_of(self(), self.queries, self.keys.shape[1], pair_of)


def _new_tokens(shape: Shape, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Return a random query, key and value of one token."""
    return tuple(
        _normal((shape.batch, heads, 1, shape.head_dim), generator)
        for heads in (shape.query_heads, shape.kv_heads, shape.kv_heads)
    )


def _normal(size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(size, generator=generator, device=generator.device, dtype=torch.bfloat16)


def _time_call(timer: Timer, call: Callable[[], torch.Tensor]) -> dict[str, Any]:
    cold, host = timer.cold(call), timer.host(call)
    graph, why = timer.graph(call)
    times: dict[str, Any] = {"us": {"cold": cold, "graph": graph}, "host_us": host}
    return times | ({"not_captured": why} if why else {})


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
    return {"name": name, "bytes": size, "error": error, "path": path} | _time_call(timer, call)


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
            rows.append(row | _time_call(timer, call))
    return rows


def measure(
    shapes: Sequence[Shape], bandwidth: float, timer: Timer, generator: torch.Generator
) -> list[dict[str, Any]]:
    """Measure all shapes on the generator's device, and return their rated and checked rows."""
    rows = []
    for shape in shapes:
        peers = _peers(shape, timer, generator)
        results = list(peers)
        for name in POLICIES:
            results.append(_ours(name, shape, timer, generator))
            gc.collect()
            torch.cuda.empty_cache()
        for row in results:
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
        if row["error"] > MAX_ERROR:
            shape = Shape(**row["shape"])
            print(
                f"error NOT met: {row['name']}, {shape}: {row['error']:.1e}, at most {MAX_ERROR:g}"
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
    """Print the times of this run relative to the times in an earlier record."""
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
    """Run the benchmark; return the exit code, 2 without a CUDA device."""
    options = parser("benchmarks.kernels", __doc__)
    options.add_argument("--quick", action="store_true", help=f"measure only {len(QUICK)} shapes")
    options.add_argument("--compare", type=Path, metavar="FILE", help="JSON file of an earlier run")
    options = options.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.kernels needs a CUDA device; there is none here", file=sys.stderr)
        return 2
    bandwidth = copy_bandwidth()
    # Use a generator of our own: a failed graph capture leaves torch's default one unusable.
    generator = torch.Generator("cuda").manual_seed(0)
    rows = measure(QUICK if options.quick else SHAPES, bandwidth, Timer(), generator)
    _tables(rows)
    print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    if options.compare:
        compare(rows, options.compare)
    # A short run must not replace the record of a full run.
    name = "kernels-quick" if options.quick else "kernels"
    line = command("benchmarks.kernels", arguments)
    record = Record(name, line, device_name("cuda"), rows, NOTES)
    record.extra["copy_bytes_per_second"] = bandwidth
    finish(record, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
