"""Pictures and sound of a clip are where their own timestamps say, in bounded memory."""

import struct
import tracemalloc
from collections.abc import Iterable
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.stream import Disposition

from oscar_mm.errors import InputError
from oscar_mm.media import Audio, MediaLimits, load_audio, load_video
from oscar_mm.media.limits import MediaCount
from oscar_mm.media.resample import RATE
from oscar_mm.media.timeline import on_show
from oscar_mm.media.video import video_outline
from tests.recordings import FAST, levels, write_clip

HERE = Path(__file__).parent

CONTAINERS = {
    # Suffix: codecs of pictures and sound.
    "mp4": ("libx264", "aac"),
    "mov": ("mpeg4", "aac"),
    "mkv": ("libx264", "libopus"),
    "webm": ("libvpx", "libopus"),
    "flv": ("flv", "libmp3lame"),
    "ts": ("mpeg2video", "mp2"),
    "mpg": ("mpeg1video", "mp2"),
}


def write_flash(
    path: Path,
    *,
    seconds: float = 4.0,
    flash: float | None = 3.0,
    shown: tuple[float, float] = (0.0, 99.0),
    lost: tuple[float, float] = (0.0, 0.0),
    pitch: float = 880.0,
    moved: float = 0.0,
) -> Path:
    """A black film at 25 frames a second and its sound, with a flash and a beep of 0.2 s.

    Args:
        path: the suffix tells the container.
        seconds: length of both.
        flash: seconds at which they begin.
        shown: seconds between which there are pictures.
        lost: seconds between which there are no packets of sound.
        pitch: of the beep, in Hz.
        moved: seconds that are added to the timestamps of sound after those that are lost.
    """
    codecs = CONTAINERS[path.suffix[1:]]
    time = np.arange(round(seconds * 48_000)) / 48_000
    beeps = (time >= flash) & (time < flash + 0.2) if flash is not None else time < 0
    samples = (0.5 * np.sin(2 * np.pi * pitch * time) * beeps).astype(np.float32)
    with av.open(str(path), "w") as container:
        film = container.add_stream(codecs[0], rate=25)
        film.width, film.height, film.pix_fmt = 64, 48, "yuv420p"
        film.options, film.codec_context.thread_count = FAST.get(codecs[0], {}), 1
        sound = container.add_stream(codecs[1], rate=48_000, layout="mono")
        packets = []
        for index in range(round(25 * seconds)):
            if not shown[0] <= index / 25 < shown[1]:
                continue
            bright = flash is not None and flash <= index / 25 < flash + 0.2
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 255 * bright, np.uint8))
            frame.pts, frame.time_base = index, Fraction(1, 25)
            packets += film.encode(frame)
        packets += film.encode()
        packets += [
            packet
            for packet in encoded_sound(sound, samples)
            if packet.pts is not None
            and not lost[0] <= float(packet.pts * packet.time_base) < lost[1]
        ]
        for packet in packets:
            if moved and packet.stream == sound and packet.pts * packet.time_base >= lost[1]:
                packet.pts = packet.dts = packet.pts + round(moved / packet.time_base)
        for packet in sorted(packets, key=lambda packet: packet.dts * packet.time_base):
            container.mux(packet)
    return path


def encoded_sound(stream: av.AudioStream, samples: np.ndarray) -> Iterable[av.Packet]:
    context = stream.codec_context
    context.open()
    frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
    frame.rate, frame.pts, frame.time_base = 48_000, 0, Fraction(1, 48_000)
    resampler = av.AudioResampler(context.format, "mono", 48_000, context.frame_size or None)
    for part in [*resampler.resample(frame), *resampler.resample(None)]:
        yield from stream.encode(part)
    yield from stream.encode(None)


def flashes(path: Path) -> float:
    """Seconds at which a clip flashes."""
    video = load_video(path, fps=25)
    bright = [frame.mean() > 128 for frame in video.frames]
    return video.times[bright.index(True)]


def beeps(sound: Audio) -> list[float]:
    """Seconds at which a recording begins to beep."""
    loud = np.flatnonzero(np.abs(sound.samples) > 0.2) / RATE
    return [time for before, time in pairwise([-1, *loud]) if time > before + 0.3]


SLIDES: dict[str, Any] = {"values": [50, 150, 250], "times": [0.0, 0.2, 5.0], "last": 1.0}


@pytest.mark.parametrize(
    ("suffix", "codec"),
    [
        ("mp4", "libx264"),
        ("mov", "mpeg4"),
        ("mkv", "mpeg4"),
        ("webm", "libvpx"),
        ("flv", "flv"),
        ("avi", "mpeg4"),
        ("gif", "gif"),
    ],
)
def test_slides_stay_on_show(tmp_path: Path, suffix: str, codec: str) -> None:
    """What programs write that record a screen: a frame where something changes."""
    path = write_clip(tmp_path / f"a.{suffix}", codec=codec, **SLIDES)
    video = load_video(path, fps=2)
    assert levels(video.frames) == [10, *[30] * 9, *[50] * 2]
    assert video.times == [i / 2 for i in range(12)]
    assert video.seconds == pytest.approx(6, abs=0.01)


def test_slides_in_a_stream(tmp_path: Path) -> None:
    """MPEG streams do not say how long the last picture lasts."""
    video = load_video(write_clip(tmp_path / "a.ts", codec="libx264", **SLIDES), fps=2)
    assert levels(video.frames)[:11] == [10, *[30] * 9, 50]


@pytest.mark.parametrize(("suffix", "codec"), [("mp4", "libx264"), ("mkv", "mpeg4")])
def test_a_long_pause(tmp_path: Path, suffix: str, codec: str) -> None:
    times = [0.5 * i for i in range(10)] + [60.0]
    path = write_clip(
        tmp_path / f"a.{suffix}", [20 * i for i in range(11)], times=times, codec=codec
    )
    video = load_video(path, fps=2)
    assert levels(video.frames) == [4 * min(i, 9) for i in range(120)] + [40]
    assert video.times == [0.5 * i for i in range(121)]
    assert video.seconds == pytest.approx(60, abs=0.2)
    few = load_video(path, fps=2, limits=MediaLimits(max_video_frames=13))
    assert len(few.frames) == 13 and few.times == pytest.approx(
        [few.seconds / 13 * i for i in range(13)]
    )


def test_what_is_on_show() -> None:
    slides = [(0.0, "a"), (0.2, "b"), (0.2, "c"), (0.7004, "d"), (9.0, "e")]
    shown = on_show(slides, [0.0, 0.1, 0.2, 0.5, 0.7, 1.0, 8.999, 30.0])
    assert [*shown] == ["a", "a", "c", "c", "d", "d", "e", "e"]
    assert [*on_show([(5.0, "late")], [0.0, 6.0])] == ["late", "late"]
    assert [*on_show([], [0.0, 1.0])] == [] == [*on_show(slides, [])]


@pytest.mark.parametrize(
    ("suffix", "options"),
    [
        ("webm", {"live": "1"}),
        ("mkv", {"live": "1"}),
        ("mp4", {"movflags": "frag_keyframe+empty_moov"}),
        ("ts", {}),
    ],
)
def test_without_a_length(tmp_path: Path, suffix: str, options: dict[str, str]) -> None:
    """What browsers and cameras write while they record."""
    codec = "libvpx" if suffix == "webm" else "libx264"
    path = tmp_path / f"a.{suffix}"
    write_clip(path, [5 * i for i in range(50)], size=(320, 180), codec=codec, options=options)
    limits = MediaLimits(max_video_pixels=10 * 320 * 180)
    video = load_video(path, limits=limits)
    assert video.frames.shape == (10, 180, 320, 3)
    assert levels(video.frames) == pytest.approx(list(range(0, 50, 5)), abs=1)
    if suffix in ("webm", "mkv", "ts"):
        assert video_outline(path, fps=2.0, limits=limits, sound=False) is None


def test_without_timestamps(tmp_path: Path) -> None:
    path = tmp_path / "a.m4v"
    write_clip(path, [5 * i for i in range(50)], rate=25, codec="mpeg4", format="m4v")
    video = load_video(path, fps=5)
    assert levels(video.frames) == pytest.approx(list(range(0, 50, 5)), abs=1)
    assert video.seconds == pytest.approx(2)


@pytest.mark.parametrize("suffix", ["ts", "mpg", "mkv"])
def test_joined_streams(tmp_path: Path, suffix: str) -> None:
    """``cat a.ts b.ts``, as recorders do."""
    one = write_flash(tmp_path / f"a.{suffix}", flash=1.0)
    two = write_flash(tmp_path / f"b.{suffix}", flash=2.0)
    joined = tmp_path / f"c.{suffix}"
    joined.write_bytes(one.read_bytes() + two.read_bytes())
    video = load_video(joined, fps=25, sound=True)
    bright = [
        time for time, frame in zip(video.times, video.frames, strict=True) if frame.mean() > 128
    ]
    begins = [time for before, time in pairwise([-1, *bright]) if time > before + 0.3]
    assert begins == pytest.approx([1, 6], abs=0.09)
    assert video.seconds == pytest.approx(8, abs=0.1)
    assert video.sound.seconds == pytest.approx(8, abs=0.15)
    assert beeps(video.sound) == pytest.approx([1, 6], abs=0.1)
    assert np.array_equal(load_audio(joined).samples, video.sound.samples)


def test_joined_recordings_of_far_times(tmp_path: Path) -> None:
    """The second began 300 s later, or before the first, where a clock of 33 bits wraps."""
    parts = []
    for name, offset in (("a", 100), ("b", 400), ("c", 0)):
        path = tmp_path / f"{name}.ts"
        write_clip(
            path, [50 * len(parts)] * 20, codec="libx264", options={"output_ts_offset": str(offset)}
        )
        parts.append(path.read_bytes())
    joined = tmp_path / "joined.ts"
    joined.write_bytes(b"".join(parts))
    video = load_video(joined, fps=2)
    assert video.seconds == pytest.approx(6, abs=0.1)
    assert levels(video.frames) == [*[0] * 4, *[10] * 4, *[20] * 4]


@pytest.mark.daily("mp4", "webm", "ts")
@pytest.mark.parametrize("suffix", ["mp4", "mov", "mkv", "webm", "flv", "ts"])
def test_lost_sound(tmp_path: Path, suffix: str) -> None:
    """Packets that are missing, and sound that begins late, are silence."""
    gap = write_flash(tmp_path / f"gap.{suffix}", lost=(0.5, 2.5))
    late = write_flash(tmp_path / f"late.{suffix}", lost=(0.0, 2.5))
    for path in (gap, late):
        assert flashes(path) == pytest.approx(3, abs=0.05)
        for sound in (load_video(path, sound=True).sound, load_audio(path)):
            assert beeps(sound) == pytest.approx([3], abs=0.1)
            assert sound.seconds == pytest.approx(4, abs=0.15)


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "ts"])
def test_pictures_that_begin_late(tmp_path: Path, suffix: str) -> None:
    """The clip begins with its sound; the first picture is shown from there on."""
    path = write_flash(tmp_path / f"a.{suffix}", shown=(2.0, 99.0))
    video = load_video(path, fps=25, sound=True)
    assert flashes(path) == pytest.approx(3, abs=0.05)
    assert beeps(video.sound) == pytest.approx([3], abs=0.1)
    assert video.seconds == pytest.approx(4, abs=0.1)


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "webm", "ts"])
def test_nothing_is_added_to_whole_sound(tmp_path: Path, suffix: str) -> None:
    """An encoder's delay is no gap: what is decoded follows without a seam."""
    path = write_flash(tmp_path / f"a.{suffix}", flash=1.0)
    with av.open(str(path)) as container:
        count = sum(frame.samples for frame in container.decode(audio=0))
    assert load_audio(path).seconds == pytest.approx(count / 48_000, abs=1e-3)


def test_a_recording_with_lost_packets(tmp_path: Path) -> None:
    """A recording without pictures begins with its sound, wherever its clock stands."""
    for suffix in ("mkv", "mp4", "webm"):
        path = write_flash(tmp_path / f"a.{suffix}", shown=(99.0, 99.0), lost=(1.0, 2.0))
        recording = load_audio(path)
        assert beeps(recording) == pytest.approx([3], abs=0.1)
        assert recording.seconds == pytest.approx(4, abs=0.1)
        late = write_flash(tmp_path / f"b.{suffix}", shown=(99.0, 99.0), lost=(-1.0, 2.0))
        assert beeps(load_audio(late)) == pytest.approx([1], abs=0.1)


@pytest.mark.parametrize("moved", [7_200.0, 1e6, 1e9])
def test_claims_take_no_memory(tmp_path: Path, moved: float) -> None:
    """Timestamps may say anything."""
    path = write_flash(tmp_path / "a.mkv", shown=(99.0, 99.0), lost=(1.0, 1.5), moved=moved)
    limits = MediaLimits(max_audio_seconds=8_000)
    load_audio(write_flash(tmp_path / "b.mkv"))
    tracemalloc.start()
    with pytest.raises(InputError, match=r"a\.mkv: .* longer than"):
        load_audio(path, limits=limits, count=MediaCount(limits, max_seconds=60))
    with pytest.raises(InputError, match=r"a\.mkv: .* longer than the limit of 3600 s"):
        load_audio(path, limits=MediaLimits(max_audio_seconds=3600))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2e7
    slides = write_clip(tmp_path / "c.mkv", [50, 150], times=[0.0, moved])
    with pytest.raises(InputError, match=r"c\.mkv: .* longer than the limit of 3600 s"):
        load_video(slides)
    day = write_clip(tmp_path / "d.mkv", [50], times=[0.0], last=moved)
    with pytest.raises(InputError, match=r"d\.mkv: .* longer than the limit of 3600 s"):
        load_video(day)


def test_clocks_that_run_wild(tmp_path: Path) -> None:
    """Keyframes at random times, before and after each other: bounded, or refused."""
    random = np.random.default_rng(0)
    for suffix, codec in (("mkv", "mpeg4"), ("ts", "mpeg2video"), ("mkv", "libvpx")):
        for spread in (1, 100, 10_000):
            path = tmp_path / f"a.{suffix}"
            shuffled(
                write_clip(tmp_path / f"b.{suffix}", [50] * 25, codec=codec, rate=25),
                path,
                random,
                spread,
            )
            try:
                video = load_video(path, fps=2, sound=True)
            except InputError as error:
                assert "longer than the limit" in str(error)
            else:
                assert 0 < video.seconds <= 3600 and 2 <= len(video.frames) <= 768


def shuffled(path: Path, target: Path, random: np.random.Generator, spread: float) -> None:
    """A copy whose packets have random times, which only a muxer for one packet a file writes."""
    with av.open(str(path)) as source:
        parts = [packet for packet in source.demux() if packet.size]
        pieces = []
        for packet in parts:
            time = random.uniform(0, spread)
            with av.open(str(target), "w") as container:
                stream = container.add_stream_from_template(source.streams.video[0])
                packet.pts = packet.dts = round(time / packet.time_base)
                packet.stream = stream
                container.mux(packet)
            pieces.append(target.read_bytes())
    target.write_bytes(b"".join(pieces))


@pytest.mark.parametrize("suffix", ["mkv", "mp4", "mov"])
@pytest.mark.parametrize("default", [0, 1])
def test_default_tracks(tmp_path: Path, suffix: str, default: int) -> None:
    """Players open the tracks that are marked as default, which need not be the first."""
    path = tmp_path / f"a.{suffix}"
    with av.open(
        str(path), "w", options={"default_mode": "passthrough"} if suffix == "mkv" else {}
    ) as container:
        films = [container.add_stream("mpeg4", rate=25) for _ in range(2)]
        sounds = [container.add_stream("aac", rate=48_000, layout="mono") for _ in range(2)]
        for index, (film, sound) in enumerate(zip(films, sounds, strict=True)):
            film.width, film.height, film.pix_fmt = 64, 48, "yuv420p"
            film.disposition = sound.disposition = (
                Disposition.default if index == default else Disposition(0)
            )
        packets = []
        for index, (film, sound) in enumerate(zip(films, sounds, strict=True)):
            for place in range(25):
                frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 50 + 100 * index, np.uint8))
                frame.pts, frame.time_base = place, Fraction(1, 25)
                packets += film.encode(frame)
            time = np.arange(48_000) / 48_000
            packets += film.encode()
            samples = 0.4 * np.sin(2 * np.pi * (440 + 440 * index) * time)
            packets += [*encoded_sound(sound, samples.astype(np.float32))]
        for packet in sorted(packets, key=lambda packet: packet.dts * packet.time_base):
            container.mux(packet)
    video = load_video(path, sound=True)
    assert set(levels(video.frames)) == {10 + 20 * default}
    spectrum = np.abs(np.fft.rfft(video.sound.samples[:RATE]))
    assert spectrum.argmax() == pytest.approx(440 + 440 * default, abs=2)
    assert np.array_equal(load_audio(path).samples, video.sound.samples)


def test_repeats_are_empty_packets(tmp_path: Path) -> None:
    """still.ogv: ffmpeg -f lavfi -i color=gray:s=32x32:r=10 -frames:v 33 -c:v libtheora -g 8."""
    video = load_video(HERE / "still.ogv")
    assert video.seconds == pytest.approx(3.3) and len(video.frames) == 7
    assert levels(video.frames) == [26] * 7


def test_empty_frames_of_ivf(tmp_path: Path) -> None:
    """Encoders of calls leave out frames that way."""
    path = write_clip(tmp_path / "a.ivf", [50] * 10 + [150] * 20, codec="libvpx")
    data = path.read_bytes()
    place, index, kept = 32, 0, bytearray(data[:32])
    while place < len(data):
        size, time = struct.unpack("<IQ", data[place : place + 12])
        frame = data[place + 12 : place + 12 + size] if index in (0, 10, 29) else b""
        kept += struct.pack("<IQ", len(frame), time) + frame
        place, index = place + 12 + size, index + 1
    path.write_bytes(kept)
    video = load_video(path)
    assert video.seconds == pytest.approx(3) and levels(video.frames) == [10, 10, 30, 30, 30, 30]


def test_empty_chunks_of_avi(tmp_path: Path) -> None:
    """A film that ends with a still."""
    path = write_clip(tmp_path / "a.avi", [50] * 5 + [150] * 25)
    data = path.read_bytes()
    place = data.index(b"movi") + 4
    body, index = bytearray(b"movi"), bytearray()
    for number in range(30):
        size = struct.unpack("<I", data[place + 4 : place + 8])[0]
        chunk = data[place + 8 : place + 8 + size + size % 2] if number < 10 else b""
        length = size if number < 10 else 0
        index += b"00dc" + struct.pack("<III", 16 * (number == 0), len(body), length)
        body += b"00dc" + struct.pack("<I", length) + chunk
        place += 8 + size + size % 2
    movie = (
        b"LIST"
        + struct.pack("<I", len(body))
        + body
        + b"idx1"
        + struct.pack("<I", len(index))
        + index
    )
    head = data[: data.index(b"movi") - 8]
    path.write_bytes(head[:4] + struct.pack("<I", len(head) + len(movie) - 8) + head[8:] + movie)
    video = load_video(path)
    assert video.seconds == pytest.approx(3) and levels(video.frames) == [10, 30, 30, 30, 30, 30]
