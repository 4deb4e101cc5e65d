"""Pictures of every kind come out upright, in RGB and bounded; the rest is refused by name."""

import base64
import contextlib
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from PIL import Image

from oscar_mm.errors import InputError
from oscar_mm.media import MediaLimits, load_image

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


@pytest.fixture
def picture() -> Image.Image:
    """8 x 4 pixels, red but for a blue top left corner."""
    image = Image.new("RGB", (8, 4), RED)
    image.putpixel((0, 0), BLUE)
    return image


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "GIF", "WEBP", "PPM"])
def test_path_bytes_and_data_uri_agree(tmp_path: Path, picture: Image.Image, kind: str) -> None:
    data = encoded(picture, kind, **({"lossless": True} if kind == "WEBP" else {}))
    path = tmp_path / "picture.bin"
    path.write_bytes(data)
    uri = "data:image/x;base64," + base64.b64encode(data).decode()
    for source in (path, str(path), data, bytearray(data), memoryview(data), uri):
        image = load_image(source)
        assert image.mode == "RGB"
        assert np.array_equal(np.asarray(image), np.asarray(picture))


def test_percent_encoded_data_uri(picture: Image.Image) -> None:
    uri = "data:image/png," + "".join(f"%{byte:02x}" for byte in encoded(picture))
    assert load_image(uri).size == picture.size


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_exif_rotation(kind: str) -> None:
    image = Image.new("RGB", (64, 32), RED)
    image.paste(BLUE, (0, 0, 16, 16))
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by 90 degrees clockwise
    upright = load_image(encoded(image, kind, exif=exif))
    assert upright.size == (32, 64)
    assert upright.getpixel((28, 4))[2] > 200 and upright.getpixel((4, 4))[0] > 200
    assert load_image(upright).size == (32, 64)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_data_that_are_none(kind: str) -> None:
    image = Image.new("RGB", (64, 32), RED)
    assert load_image(encoded(image, kind, exif=b"Exif\0\0no such data")).size == (64, 32)


def test_transparency_is_white() -> None:
    clear = Image.new("RGBA", (3, 3), (255, 0, 0, 0))
    clear.putpixel((1, 1), (255, 0, 0, 255))
    half = Image.new("LA", (3, 3), (0, 128))
    palette = Image.new("P", (3, 3), 1)
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.info["transparency"] = 1
    keyed = encoded(Image.new("RGB", (3, 3), RED), transparency=RED)
    assert load_image(clear).getpixel((0, 0)) == WHITE
    assert load_image(clear).getpixel((1, 1)) == RED
    assert load_image(half).getpixel((0, 0)) == (127, 127, 127)
    assert load_image(palette).getpixel((0, 0)) == WHITE
    assert load_image(encoded(palette)).getpixel((0, 0)) == WHITE
    assert load_image(keyed).getpixel((0, 0)) == WHITE


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV", "La"])
def test_modes_become_rgb(mode: str) -> None:
    image = load_image(Image.new("L", (5, 4), 255).convert("LA" if mode == "La" else mode))
    assert image.mode == "RGB" and image.getpixel((2, 2)) == WHITE


def test_cmyk_jpeg() -> None:
    image = load_image(encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG"))
    assert image.getpixel((8, 8))[0] > 240 and max(image.getpixel((8, 8))[1:]) < 15


@pytest.mark.parametrize(
    ("dtype", "low", "high", "want"),
    [
        (np.uint16, 0, 65535, (0, 255)),
        (np.uint16, 0, 32768, (0, 128)),
        (np.int32, 0, 255, (0, 255)),
        (np.int32, 0, 65535, (0, 255)),
        (np.int32, -1000, 100_000, (0, 255)),
        (np.float32, 0.0, 1.0, (0, 255)),
        (np.float32, 0.0, 128.0, (0, 128)),
        (np.float32, -5.0, 1e6, (0, 255)),
    ],
)
def test_deep_gray_is_scaled(dtype: type, low: float, high: float, want: tuple) -> None:
    values = np.array([[low, high]], dtype)
    image = load_image(encoded(Image.fromarray(values), "TIFF"))
    assert (image.getpixel((0, 0))[0], image.getpixel((1, 0))[0]) == want


def test_sixteen_bit_png_keeps_its_order() -> None:
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    values = np.asarray(load_image(encoded(Image.fromarray(ramp))))[:, :, 0].ravel()
    assert (np.diff(values.astype(int)) >= 3).all()


def test_float_image_with_nan_is_refused() -> None:
    with pytest.raises(InputError, match="NaN"):
        load_image(Image.fromarray(np.full((2, 2), np.nan, np.float32)))


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_first_frame_of_animation(kind: str) -> None:
    more = Image.new("RGB", (32, 32), BLUE)
    data = encoded(
        Image.new("RGB", (32, 32), RED), kind, save_all=True, append_images=[more], duration=100
    )
    pixel = load_image(data).getpixel((16, 16))
    assert pixel[0] > 240 and pixel[2] < 15


def test_source_image_is_left_alone(picture: Image.Image) -> None:
    copy = load_image(picture)
    copy.putpixel((0, 0), WHITE)
    assert picture.getpixel((0, 0)) == BLUE


def test_smallest_and_longest() -> None:
    assert load_image(Image.new("L", (1, 1), 7)).getpixel((0, 0)) == (7, 7, 7)
    assert load_image(Image.new("L", (200, 1))).size == (200, 1)
    with pytest.raises(InputError, match="201x1 pixels have a side ratio of more than 200:1; crop"):
        load_image(Image.new("L", (201, 1)))


shapes = st.tuples(st.integers(1, 12), st.integers(1, 12)).flatmap(
    lambda side: st.sampled_from([side, (*side, 1), (*side, 3), (*side, 4)])
)
good_arrays = st.one_of(
    npst.arrays(st.sampled_from([np.uint8, np.uint16, np.bool_]), shapes),
    npst.arrays(np.float32, shapes, elements=st.floats(0, 1, width=32)),
    npst.arrays(np.float16, shapes, elements=st.floats(0, 1, width=16)),
)


@settings(max_examples=80, deadline=None)
@given(good_arrays)
def test_good_arrays(array: np.ndarray) -> None:
    image = load_image(array)
    assert image.mode == "RGB" and image.size == (array.shape[1], array.shape[0])
    top = {"b": 1, "f": 1, "u": np.iinfo(array.dtype).max if array.dtype.kind == "u" else 1}
    values = array.reshape(*array.shape[:2], -1).astype(float) / top[array.dtype.kind]
    if values.shape[2] == 4:
        values = 1 - values[:, :, 3:] * (1 - values[:, :, :3])
    assert np.abs(np.asarray(image) / 255 - values).max() < 1.6 / 255


@settings(max_examples=80, deadline=None)
@given(npst.arrays(npst.scalar_dtypes(), npst.array_shapes(min_dims=0, max_dims=5, min_side=0)))
def test_any_array_is_read_or_refused(array: np.ndarray) -> None:
    try:
        assert load_image(array).mode == "RGB"
    except InputError as error:
        assert str(error).startswith("image: ")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 20, 30), np.uint8), "channels last"),
        (np.zeros((4, 4), np.int64), "int64"),
        (np.full((4, 4), 200.0), "divide by 255"),
        (np.zeros((0, 4), np.uint8), "empty"),
        (np.zeros((2, 4, 4, 3), np.uint8), "shape"),
    ],
)
def test_bad_arrays(array: np.ndarray, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_image(array, label="page 3")


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=40), st.integers(0, 200), st.sampled_from(["PNG", "JPEG", "GIF"]))
def test_damaged_bytes_never_leak_other_errors(noise: bytes, place: int, kind: str) -> None:
    data = bytearray(encoded(Image.new("RGB", (9, 9), RED), kind))
    data[place : place + len(noise)] = noise
    with contextlib.suppress(InputError):
        load_image(bytes(data), limits=MediaLimits(max_image_pixels=10_000))


def bomb(side: int) -> bytes:
    """A PNG of a few bytes whose header promises side x side pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels)


@pytest.mark.parametrize("side", [7_100, 60_000])
def test_bomb_is_refused_before_decoding(side: int) -> None:
    with pytest.raises(InputError, match=r"bomb.*pixels"):
        load_image(bomb(side), label="bomb")


def test_bad_files(tmp_path: Path, picture: Image.Image) -> None:
    text, empty, cut = (tmp_path / name for name in ("text.png", "empty.png", "cut.jpg"))
    text.write_text("not a picture")
    empty.touch()
    whole = encoded(Image.effect_noise((200, 200), 90).convert("RGB"), "JPEG")
    cut.write_bytes(whole[: len(whole) // 2])
    cases = {
        tmp_path / "missing.png": "no such file",
        tmp_path: "folder",
        text: "not an image",
        empty: "empty",
        cut: "damaged",
    }
    for path, reason in cases.items():
        with pytest.raises(InputError, match=reason) as caught:
            load_image(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (7, "int is not an image"),
        (None, "NoneType"),
        (b"", "image: is empty"),
        ("", "folder"),
        ("file:///etc/hostname", "pass the path"),
        ("s3://bucket/key.png", "is a URL"),
        ("data:image/png;base64", "comma"),
        ("data:image/png;base64,@@@", "base64"),
        ("x" * 5000, "path|no such file"),
        ("nul\0byte", "path|no such file"),
    ],
)
def test_bad_sources(source: object, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        load_image(source)
    assert len(str(caught.value)) < 400


def test_file_size_is_bounded(tmp_path: Path, picture: Image.Image) -> None:
    path = tmp_path / "picture.bmp"
    picture.save(path)
    limits = MediaLimits(max_file_bytes=50)
    uri = "data:image/bmp;base64," + base64.b64encode(path.read_bytes()).decode()
    for source in (path, path.read_bytes(), uri):
        with pytest.raises(InputError, match="limit of 50"):
            load_image(source, limits=limits)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_image_pixels", 0),
        ("max_image_pixels", 1.5),
        ("max_image_pixels", True),
        ("max_image_side_ratio", 0.5),
        ("max_video_seconds", float("nan")),
        ("max_video_frames", 1),
        ("remote_timeout_s", "20"),
    ],
)
def test_limits_are_checked(name: str, value: object) -> None:
    with pytest.raises(InputError, match=name):
        MediaLimits(**{name: value})
