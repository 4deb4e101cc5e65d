"""A file's kind is what is in it, whatever its suffix says."""

import io
import os
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from oscar_mm.media.kinds import kind_of
from tests.prompts import clip, noise, tone
from tests.recordings import write_movie, write_sound


def picture(kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(noise(40, 60)).save(file, kind)
    return file.getvalue()


def write_wma(path: Path) -> Path:
    samples = np.ascontiguousarray(tone(1.0)[0][None], np.float32)
    with av.open(str(path), "w", format="asf") as container:
        stream = container.add_stream("wmav2", rate=16_000, layout="mono")
        stream.bit_rate = 32_000
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
        frame.rate = 16_000
        parts = av.AudioResampler("fltp", "mono", 16_000, frame_size=2048).resample(frame)
        for part in [*parts, None]:
            container.mux(stream.encode(part))
    return path


@pytest.mark.parametrize("name", ["a.webm", "a.mp4", "a.m4a", "a.mp3", "a.flac", "a.wav", "a.opus"])
def test_sound_alone(name: str, tmp_path: Path) -> None:
    path = write_sound(tmp_path / name, tone(1.0))
    assert kind_of(path) == kind_of(str(path)) == "audio"
    for other in ("a.mkv", "a.mov", "a.bin", "a"):
        moved = path.with_name(f"moved-{other}")
        moved.write_bytes(path.read_bytes())
        assert kind_of(moved) == "audio"


def test_windows_media_and_sound_with_a_cover(tmp_path: Path) -> None:
    path = write_wma(tmp_path / "a.wma")
    assert kind_of(path) == kind_of(path.rename(tmp_path / "a.wmv")) == "audio"
    sound = write_sound(tmp_path / "a.mp3", tone(1.0))
    cover = tmp_path / "cover.mp3"
    with av.open(str(sound)) as source, av.open(str(cover), "w") as target:
        stream = target.add_stream_from_template(source.streams.audio[0])
        shown = target.add_stream("png", rate=1, width=60, height=40, pix_fmt="rgb24")
        shown.disposition = av.stream.Disposition.attached_pic
        target.mux(shown.encode(av.VideoFrame.from_ndarray(noise(40, 60))))
        for packet in source.demux(source.streams.audio[0]):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    assert kind_of(cover) == "audio"


def test_videos(tmp_path: Path) -> None:
    for name, sound in (("a.mp4", None), ("a.mkv", tone(1.0)), ("a.avi", tone(1.0))):
        path = write_movie(tmp_path / name, clip(8), sound)
        assert kind_of(path) == kind_of(path.rename(tmp_path / f"{name}.wav")) == "videos"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF", "JPEG2000"])
def test_pictures(kind: str, tmp_path: Path) -> None:
    for name in ("a.mp4", "a.wav", "a.png", "a"):
        path = tmp_path / name
        path.write_bytes(picture(kind))
        assert kind_of(path) == "images"


def test_what_cannot_be_read_is_what_its_suffix_says(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("notes " * 1000)
    os.mkfifo(tmp_path / "pipe.wav")  # To open it would wait for a writer.
    assert kind_of(text) is kind_of(tmp_path) is kind_of("gone") is None
    assert kind_of(tmp_path / "gone.MP4") == "videos"
    assert kind_of(tmp_path / "pipe.wav") == "audio"
    assert kind_of(text.rename(tmp_path / "notes.avif")) == "images"
    assert kind_of("https://example.org/a/voice.ogg?name=a.png") == "audio"
    assert kind_of("http://example.org/a.png#b.wav") == "images"
    assert kind_of("https://example.org/watch?v=1") is None
    data = {"image/png": "images", "audio/webm;codecs=opus": "audio", "video/mp4": "videos"}
    for kind, expected in data.items():
        assert kind_of(f"data:{kind};base64,AAAA") == expected
    assert kind_of("data:,AAAA") is kind_of("data:text/plain,a.png") is None
