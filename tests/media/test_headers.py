"""Sizes by headers are those that are decoded, and nothing is decoded for them."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from oscar_mm.media import MediaLimits, load_audio, load_image, load_video
from oscar_mm.media.audio import audio_outline
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
