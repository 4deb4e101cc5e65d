"""Loops for CPUs are compared with PyTorch operations: right ones pass, wrong ones do not."""

import pytest
import torch

from oscar_mm.apps import doctor, loop_checks
from oscar_mm.ops.unpack import slots_by_torch


@pytest.mark.parametrize("name", [f"{one}_on_cpu" for one in loop_checks.OPERATIONS])
def test_wrong_loops_are_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(verdict.agrees for verdict in loop_checks.check_all().values())
    wrong = {
        "decode_on_cpu": lambda arguments: torch.roll(arguments.queries, 1, 0),
        "store_on_cpu": lambda arguments: arguments.pages.bitwise_not_(),
        "unpack_on_cpu": lambda arguments: [x.roll(1, 2) for x in slots_by_torch(arguments)],
    }
    monkeypatch.setattr(loop_checks, name, wrong[name])
    monkeypatch.setattr(loop_checks._StoreLoops, "of_layers", lambda self, arguments: None)
    operation = name.removesuffix("_on_cpu")
    found = {check.name: check.ok for check in doctor._loop_checks()}
    assert not found[f"loops, {operation}, float32"] and not found[f"loops, {operation}, bfloat16"]
