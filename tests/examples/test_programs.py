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
