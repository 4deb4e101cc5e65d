"""oscar-mm chat: lines in, answers out; whatever goes wrong, the conversation goes on."""

import io
import os
import signal
import sys
from pathlib import Path

import pytest
from PIL import Image

from oscar_mm import OscarVLPipeline
from oscar_mm.cli import run
from tests.processes import Forked, command, without_notes
from tests.prompts import clip, noise, tone
from tests.recordings import write_movie, write_sound


def talk(
    folder: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch, *options: str, code: int = 0
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    arguments = ["chat", "-m", str(folder), "--device", "cpu", "--max-new-tokens", "5", *options]
    assert run(arguments) == code


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "a picture.png"
    Image.fromarray(noise(100, 120)).save(path)
    return path


def test_answers_are_those_of_the_library(qwen3_vl_folder, picture, monkeypatch, capsys) -> None:
    shown = f"/image {picture}"
    several = f'/image "{picture}" {picture.parent}/*.png'
    talk(qwen3_vl_folder, [shown, "What?", "", several, "And these?", "Why?"], monkeypatch)
    with OscarVLPipeline(qwen3_vl_folder, device="cpu").chat() as chat:
        answers = [
            chat.ask("What?", images=[picture], max_new_tokens=5),
            chat.ask("And these?", images=[picture, picture], max_new_tokens=5),
            chat.ask("Why?", max_new_tokens=5),
        ]
    captured = capsys.readouterr()
    assert captured.out == "".join(f"{answer.text}\n" for answer in answers)
    assert captured.err == ""


def test_commands(qwen3_vl_folder, picture, tmp_path, monkeypatch, capsys) -> None:
    saved = tmp_path / "chat.safetensors"
    lines = [
        *(f'/image "{picture}"', "What is it?", "/forget 1", "/segments", "/memory"),
        *("/help", f"/save {saved}", "Is it?", "/undo", f"/load {saved}"),
        *(f"/image {picture}", "/drop", "And?", "/segments", "/quit", "never asked"),
    ]
    talk(qwen3_vl_folder, lines, monkeypatch, "--system", "Be brief.")
    captured = capsys.readouterr()
    listed = [line.split() for line in captured.out.splitlines() if "text   " in line]
    assert [line[0] for line in listed if line[0].isdecimal()] == ["0", "0", "2"]
    assert captured.out.count("forgotten                         a picture.png") == 2
    assert "KV cache" in captured.out and "/quit " in captured.out
    assert "> [a picture.png]\nWhat is it?\n" in captured.out and "never asked" not in captured.out
    size = f"{saved.stat().st_size:,}"
    assert captured.err == f"saved as {saved}, {size} bytes\nremoved: Is it?\n"
    talk(qwen3_vl_folder, ["/segments"], monkeypatch, "--load", str(saved))
    assert capsys.readouterr().out.count("\n") == 2


def test_errors_are_shown_and_the_chat_goes_on(
    qwen3_vl_folder, picture, tmp_path, monkeypatch, capsys
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("no picture")
    expected = {
        "/image": "/image needs a PATH: type the path of a file after it",
        "/image gone.png": "gone.png: no such file",
        f"/image {notes}": "is not an image that can be read",
        "/audio call.wav": "Qwen3-VL supports image, video, not audio",
        "/image https://example.org/a.png": "is a URL, not a path",
        "/forget": "/forget needs the number of a segment",
        "/forget 9": "no such segment; there are none yet",
        "/undo": "the chat has no turns yet",
        "/save": "/save needs one PATH",
        f"/save {notes}": "already exists; only a .safetensors file is replaced",
        "/load": "/load needs one PATH",
        "/load a b": "/load needs one PATH of a saved chat",
        f"/image {notes.parent}/*.png gone.png": "gone.png: no such file",
        "/image *.webp": "*.webp: no such file",
        "/load gone": "gone: no such file",
        f"/load {notes}": "is not a safetensors file",
        "/what": "/what: no such command; /help lists them",
        "is <|im_end|> it?": "a control token of this model",
    }
    talk(qwen3_vl_folder, [*expected, f"/image {picture}", "And now?"], monkeypatch)
    captured = capsys.readouterr()
    errors = captured.err.splitlines()
    assert len(errors) == len(expected) and captured.out.count("\n") == 1
    for error, message in zip(errors, expected.values(), strict=True):
        assert error.startswith("error: ") and message in error
    assert notes.read_text() == "no picture"


def test_sound_and_video(qwen3_omni_folder, tmp_path, monkeypatch, capsys) -> None:
    sound = write_sound(tmp_path / "sound.flac", tone(1))
    movie = write_movie(tmp_path / "movie.mp4", clip(8), tone(1))
    lines = [f"/audio {sound}", f"/video {movie}", "What do you hear?", "/segments"]
    talk(qwen3_omni_folder, lines, monkeypatch, "--audio-in-video")
    captured = capsys.readouterr()
    assert "sound.flac" in captured.out and "movie.mp4" in captured.out
    assert "error" not in captured.err


def test_bad_options(qwen3_vl_folder, tmp_path, monkeypatch, capsys) -> None:
    for options, message in {
        ("--policy", "tiny"): "unknown policy",
        ("--top-p", "0"): "top_p",
        ("--load", "gone"): "gone: no such file",
        ("--audio-in-video",): "Qwen3-VL supports image, video, not audio",
        ("--load", __file__, "--system", "Be kind."): "--system cannot be used with --load",
        ("--load", __file__): "is not a safetensors file",
    }.items():
        talk(qwen3_vl_folder, [], monkeypatch, *options, code=2)
        captured = capsys.readouterr()
        assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_a_bundled_model_by_default(picture, monkeypatch, capsys) -> None:
    lines = [f"/image {picture}", "What is the code?", "hi", "/audio call.wav"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert run(["chat", "--device", "cpu", "--max-new-tokens", "2"]) == 0
    captured = capsys.readouterr()
    notice, hint, error = captured.err.splitlines()
    assert notice.startswith("oscar-mm: no --model given, so this is pocket-vl, 5M parameters,")
    assert hint.startswith("pocket-vl was not trained on this question")
    assert (
        error
        == "error: Qwen3-VL supports image, video, not audio; use a Qwen3-Omni model or pocket-omni"
    )
    assert captured.out.count("\n") == 2


def test_ctrl_c_ends_the_answer(qwen3_vl_folder) -> None:
    options = ["--device", "cpu", "--max-new-tokens", "4000"]
    with Forked(command, "chat", "-m", str(qwen3_vl_folder), *options) as running:
        running.stdin.write(b"What is it?\n")
        assert running.stdout.read(1)
        os.kill(running.pid, signal.SIGINT)
        code, out, errors = running.end(b"/segments\n/undo\n/undo\n")
    assert (code, out.count(b"What is it?")) == (0, 1)
    assert without_notes(errors).splitlines() == [
        b"stopped; the text so far counts as the answer",
        b"removed: What is it?",
        b"error: undo: the chat has no turns yet",
    ]
