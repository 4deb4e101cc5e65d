"""`oscar-mm plan`: tables and JSON of what a session would take, and bad input in one line."""

import json
import shutil
from pathlib import Path

import pytest

from oscar_mm.cli import run
from oscar_mm.pipelines.plan import Session, plan
from oscar_mm.sizes import GPUS


@pytest.fixture(scope="module")
def folder(qwen3_omni_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-Omni whose weights are not there."""
    copy = tmp_path_factory.mktemp("plan") / "omni"
    shutil.copytree(qwen3_omni_folder, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    return copy


def test_tables(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--images", "3", "--image-size", "640x480", "--audio-minutes", "2"]
    assert run(["plan", "--model", str(folder), *arguments]) == 0
    printed = capsys.readouterr()
    made = plan(folder, Session(images=3, image_size=(640, 480), audio_s=120))
    rows = {line.split()[0]: line.split() for line in printed.out.splitlines() if line.split()}
    for name in ("text", "image", "audio"):
        assert rows[name][1] == f"{made.tokens[name]:,}"
    assert "video" not in rows
    assert rows["all"][1] == f"{made.total:,}"
    assert rows["all"][-1] == f"{made.bf16_bytes / made.kv_bytes:.2f}x"
    assert all(f"{name}, {size} GB" in printed.out for name, size in GPUS.items())
    assert printed.err == ""
    assert printed.out.startswith(f"{made.bf16_bytes / made.kv_bytes:.1f}x smaller than 16-bit: ")


def test_json_and_one_gpu(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, name, size in (("h100", "H100, 80 GB", 80e9), ("8", "8.00 GB", 8e9)):
        arguments = ["--video-minutes", "1", "--gpu", given, "--policy", "oscar", "--json"]
        assert run(["plan", "--model", str(folder), *arguments]) == 0
        found = json.loads(capsys.readouterr().out)
        made = plan(folder, Session(video_s=60), "oscar")
        assert found["tokens"] == made.tokens and found["kv_bytes"] == made.kv_bytes
        [gpu] = found["gpus"]
        assert (gpu["gpu"], gpu["bytes"]) == (name, size)
        assert (gpu["sessions_16_bit"], gpu["sessions"]) == made.fits(size)


def test_weights_quantized_at_load(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {}
    for given in ([], ["--weights", "fp8"], ["--weights", "int4"]):
        assert run(["plan", "--model", str(folder), *given, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        sizes[found["weights"]] = found["weight_bytes"]
    assert list(sizes) == ["16-bit", "FP8", "INT4"]
    assert sizes["16-bit"] > sizes["FP8"] > sizes["INT4"]


def test_too_long_for_the_model_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", str(folder), "--audio-minutes", "90"]) == 0
    assert "the model's context of 65,536: the pipeline would" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--images", "-2"], "--images"),
        (["--image-size", "wide"], "--image-size 'wide': must be width x height"),
        (["--weights", "int3"], "weights='int3': must be one of fp8, int4"),
        (["--gpu", "Voodoo"], "--gpu 'Voodoo': must be RTX 4090"),
        (["--policy", "int1"], "int1"),
        (["--model", "no/such/folder/here"], "no such folder"),
        (["--model", "Qwen/Qwen3-VL-9B"], "did you mean Qwen/Qwen3-VL-8B"),
        (
            ["--model", "llava-v1.6-34b", "--audio-minutes", "1"],
            "LLaVA-NeXT does not support audio",
        ),
        (["--audio-minutes", "nan"], "'--audio-minutes'"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", *arguments]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.out == ""


def test_a_released_model_without_the_hub(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "Qwen3-VL-8B", "--images", "40", "--gpu", "H200"]
    assert run(["plan", *arguments, "--policy", "compact:window=128"]) == 0
    printed = capsys.readouterr()
    assert "Qwen3-VL, 8,767 million parameters: 17.53 GB" in printed.out and printed.err == ""
