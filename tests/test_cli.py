"""The command line: answers, the one line of an error, exit codes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from typer.testing import CliRunner

import oscar_mm
from oscar_mm import pipelines
from oscar_mm.apps import doctor as doctor_module
from oscar_mm.cli import app, run
from oscar_mm.models import BUNDLED
from oscar_mm.policy import KVPolicy
from tests.checkpoints import build
from tests.processes import Forked, command, without_notes
from tests.prompts import clip, tone
from tests.recordings import write_movie, write_sound

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "oscar_mm.cli"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "qwen3_vl"
    build("qwen3_vl", folder)
    return str(folder)


@pytest.fixture
def picture(tmp_path: Path) -> str:
    path = tmp_path / "picture.png"
    Image.linear_gradient("L").resize((96, 64)).convert("RGB").save(path)
    return str(path)


def request(picture: str, model: str, *more: str) -> list[str]:
    return ["ask", picture, "--model", model, "--prompt", "What is it?", "--device", "cpu", *more]


def only_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def test_answer_on_stdout_and_memory_on_stderr(model, picture, capsys) -> None:
    assert run(request(picture, model, "--max-new-tokens", "5")) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith("\n")
    assert "image" in captured.err and "parameters" not in captured.err
    assert "prefill" in captured.err.splitlines()[-1]


def test_a_terminal_says_what_runs(model, picture, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    short = ("--max-new-tokens", "2")
    for name, said in {
        model: f"{model}, Qwen3-VL, 0M parameters; it supports text, image, video\n",
        "pocket-vl": "pocket-vl, 5M parameters, a bundled demo model that reads printed codes",
    }.items():
        assert run(request(picture, name, *short)) == 0
        assert said in capsys.readouterr().err
        assert run(request(picture, name, *short, "--json")) == 0
        assert "parameters" not in capsys.readouterr().err


def test_a_bundled_model_says_what_it_was_never_taught(picture, capsys) -> None:
    for question, said in {"Describe the photo.": True, "What is the code?": False}.items():
        asked = ["--prompt", question, "--model", "pocket-vl", "--max-new-tokens", "2"]
        assert run(["ask", picture, *asked, "--device", "cpu"]) == 0
        captured = capsys.readouterr()
        assert ("pocket-vl was not trained on this question" in captured.err) == said
        assert "taught" not in captured.out


def test_an_answer_is_the_end() -> None:
    """Exit functions run, and the interpreter does not take itself apart."""
    program = (
        "import atexit; from oscar_mm import cli\n"
        "class Slow:\n    __del__ = lambda self: print('taken apart')\n"
        "slow = Slow()\n"
        "cli.run = lambda: atexit.register(print, 'last words') and 3\n"
        "cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "last words\n"), done.stderr


def test_json_is_all_there_is(model, picture, capsys) -> None:
    assert run(request(picture, model, "--max-new-tokens", "5", "--json")) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert set(answer) == {
        *("text", "reasoning", "token_ids", "finish_reason", "memory", "timings", "prompt_tokens")
    }
    assert answer["reasoning"] is None
    assert 1 <= len(answer["token_ids"]) <= 5
    assert answer["memory"]["kv_bytes"] > 0
    assert answer["timings"]["prefill_s"] > 0
    assert captured.err == ""


def test_streamed_text_is_the_text_of_json(model, picture, capsys) -> None:
    run(request(picture, model, "--max-new-tokens", "12"))
    streamed = capsys.readouterr().out
    run(request(picture, model, "--max-new-tokens", "12", "--json"))
    assert streamed == json.loads(capsys.readouterr().out)["text"] + "\n"


def test_reasoning_goes_to_stderr(qwen3_vl_thinking_folder, picture, capsys) -> None:
    """Random weights reason until they are cut."""
    arguments = request(picture, str(qwen3_vl_thinking_folder), "--max-new-tokens", "9")
    run([*arguments, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"] == "" and answer["finish_reason"] == "length" and answer["reasoning"]
    run(arguments)
    captured = capsys.readouterr()
    assert captured.out == "\n" and captured.err.startswith(answer["reasoning"] + "\n")


def test_options_reach_the_pipeline(model, picture, capsys) -> None:
    sampling = ["--temperature", "1.5", "--top-p", "0.95", "--top-k", "50", "--max-new-tokens", "8"]
    answers = []
    for seed in ("1", "1", "2"):
        options = [*sampling, "--seed", seed, "--policy", "oscar", "--dtype", "float32", "--json"]
        assert run(request(picture, model, *options)) == 0
        answers.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert answers[0] == answers[1] != answers[2]
    run(request(picture, model, "--max-new-tokens", "1", "--json"))
    plain = json.loads(capsys.readouterr().out)["memory"]
    run(request(picture, model, "--max-new-tokens", "1", "--json", "--system", "Be brief. " * 40))
    longer = json.loads(capsys.readouterr().out)["memory"]
    assert longer["kv_bytes"] > plain["kv_bytes"]


def test_a_clip_in_place_of_a_picture(model, tmp_path, capsys) -> None:
    clip = tmp_path / "clip.mp4"
    doctor_module._write_clip(clip)
    arguments = ["ask", "--video", str(clip), "-m", model, "-p", "What moves?", "--device", "cpu"]
    assert run([*arguments, "--max-new-tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["by_modality"]["video"]


@pytest.mark.slow
def test_a_recording(qwen3_omni_folder, model, tmp_path, capsys) -> None:
    sound = write_sound(tmp_path / "sound.flac", tone(1))
    movie = write_movie(tmp_path / "movie.mp4", clip(8), tone(1))
    asked = ["--prompt", "What is it?", "--device", "cpu", "--max-new-tokens", "2", "--json"]
    omni = [*asked, "--model", str(qwen3_omni_folder)]
    unmarked = sound.rename(tmp_path / "sound")
    assert run(["ask", "--audio", str(unmarked), *omni]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["tokens"]["audio"] == 13
    unmarked.rename(sound)
    assert run(["ask", str(sound), str(movie), *omni]) == 0
    tokens = json.loads(capsys.readouterr().out)["memory"]["tokens"]
    assert tokens["audio"] == 13 and tokens["video"] > 0
    assert run(["ask", "--video", str(movie), "--audio-in-video", *omni]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["tokens"]["audio"] > 10
    assert run(["ask", "--audio", str(sound), *asked, "--model", model]) == 2
    assert f"{sound}: {model} does not support audio; use a Qwen3-Omni" in only_line(capsys)
    assert run(["ask", "--video", str(movie), "--audio-in-video", *asked, "--model", model]) == 2
    assert "--audio-in-video" in only_line(capsys)
    silence = write_sound(tmp_path / "silence.wav", (tone(1)[0] * 0, 16_000))
    assert run(["ask", "--audio", str(silence), *omni]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["token_ids"]
    assert captured.err == f"oscar-mm: warning: {silence}: is silent from beginning to end\n"


def a_text_file_named_png(tmp_path: Path) -> str:
    path = tmp_path / "notes.png"
    path.write_text("no picture at all")
    return str(path)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["gone.png"], "gone.png: no such file"),
        (["."], ".: is a folder"),
        ([a_text_file_named_png], "notes.png: is not an image that can be read"),
        (["PICTURE", "--video", "gone.mp4"], "gone.mp4: no such file"),
        (["PICTURE", "--policy", "tiny"], "policy 'tiny': choose one of standard, compact"),
        (["PICTURE", "--prompt", "  "], "--prompt is empty"),
        (["gone.WAV"], "gone.WAV: no such file"),
        (["https://example.org/a.wav"], "(--allow-remote) or download the file"),
        (["--audio", "gone.wav"], "gone.wav: no such file"),
        (["--audio", "https://example.org/a.wav"], "(--allow-remote) or download the file"),
        (["PICTURE", "--max-new-tokens", "many"], "'--max-new-tokens'"),
        (["PICTURE", "--max-new-tokens", "0"], "max_new_tokens"),
        (["PICTURE", "--top-p", "0"], "top_p"),
        (["PICTURE", "--temperature", "-1"], "temperature"),
        (["PICTURE", "--no-such-option"], "--no-such-option"),
        (["https://example.org/a.png"], "(--allow-remote) or download the file"),
    ],
)
def test_bad_request(
    options: list[str | Callable[[Path], str]], expected: str, picture, tmp_path, capsys
) -> None:
    words = [option if isinstance(option, str) else option(tmp_path) for option in options]
    words = [picture if word == "PICTURE" else word for word in words]
    # The model does not exist either: each of these is told before anything is loaded.
    assert run(["ask", "--model", "no-such-folder", "--prompt", "What is it?", *words]) == 2
    assert expected in only_line(capsys)


def test_over_the_context(model, picture, capsys) -> None:
    assert run([*request(picture, model), "--max-context", "20"]) == 2
    said = only_line(capsys)
    assert "over the context, but only 20 fit: image" in said and "max_new_tokens" in said
    assert run([*request(picture, model), "--max-context", "0"]) == 2
    assert "'--max-context'" in only_line(capsys)


@pytest.mark.parametrize("option", ["--device", "--dtype"])
def test_unknown_device_and_dtype(option: str, model, picture, capsys) -> None:
    assert run([*request(picture, model), option, "abacus"]) == 2
    assert "abacus" in only_line(capsys)


def test_bundled_models_by_default(picture, tmp_path, capsys) -> None:
    sound = write_sound(tmp_path / "voice.webm", tone(1))
    asked = ["--prompt", "What is it?", "--device", "cpu", "--max-new-tokens", "2", "--json"]
    for media, name, size in ((picture, "pocket-vl", 5), (str(sound), "pocket-omni", 9)):
        assert run(["ask", media, *asked]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)["token_ids"]
        said = (
            f"no --model given, so this is {name}, {size}M parameters, a bundled demo model that "
        )
        assert captured.err == f"oscar-mm: {said}{BUNDLED[name]}; it knows nothing else\n"
        assert run(["ask", media, *asked, "--model", name]) == 0
        assert capsys.readouterr().err == ""
    assert run(["ask", str(sound), *asked, "--model", "pocket-llava"]) == 2
    assert (
        "pocket-llava does not support audio; use a Qwen3-Omni model or pocket-omni"
        in only_line(capsys)
    )
    assert run(["ask", picture, *asked, "--model", "pocket-lm"]) == 2
    assert "one of the bundled models pocket-vl, pocket-llava, pocket-omni" in only_line(capsys)


def test_missing_prompt(picture, capsys) -> None:
    assert run(["ask", picture, "--model", "anything"]) == 2
    assert "--prompt" in only_line(capsys)


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: None])
def test_no_model_folder(make: Callable[[Path], None], picture, tmp_path, capsys) -> None:
    folder = tmp_path / "model"
    make(folder)
    assert run(request(picture, str(folder))) == 2
    assert str(folder) in only_line(capsys)


def test_a_bad_request_in_a_process_of_its_own() -> None:
    arguments = ["ask", "gone.png", "--prompt", "What?", "--model", "none"]
    done = subprocess.run([*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "oscar-mm: error: gone.png: no such file\n"


def test_unexpected_error_is_one_line_unless_debugging(model, picture, monkeypatch, capsys) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the pages\nran out")

    monkeypatch.setattr(pipelines, "pipeline_for", lambda _: fail)
    monkeypatch.delenv("OSCAR_MM_DEBUG", raising=False)
    assert run(request(picture, model)) == 1
    assert "RuntimeError: the pages ran out" in only_line(capsys)
    monkeypatch.setenv("OSCAR_MM_DEBUG", "1")
    assert run(request(picture, model)) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("terminal", "shown"), [(True, "a\ufffd[2Jb\tc\n"), (False, "a\x1b[2Jb\tc\n")]
)
def test_an_answer_cannot_command_a_terminal(
    terminal, shown, model, picture, monkeypatch, capsys
) -> None:
    stream = SimpleNamespace(
        with_reasoning=lambda: iter(["a\x1b[2J", "b\tc"]),
        result=SimpleNamespace(
            timings=SimpleNamespace(prefill_s=1.0, decode_s=1.0, tokens_per_s=1.0),
            memory=SimpleNamespace(by_kind={}, kv_bytes=0, bf16_bytes=0),
        ),
    )
    model_of = SimpleNamespace(name_or_path="", num_parameters=lambda: 1)
    family = SimpleNamespace(outer_model=model_of, name="Qwen3-VL", reads=())
    pipeline = SimpleNamespace(stream=lambda *_, **__: stream, model=None, family=family)
    monkeypatch.setattr(pipelines, "pipeline_for", lambda _: lambda *_, **__: pipeline)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    assert run(request(picture, model)) == 0
    assert capsys.readouterr().out == shown


def test_interrupt_and_closed_pipe_are_quiet(model, picture, tmp_path) -> None:
    # A model that never ends its answer: no token has this id.
    endless = Path(shutil.copytree(model, tmp_path / "endless"))
    settings = endless / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token_id": 10**6}))
    model = str(endless)
    arguments = request(picture, model, "--max-new-tokens", "4000")
    with Forked(command, *arguments) as interrupted:
        assert interrupted.stdout.read(1)
        os.kill(interrupted.pid, signal.SIGINT)
        assert interrupted.wait(60) == 130
        assert without_notes(interrupted.stderr.read()) == b""
    with Forked(command, *arguments) as piped:
        assert piped.stdout.read(1)
        piped.stdout.close()
        assert piped.wait(60) == 1
        assert without_notes(piped.stderr.read()) == b""


def test_help_and_version() -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["--version"]).stdout == f"oscar-mm {oscar_mm.__version__}\n"
    for arguments in ([], ["--help"]):
        shown = runner.invoke(app, arguments)
        assert shown.exit_code == 0
        assert "ask" in shown.stdout and "doctor" in shown.stdout
    shown = runner.invoke(app, ["ask", "--help"])
    assert "--max-new-tokens" in shown.stdout
    assert ", ".join(KVPolicy.preset_names()) in " ".join(shown.stdout.split())
