"""The benchmark of attention over prompts."""

from __future__ import annotations

import pytest
import torch

from benchmarks.prompt_attention import Pass, main


def test_operations_are_those_of_scores_that_are_not_masked() -> None:
    new, whole = (3, 4), (3, 7)
    seen = sum(torch.ones(x, y).tril(y - x).sum().item() for x, y in zip(new, whole, strict=True))
    # A multiplication and an addition for each channel, of scores and of outputs.
    assert Pass(new, whole).operations == 2 * 2 * 128 * 32 * seen
    assert Pass(new, whole).name == "3, 4/7"


def test_needs_a_hopper_gpu(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    assert "needs a Hopper GPU" in capsys.readouterr().err
