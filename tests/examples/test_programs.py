"""The short programs run as they are."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MEDIA = EXAMPLES / "media"


def run(program: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    runpy.run_path(str(EXAMPLES / program), run_name="__main__")


def test_chat(qwen3_vl_folder, monkeypatch, capsys) -> None:
    pictures = [str(MEDIA / "receipt.jpg"), str(MEDIA / "chart.png")]
    run("chat.py", [str(qwen3_vl_folder), *pictures], monkeypatch)
    assert "KV cache" in capsys.readouterr().out


def test_questions_about_a_recording(qwen3_omni_folder, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    questions = ["Who speaks?", "What is it about?"]
    arguments = [str(qwen3_omni_folder), str(MEDIA / "dial.wav"), *questions]
    run("questions_about_a_recording.py", arguments, monkeypatch)
    printed = capsys.readouterr().out
    assert all(f"{question}\n" in printed for question in questions)
    assert (tmp_path / "heard.safetensors").is_file()


def test_many_requests(monkeypatch, capsys) -> None:
    run("many_requests.py", [], monkeypatch)
    printed = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    assert len(printed) == 20
    assert printed["01.png"] == "7KQ2" and printed["04.png"] == "HOTEL"


def test_pictures_and_sound(monkeypatch, capsys) -> None:
    run("pictures_and_sound.py", [], monkeypatch)
    assert capsys.readouterr().out == "19408"


def test_go_on_later(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for segments in (21, 22):
        run("go_on_later.py", [], monkeypatch)
        answer, said = capsys.readouterr().out.splitlines()
        assert answer == "T6ZPAE" and said.startswith(f"{segments} segments")


def test_several_gpus(monkeypatch, capsys) -> None:
    monkeypatch.delenv("RANK", raising=False)
    # As it is without torchrun; tests/pipelines/test_divided.py starts it with torchrun.
    run(
        "several_gpus.py",
        ["pocket-vl", *map(str, sorted(MEDIA.glob("cards/*.png"))[:3])],
        monkeypatch,
    )
    assert capsys.readouterr().out.startswith("93015\n")


def test_generate(monkeypatch, capsys) -> None:
    run("generate.py", [], monkeypatch)
    assert capsys.readouterr().out == "7KQ2\n"
