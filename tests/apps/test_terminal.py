"""What commands write of an answer, bars on a terminal only, and lines that a user types there."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oscar_mm import OscarCache
from oscar_mm.apps.terminal import (
    completions,
    headline,
    memory_text,
    no_echo,
    paths_of,
    prefill_bar,
    print_pieces,
    rows_bar,
    typed_lines,
)
from oscar_mm.engine.answer import Reasoning
from tests.checkpoints import build_decoder

PIECES = [Reasoning("It is "), Reasoning("a \x1b[2Jsign."), "The ", "sign."]
COMMANDS = ["/image", "/load", "/save"]


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
    assert ("reading media and prompt" in captured.err) == terminal


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
        "5.8x smaller than 16-bit: 2.20 MB instead of 12.70 MB"
    )
    short = headline(1000, 990)
    assert short.startswith("1.00 KB stored, against 990 B in 16-bit") and "x smaller" not in short


def test_what_takes_more_than_16_bit_is_explained() -> None:
    cache = OscarCache("standard")
    states = torch.randn(1, 2, 20, 64)
    cache.expect(torch.zeros(1, 20, dtype=torch.long))
    cache.update(states, states, 0)
    report = cache.memory()
    assert report.ratio < 1
    first, *table = memory_text(report).splitlines()
    assert first.startswith("No token is packed; tables take ")
    assert "\n".join(table) == str(report)
    cache.update(states[:, :, :1], states[:, :, :1], 0)
    text = memory_text(cache.memory())
    assert text.startswith("No token is packed; tables and free slots take ")
    assert memory_text(replace(report, bf16_bytes=report.kv_bytes)).startswith("KV cache")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("cards").mkdir()
    for name in ("cards/1.png", "cards/2.png", "cards/two words.png", "it's.png", "[1].png"):
        Path(name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/", ["/image ", "/load ", "/save "]),
        ("/im", ["/image "]),
        ("im", []),
        ("What is c", []),
        ("/image ca", ["/image cards/"]),
        ("/image cards/1", ["/image cards/1.png"]),
        ("/image cards/1.png cards/2", ["/image cards/1.png cards/2.png"]),
        ("/image cards/t", ["/image 'cards/two words.png'"]),
        ("/image [", ["/image '[1].png'"]),
        ("/image gone", []),
    ],
)
def test_tab(folder: Path, line: str, expected: list[str]) -> None:
    assert completions(line, COMMANDS) == expected


def test_tab_at_home(folder: Path) -> None:
    assert completions("/image ~/cards/1", COMMANDS) == [f"/image {folder}/cards/1.png"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cards/1.png", ["cards/1.png"]),
        (" cards/1.png  cards/2.png ", ["cards/1.png", "cards/2.png"]),
        ("cards/two words.png", ["cards/two words.png"]),
        ("'cards/two words.png' cards/1.png", ["cards/two words.png", "cards/1.png"]),
        ("cards/?.png", ["cards/1.png", "cards/2.png"]),
        ("it's.png", ["it's.png"]),
        ("isn't.png", ["isn't.png"]),
        ("[1].png", ["[1].png"]),
        ("gone.png", ["gone.png"]),
        ("https://example.org/a.png?b=c", ["https://example.org/a.png?b=c"]),
        ("", []),
    ],
)
def test_files_of_a_line(folder: Path, line: str, expected: list[str]) -> None:
    assert paths_of(line) == expected


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_what_is_typed_while_an_answer_runs_comes_after_it(monkeypatch) -> None:
    master, slave = os.openpty()
    with open(slave) as terminal, open(master, "r+b", buffering=0) as keyboard:
        monkeypatch.setattr(sys, "stdin", terminal)
        with no_echo():
            keyboard.write(b"And then?\n")
            os.set_blocking(master, False)
            assert keyboard.read(100) is None, "nothing is echoed"
        assert terminal.readline() == "And then?\n"
        keyboard.write(b"Why?\n")
        assert terminal.readline() == "Why?\n" and b"Why?" in keyboard.read(100)


def test_a_pipe_is_read_as_it_is(monkeypatch) -> None:
    read, write = os.pipe()
    os.write(write, b"/image a.png\n\nWhat?\n")
    os.close(write)
    with open(read) as lines:
        monkeypatch.setattr(sys, "stdin", lines)
        with no_echo():
            assert list(typed_lines(COMMANDS)) == ["/image a.png", "", "What?"]


@pytest.mark.parametrize("typed", ["/image a b", "/image 'a b", '/image "a b', "/image a\\ b"])
def test_a_name_with_spaces_is_completed(tmp_path, monkeypatch, typed: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "c.png").touch()
    (tmp_path / "b.png").touch()
    assert completions(typed, ["/image"]) == ["/image a b/"]
    assert completions(f"{typed}/", ["/image"]) == ["/image 'a b/c.png'"]
    assert completions("/image b.png a", ["/image"]) == ["/image b.png a b/"]


@pytest.mark.parametrize("text", ["~nobody-of-this-name/x", "a" * 5000, "\0"])
def test_paths_that_cannot_be(text: str) -> None:
    assert paths_of(text) == [text]
