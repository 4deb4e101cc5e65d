"""What commands write of an answer, and where; bars on a terminal only, which leave no hooks."""

import sys

import pytest
import torch

from oscar_mm.apps.terminal import headline, prefill_bar, print_pieces, rows_bar
from oscar_mm.generation.answer import Reasoning
from tests.checkpoints import build_decoder

PIECES = [Reasoning("It is "), Reasoning("a \x1b[2Jsign."), "The ", "sign."]


def test_reasoning_is_apart_and_pieces_are_given_on(capsys) -> None:
    assert list(print_pieces(PIECES)) == PIECES
    assert capsys.readouterr() == ("The sign.", "It is a \x1b[2Jsign.\n\n")
    assert list(print_pieces(PIECES[2:])) == PIECES[2:]
    assert capsys.readouterr() == ("The sign.", "")
    assert list(print_pieces(PIECES[:1])) == PIECES[:1]
    assert capsys.readouterr() == ("", "It is \n")


def test_a_terminal_shows_it_dimly_and_harmlessly(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert list(print_pieces(PIECES)) == PIECES
    dim = "\x1b[2mIt is \x1b[0m\x1b[2ma \ufffd[2Jsign.\x1b[0m\n\n"
    assert capsys.readouterr().err == dim


@pytest.mark.parametrize("terminal", [True, False])
def test_prefill_shows_layers(terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    model = build_decoder("llama")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("TTY_COMPATIBLE", "1" if terminal else "0")
    with prefill_bar(model), torch.no_grad():
        model(torch.arange(5)[None])
    assert not any(layer._forward_hooks for layer in model.get_decoder().layers)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("reading images and prompt" in captured.err) == terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_rows_audio_and_memory(terminal: bool, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("TTY_COMPATIBLE", "1" if terminal else "0")
    monkeypatch.setenv("COLUMNS", "120")
    with rows_bar(8) as shown:
        shown.update(3, audio_seconds=90.0, seconds=6.0, kv_bytes=2_500_000)
    captured = capsys.readouterr()
    assert captured.out == ""
    for part in ("3/8", "15.0 h audio/h", "KV 2.50 MB"):
        assert (part in captured.err) is terminal


def test_what_is_saved_comes_first() -> None:
    assert headline(2_200_000, 12_700_000) == (
        "5.8x smaller than 16 bit: 2.20 MB instead of 12.70 MB"
    )
    short = headline(1000, 990)
    assert short.startswith("1.00 KB held, 990 B in 16 bit") and "x smaller" not in short
