"""Requests that cannot be answered: one line that says why, and the pipeline goes on."""

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from oscar_mm import InputError, OscarVLPipeline
from oscar_mm.media import MediaLimits
from oscar_mm.pipelines.shared_media import SharedMedia, choose
from tests.prompts import clip, noise

PICTURE = noise(64, 64)


@pytest.fixture(scope="module")
def pipe(qwen3_vl_folder) -> OscarVLPipeline:
    return OscarVLPipeline(qwen3_vl_folder, device="cpu")


@pytest.fixture(scope="module")
def expected(pipe) -> list[int]:
    return pipe(PICTURE, "What is it?", max_new_tokens=6).token_ids


@pytest.fixture(autouse=True)
def pipeline_goes_on(pipe, expected) -> Any:
    yield
    assert pipe(PICTURE, "What is it?", max_new_tokens=6).token_ids == expected


def refused(pipe: OscarVLPipeline, *words: str, **request: Any) -> str:
    request = {"images": PICTURE, "prompt": "What is it?"} | request
    messages = []
    for ask in (pipe, pipe.stream):
        with pytest.raises(InputError) as caught:
            ask(request["images"], **{k: v for k, v in request.items() if k != "images"})
        messages.append(str(caught.value))
    message = messages[0]
    assert messages[1] == message
    assert "\n" not in message and len(message) < 700
    for word in words:
        assert re.search(word, message, re.IGNORECASE), (word, message)
    return message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_of_the_caller_changes_nothing(pipe, expected, dtype: torch.dtype) -> None:
    """A step is for the answers of several threads, of which each has its own autocast."""
    with torch.autocast("cpu", dtype):
        assert pipe(PICTURE, "What is it?", max_new_tokens=6).token_ids == expected
        chat = pipe.chat()
        assert chat.ask("What is it?", images=PICTURE, max_new_tokens=6).token_ids == expected
        media = SharedMedia(pipe, pipe.read_media(PICTURE))
        [chosen] = choose(pipe, [media.question("What is it?", ["A dog", "The sign"])])
    [alone] = choose(pipe, [media.question("What is it?", ["A dog", "The sign"])])
    assert chosen.scores == pytest.approx(alone.scores, rel=1e-5)
    media.close()


def test_missing_file(pipe, tmp_path: Path) -> None:
    missing = tmp_path / "missing.png"
    refused(pipe, "missing.png", "no such file", images=missing)
    refused(pipe, "missing.png", "no such file", images=[PICTURE, str(missing)])
    refused(pipe, "missing.mp4", "no such file", videos="missing.mp4")
    refused(pipe, "folder", images=tmp_path)
    refused(pipe, "folder", images="")


def test_damaged_files(pipe, tmp_path: Path) -> None:
    text = tmp_path / "text.png"
    text.write_text("This is no picture.")
    refused(pipe, r"text\.png", "not an image", images=text)
    refused(pipe, r"text\.png", "not a video", videos=text)
    empty = tmp_path / "empty.jpg"
    empty.touch()
    refused(pipe, r"empty\.jpg", "empty", images=empty)
    buffer = io.BytesIO()
    Image.fromarray(noise(200, 200)).save(buffer, "JPEG")
    truncated = tmp_path / "truncated.jpg"
    truncated.write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])
    refused(pipe, r"truncated\.jpg", "damaged", images=truncated)
    refused(pipe, r"images\[1\]", "damaged", images=[PICTURE, truncated.read_bytes()])
    refused(pipe, r"images\[0\]", images=b"")


@pytest.mark.parametrize("value", [5, {}, {"path": "a.png"}, [PICTURE], object(), 1.5, True])
def test_what_is_no_image(pipe, value: Any) -> None:
    words = [r"images\[2\]", type(value).__name__, "a PIL image, a numpy array or a torch tensor"]
    refused(pipe, *words, images=[PICTURE, PICTURE, value])
    if not isinstance(value, list):
        refused(pipe, r"images\[0\]", *words[1:], images=value)


def test_what_is_no_picture(pipe) -> None:
    refused(pipe, r"images\[0\]", "channels last", images=np.zeros((3, 64, 65), np.uint8))
    refused(pipe, r"images\[0\]", "int64", images=np.zeros((64, 64, 3), np.int64))
    refused(pipe, r"images\[0\]", "0..1", images=np.full((64, 64, 3), 200.0))
    refused(pipe, r"images\[0\]", "empty", images=np.zeros((0, 64, 3), np.uint8))
    refused(pipe, r"images\[0\]", "200:1", images=noise(1, 201))
    refused(pipe, "remote media are disabled", "allow_remote", images="https://example.com/a.png")


@pytest.mark.parametrize("value", [5, {}, 1.5, object()])
def test_what_is_no_video(pipe, value: Any) -> None:
    refused(pipe, r"videos\[0\]", type(value).__name__, videos=value)
    refused(pipe, r"videos\[1\]", type(value).__name__, videos=[clip(2), value])


def test_clips_that_cannot_be(pipe) -> None:
    refused(pipe, r"videos\[0\]", "the same size", videos=[noise(48, 64), noise(64, 48)])
    refused(pipe, r"videos\[1\]", "no frames", videos=[clip(2), []])
    refused(pipe, r"videos\[0\]", "shape", videos=np.zeros((48, 64), np.uint8))


@pytest.mark.parametrize("blank", ["", " ", "\n\t ", "\u3000"])
def test_blank_text(pipe, blank: str) -> None:
    refused(pipe, "prompt", "empty", prompt=blank)
    refused(pipe, "system", "empty", system=blank)


@pytest.mark.parametrize("value", [None, 5, b"What?", ["What?"], PICTURE, {"text": "What?"}])
def test_text_of_a_wrong_type(pipe, value: Any) -> None:
    refused(pipe, "prompt", "text", type(value).__name__, prompt=value)
    if value is not None:
        refused(pipe, "system", "text", type(value).__name__, system=value)


def test_bytes_that_are_no_text(pipe) -> None:
    # As a shell gives them to Python in another encoding.
    garbled = b"caf\xe9".decode("utf-8", "surrogateescape")
    refused(pipe, "prompt", "UTF-8", prompt=garbled)
    refused(pipe, "system", "UTF-8", system=garbled)


def test_image_and_prompt_swapped(pipe) -> None:
    refused(pipe, "prompt must be text, not", images="What is it?", prompt=Image.new("RGB", (9, 9)))


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|im_end|>", "<|vision_start|>"])
def test_control_tokens(pipe, token: str) -> None:
    for argument in ("prompt", "system"):
        refused(pipe, argument, re.escape(token), "control token", **{argument: f"a{token}b"})


def test_context(pipe) -> None:
    count = pipe(PICTURE, "What is it?", max_new_tokens=1).prompt_tokens
    tight = OscarVLPipeline(pipe.model, processor=pipe.processor, max_context=count + 5)
    assert len(tight(PICTURE, "What is it?", max_new_tokens=5).token_ids) == 5
    message = refused(tight, "context", max_new_tokens=6)
    assert {count + 6, 4, 6, count + 5} <= {int(number) for number in re.findall(r"\d+", message)}
    refused(pipe, "65,536", max_new_tokens=65536)
    refused(
        tight, "image 16", "use fewer or smaller images", images=[PICTURE] * 4, max_new_tokens=1
    )


def test_limits(pipe) -> None:
    small = OscarVLPipeline(
        pipe.model, processor=pipe.processor, limits=MediaLimits(max_image_pixels=64 * 64)
    )
    assert small(PICTURE, "What is it?", max_new_tokens=1)
    refused(small, r"images\[0\]", "65x64", "4,096", images=noise(64, 65))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -1),
        ("top_p", 1.5),
        ("top_k", -1),
        ("repetition_penalty", 0),
        ("seed", -1),
        ("stop", ""),
        ("stop", 5),
    ],
)
def test_sampling(pipe, name: str, value: Any) -> None:
    refused(pipe, f"^{name}=", "must be", **{name: value})


def test_unknown_arguments(pipe) -> None:
    refused(pipe, "unknown argument max_tokens", "max_new_tokens", max_tokens=5)
    refused(pipe, "unknown argument frames, image:", image=PICTURE, frames=5)


def test_requests_are_checked_before_the_first_piece(pipe) -> None:
    forwards = []
    hook = pipe.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        with pytest.raises(InputError):
            pipe.stream("missing.png", "What is it?")
    finally:
        hook.remove()
    assert not forwards
