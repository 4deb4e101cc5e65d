"""Pictures and sound of a clip are where their own timestamps say."""

from __future__ import annotations

import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.stream import Disposition
from PIL import Image

from oscar_mm.errors import InputError
from oscar_mm.media import MediaLimits, load_audio, load_video
from tests.media.test_video import levels, write_clip

RATE = 48_000
BEEP_S, SHOWN = 0.5, 40
"""Length of a beep, and the level of the picture that is on meanwhile."""


def write_with_sound(
    path: Path,
    pictures: list[tuple[float, int]],
    sounds: list[tuple[float, np.ndarray]],
    *,
    muxer: dict[str, str] | None = None,
    codecs: tuple[str, str] = ("mpeg4", "aac"),
) -> Path:
    """A clip of grey pictures and pieces of sound, each with the second at which it is due."""
    with av.open(str(path), "w", options=muxer or {}) as container:
        tick, packets = Fraction(1, 1000), list[Any]()
        video = container.add_stream(codecs[0], rate=25) if pictures else None
        audio = container.add_stream(codecs[1], rate=RATE, layout="mono") if sounds else None
        if video:
            video.width, video.height, video.pix_fmt = 64, 32, "yuv420p"
            video.codec_context.time_base = tick if codecs[0] != "mpeg2video" else Fraction(1, 25)
        for time, level in pictures:
            frame = av.VideoFrame.from_ndarray(np.full((32, 64, 3), 5 * level, np.uint8))
            frame.time_base = video.codec_context.time_base
            frame.pts = round(time / frame.time_base)
            packets += video.encode(frame)
        packets += video.encode() if video else []
        for time, samples in sounds:
            size = audio.codec_context.frame_size or len(samples)
            for start in range(0, len(samples), size):
                part = np.ascontiguousarray(samples[None, start : start + size], np.float32)
                frame = av.AudioFrame.from_ndarray(part, format="fltp", layout="mono")
                frame.rate, frame.time_base = RATE, Fraction(1, RATE)
                frame.pts = round(time * RATE) + start
                packets += audio.encode(frame)
        if audio:
            packets += audio.encode()
        for packet in sorted(packets, key=lambda one: one.dts * one.time_base):
            container.mux(packet)
    return path


def beep(seconds: float) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * RATE)) / RATE)


def quiet(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * RATE), np.float32)


def beeps_at(samples: np.ndarray) -> float:
    """Seconds of 16 kHz samples before the first loud one."""
    return int(np.argmax(np.abs(samples) > 0.1)) / 16_000


# Uneven pictures


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "ts", "flv", "avi"])
def test_the_picture_on_show_is_kept(tmp_path: Path, suffix: str) -> None:
    """A screen recording has a picture where something changes; AVI repeats it by empty packets."""
    codec = {"flv": "flv", "ts": "libx264"}.get(suffix, "mpeg4")
    times, values = [0.0, 0.2, 5.0, 5.8], [0, 50, 100, 100]
    path = write_clip(tmp_path / f"slides.{suffix}", values, times=times, codec=codec, rate=10)
    video = load_video(path, fps=2)
    assert levels(video.frames) == pytest.approx([0, *[10] * 9, 20, 20], abs=1)
    assert video.times == [index / 2 for index in range(12)]
    assert video.seconds == pytest.approx(6, abs=0.2)


def test_pictures_of_a_gif(tmp_path: Path) -> None:
    first, *others = [Image.new("L", (32, 32), value) for value in (0, 50, 100)]
    how = {"save_all": True, "append_images": others, "duration": [200, 3000, 1000]}
    first.save(tmp_path / "slides.gif", **how)
    video = load_video(tmp_path / "slides.gif", fps=2)
    assert levels(video.frames) == [0, *[10] * 6, 20, 20]
    assert video.seconds == pytest.approx(4.2, abs=0.11)


@pytest.mark.parametrize("suffix", ["mp4", "mov", "mkv"])
def test_a_last_picture_after_a_pause(tmp_path: Path, suffix: str) -> None:
    times = [*(index / 2 for index in range(10)), 60.0]
    values = [20 * index for index in range(11)]
    video = load_video(write_clip(tmp_path / f"pause.{suffix}", values, times=times), fps=2)
    expected = [*range(0, 40, 4), *[36] * 110, 40]
    assert levels(video.frames) == pytest.approx(expected, abs=1)
    assert video.seconds == pytest.approx(60, abs=0.6)
    times = [i / video.metadata["fps"] for i in video.metadata["frames_indices"]]
    assert times == video.times == [index / 2 for index in range(121)]


@pytest.mark.parametrize(
    ("suffix", "codec", "muxer"),
    [
        ("webm", "libvpx", {"live": "1"}),
        ("mkv", "mpeg4", {"live": "1"}),
        ("mp4", "mpeg4", {"movflags": "frag_keyframe+empty_moov"}),
        ("m4v", "mpeg4", {}),
    ],
)
def test_a_clip_without_a_length_keeps_its_pixels(
    tmp_path: Path, suffix: str, codec: str, muxer: dict[str, str]
) -> None:
    pictures = [(index / 10, index) for index in range(40)]
    path = write_with_sound(
        tmp_path / f"live.{suffix}", pictures, [], muxer=muxer, codecs=(codec, "")
    )
    video = load_video(path, fps=2, limits=MediaLimits(max_video_pixels=8 * 64 * 32))
    assert video.frames.shape == (8, 32, 64, 3)
    assert levels(video.frames) == pytest.approx(range(0, 40, 5), abs=2)
    few = load_video(path, fps=10, limits=MediaLimits(max_video_frames=4))
    assert levels(few.frames) == pytest.approx([0, 10, 20, 30], abs=2)


# Matrices


@pytest.mark.parametrize(
    "matrix",
    [
        *[(-1, 0, 0, 1), (1, 0, 0, -1), (-1, 0, 0, -1)],
        *[(0, 1, 1, 0), (0, -1, -1, 0), (0, 1, -1, 0), (0, -1, 1, 0)],
    ],
)
@pytest.mark.parametrize("suffix", ["mp4", "mov"])
def test_mirrors_and_turns(tmp_path: Path, suffix: str, matrix: tuple[int, ...]) -> None:
    """A file's matrix puts the place (x, y) at (a x + c y, b x + d y)."""
    path = write_clip(tmp_path / f"front.{suffix}", [0] * 10, rotation=90)
    data = bytearray(path.read_bytes())
    place = data.index(b"tkhd") + 4 + 40
    a, b, c, d = matrix
    fixed = [value << 16 for value in (a, b)], [value << 16 for value in (c, d)]
    struct.pack_into(">9i", data, place, *fixed[0], 0, *fixed[1], 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    frame = load_video(path).frames[0, ..., 0]
    bright = np.zeros((32, 64), bool)
    bright[:16, :16] = True
    y, x = np.nonzero(bright)
    left, top = a * x + c * y, b * x + d * y
    corners_x = [0, a * 63, c * 31, a * 63 + c * 31]
    corners_y = [0, b * 63, d * 31, b * 63 + d * 31]
    expected = np.zeros((max(corners_y) - min(corners_y) + 1, max(corners_x) - min(corners_x) + 1))
    expected[top - min(corners_y), left - min(corners_x)] = 255
    assert frame.shape == expected.shape
    assert np.abs(frame - expected).mean() < 12


# Clocks


@pytest.mark.parametrize(("suffix", "codec"), [("ts", "mpeg2video"), ("mpg", "mpeg2video")])
def test_joined_streams(tmp_path: Path, suffix: str, codec: str) -> None:
    """``cat a.ts b.ts``: the second part begins with the first time again."""
    parts = [
        write_clip(
            tmp_path / f"{start}.{suffix}",
            [5 * (start + i) for i in range(20)],
            codec=codec,
            rate=25,
        )
        for start in (0, 20)
    ]
    # 25 pictures a second, as MPEG-2 has no 10.
    path = tmp_path / f"joined.{suffix}"
    path.write_bytes(b"".join(part.read_bytes() for part in parts))
    video = load_video(path, fps=5)
    assert video.seconds == pytest.approx(1.6, abs=0.1)
    assert levels(video.frames) == pytest.approx(range(0, 40, 5), abs=1)


def test_joined_streams_with_sound(tmp_path: Path) -> None:
    pictures = [(index / 25, SHOWN if index >= 50 else 0) for index in range(60)]
    path = write_with_sound(
        tmp_path / "a.ts",
        pictures,
        [(0.0, np.concatenate([quiet(2), beep(0.4)]))],
        codecs=("mpeg2video", "mp2"),
    )
    joined = tmp_path / "joined.ts"
    joined.write_bytes(3 * path.read_bytes())
    video = load_video(joined, fps=10, sound=True)
    assert video.seconds == pytest.approx(7.2, abs=0.2)
    shown = np.array(levels(video.frames)) > SHOWN / 2
    loud = np.abs(video.sound.samples) > 0.1
    for start in (2.0, 4.4, 6.8):
        assert shown[round(10 * start) + 1] and not shown[round(10 * start) - 2]
        assert loud[round((start + 0.1) * 16_000) : round((start + 0.3) * 16_000)].mean() > 0.5
        assert not loud[round((start - 0.3) * 16_000) : round((start - 0.1) * 16_000)].any()


@pytest.mark.parametrize(
    ("suffix", "sound"), [("mkv", "aac"), ("mp4", "aac"), ("mkv", "libopus"), ("ts", "mp2")]
)
@pytest.mark.parametrize("gap", ["within", "before"])
def test_sound_is_where_its_timestamps_say(
    tmp_path: Path, suffix: str, sound: str, gap: str
) -> None:
    pictures = [(index / 10, SHOWN if 30 <= index < 35 else 0) for index in range(50)]
    last = (2.5, np.concatenate([quiet(0.5), beep(BEEP_S), quiet(1.5)]))
    sounds = [(0.0, quiet(1.0)), last] if gap == "within" else [last]
    codecs = "libx264" if suffix == "ts" else "mpeg4", sound
    path = write_with_sound(tmp_path / f"flash.{suffix}", pictures, sounds, codecs=codecs)
    video = load_video(path, fps=10, sound=True)
    assert levels(video.frames)[30] == pytest.approx(SHOWN, abs=1)
    assert beeps_at(video.sound.samples) == pytest.approx(3.0, abs=0.1)
    assert len(video.sound.samples) / 16_000 == pytest.approx(5, abs=0.2)


def test_a_recording_begins_with_its_sound(tmp_path: Path) -> None:
    """What is missing in between is silence, what is missing before is no part of it."""
    sounds = [(7.0, beep(BEEP_S)), (9.0, np.concatenate([quiet(0.5), beep(BEEP_S)]))]
    audio = load_audio(write_with_sound(tmp_path / "call.mka", [], sounds))
    assert beeps_at(audio.samples) == pytest.approx(0, abs=0.1)
    assert beeps_at(audio.samples[16_000:]) == pytest.approx(1.5, abs=0.1)
    assert len(audio.samples) / 16_000 == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize("suffix", ["mkv", "mp4"])
def test_a_claimed_day_of_silence_is_refused(tmp_path: Path, suffix: str) -> None:
    sounds = [(0.0, quiet(0.2)), (20_000.0, quiet(0.2))]
    path = write_with_sound(tmp_path / f"day.{suffix}", [(0.0, 0), (0.1, 0)], sounds)
    with pytest.raises(InputError, match="longer"):
        load_video(path, sound=True, limits=MediaLimits(max_audio_seconds=600))


# Tracks


@pytest.mark.parametrize("suffix", ["mkv", "mov"])
def test_the_default_track_is_heard(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"tracks.{suffix}"
    with av.open(str(path), "w") as container:
        tracks = [container.add_stream("pcm_s16le", rate=RATE, layout="mono") for _ in range(2)]
        tracks[0].disposition, tracks[1].disposition = Disposition(0), Disposition.default
        for track, samples in zip(tracks, (quiet(1), beep(1)), strict=True):
            frame = av.AudioFrame.from_ndarray(
                (samples[None] * 32767).astype(np.int16), format="s16", layout="mono"
            )
            frame.rate = RATE
            container.mux(track.encode(frame))
            container.mux(track.encode())
    assert np.abs(load_audio(path).samples).max() > 0.4


def test_the_default_pictures_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "tracks.mkv"
    with av.open(str(path), "w") as container:
        tracks = [container.add_stream("mpeg4", rate=10) for _ in range(2)]
        tracks[0].disposition, tracks[1].disposition = Disposition(0), Disposition.default
        for track in tracks:
            track.width, track.height, track.pix_fmt = 64, 32, "yuv420p"
        for track, value in zip(tracks, (20, 100), strict=True):
            for _ in range(10):
                frame = av.VideoFrame.from_ndarray(np.full((32, 64, 3), value, np.uint8))
                container.mux(track.encode(frame))
            container.mux(track.encode())
    assert levels(load_video(path).frames) == [20, 20]


# Calls


def test_pauses_of_a_call(tmp_path: Path) -> None:
    """AMR writes small frames where nobody speaks."""
    path = tmp_path / "call.amr"
    speech = np.random.default_rng(0).normal(0, 0.2, 16_000)
    samples = np.concatenate([speech, np.zeros(24_000), speech])
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libopencore_amrnb", rate=8000, layout="mono")
        stream.bit_rate, stream.options = 12_200, {"dtx": "1"}
        for start in range(0, len(samples), 160):
            part = (samples[None, start : start + 160] * 32767).clip(-32768, 32767)
            frame = av.AudioFrame.from_ndarray(part.astype(np.int16), format="s16", layout="mono")
            frame.rate, frame.pts = 8000, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    audio = load_audio(path)
    assert len(audio.samples) / 16_000 == pytest.approx(7, abs=0.1)
    quiet_part = audio.samples[3 * 16_000 : 4 * 16_000]
    assert np.abs(quiet_part).max() < 0.1 < np.abs(audio.samples[:16_000]).max()
