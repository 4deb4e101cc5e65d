"""Recordings come out as mono at 16 kHz in bounded memory; bad ones are refused by name."""

import io
import os
import runpy
import struct
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
from oscar_mm.media.truncation import is_joined_ogg, lacks_ogg_pages
from tests.prompts import clip, tone
from tests.recordings import CODECS, write_movie, write_sound

ROOT = Path(__file__).parents[2]


def pitch(audio: Audio) -> float:
    """The strongest frequency, in Hz."""
    spectrum = np.abs(np.fft.rfft(audio.samples))
    return float(spectrum.argmax() / audio.seconds)


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


def cut(path: Path, share: float) -> Path:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    return path


def test_bad_files(tmp_path: Path) -> None:
    text, empty, playlist, zero, short = (tmp_path / f"{name}.wav" for name in "abcde")
    text.write_text("no sound at all")
    empty.touch()
    playlist.write_text("#EXTM3U\n#EXTINF:4,\n/etc/hostname\n#EXT-X-ENDLIST\n")
    soundfile.write(zero, np.zeros(0), 16_000)
    soundfile.write(short, np.ones(100) / 2, 16_000)
    broken = tmp_path / "nan.wav"
    soundfile.write(broken, np.array([0.1, np.nan, 0.2] * 9000), 16_000, subtype="FLOAT")
    loud = tmp_path / "loud.wav"
    soundfile.write(loud, 9000 * tone(1)[0], 16_000, subtype="FLOAT")
    cases = {
        tmp_path / "missing.wav": "no such file",
        tmp_path: "folder",
        text: "not a recording",
        empty: "file is empty",
        playlist: "not a recording",
        zero: "no samples",
        short: r"lasts 0\.006 s, which is too short",
        broken: "NaN or infinite",
        loud: r"floats must lie in -1\.\.1",
        cut(write_sound(tmp_path / "cut.wav", tone(3)), 0.5): "cut off",
        cut(write_sound(tmp_path / "cut.flac", tone(3)), 0.5): "cut off|damaged",
        cut(write_sound(tmp_path / "cut.m4a", tone(3)), 0.7): "damaged|cut off",
        cut(write_sound(tmp_path / "cut.webm", tone(3)), 0.5): "damaged|cut off",
    }
    for path, reason in cases.items():
        with pytest.raises(InputError, match=reason) as caught:
            load_audio(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def two_mp3(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("mp3")
    return [write_sound(folder / "a.mp3", tone(6, hertz)).read_bytes() for hertz in (523, 1000)]


@pytest.mark.parametrize("size", [360, 500, 800, 2_000, 20_000, 60_000])
def test_a_cut_mp3_holds_nothing_of_others(two_mp3: list[bytes], size: int) -> None:
    """Decoders fill only the part of a buffer that they have samples for."""
    data, other = two_mp3
    load_audio(other)
    with pytest.raises(InputError, match=r"^call: .*(cut off|not a recording)") as caught:
        load_audio(data[:size], label="call")
    assert "nan" not in str(caught.value) and "e+" not in str(caught.value)


def test_a_flac_that_promises_more(tmp_path: Path) -> None:
    path = write_sound(tmp_path / "a.flac", tone(3))
    data = bytearray(path.read_bytes())
    # The last four bytes of the count of samples.
    assert int.from_bytes(data[22:26], "big") == 3 * 48_000
    data[22:26] = (9 * 48_000).to_bytes(4, "big")
    with pytest.raises(InputError, match=r"^audio: .*(cut off|damaged)"):
        load_audio(bytes(data))
    data[22:26] = bytes(4)  # of unknown length, from a pipe
    assert load_audio(bytes(data)).seconds == pytest.approx(3, abs=0.01)


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_a_cut_ogg(tmp_path: Path, subtype: str) -> None:
    path = tmp_path / "a.ogg"
    soundfile.write(path, tone(6, 523)[0], 16_000, format="OGG", subtype=subtype)
    data = path.read_bytes()
    assert load_audio(data).seconds == pytest.approx(6, abs=0.01)
    assert load_audio(data + b"TAG" + bytes(125)).seconds == pytest.approx(6, abs=0.01)
    last_page = data.rindex(b"OggS")
    for size in (len(data) // 2, last_page, last_page + 30, len(data) - 1):
        with pytest.raises(InputError, match=r"^voice: .*the file is cut off"):
            load_audio(data[:size], label="voice")


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_joined_ogg(tmp_path: Path, subtype: str) -> None:
    """``cat a.ogg b.ogg`` is a recording, of the length of both: radio makes such files."""
    parts = []
    for seconds, hertz in ((3, 523), (5, 1000)):
        path = tmp_path / f"{hertz}.ogg"
        soundfile.write(path, tone(seconds, hertz)[0], 16_000, format="OGG", subtype=subtype)
        parts.append(path.read_bytes())
    audio = load_audio(b"".join(parts))
    assert audio.seconds == pytest.approx(8, abs=0.05)
    first, second = (Audio(part, 16_000, 1) for part in np.split(audio.samples, [3 * 16_000]))
    assert pitch(first) == pytest.approx(523, abs=1)
    assert pitch(second) == pytest.approx(1000, abs=1)
    assert load_audio(b"".join([*parts, parts[0]])).seconds == pytest.approx(11, abs=0.05)
    with pytest.raises(InputError, match="the file is cut off"):
        load_audio(b"".join(parts)[:-100])
    stereo = np.stack([tone(1)[0]] * 2, 1)
    soundfile.write(path, stereo, 16_000, format="OGG", subtype=subtype)
    with pytest.raises(InputError, match=r"^audio: .*convert it to WAV or FLAC"):
        load_audio(parts[0] + path.read_bytes())


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
@pytest.mark.parametrize("lost", [1, 3])
def test_missing_pages_of_ogg_are_silent(tmp_path: Path, subtype: str, lost: int) -> None:
    """What comes after them is where its timestamp says."""
    path = tmp_path / "a.ogg"
    noise = np.random.default_rng(0).normal(0, 0.01, 12 * 16_000)
    noise[10 * 16_000 :] *= 20
    with soundfile.SoundFile(path, "w", 16_000, 1, format="OGG", subtype=subtype) as file:
        for second in np.split(noise, 12):
            file.write(second)
    data = path.read_bytes()
    assert not lacks_ogg_pages(data, "") and not lacks_ogg_pages(data[4:], "")
    pages = [b"OggS" + page for page in data.split(b"OggS")[1:]]
    data = b"".join([*pages[:6], *pages[6 + lost :]])
    assert lacks_ogg_pages(data, "")
    audio = load_audio(data)
    assert audio.seconds == pytest.approx(12, abs=0.05)
    assert np.flatnonzero(np.abs(audio.samples) > 0.15)[0] / 16_000 == pytest.approx(10, abs=0.1)
    assert not audio.samples[66_000:70_000].any() and audio.samples[48_000:50_000].all()


def test_where_pages_of_ogg_lie_does_not_matter(monkeypatch, tmp_path: Path) -> None:
    path = tmp_path / "a.ogg"
    soundfile.write(path, tone(5)[0], 16_000)
    data = path.read_bytes()
    gap = b"OggS".join([*data.split(b"OggS")[:3], *data.split(b"OggS")[4:]])
    for size in range(5, 40):
        monkeypatch.setattr("oscar_mm.media.truncation._PIECE_BYTES", size)
        assert is_joined_ogg(data + data, "") and not is_joined_ogg(data, "")
        assert lacks_ogg_pages(gap, "") and not lacks_ogg_pages(data, "")


@pytest.mark.parametrize("suffix", ["wav", "mp3", "webm", "flac", "m4a", "opus"])
def test_the_last_twentieth_is_missed(tmp_path: Path, suffix: str) -> None:
    """Also at the end of a packet, where no decoder stumbles."""
    path = write_sound(
        tmp_path / f"a.{suffix}", tone(20), layout="mono", muxer={"movflags": "faststart"}
    )
    data = path.read_bytes()
    assert load_audio(data).seconds == pytest.approx(20, abs=0.1)
    with av.open(io.BytesIO(data)) as container:
        ends = [packet.pos + packet.size for packet in container.demux() if packet.size]
    for size in (int(0.95 * len(data)), max(end for end in ends if end < 0.96 * len(data))):
        with pytest.raises(InputError, match=r"^voice: .*(cut off|damaged)"):
            load_audio(data[:size], label="voice")


@pytest.mark.parametrize("kind", ["AIFF", "AU", "CAF", "NIST", "RF64", "WAVEX", "WAV"])
def test_other_files_without_their_last_twentieth(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.bin"
    soundfile.write(path, tone(20)[0], 16_000, format=kind, subtype="PCM_16")
    data = path.read_bytes()
    assert load_audio(data).seconds == 20
    assert load_audio(data[:-2]).seconds == pytest.approx(20, abs=0.01)
    with pytest.raises(InputError, match=r"the file is cut off"):
        load_audio(data[: int(0.95 * len(data))])


@pytest.mark.parametrize("riff", [0, 2**32 - 1, 9_000])
def test_a_wav_that_states_only_the_size_of_its_sound(tmp_path: Path, riff: int) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, tone(3)[0], 16_000, subtype="PCM_16")
    data = bytearray(path.read_bytes())
    place = data.index(b"data")
    data[4:8] = struct.pack("<I", riff)
    # A chunk of odd length before the sound.
    listed = bytes(data[:place]) + b"LIST" + struct.pack("<I", 5) + bytes(6) + bytes(data[place:])
    for whole in (bytes(data), listed):
        assert load_audio(whole).seconds == 3
        with pytest.raises(InputError, match=r"^audio: has [\d,]+ of [\d,]+ bytes; .*cut off"):
            load_audio(whole[: len(whole) // 2])
    # What sox and others write to a pipe.
    for unknown in (0x7FFFF000, 0x7FFFFFFF, 2**32 - 1):
        data[place + 4 : place + 8] = struct.pack("<I", unknown)
        data[4:8] = struct.pack("<I", min(unknown + place, 2**32 - 1))
        assert load_audio(bytes(data)).seconds == 3


@pytest.mark.parametrize("kind", ["AIFF", "AU", "CAF", "NIST", "RF64", "WAVEX"])
def test_other_cut_files(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.bin"
    soundfile.write(path, tone(3, 523)[0], 16_000, format=kind, subtype="PCM_16")
    audio = load_audio(path)
    assert audio.seconds == pytest.approx(3) and pitch(audio) == pytest.approx(523, abs=1)
    with pytest.raises(InputError, match=r"a\.bin: .*the file is cut off"):
        load_audio(cut(path, 0.6))


def half_loud() -> tuple[np.ndarray, int]:
    """Three seconds of noise, three of silence: of far more bits at the beginning."""
    samples, rate = tone(6)
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, len(samples)).astype(np.float32)
    return noise * (np.arange(len(samples)) < len(samples) / 2), rate


def test_mp3_without_a_count_of_frames(tmp_path: Path) -> None:
    """What FFmpeg and mpg123 guess from the first bit rate is no promise."""
    plain, variable = {"write_xing": "0"}, {"flags": "+qscale", "global_quality": "236"}
    for source in (half_loud(), (half_loud()[0][::-1], half_loud()[1])):
        path = write_sound(tmp_path / "a.mp3", source, muxer=plain, encoder=variable)
        assert load_audio(path).seconds == pytest.approx(6, abs=0.1)
        counted = write_sound(tmp_path / "b.mp3", source, encoder=variable)
        assert load_audio(counted).seconds == pytest.approx(6, abs=0.1)
    raw = write_sound(tmp_path / "a.aac", half_loud())
    assert load_audio(raw).seconds == pytest.approx(6, abs=0.1)


def test_joined_mp3(tmp_path: Path) -> None:
    """``cat a.mp3 b.mp3`` is a recording, of the length of both."""
    one = write_sound(tmp_path / "a.mp3", tone(2, 523)).read_bytes()
    assert load_audio(one + one).seconds == pytest.approx(4, abs=0.1)
    ape = b"APETAGEX" + bytes([0xD0, 7, 0, 0, 32]) + bytes(19) + b"TAG" + bytes(125)
    assert load_audio(one + ape).seconds == pytest.approx(2, abs=0.1)
    other = write_sound(tmp_path / "b.mp3", tone(2, 523), rate=16_000).read_bytes()
    with pytest.raises(InputError, match="audio: changes its sample rate or channels"):
        load_audio(one + other)


@pytest.mark.parametrize("seconds", [0.12, 0.3])
def test_delay_of_an_encoder(tmp_path: Path, seconds: float) -> None:
    untagged = {"id3v2_version": "0"}
    for rate in (48_000, 16_000):
        path = write_sound(tmp_path / "a.mp3", tone(seconds), rate=rate, muxer=untagged)
        assert load_audio(path).seconds == pytest.approx(seconds, abs=0.08)
        tagged = b"ID3\4\0\0\0\0\2\1" + bytes(257) + path.read_bytes()
        assert load_audio(tagged).seconds == pytest.approx(seconds, abs=0.08)
        longer = write_sound(tmp_path / "b.mp3", tone(9), rate=rate, muxer=untagged).read_bytes()
        with pytest.raises(InputError, match=r"of [89]\.\d s; the file is cut off"):
            load_audio(tagged[:267] + longer[: len(longer) // 2])


def test_no_error_prints_samples() -> None:
    loud = np.full(9000, 1234.5, np.float32)
    with pytest.raises(InputError, match=r"floats must lie in -1\.\.1") as caught:
        load_audio((loud, 16_000))
    assert "1234" not in str(caught.value)


def test_a_wav_of_unknown_size(tmp_path: Path) -> None:
    """Programs that write to a pipe leave sizes of all ones in the header."""
    path = tmp_path / "piped.wav"
    soundfile.write(path, tone(1)[0], 16_000, subtype="PCM_16")
    data = bytearray(path.read_bytes())
    place = data.index(b"data")
    data[4:8] = data[place + 4 : place + 8] = struct.pack("<I", 2**32 - 1)
    path.write_bytes(data)
    assert load_audio(path).seconds == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (tone(1)[0], "array of samples needs its rate"),
        ((tone(1)[0],), "pair must be an array of samples and their rate"),
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
    with pytest.raises(InputError, match=r"package soxr; pip install '\.\[audio\]'"):
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
