"""`oscar-mm inspect`: tables and words on stdout, three files in a folder."""

import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from oscar_mm.cli import run
from oscar_mm.extras import install_command
from tests.prompts import clip, noise, tone
from tests.recordings import write_movie, write_sound

pytestmark = pytest.mark.usefixtures("quick_collection")


@pytest.fixture
def pictures(tmp_path: Path) -> list[str]:
    paths = []
    for seed in range(3):
        paths.append(str(tmp_path / f"picture{seed}.png"))
        Image.fromarray(noise(256, 256, seed)).save(paths[-1])
    return paths


def test_tables_and_files(qwen3_vl_folder, pictures, tmp_path, capsys) -> None:
    out = tmp_path / "made" / "here"
    asked = ["--model", str(qwen3_vl_folder), "--device", "cpu", "--prompt", "Compare. " * 80]
    assert run(["inspect", *pictures, *asked, "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert "On this prompt" in captured.out and "per_head" in captured.out
    assert sorted(path.name for path in out.iterdir()) == [
        *("inspection.html", "inspection.json", "inspection.png"),
    ]
    assert captured.err.split() == [
        str(out / f"inspection.{suffix}") for suffix in ("json", "png", "html")
    ]
    record = json.loads((out / "inspection.json").read_text())
    assert record["media"] == ["picture0.png", "picture1.png", "picture2.png"]
    assert record["tokens"]["image"] == 3 * 64 and len(record["layers"]) == 2
    assert record["findings"][0] in " ".join(captured.out.split())
    assert record["layers"][0]["errors"]["channel, no token scaling"]["image"]["output"] > 0
    Image.open(out / "inspection.png").verify()
    assert record["findings"][0] in (out / "inspection.html").read_text()
    # Written over, as a whole.
    assert run(["inspect", *asked, "--out", str(out)]) == 0
    assert json.loads((out / "inspection.json").read_text())["media"] == []
    assert len(list(out.iterdir())) == 3


def test_a_bundled_model_by_default(pictures, tmp_path, capsys) -> None:
    sound = write_sound(tmp_path / "sound.wav", tone(1.0))
    asked = (pictures[:1], "pocket-vl, 5M"), ([str(sound)], "pocket-omni, 9M")
    for media, name in asked:
        assert run(["inspect", *media, "--device", "cpu", "--prompt", "What is the code?"]) == 0
        captured = capsys.readouterr()
        assert "By layer" in captured.out
        assert captured.err.startswith(f"oscar-mm: no --model given, so this is {name} parameters")


def test_media_of_all_kinds_without_files(
    qwen3_omni_folder, pictures, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.chdir(tmp_path)
    sound = write_sound(tmp_path / "sound.flac", tone(1.0)).rename(tmp_path / "sound.FLAC")
    movie = write_movie(tmp_path / "movie.mp4", clip(8), None)
    media = [str(sound), pictures[0], str(movie)]
    before = sorted(tmp_path.iterdir())
    assert run(["inspect", *media, "-m", str(qwen3_omni_folder), "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    for name in ("text", "image", "video", "audio"):
        assert name in captured.out
    assert captured.err == "" and sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["gone.png", "-m", "MODEL"], "gone.png: no such file"),
        (["https://example.com/a.png", "-m", "MODEL"], "is a URL, not a path"),
        (["SOUND", "-m", "MODEL"], "sound.wav: MODEL does not support audio"),
        (["PICTURE", "-m", "MODEL", "-p", " "], "prompt is empty"),
        (["PICTURE", "-m", "MODEL", "--out", "PICTURE"], "picture0.png is a file; pass a folder"),
        (
            ["PICTURE", "-m", "MODEL", "--out", "PICTURE/in"],
            "picture0.png is a file; pass a folder",
        ),
        (["PICTURE", "-m", "nowhere/at/all"], "nowhere/at/all: no such folder; pass"),
        (["PICTURE", "-m", "MODEL", "--device", "abacus"], "device 'abacus' cannot be used"),
    ],
)
def test_bad_input(
    options, message, qwen3_vl_folder, pictures, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_sound(tmp_path / "sound.wav", tone(0.5))
    names = {"MODEL": str(qwen3_vl_folder), "SOUND": "sound.wav", "PICTURE": "picture0.png"}
    for name, value in names.items():
        options = [option.replace(name, value) for option in options]
        message = message.replace(name, value)
    assert run(["inspect", *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1


def test_plots_are_missed_before_the_model_loads(
    qwen3_vl_folder, pictures, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "out"
    assert run(["inspect", pictures[0], "-m", "no/model", "--out", str(out)]) == 2
    assert install_command("plots") in capsys.readouterr().err
    assert not out.exists()
