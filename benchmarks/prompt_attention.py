"""Compare attention over the prompts of a pass on a GPU with torch's kernels and a floor.

python -m benchmarks.prompt_attention
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.profiling import Timer
from benchmarks.record import Record, command, device_name, finish, parser, show
from oscar_mm.kernels.launch import uses_wgmma
from oscar_mm.kernels.self_check import relative_error
from oscar_mm.ops.varlen import VarlenArguments, VarlenKernel, boundaries

_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
_DTYPE = torch.bfloat16
_PRODUCT = 8192
"""Rows and columns of the matrices whose product gives the floor's rate."""
NOTES = [
    f"{_HEADS} query heads, {_KV_HEADS} KV heads of {_HEAD_DIM} channels, bfloat16. Tokens: those "
    "that a pass reads of each prompt, and after a slash the prompt's tokens so far.",
    "Times of a call in a CUDA graph, in microseconds. Flash: torch's FlashAttention 2 for several "
    "sequences; cuDNN: SDPA, only for a whole prompt, since it aligns the mask with the first key.",
    f"Floor: the products of scores that are not masked, at the rate of torch's product of "
    f"matrices of {_PRODUCT:,} x {_PRODUCT:,} in the same run.",
    "All outputs agree within 1%.",
]


class Pass(NamedTuple):
    """Tokens that a pass reads of each prompt, and each prompt's tokens so far."""

    new: tuple[int, ...]
    whole: tuple[int, ...]

    @property
    def name(self) -> str:
        """Return the numbers of tokens as text."""
        pairs = zip(self.new, self.whole, strict=True)
        return ", ".join(f"{x:,}" if x == y else f"{x:,}/{y:,}" for x, y in pairs)

    @property
    def operations(self) -> float:
        """Return the floating-point operations of scores that are not masked."""
        pairs = zip(self.new, self.whole, strict=True)
        scores = sum(x * (y - x) + x * (x + 1) / 2 for x, y in pairs)
        return 4 * _HEADS * _HEAD_DIM * scores


PASSES = [
    Pass((960,), (960,)),
    Pass((960,), (1920,)),
    Pass((500, 460), (2000, 460)),
    Pass((500, 500), (500, 500)),
    Pass((2000, 496), (2000, 496)),
    Pass((1024,), (8192,)),
    Pass((8192,), (8192,)),
    Pass((32768,), (32768,)),
]


def arguments_of(one: Pass) -> VarlenArguments:
    """Return random arguments of a pass."""
    device = torch.device("cuda")
    random = partial(torch.randn, device=device, dtype=_DTYPE)
    queries = random(sum(one.new), _HEADS, _HEAD_DIM)
    keys, values = (random(sum(one.whole), _KV_HEADS, _HEAD_DIM) for _ in range(2))
    ends = boundaries(one.new, device), boundaries(one.whole, device)
    return VarlenArguments(
        queries, keys, values, ends[0], ends[1], _HEAD_DIM**-0.5, torch.empty_like(queries)
    )


def ways(one: Pass) -> dict[str, Callable[[], torch.Tensor]]:
    """Return what computes the attention of a pass, by name; the first is ours."""
    arguments = arguments_of(one)
    queries, keys, values, *ends, scaling, output = arguments
    kernel = VarlenKernel.for_arguments(arguments)
    assert kernel is not None

    def ours() -> torch.Tensor:
        kernel(arguments)
        return output

    longest = max(one.new), max(one.whole)
    flash = partial(torch.ops.aten._flash_attention_forward, scale=scaling)
    found = {"varlen": ours}
    found["flash"] = lambda: flash(queries, keys, values, *ends, *longest, 0.0, True, False)[0]
    if len(one.new) == 1 and one.new == one.whole:
        query, key, value = (x.transpose(0, 1)[None] for x in (queries, keys, values))
        sdpa = partial(scaled_dot_product_attention, query, key, value)

        def cudnn() -> torch.Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = sdpa(is_causal=True, scale=scaling, enable_gqa=True)
            return out[0].transpose(0, 1)

        found["cuDNN"] = cudnn
    expected = found["flash"]()
    for name, way in found.items():
        if not (error := relative_error(way(), expected)) < 0.01:
            raise RuntimeError(f"{name} is wrong for {one.name}: relative error {error:.3g}")
    return found


def peak_rate(timer: Timer) -> float:
    """Return the floating-point operations per second of a large product of matrices."""
    shape = _PRODUCT, _PRODUCT
    first, second = (torch.randn(shape, device="cuda", dtype=_DTYPE) for _ in range(2))
    us, why = timer.graph(lambda: first @ second)
    if us is None:
        raise RuntimeError(f"the product could not be captured in a CUDA graph: {why}")
    return 2 * _PRODUCT**3 / us * 1e6


def measure(timer: Timer, rate: float) -> list[dict[str, Any]]:
    """Return a row for each pass and kernel; ``us`` is None if the call cannot be captured."""
    rows = list[dict[str, Any]]()
    for one in PASSES:
        floor = one.operations / rate * 1e6
        for name, way in ways(one).items():
            us, why = timer.graph(way)
            row = {"tokens": one.name, "kernel": name, "us": us, "floor_us": floor}
            rows.append(row | ({} if us is not None else {"why": why}))
    return rows


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code, 2 without a Hopper GPU."""
    options = parser("benchmarks.prompt_attention", __doc__).parse_args(arguments)
    if not (torch.cuda.is_available() and uses_wgmma(torch.device("cuda", 0))):
        print("benchmarks.prompt_attention needs a Hopper GPU", file=sys.stderr)
        return 2
    rate = peak_rate(timer := Timer())
    rows = measure(timer, rate)
    show(
        "Attention over the prompts of a pass",
        ("tokens", "kernel", "us", "floor", "floors"),
        (
            (
                *(row["tokens"], row["kernel"]),
                "-" if row["us"] is None else f"{row['us']:.1f}",
                f"{row['floor_us']:.1f}",
                "-" if row["us"] is None else f"{row['us'] / row['floor_us']:.2f}",
            )
            for row in rows
        ),
    )
    line = command("benchmarks.prompt_attention", arguments)
    record = Record("prompt_attention", line, device_name("cuda"), rows, NOTES)
    record.extra["operations_per_second"] = rate
    finish(record, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
