"""Progress bars: on a terminal only, and without leaving hooks behind."""

import sys

import pytest
import torch

from oscar_mm.apps import progress
from tests.checkpoints import build_decoder


@pytest.mark.parametrize("terminal", [True, False])
def test_prefill_shows_layers(terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    model = build_decoder("llama")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("TTY_COMPATIBLE", "1" if terminal else "0")
    with progress.prefill(model), torch.no_grad():
        model(torch.arange(5)[None])
    assert not any(layer._forward_hooks for layer in model.get_decoder().layers)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("reading images and prompt" in captured.err) == terminal
