"""Sizes by headers are those that are decoded, and nothing is decoded for them."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from oscar_mm.errors import InputError
from oscar_mm.media import MediaLimits, load_audio, load_image, load_video
from oscar_mm.media.audio import audio_outline
from oscar_mm.media.headers import opened_image
from oscar_mm.media.image import PictureSize, image_outline
from oscar_mm.media.video import video_outline
from tests.prompts import clip, noise, tone
from tests.recordings import write_movie, write_sound

COUNTER = Path(__file__).parents[2] / "examples" / "media" / "counter.mp4"
LIMITS = MediaLimits()


def image_size(source: Any, **options: Any) -> PictureSize | None:
    outline = image_outline(source, **options)
    return None if outline is None else outline.size


def encoded(kind: str, orientation: int = 1) -> bytes:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[274] = orientation
    Image.fromarray(noise(40, 90)).save(file, kind, exif=exif)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_images(kind: str, orientation: int, tmp_path: Path) -> None:
    data = encoded(kind, orientation)
    path = tmp_path / "a.bin"
    path.write_bytes(data)
    for source in (data, path, str(path), Image.open(path)):
        assert image_size(source, limits=LIMITS) == load_image(source).size


def test_nothing_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_: object) -> None:
        raise AssertionError("pixels were decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decode)
    assert image_size(encoded("PNG"), limits=LIMITS) == (90, 40)
    assert image_size(encoded("PNG", 6), limits=LIMITS) == (40, 90)
    assert image_size(encoded("JPEG", 8)[:900], limits=LIMITS) == (40, 90)


@pytest.mark.parametrize(
    "source",
    [b"no image", "gone.png", "https://example.org/a.png", 5, None, np.zeros((0, 4, 3)), b"", "."],
)
def test_what_is_not_known(source: object) -> None:
    assert image_size(source, limits=LIMITS) is None
    assert audio_outline(source, limits=LIMITS) is None
    assert video_outline(source, fps=2.0, limits=LIMITS, sound=True) is None


def test_over_the_limits() -> None:
    small = MediaLimits(max_image_pixels=999, max_audio_seconds=0.5, max_video_seconds=1)
    assert image_size(encoded("PNG"), limits=small) is None
    assert audio_outline(tone(1.0), limits=small) is None
    assert video_outline(COUNTER, fps=2.0, limits=small, sound=False) is None


@pytest.mark.parametrize("suffix", ["wav", "flac", "mp3", "m4a"])
def test_recordings(suffix: str, tmp_path: Path) -> None:
    path = write_sound(tmp_path / f"a.{suffix}", tone(2.3))
    decoded = load_audio(path).seconds
    for source in (path, path.read_bytes()):
        assert audio_outline(source, limits=LIMITS).seconds == pytest.approx(decoded, rel=0.05)
    samples, rate = tone(1.7)
    for pair in ((samples, rate), (rate, samples), (np.stack([samples] * 2), rate)):
        assert audio_outline(pair, limits=LIMITS).seconds == pytest.approx(1.7)


@pytest.mark.parametrize("fps", [2.0, 0.4, 7.3])
def test_videos(fps: float, tmp_path: Path) -> None:
    silent = write_movie(tmp_path / "silent.mp4", clip(8), None)
    heard = write_movie(tmp_path / "heard.mp4", clip(8), tone(1.0))
    frames = list(clip(5))
    pictures = [Image.fromarray(frame) for frame in frames]
    sources: list[Any] = [COUNTER, silent, heard, clip(6), clip(1), frames, pictures]
    for source in sources:
        video = load_video(source, fps=fps, sound=True)
        outline = video_outline(source, fps=fps, limits=LIMITS, sound=True)
        assert outline.frames.shape[1:] == video.frames.shape[1:] and outline.frames.is_meta
        from_file = isinstance(source, Path) and len(video.frames) > 2
        assert 0 <= len(video.frames) - len(outline.frames) <= from_file
        assert (outline.sound is None) == (video.sound is None)
        if video.sound is not None:
            assert outline.sound.seconds == pytest.approx(video.sound.seconds, rel=0.05)


def png_with(*texts: tuple[bytes, bytes, bytes], after: bool = False) -> bytes:
    """A PNG of 30 x 20 with compressed texts: their kinds, keywords and what they say."""
    file = io.BytesIO()
    Image.new("L", (30, 20)).save(file, "PNG")
    png, chunks = file.getvalue(), b""
    for kind, keyword, said in texts:
        between = b"\0\1\0\0\0" if kind == b"iTXt" else b"\0\0"
        content = kind + keyword + between + zlib.compress(said)
        chunks += struct.pack(">I", len(content) - 4) + content
        chunks += struct.pack(">I", zlib.crc32(content))
    at = len(png) - 12 if after else 33
    return png[:at] + chunks + png[at:]


@pytest.mark.daily("False-zTXt", "True-iTXt")
@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt"])
@pytest.mark.parametrize("after", [False, True])
def test_texts_of_a_png_are_not_unpacked(kind: bytes, after: bool, tmp_path: Path) -> None:
    data = png_with(*[(kind, b"key %d" % i, b"a" * 10**6) for i in range(70)], after=after)
    path = tmp_path / "a.png"
    path.write_bytes(data)
    for source in (io.BytesIO(data), path):
        with opened_image(source) as image:
            image.load()
            assert image.size == (30, 20) and image.info == {}


@pytest.mark.parametrize("after", [False, True])
def test_texts_that_say_how_a_png_lies(after: bool) -> None:
    exif = Image.Exif()
    exif[274] = 6
    profile = b"\nexif\n%8d\n" % len(exif.tobytes()) + exif.tobytes().hex().encode()
    xmp = b'<x tiff:Orientation="6"/>'
    for text in (
        (b"zTXt", b"Raw profile type exif", profile),
        (b"iTXt", b"XML:com.adobe.xmp", xmp),
    ):
        data = png_with((b"zTXt", b"Comment", b"a" * 1000), text, after=after)
        assert load_image(data).size == (20, 30)


def icon(content: bytes, bits: int = 32) -> bytes:
    entry = struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, bits, len(content), 22)
    return struct.pack("<HHH", 0, 1, 1) + entry + content


def test_an_icon_is_opened_by_its_header(tmp_path: Path) -> None:
    """Pillow alone decodes an icon to open it."""
    whole = png_with((b"zTXt", b"Comment", b"a" * 1000))
    path = tmp_path / "a.ico"
    path.write_bytes(icon(whole[:-30]))
    for source in (icon(whole[:-30]), path):
        assert image_size(source, limits=LIMITS) == (30, 20)
    with opened_image(io.BytesIO(icon(whole))) as image:
        assert image.info == {}


@pytest.mark.parametrize("bits", [8, 32])
def test_an_icon_without_a_png_is_small(bits: int) -> None:
    """A run of pixels takes two bytes, so that few bytes may be many pixels."""
    for side, fits in ((256, True), (257, False), (7000, False)):
        size = side * side * bits // 8
        header = struct.pack("<IiiHHIIiiII", 40, side, 2 * side, 1, bits, 0, size, 0, 0, 0, 0)
        palette = bytes(1024) if bits == 8 else b""
        pixels = bytes(size + side * side // 8) if side < 300 else bytes(99)
        data = icon(header + palette + pixels, bits)
        assert (image_size(data, limits=LIMITS) == (side, side)) is fits
        if not fits:
            with pytest.raises(InputError, match="not an image that can be read"):
                load_image(data)


def tiff_of_strips(order: str, large: bool, strips: int) -> bytes:
    """A TIFF of 64 pixels a row, whose rows all lie at the same place."""
    long, value, count = ("Q", "Q", "Q") if large else ("I", "I", "H")
    strip, start = 4, 16 if large else 8
    size = struct.calcsize(order + "HH" + long + value)
    places = start + struct.calcsize(order + count) + 9 * size + struct.calcsize(order + long)
    entries = b""
    for tag, kind, values, said in (
        *((256, 4, 1, 64), (257, 4, 1, strips), (258, 4, 1, 8), (259, 4, 1, 1), (262, 4, 1, 1)),
        *((273, 4, strips, places), (277, 4, 1, 1), (278, 4, 1, 1), (279, 4, strips, places)),
    ):
        entries += struct.pack(order + "HH" + long, tag, kind, values)
        as_entry = values == 1 and order == ">"  # A value of four bytes lies at the left.
        packed = struct.pack(order + "I", said) if as_entry else struct.pack(order + value, said)
        entries += packed.ljust(struct.calcsize(order + value), b"\0")
    first = {"<": b"II", ">": b"MM"}[order] + struct.pack(order + "H", 43 if large else 42)
    first += struct.pack("<HHQ", 8, 0, 16) if large else struct.pack(order + "I", 8)
    table = struct.pack(order + count, 9) + entries + struct.pack(order + long, 0)
    return first + table + struct.pack(order + "I", places) * strips + bytes(strip * 16)


@pytest.mark.parametrize(("order", "large"), [("<", False), (">", False), ("<", True)])
def test_strips_of_a_tiff(order: str, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes 400 bytes, and they are counted before Pillow makes a list of them."""
    data = tiff_of_strips(order, large, 1000)
    assert load_image(data).size == (64, 1000)
    outline = image_outline(data, limits=LIMITS)
    assert outline is not None and outline.decoding_bytes > 400 * 1000
    monkeypatch.setattr("oscar_mm.media.headers._MAX_VALUES", 999)
    monkeypatch.setattr("PIL.TiffImagePlugin.TiffImageFile._open", None)
    assert image_size(data, limits=LIMITS) is None
    with pytest.raises(InputError, match="not an image that can be read"):
        load_image(data)
