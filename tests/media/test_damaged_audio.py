"""Recordings that are damaged, cut off, joined, or declare a wrong length."""

import io
import struct
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile

from oscar_mm.errors import InputError
from oscar_mm.media import Audio, load_audio
from oscar_mm.media.truncation import is_joined_ogg, lacks_ogg_pages
from tests.prompts import tone
from tests.recordings import pitch, write_sound


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


@pytest.mark.daily("1-VORBIS", "3-OPUS")
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


@pytest.mark.daily("wav", "webm", "m4a")
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
        with pytest.raises(InputError, match=r"^audio: has [\d,]+ of [\d,]+ bytes, .*cut off"):
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


@pytest.mark.parametrize("rate", [48_000, 16_000])
def test_delay_of_an_encoder(tmp_path: Path, rate: int) -> None:
    untagged = {"id3v2_version": "0"}
    for seconds in (0.12, 0.3):
        path = write_sound(tmp_path / "a.mp3", tone(seconds), rate=rate, muxer=untagged)
        assert load_audio(path).seconds == pytest.approx(seconds, abs=0.08)
        tagged = b"ID3\4\0\0\0\0\2\1" + bytes(257) + path.read_bytes()
        assert load_audio(tagged).seconds == pytest.approx(seconds, abs=0.08)
    longer = write_sound(tmp_path / "b.mp3", tone(9), rate=rate, muxer=untagged).read_bytes()
    with pytest.raises(InputError, match=r"of [89]\.\d s, so the file is cut off"):
        load_audio(tagged[:267] + longer[: len(longer) // 2])


def test_a_wav_of_unknown_size(tmp_path: Path) -> None:
    """Programs that write to a pipe leave sizes of all ones in the header."""
    path = tmp_path / "piped.wav"
    soundfile.write(path, tone(1)[0], 16_000, subtype="PCM_16")
    data = bytearray(path.read_bytes())
    place = data.index(b"data")
    data[4:8] = data[place + 4 : place + 8] = struct.pack("<I", 2**32 - 1)
    path.write_bytes(data)
    assert load_audio(path).seconds == pytest.approx(1, abs=0.01)
