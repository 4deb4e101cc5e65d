"""Lines that are typed: what Tab completes, which files a line names, silence while one waits."""

import os
import sys
from pathlib import Path

import pytest

from oscar_mm.apps.line_input import completions, no_echo, paths_of, typed_lines

COMMANDS = ["/image", "/load", "/save"]


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
