"""Recordings come out as mono at 16 kHz in bounded memory; bad ones are refused by name."""

import os
import runpy
import sys
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_mm import thread_pool
from oscar_mm.errors import InputError
from oscar_mm.media import Audio, MediaLimits, load_audio, load_video
from oscar_mm.media import audio as audio_module
from tests.prompts import clip, tone
from tests.recordings import CODECS, pitch, write_movie, write_sound

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("suffix", CODECS)
def test_formats(tmp_path: Path, suffix: str) -> None:
    path = write_sound(tmp_path / f"a: 1.{suffix}", tone(3, 523))
    audio = load_audio(path)
    assert audio.samples.dtype == np.float32 and audio.samples.ndim == 1
    assert audio.seconds == pytest.approx(3, abs=0.1)
    assert pitch(audio) == pytest.approx(523, abs=1)
    assert (audio.source_rate, audio.channels) == (48_000, 2)
    loudness = np.sqrt((tone(3, 523)[0] ** 2).mean())
    assert np.sqrt((audio.samples**2).mean()) == pytest.approx(loudness, rel=0.1)
    again = load_audio(path.read_bytes())
    assert np.array_equal(again.samples, audio.samples)


def test_ogg_vorbis(tmp_path: Path) -> None:
    path = tmp_path / "a.ogg"
    soundfile.write(path, tone(3, 523)[0], 16_000)
    audio = load_audio(path)
    assert audio.seconds == pytest.approx(3, abs=0.01) and pitch(audio) == pytest.approx(523, abs=1)


@pytest.mark.parametrize("rate", [8_000, 11_025, 16_000, 22_050, 44_100, 48_000, 96_000])
@pytest.mark.parametrize("layout", ["mono", "stereo"])
def test_rates_and_channels(tmp_path: Path, rate: int, layout: str) -> None:
    audio = load_audio(write_sound(tmp_path / "a.wav", tone(1, 880), rate=rate, layout=layout))
    assert (audio.source_rate, audio.channels) == (rate, 1 + (layout == "stereo"))
    assert audio.seconds == pytest.approx(1, abs=0.01)
    assert pitch(audio) == pytest.approx(880, abs=2)


@pytest.mark.parametrize("channels", [1, 3, 8])
def test_channels_that_ffmpeg_decodes(tmp_path: Path, channels: int) -> None:
    """Eight are those of a film with 7.1 sound."""
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, (16_000, channels))
    soundfile.write(tmp_path / "a.au", samples, 16_000, subtype="FLOAT")
    audio = load_audio(tmp_path / "a.au")
    assert audio.channels == channels
    np.testing.assert_allclose(audio.samples, samples.mean(axis=1), atol=1e-6)


def test_channels_are_averaged() -> None:
    left, rate = tone(1, 300)
    right, _ = tone(1, 2000, seed=1)
    both = load_audio((np.stack([left, right], 1), rate))
    assert np.allclose(both.samples, (left + right) / 2, atol=1e-6)


def test_arrays_of_every_type() -> None:
    samples, rate = tone(0.5)
    expected = load_audio((samples, rate)).samples
    assert np.allclose(expected, samples, atol=1e-6)
    forms = [
        (samples.astype(np.float64), rate),
        ((samples * 2**15).astype(np.int16), rate),
        ((samples * 2**31).astype(np.int32), rate),
        (rate, samples),
        (samples[:, None], np.int64(rate)),
        (samples[None], rate),
    ]
    for form in forms:
        assert np.allclose(load_audio(form).samples, expected, atol=1e-4)
    coarse = load_audio(((samples * 2**7 + 128).astype(np.uint8), rate))
    assert np.allclose(coarse.samples, expected, atol=0.01)
    assert samples.flags.writeable


@settings(max_examples=25, deadline=None)
@given(st.integers(4_000, 192_000), st.floats(0.1, 21), st.integers(1, 4))
def test_length_is_kept(rate: int, seconds: float, channels: int) -> None:
    count = round(rate * seconds) + 1
    samples = np.random.default_rng(count).uniform(-0.5, 0.5, (count, channels))
    audio = load_audio((samples.astype(np.float32), rate))
    assert len(audio.samples) == pytest.approx(count * 16_000 / rate, abs=2)
    assert audio.channels == channels


def test_pieces_join_without_a_seam() -> None:
    """Longer than a piece, at a rate that is no multiple: still one clean tone."""
    time = np.arange(25 * 44_100) / 44_100
    audio = load_audio(((0.5 * np.sin(2 * np.pi * 440 * time)).astype(np.float32), 44_100))
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(len(audio.samples)) / 16_000)
    assert np.abs(audio.samples - expected)[500:-500].max() < 1e-3


def test_files_are_decoded_in_pieces(monkeypatch, tmp_path: Path) -> None:
    """Two minutes of 48 kHz stereo are 92 MB as float64; here 8 MB are kept, twice at the end."""
    monkeypatch.setattr(thread_pool, "thread_count", lambda: 1)
    path = tmp_path / "long.wav"
    piece = np.random.default_rng(0).integers(-9999, 9999, (48_000 * 10, 2)).astype(np.int16)
    soundfile.write(path, np.tile(piece, (12, 1)), 48_000)
    tracemalloc.start()
    audio = load_audio(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert audio.seconds == pytest.approx(120)
    # Two pieces are under way, in float32 and with what is computed of them.
    assert peak < 2 * audio.samples.nbytes + 2 * 3 * 2 * piece.nbytes < 46e6


@pytest.mark.parametrize(("channels", "later"), [(1, 2), (2, 1)])
def test_a_file_that_another_replaces_meanwhile(
    monkeypatch, tmp_path: Path, channels: int, later: int
) -> None:
    noise = np.random.default_rng(0).uniform(-1, 1, (5 * 16_000, 2))
    path, other = tmp_path / "a.wav", tmp_path / "b.wav"
    soundfile.write(path, noise[:, :channels], 16_000)
    soundfile.write(other, noise[:, :later], 16_000)
    expected, opens = load_audio(path).samples, audio_module.sound_file

    def replaced(*args: Any) -> Any:
        file = opens(*args)
        if other.exists():
            other.replace(path)
        return file

    monkeypatch.setattr(audio_module, "_PIECE_S", 1)
    monkeypatch.setattr(audio_module, "sound_file", replaced)
    assert np.array_equal(load_audio(path).samples, expected)


@pytest.mark.parametrize(
    ("suffix", "rate", "channels"),
    [("wav", 16_000, 1), ("flac", 16_000, 1), ("wav", 16_000, 2), ("flac", 44_100, 2)],
)
def test_threads_decode_what_one_does(
    monkeypatch, tmp_path: Path, suffix: str, rate: int, channels: int
) -> None:
    noise = np.random.default_rng(0).uniform(-1, 1, (5 * rate + 1234, channels))
    path = tmp_path / f"long.{suffix}"
    soundfile.write(path, noise, rate)
    alone = load_audio(path)
    used = []
    monkeypatch.setattr(audio_module, "_PIECE_S", 1)
    pieces = audio_module.parallel_map
    monkeypatch.setattr(
        audio_module, "parallel_map", lambda call, items: used.append(1) or pieces(call, items)
    )
    for source in (path, path.read_bytes()):
        assert np.array_equal(load_audio(source).samples, alone.samples)
    assert used == [1, 1]
    if suffix == "flac":
        # Its middle is lost, so that it cannot be decoded to its end.
        data = bytearray(path.read_bytes())
        data[len(data) // 3 : len(data) // 2] = bytes(len(data) // 2 - len(data) // 3)
        with pytest.raises(InputError, match=r"damaged|cut off"):
            load_audio(bytes(data), label="broken.flac")


def test_sound_of_a_video(tmp_path: Path) -> None:
    movie = write_movie(tmp_path / "movie.mp4", clip(16), tone(2, 700))
    audio = load_audio(movie)
    assert audio.seconds == pytest.approx(2, abs=0.1) and pitch(audio) == pytest.approx(700, abs=2)
    video = load_video(movie, sound=True)
    assert np.array_equal(video.sound.samples, audio.samples)
    assert load_video(movie).sound is None
    longer = write_movie(tmp_path / "longer.mp4", clip(64), tone(2, 700))
    assert load_video(longer, sound=True).sound.seconds == pytest.approx(2, abs=0.1)
    silent = write_movie(tmp_path / "silent.mp4", clip(16), None)
    assert load_video(silent, sound=True).sound is None
    assert load_video(list(clip(4)), sound=True).sound is None
    with pytest.raises(InputError, match=r"silent\.mp4: has no audio track"):
        load_audio(silent)


def test_silence_and_clipping_are_reported() -> None:
    samples, rate = tone(1)
    with pytest.warns(UserWarning, match=r"^call: is silent from beginning to end$"):
        assert not load_audio((samples * 0, rate), label="call").samples.any()
    with pytest.warns(UserWarning, match=r"^audio: is clipped \(\d+% of its samples"):
        load_audio(((samples * 8).clip(-1, 1), rate))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_audio((samples, rate))
        load_audio((samples / samples.max(), rate))


CANCELLED = r"is silent, because its channels cancel each other out; pass only one of them$"


@pytest.mark.parametrize("suffix", ["wav", "flac", "mp3", "m4a", "opus"])
def test_channels_in_antiphase_are_reported(tmp_path: Path, suffix: str) -> None:
    """What a microphone gives whose cable is turned around."""
    samples, rate = tone(1)
    path = write_sound(tmp_path / f"a.{suffix}", (np.stack([samples, -samples]), rate))
    with pytest.warns(UserWarning, match=rf"a\.{suffix}: {CANCELLED}"):
        assert np.abs(load_audio(path).samples).max() < 0.01


def test_which_channels_cancel_each_other_out() -> None:
    samples, rate = tone(1)
    for gains in ([1, -1], [1, -0.97], [1, 1, -1, -1], [0.1, -0.1], [1, 0, -1]):
        with pytest.warns(UserWarning, match=f"^call: {CANCELLED}"):
            load_audio((np.outer(samples, gains).astype(np.float32), rate), label="call")
    # Half of it is heard, or a bit of it.
    heard = np.stack([samples, np.where(np.arange(len(samples)) < 8_000, -samples, samples)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_audio((heard, rate))
        for gains in ([1, -0.5], [1, 0], [1, 0, 0, 0, 0, 0, 0, 0]):
            load_audio((np.outer(samples, gains).astype(np.float32), rate))


def write_call(path: Path, *, dtx: bool) -> Path:
    """2 s of a tone, 3 s in which nobody speaks, 1.5 s of a tone, in AMR as phones write it."""
    samples = np.concatenate([tone(2)[0][::2], np.zeros(24_000, np.float32), tone(1.5)[0][::2]])
    with av.open(str(path), "w") as container:
        stream = container.add_stream(
            "libopencore_amrnb", rate=8_000, layout="mono", options={"dtx": str(int(dtx))}
        )
        stream.bit_rate = 12_200
        for start in range(0, len(samples), 160):
            piece = (samples[None, start : start + 160] * 32_767).astype(np.int16)
            frame = av.AudioFrame.from_ndarray(piece, format="s16", layout="mono")
            frame.rate, frame.pts = 8_000, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


@pytest.mark.parametrize("suffix", ["amr", "3gp"])
@pytest.mark.parametrize("dtx", [True, False])
def test_calls_in_amr(tmp_path: Path, suffix: str, dtx: bool) -> None:
    """Phones send a few bytes, or none, while nobody speaks."""
    path = write_call(tmp_path / f"a.{suffix}", dtx=dtx)
    with av.open(str(path)) as container:
        sizes = {packet.size for packet in container.demux() if packet.size}
    assert (min(sizes) < 13) == dtx or suffix == "3gp"
    audio = load_audio(path)
    assert audio.seconds == pytest.approx(6.5, abs=0.05) and audio.source_rate == 8_000
    spoken, silent, again = np.split(audio.samples, [33_000, 79_000])
    assert pitch(Audio(spoken, 16_000, 1)) == pytest.approx(440, abs=2)
    assert pitch(Audio(again, 16_000, 1)) == pytest.approx(440, abs=2)
    assert np.abs(silent).max() < 0.02
    assert np.array_equal(load_audio(path.read_bytes()).samples, audio.samples)


def test_pauses_in_wide_band_amr() -> None:
    """Pauses are decoded in calls too; without an encoder, the speech is random bits."""
    bits = np.random.default_rng(0)
    speech, comfort, nothing = (
        bytes([0x44]) + bits.bytes(60),
        bytes([0x4C]) + bits.bytes(5),
        b"\x7c",
    )
    pause = (comfort + 7 * nothing) * 19
    data = b"#!AMR-WB\n" + 50 * speech + pause + 25 * speech + pause
    audio = load_audio(data)
    assert audio.seconds == pytest.approx((50 + 152 + 25 + 152) / 50)
    assert audio.source_rate == 16_000 and np.abs(audio.samples[:16_000]).max() > 0.2
    with pytest.raises(InputError, match=r"damaged|cut off"):
        load_audio(b"#!AMR-WB\n" + 50 * bytes([0x54, 1, 2, 3]))


def test_limits(tmp_path: Path) -> None:
    limits = MediaLimits(max_audio_seconds=2)
    assert load_audio(tone(2), limits=limits).seconds == 2
    for suffix in ("wav", "m4a"):
        path = write_sound(tmp_path / f"a.{suffix}", tone(3))
        with pytest.raises(InputError, match=rf"a\.{suffix}: lasts 3.* s, longer than .* 2 s"):
            load_audio(path, limits=limits)
    with pytest.raises(InputError, match=r"audio: lasts 3\.0 s.*max_audio_seconds"):
        load_audio(tone(3), limits=limits)
    with pytest.raises(InputError, match="max_file_bytes"):
        load_audio(path.read_bytes(), limits=MediaLimits(max_file_bytes=1000))


def test_no_error_prints_samples() -> None:
    loud = np.full(9000, 1234.5, np.float32)
    with pytest.raises(InputError, match=r"floats must lie in -1\.\.1") as caught:
        load_audio((loud, 16_000))
    assert "1234" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (tone(1)[0], "array of samples needs a rate"),
        ((tone(1)[0],), "pair must be an array of samples and a rate"),
        ((tone(1)[0], "16k"), "pair must be"),
        ((tone(1)[0], 16_000.0), "pair must be"),
        ((tone(1)[0], True), "pair must be"),
        ((tone(1)[0], 0), "0 samples per second is not a usable rate"),
        ((tone(1)[0], -16_000), "not a usable rate"),
        ((np.zeros((3, 40, 40), np.float32), 16_000), r"shape \(3, 40, 40\)"),
        ((np.zeros((99, 99), np.float32), 16_000), r"shape \(99, 99\).*at most 8 channels"),
        ((np.zeros(900, np.int64), 16_000), "int64"),
        ((np.zeros(900, np.complex64), 16_000), "complex64"),
        ((np.full(9000, np.inf), 16_000), "infinite"),
        ((np.full(9000, 9000.0), 16_000), "divide by 32768"),
        ((np.zeros(0, np.float32), 16_000), "no samples"),
        (b"", "audio: is empty"),
        (b"RIFF", "not a recording"),
        (b"RIFF\x24\x00\x00\x00WAVEfmt ", "not a recording|damaged|cut off"),
        (5, "int is not a recording"),
        (None, "NoneType is not a recording"),
        ([tone(1)], "list is not a recording"),
        ("https://example.org/a.wav", "remote media are disabled"),
        ("file:///a.wav", "path itself"),
        ("ftp://example.org/a.wav", "is a URL"),
        ("data:audio/wav;base64,????", "is not valid base64"),
    ],
)
def test_bad_sources(source: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        load_audio(source)


def test_data_uri(tmp_path: Path) -> None:
    import base64

    path = write_sound(tmp_path / "a.wav", tone(1))
    uri = "data:audio/wav;base64," + base64.b64encode(path.read_bytes()).decode()
    assert np.array_equal(load_audio(uri).samples, load_audio(path).samples)


def test_missing_packages_are_reported(monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "soxr", None)
    with pytest.raises(InputError, match=r"the soxr package: run pip install .*audio\]"):
        load_audio(tone(1))


def test_the_example() -> None:
    audio = load_audio(ROOT / "examples" / "media" / "dial.wav")
    assert audio.seconds == pytest.approx(2.68, abs=0.01)
    # The first key is a 5: 770 and 1336 Hz.
    key = Audio(audio.samples[round(0.12 * 16_000) : round(0.32 * 16_000)], 8000, 1)
    spectrum = np.abs(np.fft.rfft(key.samples))
    strongest = sorted(np.argsort(spectrum)[-2:] / key.seconds)
    assert strongest == pytest.approx([770, 1336], abs=6)
    script = runpy.run_path(str(ROOT / "examples" / "media" / "make_audio.py"))
    drawn = load_audio((script["dialled"](script["NUMBER"]), script["RATE"]))
    assert np.abs(drawn.samples - audio.samples).max() < 1e-4


@pytest.mark.skipif(sys.platform != "linux", reason="names are text elsewhere")
@pytest.mark.parametrize("kind", ["wav", "flac", "mp3"])
def test_a_name_that_is_no_text(kind: str, tmp_path: Path) -> None:
    sound = write_sound(tmp_path / f"a.{kind}", tone(1.0))
    odd = os.path.join(os.fsencode(tmp_path), b"\xff\xfe." + kind.encode())
    os.replace(sound, odd)
    assert load_audio(os.fsdecode(odd)).seconds == pytest.approx(1.0, abs=0.1)
