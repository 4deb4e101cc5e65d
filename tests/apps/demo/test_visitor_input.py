"""Which files a message may have."""

from pathlib import Path

import pytest
from PIL import Image

from oscar_mm.apps.demo import visitor_input as module
from oscar_mm.apps.demo.transcript import load_previews
from oscar_mm.apps.demo.visitor_input import bounded_text, files_by_kind, place_files
from oscar_mm.errors import InputError
from tests.prompts import tone
from tests.recordings import write_sound


def test_files_by_kind_in_their_order(uploads: Path) -> None:
    names = ["1.png", "tone.wav", "0.png", "clip.mp4"]
    kinds = files_by_kind([str(uploads / name) for name in names], [uploads])
    assert {kind: [path.name for path in paths] for kind, paths in kinds.items()} == {
        "images": ["1.png", "0.png"],
        "videos": ["clip.mp4"],
        "audio": ["tone.wav"],
    }


def test_kinds_are_recognized_by_content(uploads: Path, tmp_path: Path) -> None:
    voice = write_sound(tmp_path / "voice.webm", tone(0.5))
    for kind in ("avif", "tif"):
        Image.open(uploads / "0.png").save(tmp_path / f"a.{kind}")
    files = [voice, tmp_path / "a.avif", tmp_path / "a.tif", uploads / "clip.mp4"]
    kinds = files_by_kind(files, [uploads, tmp_path])
    assert list(kinds.values()) == [[*files[1:3]], [files[3]], [voice]]
    shown = [one.kind for one in load_previews(kinds, module.LIMITS)]
    assert shown == ["picture", "picture", "video", "clip"]


def test_other_files_are_not_read(uploads: Path, tmp_path: Path) -> None:
    outside = tmp_path / "secret.png"
    outside.write_bytes(b"secret")
    link = uploads / "link.png"
    link.symlink_to(outside)
    for path in (outside, link, uploads / ".." / outside.name, Path("/etc/passwd")):
        with pytest.raises(InputError, match="was not uploaded here"):
            files_by_kind([path], [uploads])
    link.unlink()
    with pytest.raises(InputError, match=r"gone\.png is no longer available"):
        files_by_kind([uploads / "gone.png"], [uploads])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("What is it?", [0, 1, 2, "What is it?"]),
        ("Before: [a.png] after: [b.wav]", [2, "Before:", 0, "after:", 1]),
        ("[b.wav][a.png]", [2, 1, 0]),
        ("[a.png] and [a.png] and [a.png]", [1, 0, "and", 2, "and [a.png]"]),
        ("[c.png] [A.PNG] [[a.png]]", [1, 2, "[c.png] [A.PNG] [", 0, "]"]),
        ("", [0, 1, 2]),
        ("[" * 1000, [0, 1, 2, "[" * 1000]),
    ],
)
def test_files_are_placed_by_name(text: str, parts: list) -> None:
    assert place_files(text, ["a.png", "b.wav", "a.png"]) == parts


def test_names_with_brackets_are_placed_too() -> None:
    names = ["a[1] (2).png", "[].png", "a].png", "$x$ [.png"]
    text = "See [a[1] (2).png], [[].png]: [a].png] not [[] or [$x$ [.png]."
    expected = ["See", 0, ",", 1, ":", 2, "not [[] or", 3, "."]
    assert place_files(text, names) == expected
    assert place_files("[a] [] [", []) == ["[a] [] ["]


def test_bounds(uploads: Path, monkeypatch) -> None:
    text = uploads / "notes.txt"
    text.write_text("notes")
    with pytest.raises(InputError, match=r"notes\.txt is not an image, video or recording"):
        files_by_kind([text], [uploads])
    small = module.MediaLimits(max_file_bytes=2**20)
    monkeypatch.setattr(module, "LIMITS", small)
    large = uploads / "large.png"
    large.write_bytes(bytes(2**20 + 1))
    with pytest.raises(InputError, match=r"large\.png is larger than the 1 MiB"):
        files_by_kind([large], [uploads])
    large.unlink()
    with pytest.raises(InputError, match="system prompt: 100,001 characters"):
        bounded_text("system prompt", "x" * 100_001)
    assert bounded_text("message", " a \n") == "a"
