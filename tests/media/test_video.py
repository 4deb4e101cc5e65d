"""Clips come out sampled with true times in bounded memory; bad ones are refused by name."""

import struct
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
from oscar_mm.media.video import video_outline
from tests.prompts import clip, tone
from tests.recordings import levels, write_clip, write_movie


@pytest.mark.parametrize(
    ("suffix", "codec"), [("mp4", "mpeg4"), ("mkv", "mpeg4"), ("avi", "mpeg4"), ("mp4", "libx264")]
)
def test_samples_by_time(tmp_path: Path, suffix: str, codec: str) -> None:
    path = write_clip(tmp_path / f"clip: 1.{suffix}", [5 * i for i in range(40)], codec=codec)
    video = load_video(path, fps=2)
    assert video.frames.shape == (8, 32, 64, 3) and video.frames.dtype == np.uint8
    assert levels(video.frames) == list(range(0, 40, 5))
    assert video.times == [0.5 * i for i in range(8)]
    assert video.seconds == pytest.approx(4, abs=0.02) and video.fps == 2


def test_rate_above_the_source_repeats_frames(tmp_path: Path) -> None:
    video = load_video(write_clip(tmp_path / "clip.mp4", [30 * i for i in range(7)]), fps=40)
    assert levels(video.frames) == [6 * i for i in range(7) for _ in range(4)]
    assert video.times == [i / 40 for i in range(28)]


def test_frames_are_capped(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "clip.mp4", [5 * i for i in range(40)])
    video = load_video(path, fps=10, limits=MediaLimits(max_video_frames=4))
    assert levels(video.frames) == [0, 10, 20, 30] and video.times == [0, 1, 2, 3]


def test_short_clips_give_two_frames(tmp_path: Path) -> None:
    few = load_video(write_clip(tmp_path / "few.mp4", [0, 50, 100, 150]), fps=1)
    assert levels(few.frames) == [0, 20] and few.times == pytest.approx([0, 0.2])
    lone = load_video(write_clip(tmp_path / "lone.mp4", [50]), fps=1)
    assert levels(lone.frames) == [10, 10] and lone.times == pytest.approx([0, 0.05])


ORIENTATIONS = {
    # a, b, c, d of a display matrix, and the first frame as ``ffmpeg -i`` shows it.
    "as it is": ((1, 0, 0, 1), lambda frame: frame),
    "left to right": ((-1, 0, 0, 1), np.fliplr),
    "top to bottom": ((1, 0, 0, -1), np.flipud),
    "upside down": ((-1, 0, 0, -1), lambda frame: np.rot90(frame, 2)),
    "clockwise": ((0, 1, -1, 0), lambda frame: np.rot90(frame, -1)),
    "counterclockwise": ((0, -1, 1, 0), np.rot90),
    "mirrored, then counterclockwise": ((0, 1, 1, 0), lambda frame: np.rot90(np.fliplr(frame))),
    "mirrored, then clockwise": ((0, -1, -1, 0), lambda frame: np.rot90(np.fliplr(frame), -1)),
    "almost clockwise": ((0.03, 0.99, -0.99, 0.03), lambda frame: np.rot90(frame, -1)),
    "no matrix at all": ((0, 0, 0, 0), lambda frame: frame),
}


@pytest.mark.parametrize("suffix", ["mp4", "mov"])
def test_display_matrix(tmp_path: Path, suffix: str) -> None:
    """Front cameras write films that are mirrored."""
    path = write_clip(tmp_path / f"a.{suffix}", [0] * 4, size=(64, 48), corner=255)
    plain, data = load_video(path).frames[0], path.read_bytes()
    assert (plain[:24, :16] > 200).all() and (plain[:, 24:] < 50).all()
    place = data.index(
        struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 1 << 30), data.index(b"tkhd")
    )
    for name, ((a, b, c, d), shown) in ORIENTATIONS.items():
        entries = (round(65536 * entry) for entry in (a, b, 0, c, d, 0, 0, 0))
        matrix = struct.pack(">9i", *entries, 1 << 30)
        path.write_bytes(data[:place] + matrix + data[place + len(matrix) :])
        assert np.array_equal(load_video(path).frames[0], shown(plain)), name


@pytest.mark.parametrize(("rotation", "corner"), [(-90, (0, -1)), (90, (-1, 0)), (180, (-1, -1))])
@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_rotation(tmp_path: Path, suffix: str, rotation: int, corner: tuple[int, int]) -> None:
    # -90 is what a phone held upright writes: turn clockwise, top left goes to top right.
    path = write_clip(tmp_path / f"a.{suffix}", [0] * 10, rotation=rotation, corner=255)
    video = load_video(path)
    assert video.frames.shape[1:3] == ((32, 64) if rotation == 180 else (64, 32))
    assert video.frames[0][corner].min() > 200
    assert (video.frames[0, [0, 0, -1, -1], [0, -1, 0, -1], 0] > 200).sum() == 1


def test_pixels_are_bounded(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "big.mp4", [5 * i for i in range(40)], size=(320, 160))
    video = load_video(path, limits=MediaLimits(max_video_pixels=8 * 160 * 80))
    assert video.frames.size <= 3 * 8 * 160 * 80
    assert len(video.frames) == 8
    assert video.frames.shape[2] == pytest.approx(2 * video.frames.shape[1], abs=2)
    assert levels(video.frames) == pytest.approx(list(range(0, 40, 5)), abs=1)
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
    with pytest.raises(InputError, match=rf"a\.{suffix}: has .* bytes, so the file is cut off"):
        load_video(path)


def test_bytes_are_as_good_as_a_path(tmp_path: Path) -> None:
    path = write_movie(tmp_path / "a.mp4", clip(12), tone(1.5))
    at_path, in_memory = (load_video(x, sound=True) for x in (path, path.read_bytes()))
    assert np.array_equal(at_path.frames, in_memory.frames)
    assert at_path.sound is not None and in_memory.sound is not None
    assert np.array_equal(at_path.sound.samples, in_memory.sound.samples)
    assert at_path.metadata == in_memory.metadata
    how = {"fps": 2.0, "limits": MediaLimits(), "sound": True}
    outlines = [video_outline(x, **how) for x in (path, path.read_bytes())]
    assert outlines[0].frames.shape == outlines[1].frames.shape
    with pytest.raises(InputError, match="max_file_bytes"):
        load_video(path.read_bytes(), limits=MediaLimits(max_file_bytes=100))


@pytest.mark.parametrize(
    ("source", "fps", "reason"),
    [
        ("https://example.org/clip.mp4", 2, "download"),
        ("file:///clip.mp4", 2, "path itself"),
        (b"bytes", 2, "is not a video that can be read"),
        (5, 2, "int is not a video; pass the path or the bytes"),
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
    assert whole.fps == pytest.approx(len(whole.frames) / whole.seconds)
    assert whole.times[1] == pytest.approx(1 / fps if len(array) > 1 else 0.5 / fps)


def test_metadata_is_not_shared() -> None:
    video = load_video([Image.new("RGB", (16, 8))] * 3, fps=4)
    video.metadata["frames_indices"].append(9)
    assert video.metadata["frames_indices"] == [0, 1, 2]
    assert (video.metadata["width"], video.metadata["height"]) == (16, 8)
    assert video.metadata["duration"] == 0.75
