"""The short programs run as they are."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import oscar_mm

EXAMPLES = Path(__file__).parents[2] / "examples"
MEDIA = EXAMPLES / "media"


def run(program: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    runpy.run_path(str(EXAMPLES / program), run_name="__main__")


@pytest.mark.slow
def test_chat(qwen3_vl_folder, monkeypatch, capsys) -> None:
    pictures = [str(MEDIA / "receipt.jpg"), str(MEDIA / "chart.png")]
    run("chat.py", [str(qwen3_vl_folder), *pictures], monkeypatch)
    assert "KV cache" in capsys.readouterr().out


@pytest.mark.slow
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


def test_generate(monkeypatch, capsys, recwarn) -> None:
    run("generate.py", [], monkeypatch)
    assert not [one for one in recwarn if "OscarCache" in str(one.message)]
    assert capsys.readouterr().out == "7KQ2\n"


def test_first_run(monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        run("first_run.py", [], monkeypatch)
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    for line in ("picture 7? YH38 (right)", "picture 57? 45 (right)", "clip 5? 19408 (right)"):
        assert line in printed
    assert "loading pocket-omni" in printed
    *_, table = printed.partition("KV cache of")
    rows = [line.split() for line in table.splitlines() if line.strip()]
    assert [row[:2] for row in rows[-3:]] == [
        *(["20", "pictures"], ["100", "pictures"], ["10", "recordings"])
    ]
    assert all(row[6].endswith("x") and float(row[7]) > 0 for row in rows[-3:])


def test_first_run_fails_where_an_answer_is_wrong(monkeypatch, capsys) -> None:
    memory = SimpleNamespace(bf16_bytes=2_000, kv_bytes=1_000, ratio=2.0)

    def guess(**_: object) -> SimpleNamespace:
        return SimpleNamespace(text="45", memory=memory)

    for name in ("OscarVLPipeline", "OscarOmniPipeline"):
        monkeypatch.setattr(oscar_mm, name, lambda *_, **__: guess)
    with pytest.raises(SystemExit) as ended:
        run("first_run.py", [], monkeypatch)
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert "7? 45 (WRONG: it is YH38)" in printed and "57? 45 (right)" in printed
