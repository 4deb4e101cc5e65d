"""Measure how attention changes when synthetic keys and values are stored in packed pages.

python -m benchmarks.fidelity
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch

from benchmarks.record import Record, command, device_name, finish, parser, show
from oscar_mm import KVPolicy, roundtrip
from oscar_mm.quant.balance import sigma_from_rms
from tests.quant.synthetic import multimodal, relative_error

SEEDS = (0, 1, 2)
TOKENS, QUERIES = 1024, 64
POLICIES = {name: KVPolicy.preset(name) for name in KVPolicy.preset_names()} | {
    "channel, 4 bit": KVPolicy.preset("channel", bits=4),
    "channel, balance None": KVPolicy.preset("channel", balance=None),
}
MEASURES = ("key_error", "value_error", "output_error", "kl")
NOTES = [
    "Synthetic keys, values and queries (8 KV heads, 32 query heads of 128, float32): text, image, "
    "text, audio, image; heads of unequal size. They compare storage formats under known troubles; "
    "only tasks with trained models measure accuracy.",
    "Errors: |stored - exact| / |exact| of keys, values and attention outputs. KL: of the "
    "attention weights, exact against stored, in nats, mean over queries and heads. Means over "
    f"{len(SEEDS)} seeds, {TOKENS} tokens, all in pages; the last {QUERIES} queries see all.",
    "bf16 keeps its inputs as they are, here float32.",
    "A few keys that are 5x longer draw attention far beyond their number. That rewards exact "
    "extremes of a group, as kivi stores them; trained models need not look so.",
]


@dataclass(frozen=True)
class Scenario:
    """Difficult properties of synthetic inputs, as factors.

    Attributes:
        imbalance: factor by which text keys are longer than image and audio keys.
        outliers: factor by which three rotary pairs of key channels are scaled; these channels
            also have a nonzero mean.
        stress: factor by which two more rotary pairs of key channels are scaled. The corresponding
            query channels are divided by it, so that exact attention does not change.
        long: factor by which 1.5% of the keys are longer than the others.
    """

    imbalance: float = 1.0
    outliers: float = 1.0
    stress: float = 1.0
    long: float = 1.0

    def inputs(
        self, seed: int, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return synthetic queries, keys, values and modality ids."""
        queries, keys, values, ids = multimodal(
            seed,
            tokens=tokens,
            outliers=self.outliers,
            imbalance=self.imbalance,
            long=self.long,
        )
        half = keys.shape[-1] // 2
        pairs = torch.randperm(half, generator=torch.Generator().manual_seed(seed))[:2]
        channels = torch.cat([pairs, pairs + half])
        keys[..., channels] *= self.stress
        queries[..., channels] /= self.stress
        return queries, keys, values, ids


SCENARIOS = {
    "plain": Scenario(),
    "text keys 3x longer": Scenario(imbalance=3),
    "outlier channels 6x": Scenario(outliers=6),
    "rotary pairs x8, queries /8": Scenario(stress=8),
    "1.5% of keys 5x longer": Scenario(long=5),
    "all four": Scenario(imbalance=3, outliers=6, stress=8, long=5),
}


def attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log weights of full (non-causal) attention in float64."""
    grouped = queries.double().unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
    scores = grouped @ keys.double().transpose(2, 3) * keys.shape[-1] ** -0.5
    weights = scores.log_softmax(-1)
    return weights.exp() @ values.double(), weights


def measure(
    seeds: Iterable[int] = SEEDS,
    policies: dict[str, KVPolicy] = POLICIES,
    scenarios: dict[str, Scenario] = SCENARIOS,
    tokens: int = TOKENS,
) -> list[dict[str, Any]]:
    """Return a row for each scenario and policy, with means over the seeds and the KL per seed."""
    rows = []
    for title, scenario in scenarios.items():
        varlen_batches = {name: [] for name in policies}
        for seed in seeds:
            queries, keys, values, ids = scenario.inputs(seed, tokens)
            exact, weights = attention(queries[:, :, -QUERIES:], keys, values)
            grouped = queries[0].unflatten(0, (keys.shape[1], -1))
            # The mean of a channel causes no error, see ``oscar_mm.quant.balance``.
            spread, size = keys[0].std(1, correction=0), grouped.square().mean((1, 2)).sqrt()
            sigma = sigma_from_rms(spread, size)
            for name, policy in policies.items():
                back = roundtrip(keys, values, policy, ids, sigma=sigma)
                output, log_weights = attention(queries[:, :, -QUERIES:], back.k, back.v)
                divergence = (weights.exp() * (weights - log_weights)).sum(-1).mean()
                varlen_batches[name].append(
                    {
                        "bits": back.bits_per_value,
                        "key_error": relative_error(back.k, keys),
                        "value_error": relative_error(back.v, values),
                        "output_error": relative_error(output, exact),
                        "kl": float(divergence),
                    }
                )
        for name, runs in varlen_batches.items():
            row = {"scenario": title, "policy": name, "bits_per_value": runs[0]["bits"]}
            row |= {key: mean(run[key] for run in runs) for key in MEASURES}
            rows.append(row | {"kl_by_seed": [run["kl"] for run in runs]})
    return rows


def _table(rows: list[dict[str, Any]]) -> None:
    for title in dict.fromkeys(row["scenario"] for row in rows):
        show(
            f"Synthetic inputs: {title}",
            ("policy", "bits", "keys", "values", "output", "KL"),
            (
                (
                    row["policy"],
                    f"{row['bits_per_value']:.2f}",
                    *(f"{row[key]:.4f}" for key in MEASURES),
                )
                for row in rows
                if row["scenario"] == title
            ),
        )


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark: measure, print and record; return the exit code."""
    options = parser("benchmarks.fidelity", __doc__).parse_args(arguments)
    rows = measure()
    _table(rows)
    line = command("benchmarks.fidelity", arguments)
    finish(Record("fidelity", line, device_name("cpu"), rows, NOTES), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
