"""Tensors, open files and recordings of datasets are read as the same media in other forms."""

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from oscar_mm.errors import InputError
from oscar_mm.media import MediaLimits
from oscar_mm.media.media import Media, MediaReader
from oscar_mm.media.part import media_parts
from tests.prompts import clip, noise, tone

PICTURE = noise(24, 40)
TENSOR = torch.from_numpy(PICTURE)


def read(limits: MediaLimits | None = None, **sources: Any) -> Media:
    return MediaReader(limits or MediaLimits()).read(media_parts(**sources))


def png() -> bytes:
    file = io.BytesIO()
    Image.fromarray(PICTURE).save(file, "PNG")
    return file.getvalue()


FORMS = {
    "channels last": TENSOR,
    "channels first": TENSOR.movedim(-1, 0),
    "floats": TENSOR.movedim(-1, 0) / 255,
    "float64": TENSOR.movedim(-1, 0).double() / 255,
    "gradient": (TENSOR.movedim(-1, 0) / 255).requires_grad_(),
    "transparent": torch.cat([TENSOR, torch.full((24, 40, 1), 255, dtype=torch.uint8)], -1),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_tensors(form: torch.Tensor) -> None:
    for images in (form, [form]):
        (image,) = read(images=images).images
        assert np.array_equal(np.asarray(image), PICTURE)


def test_tensors_of_other_shapes() -> None:
    gray = TENSOR[:, :, 0]
    expected = np.repeat(PICTURE[:, :, :1], 3, axis=2)
    for form in (gray, gray[None], gray[..., None]):
        assert np.array_equal(np.asarray(read(images=form).images[0]), expected)
    narrow = TENSOR[:, :2].movedim(-1, 0)
    assert np.array_equal(np.asarray(read(images=narrow).images[0]), PICTURE[:, :2])
    half = (TENSOR.movedim(-1, 0) / 255).bfloat16()
    assert np.abs(np.asarray(read(images=half).images[0]) - PICTURE.astype(int)).max() <= 1


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (TENSOR[None], r"shape \(1, 24, 40, 3\) .*; pass a list of images"),
        (torch.zeros(5, 24, 40), r"images\[0\]: an array of shape \(5, 24, 40\) .*\(C, H, W\)"),
        (torch.zeros(()), r"shape \(\)"),
        (TENSOR.movedim(-1, 0).float(), "floats must lie in 0..1; divide by 255"),
        (torch.full((3, 24, 40), -0.1), "floats must lie in 0..1"),
        (torch.full((3, 24, 40), torch.nan), "remove NaN"),
        (TENSOR.long(), "int64"),
        (torch.zeros(3, 24, 40, device="meta"), "images: a tensor of torch.float32 on meta"),
        (torch.zeros(24, 40).to_sparse(), "dense"),
    ],
)
def test_refused_tensors(tensor: torch.Tensor, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(images=[tensor])


def test_open_files(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png())
    written = io.BytesIO()
    Image.fromarray(PICTURE).save(written, "PNG")
    with path.open("rb") as file:
        # A file may occur twice, and a stream in memory stands at its end once it is written.
        media = read(images=[file, written, file])
        assert not file.closed
    assert all(np.array_equal(np.asarray(image), PICTURE) for image in media.images)
    assert media.labels == [str(path), "images[1]", str(path)]


def test_a_stream_that_cannot_seek() -> None:
    class Pipe(io.RawIOBase):
        data = io.BytesIO(png())

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            return self.data.readinto(buffer)

    (image,) = read(images=io.BufferedReader(Pipe())).images
    assert np.array_equal(np.asarray(image), PICTURE)


def test_refused_files(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png())
    with path.open("rb") as closed:
        pass
    with path.open("rb") as file, path.open("w+") as text:
        path.write_bytes(png())
        small = MediaLimits(max_file_bytes=10)
        for source, words, limits in (
            (closed, f"{re.escape(str(path))}: cannot be read .*closed", None),
            (text, "a.png: (is not a binary file|cannot be read)", None),
            (io.StringIO("a"), r"images\[0\]: is not a binary file; open it with .*'rb'", None),
            (io.BytesIO(), r"images\[0\]: is empty", None),
            (file, "11 bytes are more than the limit of 10", small),
        ):
            with pytest.raises(InputError, match=words):
                read(limits, images=source)


def test_recordings(tmp_path: Path) -> None:
    import soundfile

    samples, rate = tone(1.0)
    expected = read(audio=(samples, rate)).audio[0].samples
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="FLOAT")
    stereo = torch.from_numpy(np.stack([samples, samples]))
    for form in (
        (torch.from_numpy(samples), rate),
        (stereo, rate),
        {"array": samples, "sampling_rate": rate, "path": None},
        {"raw": torch.from_numpy(samples), "sampling_rate": rate},
        file,
    ):
        for audio in (form, [form]):
            (heard,) = read(audio=audio).audio
            assert np.array_equal(heard.samples, expected)
    for wrong in ({"array": samples, "sampling_rate": "16k"}, {"array": samples}):
        with pytest.raises(InputError, match=r"audio\[0\]: "):
            read(audio=wrong)


def test_videos(tmp_path: Path) -> None:
    frames = np.stack(clip(4))
    expected = read(videos=frames).videos[0].frames
    tensor = torch.from_numpy(frames)
    for form in (tensor, tensor.movedim(-1, 1), list(tensor), [*tensor.movedim(-1, 1)]):
        (video,) = read(videos=form).videos
        assert np.array_equal(video.frames, expected)
    assert len(read(videos=[list(tensor), tensor]).videos) == 2
