"""Time a layer's matrix products by weight format and number of rows, and compare with a floor.

python -m benchmarks.products [--models qwen3-vl-8b] [--formats bf16,fp8,int4] [--rows 1,2,8]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import cycle

import torch

from benchmarks.decode_step import numbers
from benchmarks.profiling import GRAPH_CALLS, Timer, copy_bandwidth
from benchmarks.random_model import RELEASED
from benchmarks.record import (
    Record,
    Row,
    command,
    device_name,
    device_of,
    finish,
    parser,
    show,
)
from oscar_mm.fast_decode.linear import kernel_for, linear_of
from oscar_mm.fast_decode.linear_torch import LinearArguments, linear_by_torch
from oscar_mm.kernels.self_check import relative_error
from oscar_mm.weights.matrix import QuantizedMatrix

FORMATS = {"bf16": 16, "fp8": 8, "int4": 4}
_PRODUCTS = ("qkv", "output", "gate, up", "down")
_MORE_THAN_CACHE = 256 << 20
"""Bytes of weights that calls cycle through, several times the size of an L2 cache."""
ROWS = (1, 2, 3, 4, 8, 16, 24, 32, 64, 128)
BOUND = {"fp8": 1.2, "int4": 1.3}
"""Maximum time of a layer's products for one row, in floors."""
MAX_ERROR = 5e-3
"""Maximum relative error of a row against float64, three times the rounding error of bfloat16."""
NOTES = [
    "Products of one decoder layer: queries, keys and values; attention output; gate and up, with "
    "silu; down. bfloat16 activations, random weights and inputs, no norms or residuals.",
    f"us: time of a call in a CUDA graph of {GRAPH_CALLS}, each with weights of its own, so that "
    "they come from memory. floor: bytes of weights, scales and zero points at the copy bandwidth "
    "of the same run. cuBLAS: the same products with bfloat16 weights.",
    "error: largest relative error of a row against float64 and the dequantized weights.",
]


def products_of(name: str) -> dict[str, tuple[int, tuple[int, ...], bool]]:
    """Return width, outputs and gate of the products of a layer, by name."""
    text = RELEASED[name].text
    hidden, inner, head_dim = text["hidden_size"], text["intermediate_size"], text["head_dim"]
    heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    return {
        "qkv": (hidden, (heads * head_dim, *(kv_heads * head_dim,) * 2), False),
        "output": (heads * head_dim, (hidden,), False),
        "gate, up": (hidden, (inner, inner), True),
        "down": (inner, (hidden,), False),
    }


class Product:
    """A product with random weights in one format.

    Args:
        width: columns of the weights.
        outputs: outputs of each matrix.
        gated: see ``LinearArguments``.
        bits: bits of a weight.
        device: device of the weights.

    Attributes:
        nbytes: bytes of the weights, scales and zero points.
    """

    def __init__(
        self, width: int, outputs: Sequence[int], gated: bool, bits: int, device: torch.device
    ) -> None:
        self._generator = torch.Generator(device).manual_seed(0)
        self._width, self._gated = width, gated
        exact = [self._random(count, width).div_(width**0.5) for count in outputs]
        if bits == 16:
            self._parts = [exact, [], []]
        else:
            matrices = [QuantizedMatrix.of(weight, bits) for weight in exact]
            exact = [matrix.dequantized(torch.float32) for matrix in matrices]
            lists = zip(*matrices, strict=True)
            self._parts = [[x for x in tensors if x is not None] for tensors in lists]
        self._exact = exact
        self.nbytes = sum(x.nbytes for tensors in self._parts for x in tensors)

    def _random(self, *shape: int) -> torch.Tensor:
        generator, device = self._generator, self._generator.device
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    def calls(self, rows: int, copies: int) -> list[LinearArguments]:
        """Return the arguments of calls with the same values in different memory."""
        x = self._random(rows, self._width)
        return [
            self._arguments(x, *([x.clone() for x in tensors] for tensors in self._parts))
            for _ in range(copies)
        ]

    def _arguments(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor] = (),
        zeros: Sequence[torch.Tensor] = (),
    ) -> LinearArguments:
        return LinearArguments.of(x, weights, gated=self._gated, scales=scales, zeros=zeros)

    def error(self, arguments: LinearArguments) -> float:
        """Return the largest relative error of a row against float64."""
        exact = self._arguments(arguments.x.double(), [weight.double() for weight in self._exact])
        return relative_error(linear_of(arguments).double(), linear_by_torch(exact))


def measured(name: str, form: str, rows: Sequence[int], bandwidth: float) -> Iterator[Row]:
    """Yield a row of the record for each product and number of rows.

    Args:
        name: name of a released model.
        form: key of ``FORMATS``.
        rows: numbers of rows.
        bandwidth: bytes per second, for the floor.
    """
    timer, device = Timer(), torch.device("cuda")
    for what, (width, outputs, gated) in products_of(name).items():
        product = Product(width, outputs, gated, FORMATS[form], device)
        copies = min(-(-_MORE_THAN_CACHE // product.nbytes), GRAPH_CALLS)
        for count in rows:
            calls = product.calls(count, copies)
            following = cycle(calls)
            us, reason = timer.graph(lambda following=following: linear_of(next(following)))
            yield {
                "model": name,
                "format": form,
                "product": what,
                "rows": count,
                "kernel": type(kernel_for(calls[0])).__name__,
                "us": us,
                "floor_us": 1e6 * product.nbytes / bandwidth,
                "error": product.error(calls[0]),
                **({"reason": reason} if reason else {}),
            }


def report(rows: Sequence[Row]) -> None:
    """Print the times of whole layers, and verdicts."""
    layers: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        layers.setdefault((row["model"], row["format"], row["rows"]), []).append(row)

    def line(key: tuple[str, str, int], parts: Sequence[Row]) -> tuple[str, ...]:
        times = [part["us"] for part in parts]
        floor = sum(part["floor_us"] for part in parts)
        total = None if None in times else sum(times)
        return (
            *(key[0], key[1], str(key[2])),
            *("-" if us is None else f"{us:.1f}" for us in times),
            *(("-", "-") if total is None else (f"{total:.1f}", f"{total / floor:.2f}x")),
            f"{max(part['error'] for part in parts):.1e}",
        )

    columns = ("model", "weights", "rows", *_PRODUCTS, "layer us", "of floor", "error")
    show("Products of a layer", columns, (line(*item) for item in layers.items()))
    for (model, form, count), parts in layers.items():
        worst = max(part["error"] for part in parts)
        if not worst <= MAX_ERROR:
            print(f"{model}, {form}, {count} rows: error {worst:.1e}, at most {MAX_ERROR}: NOT met")
        if form in BOUND and count == 1 and all(part["us"] for part in parts):
            floors = sum(part["us"] for part in parts) / sum(part["floor_us"] for part in parts)
            verdict = "met" if floors <= BOUND[form] else "NOT met"
            print(f"{model}, {form}, 1 row: {floors:.2f} floors, at most {BOUND[form]}: {verdict}")


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark: measure, print and record; return the exit code, 2 without a GPU."""
    options_parser = parser("benchmarks.products", __doc__)
    options_parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = options_parser.add_argument
    add("--models", default="qwen3-vl-8b", help="dense models, comma-separated")
    add("--formats", default=",".join(FORMATS), help="formats of weights, comma-separated")
    add("--rows", type=numbers, default=ROWS, help="numbers of rows, comma-separated")
    options = options_parser.parse_args(arguments)
    if device_of("products", tiny=False) is None:
        return 2
    bandwidth, rows = copy_bandwidth(), list[Row]()
    line = command("benchmarks.products", arguments)
    record = Record("products", line, device_name("cuda"), rows, NOTES, {"bandwidth": bandwidth})
    for name in options.models.split(","):
        for form in options.formats.split(","):
            for row in measured(name, form, options.rows, bandwidth):
                rows.append(row)
                record.write(options.out)
    report(rows)
    finish(record, options.out)
    return int(any(row["us"] is None or not row["error"] <= MAX_ERROR for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
