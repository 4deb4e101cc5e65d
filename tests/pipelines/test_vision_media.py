"""Every form of a picture or a clip gives the same answer; strange ones pass through."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from oscar_mm import OscarVLPipeline
from tests.prompts import clip, noise, prepare

PICTURE = noise(64, 96)


@pytest.fixture(scope="module")
def pipe(qwen3_vl_folder) -> OscarVLPipeline:
    return OscarVLPipeline(qwen3_vl_folder, device="cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("media") / "a picture: it's \u6f22.png"
    Image.fromarray(PICTURE).save(path)
    return path


@pytest.fixture(scope="module")
def movie(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import av

    path = tmp_path_factory.mktemp("media") / "movie.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for frame in clip(16):
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame)):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def tokens(pipe: OscarVLPipeline, images, **options) -> list[int]:
    return pipe(images, "What is it?", max_new_tokens=10, **options).token_ids


def pixels(pipe: OscarVLPipeline, images) -> torch.Tensor:
    """What the model is given."""
    prompt = prepare(pipe, "What is it?", pipe.read_media(images))
    return prompt.inputs["pixel_values"]


def encoded(image: Image.Image, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **options)
    return buffer.getvalue()


def test_every_form_of_a_picture(pipe, path: Path) -> None:
    image = Image.fromarray(PICTURE)
    expected = tokens(pipe, [image])
    alpha = np.dstack([PICTURE, np.full(PICTURE.shape[:2], 255, np.uint8)])
    forms = [str(path), path, image, PICTURE, path.read_bytes(), bytearray(path.read_bytes())]
    forms += [memoryview(path.read_bytes()), alpha, image.convert("RGBA")]
    forms += [PICTURE.astype(np.float64) / 255, np.asfortranarray(PICTURE), PICTURE[:, ::1]]
    seen = pixels(pipe, image)
    for form in forms:
        assert tokens(pipe, form) == expected
        for images in (form, [form], (form,)):
            assert torch.equal(pixels(pipe, images), seen)
    assert tokens(pipe, noise(64, 96, 1)) != expected
    assert PICTURE.flags.writeable and image.mode == "RGB"


def test_mixtures_keep_their_order(pipe, path: Path) -> None:
    other = noise(40, 70, 5)
    expected = tokens(pipe, [PICTURE, other, PICTURE])
    assert tokens(pipe, (str(path), encoded(Image.fromarray(other)), path)) == expected
    assert tokens(pipe, [other, PICTURE, PICTURE]) != expected


@pytest.mark.daily("1", "6", "7")
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation(pipe, tmp_path: Path, orientation: int) -> None:
    methods = [
        None,
        Image.Transpose.FLIP_LEFT_RIGHT,
        Image.Transpose.ROTATE_180,
        Image.Transpose.FLIP_TOP_BOTTOM,
        Image.Transpose.TRANSPOSE,
        Image.Transpose.ROTATE_90,
        Image.Transpose.TRANSVERSE,
        Image.Transpose.ROTATE_270,
    ]
    image = Image.fromarray(PICTURE)
    method = methods[orientation - 1]
    stored = image if method is None else image.transpose(method)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "turned.png"
    path.write_bytes(encoded(stored, exif=exif))
    expected = tokens(pipe, image)
    for form in (path, path.read_bytes(), Image.open(path)):
        assert tokens(pipe, form) == expected


def strange() -> dict[str, object]:
    gray = np.asarray(Image.fromarray(PICTURE).convert("L"))
    clear = np.dstack([PICTURE, gray])
    return {
        "transparent": Image.fromarray(clear),
        "palette": Image.fromarray(PICTURE).quantize(16),
        "gray": Image.fromarray(gray),
        "gray with alpha": Image.fromarray(gray).convert("LA"),
        "one bit": Image.fromarray(gray).convert("1"),
        "bool": gray > 127,
        "cmyk": Image.fromarray(PICTURE).convert("CMYK"),
        "16 bit": Image.fromarray(gray.astype(np.uint16) * 257),
        "16 bit array": gray.astype(np.uint16) * 257,
        "float gray": Image.fromarray(gray.astype(np.float32) / 255),
        "one channel": gray[:, :, None],
        "one pixel": PICTURE[:1, :1],
        "wide": noise(1, 200),
        "tall": noise(200, 1),
        "wide and larger": noise(7, 1390),
        "large": noise(900, 1200),
    }


@pytest.mark.parametrize("name", strange())
def test_strange_pictures(pipe, name: str) -> None:
    answer = pipe(strange()[name], "What is it?", max_new_tokens=4)
    assert len(answer.token_ids) == 4
    assert 1 <= answer.memory.tokens["image"] <= 64


def test_depth_does_not_matter(pipe) -> None:
    pictures = strange()
    expected = tokens(pipe, pictures["gray"])
    for name in ("16 bit", "16 bit array", "float gray", "one channel", "gray with alpha"):
        assert tokens(pipe, pictures[name]) == expected


def test_every_form_of_a_clip(pipe) -> None:
    frames = clip(4)
    pictures = [Image.fromarray(frame) for frame in frames]
    expected = tokens(pipe, None, videos=frames)
    mixed = [frames[0], *pictures[1:]]
    forms = [[frames], (frames,), pictures, tuple(pictures), [pictures], list(frames), mixed]
    for form in [*forms, [list(frames)]]:
        assert tokens(pipe, None, videos=form) == expected
    two = tokens(pipe, None, videos=[frames, clip(3, 20)])
    assert two == tokens(pipe, [], videos=[pictures, list(clip(3, 20))]) != expected


def test_clip_from_a_file(pipe, qwen3_vl_folder, movie: Path) -> None:
    answer = pipe(None, "What moves?", videos=movie, max_new_tokens=6)
    assert answer.memory.tokens["video"] == 8
    assert tokens(pipe, None, videos=[str(movie)]) == tokens(pipe, [], videos=movie)
    faster = OscarVLPipeline(pipe.model, processor=pipe.processor, video_fps=8.0)
    again = faster(None, "What moves?", videos=movie, max_new_tokens=6)
    assert again.memory.tokens["video"] == 32


def test_shortest_clips(pipe) -> None:
    for frames in (1, 2, 3):
        answer = pipe(None, "What moves?", videos=clip(frames), max_new_tokens=4)
        assert answer.memory.tokens["video"] == 4 * ((frames + 1) // 2)


def test_none_and_nothing(pipe) -> None:
    expected = tokens(pipe, None)
    for images in ([], ()):
        assert tokens(pipe, images, videos=[]) == tokens(pipe, images, videos=()) == expected
