"""Files of text, and what is wrong with those that are none."""

from pathlib import Path

import pytest

from oscar_mm import InputError
from oscar_mm.files import read_text


def test_text(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("Grüße\n", "utf-8")
    assert read_text(path) == "Grüße\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "--text .*notes.txt: no such file"),
        (b"", "notes.txt: is empty"),
        (b" \n\t", "notes.txt: is empty"),
        (b"\xff\xfe\x00", "notes.txt: is not valid UTF-8 text"),
    ],
)
def test_no_text(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_text(path)


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--words .*: is a folder; pass a text file"):
        read_text(tmp_path, "--words")
