"""Clips come out sampled with true times in bounded memory; bad ones are refused by name."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from PIL import Image

from oscar_mm.errors import InputError
from oscar_mm.media import MediaLimits, load_video


def write_clip(
    path: Path,
    values: list[int],
    *,
    rate: int = 10,
    size: tuple[int, int] = (64, 32),
    codec: str = "mpeg4",
    times: list[float] | None = None,
    rotation: int = 0,
) -> Path:
    """Grey frames of the given values; frame i at times[i] seconds, else at i / rate."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        tick = Fraction(1, 1000 if times else rate)
        stream.codec_context.time_base = tick
        if rotation:
            stream.set_display_rotation(rotation)
        for index, value in enumerate(values):
            pixels = np.full((size[1], size[0], 3), value, np.uint8)
            pixels[: size[1] // 2, : size[0] // 4] = 255 if rotation else value
            frame = av.VideoFrame.from_ndarray(pixels)
            frame.time_base = tick
            frame.pts = round(1000 * times[index]) if times else index
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def levels(frames: np.ndarray) -> list[int]:
    return [round(float(frame.mean()) / 5) for frame in frames]


@pytest.mark.parametrize(
    ("suffix", "codec"), [("mp4", "mpeg4"), ("mkv", "mpeg4"), ("avi", "mpeg4"), ("mp4", "libx264")]
)
def test_samples_by_time(tmp_path: Path, suffix: str, codec: str) -> None:
    path = write_clip(tmp_path / f"clip: 1.{suffix}", [5 * i for i in range(40)], codec=codec)
    video = load_video(path, fps=2)
    assert video.frames.shape == (8, 32, 64, 3) and video.frames.dtype == np.uint8
    assert levels(video.frames) == list(range(0, 40, 5))
    assert video.times == [index / 2 for index in range(8)]
    assert video.seconds == pytest.approx(4, abs=0.02) and video.fps == 2


def test_rate_above_the_source_repeats_frames(tmp_path: Path) -> None:
    video = load_video(write_clip(tmp_path / "clip.mp4", [30 * i for i in range(7)]), fps=30)
    assert levels(video.frames) == pytest.approx([index // 3 * 6 for index in range(21)], abs=1)


def test_frames_are_capped(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "clip.mp4", [5 * i for i in range(40)])
    video = load_video(path, fps=10, limits=MediaLimits(max_video_frames=4))
    assert levels(video.frames) == [0, 10, 20, 30] and video.times == [0, 1, 2, 3]


def test_short_clips_give_two_frames(tmp_path: Path) -> None:
    few = load_video(write_clip(tmp_path / "few.mp4", [0, 50, 100, 150]), fps=1)
    assert levels(few.frames) == [0, 20] and few.times == pytest.approx([0, 0.2], abs=0.01)
    lone = load_video(write_clip(tmp_path / "lone.mp4", [50]), fps=1)
    assert levels(lone.frames) == [10, 10]


@pytest.mark.parametrize(("rotation", "corner"), [(-90, (0, -1)), (90, (-1, 0)), (180, (-1, -1))])
def test_rotation(tmp_path: Path, rotation: int, corner: tuple[int, int]) -> None:
    # -90 is what a phone held upright writes: turn clockwise, top left goes to top right.
    video = load_video(write_clip(tmp_path / "turned.mp4", [0] * 10, rotation=rotation))
    assert video.frames.shape[1:3] == ((32, 64) if rotation == 180 else (64, 32))
    assert video.frames[0][corner].min() > 200
    assert (video.frames[0, [0, 0, -1, -1], [0, -1, 0, -1], 0] > 200).sum() == 1


def test_pixels_are_bounded(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "big.mp4", [5 * i for i in range(40)], size=(320, 160))
    video = load_video(path, limits=MediaLimits(max_video_pixels=8 * 160 * 80))
    assert video.frames.size <= 3 * 8 * 160 * 80
    assert len(video.frames) == 8
    assert video.frames.shape[2] == pytest.approx(2 * video.frames.shape[1], abs=2)
    assert levels(video.frames) == pytest.approx(range(0, 40, 5), abs=1)
    with pytest.raises(InputError, match=r"320x160 pixels.*max_image_pixels"):
        load_video(path, limits=MediaLimits(max_image_pixels=10_000))


def test_too_long(tmp_path: Path) -> None:
    limits = MediaLimits(max_video_seconds=3)
    for name in ("clip.mp4", "clip.m4v"):
        path = write_clip(tmp_path / name, [9] * 40)
        with pytest.raises(InputError, match=f"{name}.*longer than the limit of 3 s"):
            load_video(path, limits=limits)


def test_tags_that_are_not_utf8(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "tagged.mkv", [9] * 10)
    data = path.read_bytes()
    # The name of the writing program, a text of the same kind as a title.
    assert b"Lavf" in data
    path.write_bytes(data.replace(b"Lavf", b"L\xe4vf"))
    assert len(load_video(path).frames) == 2


def test_bad_files(tmp_path: Path) -> None:
    text, empty, cut, playlist, sound, tail = (
        tmp_path / name for name in ("a.mp4", "b.mp4", "c.mp4", "d.mp4", "e.mkv", "f.avi")
    )
    whole = write_clip(tmp_path / "whole.mp4", [9] * 40)
    text.write_text("no video at all")
    empty.touch()
    cut.write_bytes(whole.read_bytes()[:-200])
    playlist.write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:4\n#EXTINF:4,\n{whole}\n#EXT-X-ENDLIST\n")
    noise = np.random.default_rng(0).integers(0, 200, 60)
    long = write_clip(tmp_path / "long.avi", noise.tolist()).read_bytes()
    tail.write_bytes(long[: len(long) // 2])
    with av.open(str(sound), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        samples = np.zeros((1, 800), np.int16)
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    cases = {
        tmp_path / "missing.mp4": "no such file",
        tmp_path: "folder",
        text: "not a video",
        empty: "empty",
        cut: "damaged",
        playlist: "not a video",
        sound: "no video stream",
        tail: "cut off|damaged",
    }
    for path, reason in cases.items():
        with pytest.raises(InputError, match=reason) as caught:
            load_video(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("suffix", "codec"), [("mkv", "mpeg4"), ("avi", "mpeg4"), ("webm", "libvpx")]
)
def test_half_a_file(tmp_path: Path, suffix: str, codec: str) -> None:
    noise = np.random.default_rng(0).integers(0, 200, 40)
    path = write_clip(tmp_path / f"a.{suffix}", noise.tolist(), codec=codec)
    assert load_video(path).seconds == pytest.approx(4, abs=0.1)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(InputError, match=rf"a\.{suffix}: has .* bytes; the file is cut off"):
        load_video(path)


@pytest.mark.parametrize(
    ("source", "fps", "reason"),
    [
        ("https://example.org/clip.mp4", 2, "download"),
        ("file:///clip.mp4", 2, "path itself"),
        (b"bytes", 2, "bytes is not a video"),
        ([], 2, "no frames"),
        (["a.png"], 2, "frame 0: str is not a frame"),
        (np.zeros((4, 32, 32), np.uint8), 2, r"\(T, H, W, C\)"),
        (np.zeros((4, 3, 32, 3), np.uint8), 2, "too small"),
        (np.zeros((4, 32, 32, 3), np.int64), 2, "frame 0: an array of int64"),
        ([Image.new("L", (9, 9)), Image.new("L", (9, 8))], 2, "frame 1: 9x8 pixels, but frame 0"),
        (np.zeros((900, 8, 8, 3), np.uint8), 2, "every n-th"),
        (np.zeros((9, 8, 8, 3), np.uint8), 0.001, "longer"),
        ([Image.new("L", (9, 9))], 0, "fps"),
        ([Image.new("L", (9, 9))], float("nan"), "fps"),
        ([Image.new("L", (9, 9))], "2", "fps"),
    ],
)
def test_bad_sources(source: object, fps: float, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        load_video(source, fps=fps)


@settings(max_examples=30, deadline=None)
@given(
    npst.arrays(
        st.sampled_from([np.uint8, np.uint16, np.bool_]),
        st.tuples(*[st.integers(1, 5), st.integers(8, 12), st.integers(8, 12)]).flatmap(
            lambda shape: st.sampled_from([(*shape, 1), (*shape, 3), (*shape, 4)])
        ),
    ),
    st.floats(0.1, 60),
)
def test_frames_as_array_and_list_agree(array: np.ndarray, fps: float) -> None:
    whole, parts = load_video(array, fps=fps), load_video(list(array), fps=fps)
    assert np.array_equal(whole.frames, parts.frames)
    assert whole.frames.shape == (max(2, len(array)), *array.shape[1:3], 3)
    assert whole.seconds == pytest.approx(len(array) / fps)
    assert whole.times[: len(array)] == pytest.approx([i / whole.fps for i in range(len(array))])
    assert whole.fps == pytest.approx(fps * max(2, len(array)) / len(array))


def test_metadata_is_not_shared() -> None:
    video = load_video([Image.new("RGB", (16, 8))] * 3, fps=4)
    video.metadata["frames_indices"].append(9)
    assert video.metadata["frames_indices"] == [0, 1, 2]
    assert (video.metadata["width"], video.metadata["height"]) == (16, 8)
    assert video.metadata["duration"] == 0.75
