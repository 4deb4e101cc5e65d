"""What commands write of an answer, and where."""

import sys

import pytest

from oscar_mm.apps.terminal import written
from oscar_mm.generation.reasoning import Reasoning

PIECES = [Reasoning("It is "), Reasoning("a \x1b[2Jsign."), "The ", "sign."]


def test_reasoning_is_apart_and_pieces_are_given_on(capsys) -> None:
    assert list(written(PIECES)) == PIECES
    assert capsys.readouterr() == ("The sign.", "It is a \x1b[2Jsign.\n\n")
    assert list(written(PIECES[2:])) == PIECES[2:]
    assert capsys.readouterr() == ("The sign.", "")
    assert list(written(PIECES[:1])) == PIECES[:1]
    assert capsys.readouterr() == ("", "It is \n")


def test_a_terminal_shows_it_dimly_and_harmlessly(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert list(written(PIECES)) == PIECES
    dim = "\x1b[2mIt is \x1b[0m\x1b[2ma \ufffd[2Jsign.\x1b[0m\n\n"
    assert capsys.readouterr().err == dim
