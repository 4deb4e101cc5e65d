"""Rows of the fidelity benchmark are those of roundtrip."""

import pytest
import torch

from benchmarks import fidelity
from oscar_mm import KVPolicy, roundtrip
from tests.quant.synthetic import relative_error, sigma_of


def test_fidelity_rows_are_those_of_roundtrip() -> None:
    scenario = fidelity.SCENARIOS["all four"]
    policies = {"channel": KVPolicy.preset("channel"), "bf16": KVPolicy.preset("bf16")}
    compact, plain = fidelity.measure([3], policies, {"one": scenario}, tokens=1024)
    queries, keys, values, ids = scenario.inputs(3, 1024)
    back = roundtrip(keys, values, "channel", ids, sigma=sigma_of(queries, keys))
    assert compact["bits_per_value"] == back.bits_per_value
    assert compact["key_error"] == relative_error(back.k, keys)
    assert compact["value_error"] == relative_error(back.v, values)
    assert compact["kl_by_seed"] == [compact["kl"]] and compact["kl"] > 0
    assert all(plain[name] == pytest.approx(0, abs=1e-12) for name in fidelity.MEASURES)


def test_stress_leaves_exact_attention_alone() -> None:
    last = slice(-8, None)
    outputs = []
    for name in ("plain", "rotary pairs x8, queries /8"):
        queries, keys, values, _ = fidelity.SCENARIOS[name].inputs(0, 256)
        outputs.append(fidelity.attention(queries[:, :, last], keys, values)[0])
    torch.testing.assert_close(outputs[0], outputs[1])
