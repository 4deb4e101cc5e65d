"""Measure the memory of an OscarCache that contains a random conversation.

python -m benchmarks.memory [--long]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from benchmarks.random_model import synthetic_cache
from benchmarks.record import Record, command, device_name, finish, parser, show
from oscar_mm import KVPolicy
from oscar_mm.cache.memory import KINDS
from oscar_mm.pages.layout import PageFormat

KV_HEADS, HEAD_DIM = 8, 128
SIZES = (300, *(1024 << power for power in range(6)))
LONG = 131072
ANSWER = 64
NOTES = [
    f"One layer, {KV_HEADS} KV heads of {HEAD_DIM} channels, bfloat16. All layers of a model hold "
    "the same tokens in the same format, so the ratio of one layer is the model's. The tables, "
    "which all layers share, count on this one alone.",
    f"Rounds of 64 text and 448 image tokens, the last {ANSWER} tokens one at a time, as an answer "
    "after which free slots go back. Every byte held counts.",
    "Page bits: bits per value of a full page with scales, zeros and norms. Held bits: of all "
    "bytes held.",
]


def page_bits(policy: KVPolicy, kv_heads: int = KV_HEADS, head_dim: int = HEAD_DIM) -> float:
    """Return the bits per value of a full page; 16 if the policy packs nothing."""
    if not policy.packs:
        return 16.0
    return PageFormat.of(policy, policy.packed_bits[0], kv_heads, head_dim).bits_per_value


def measure(
    sizes: Iterable[int] = SIZES, presets: Iterable[str] | None = None
) -> list[dict[str, Any]]:
    """Return a row for each preset and number of tokens."""
    rows = []
    for name in presets or KVPolicy.preset_names():
        policy = KVPolicy.preset(name)
        for tokens in sizes:
            generator = torch.Generator().manual_seed(0)
            shape = (1, KV_HEADS, tokens, HEAD_DIM)
            cache = synthetic_cache(policy, shape, generator, ANSWER)
            cache.shrink()
            row = {"preset": name, "context": tokens, "page_bits": page_bits(policy)}
            rows.append(row | cache.memory().to_dict())
    return rows


def _table(rows: list[dict[str, Any]]) -> None:
    columns = ("preset", "tokens", "page bits", "held bits", "held MB", "16 bit MB", "ratio")
    kinds = [kind for kind in KINDS if any(row["by_kind"][kind] for row in rows)]
    show(
        "KV cache of one layer",
        (*columns, *(f"{kind} %" for kind in kinds)),
        (
            (
                row["preset"],
                f"{row['context']:,}",
                f"{row['page_bits']:.2f}",
                f"{row['bits_per_value']:.2f}",
                f"{row['kv_bytes'] / 1e6:.2f}",
                f"{row['bf16_bytes'] / 1e6:.2f}",
                f"{row['ratio']:.2f}x",
                *(f"{100 * row['by_kind'][kind] / row['kv_bytes']:.1f}" for kind in kinds),
            )
            for row in rows
        ),
    )


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark: measure, print and record; return the exit code."""
    options = parser("benchmarks.memory", __doc__)
    options.add_argument("--long", action="store_true", help=f"also measure {LONG:,} tokens")
    options = options.parse_args(arguments)
    rows = measure((*SIZES, LONG) if options.long else SIZES)
    _table(rows)
    line = command("benchmarks.memory", arguments)
    finish(Record("memory", line, device_name("cpu"), rows, NOTES), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
