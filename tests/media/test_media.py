"""Media of a turn: what a user may write, and how it is named."""

import io
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from oscar_mm.errors import Cancelled, InputError
from oscar_mm.media import MediaLimits, image
from oscar_mm.media import media as media_module
from oscar_mm.media.limits import MediaCount
from oscar_mm.media.media import Media, MediaReader
from oscar_mm.media.part import media_parts
from oscar_mm.media.resample import MonoPiece
from oscar_mm.modality import Modality
from tests.prompts import clip, noise, tone
from tests.recordings import write_movie, write_sound


def read(images: Any = None, videos: Any = None, audio: Any = None, **options: Any) -> Media:
    sound = options.pop("sound", False)
    reader = MediaReader(**{"limits": MediaLimits()} | options)
    return reader.read(media_parts(images, videos, audio, sound=sound))


def labels(media: Media) -> list[str]:
    return [medium.label for medium in media]


def test_one_or_a_list() -> None:
    assert len(read()) == 0 == len(read([], [], []))
    picture, (samples, rate) = noise(16, 16), tone(0.2)
    assert len(read(picture)) == len(read([picture])) == len(read((picture,))) == 1
    assert len(read(None, clip(3))) == len(read(None, [clip(3)])) == len(read(None, list(clip(3))))
    assert len(read(None, [clip(3), clip(2)]).videos) == 2
    for one in ((samples, rate), (rate, samples), [(samples, rate)]):
        assert len(read(audio=one).audio) == 1
    assert len(read(audio=((samples, rate), (samples, rate))).audio) == 2


def test_names_are_those_of_files(tmp_path: Path) -> None:
    picture = tmp_path / "a picture.png"
    Image.fromarray(noise(16, 16)).save(picture)
    sound = write_sound(tmp_path / "a.wav", tone(0.2))
    movie = write_movie(tmp_path / "a.mp4", clip(8), tone(1))
    media = read(
        [str(picture), noise(16, 16), picture], [movie, clip(3)], [sound, tone(0.2)], sound=True
    )
    assert labels(media) == [
        *("a picture.png", "images[1]", "a picture.png"),
        *("a.mp4", "videos[1]", "a.wav", "audio[1]"),
    ]
    assert [medium.modality for medium in media] == [
        *[Modality.IMAGE] * 3,
        *[Modality.VIDEO] * 2,
        *[Modality.AUDIO] * 2,
    ]
    assert [video.sound is not None for video in media.videos] == [True, False]
    digests = [medium.digest for medium in media]
    assert digests[0] == digests[1] == digests[2] and len(set(digests)) == 5


def test_many_files_keep_their_order_and_the_first_bad_one_is_named(tmp_path: Path) -> None:
    pictures = [tmp_path / f"{index}.png" for index in range(60)]
    for index, path in enumerate(pictures):
        Image.fromarray(noise(16, 16 + index, seed=index)).save(path)
    sounds = [write_sound(tmp_path / f"{i}.wav", tone(0.1 + 0.01 * i)) for i in range(12)]
    media = read(pictures, audio=sounds)
    assert labels(media) == [path.name for path in (*pictures, *sounds)]
    assert [image.width for image in media.images] == [16 + index for index in range(60)]
    lengths = [len(recording.samples) for recording in media.audio]
    assert lengths == sorted(set(lengths))
    for index in (7, 23, 59):
        pictures[index].write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"7\.png: is not an image"):
        read(pictures)
    few = MediaLimits(max_request_pixels=5000)
    with pytest.raises(InputError, match="more than the limit of 5,000"):
        read([noise(32, 32)] * 20, limits=few)


def test_an_image_that_is_not_loaded_yet_may_be_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(noise(300, 300)).save(path)
    for _ in range(5):
        with Image.open(path) as opened:
            images = read([opened] * 12).images
        assert all(np.array_equal(one, noise(300, 300)) for one in images)


def test_large_pictures_and_files_take_turns(monkeypatch, tmp_path: Path) -> None:
    turns: list[bool] = []
    turn = MediaCount.turn
    monkeypatch.setattr(
        MediaCount, "turn", lambda self, *, large: turns.append(large) or turn(self, large=large)
    )
    path = tmp_path / "a.png"
    Image.fromarray(noise(30, 30)).save(path)
    read(path)
    monkeypatch.setattr(image, "LARGE_PIXELS", 899)
    read(path)
    monkeypatch.setattr(media_module, "LARGE_BYTES", path.stat().st_size - 1)
    read(path)
    # Of the file, then of its pixels.
    assert turns == [False, False, False, True, True, True]


def test_labels_by_default_and_turns_together() -> None:
    first = read([noise(16, 16)], None, [tone(0.2)])
    by_hand = Media(images=first.images, audio=first.audio)
    assert labels(by_hand) == ["images[0]", "audio[0]"]
    later = Media(images=[Image.new("RGB", (16, 16))], audio=first.audio, labels=["new", "same"])
    both = first + later
    assert labels(both) == ["images[0]", "new", "audio[0]", "same"]
    assert both.images == [*first.images, *later.images]
    with pytest.raises(ValueError, match=r"shorter|longer"):
        labels(Media(images=first.images, labels=["a", "b"]))
    assert np.asarray(both.images[1]).sum() == 0


def test_an_address_is_fetched_in_no_thread_that_others_need(monkeypatch) -> None:
    file, places = io.BytesIO(), list[int]()
    Image.new("RGB", (8, 8)).save(file, "PNG")

    def fetch(source: str, **_: Any) -> bytes:
        places.append(threading.get_ident())
        return file.getvalue()

    monkeypatch.setattr(media_module, "read_bytes", fetch)
    picture = np.zeros((8, 8, 3), np.uint8)
    for sources in (["http://127.0.0.1/a.png"] * 3, [picture, "HTTPS://127.0.0.1/a.png"]):
        media = MediaReader(MediaLimits(), allow_remote=True).read(media_parts(sources))
        assert labels(media)[1:] == sources[1:]
    assert set(places) == {threading.get_ident()} and len(places) == 4


def test_arrays_take_turns(monkeypatch) -> None:
    inside, most = [0], [0]

    def reads(source, **_) -> Image.Image:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.01)
        inside[0] -= 1
        return Image.new("RGB", (8, 8))

    monkeypatch.setattr(media_module, "load_image", reads)
    MediaReader(MediaLimits()).read(media_parts([np.zeros((8, 8, 3), np.uint8)] * 6))
    assert most == [1]


def test_sound_beyond_the_context_is_not_decoded(tmp_path: Path) -> None:
    """Where no header tells its length either."""
    second = write_sound(tmp_path / "a.flac", tone(1.0)).read_bytes()
    assert len(read(audio=second, max_seconds=1.5).audio) == 1
    with pytest.raises(InputError, match=r"audio\[[0-2]\].* longer than the 2 s .* shorten it or"):
        read(audio=[second] * 3, max_seconds=2.2)
    movie = write_movie(tmp_path / "a.mp4", clip(8), tone(2))
    with pytest.raises(InputError, match=r"a.mp4: the audio of the request is longer"):
        read(None, str(movie), second, sound=True, max_seconds=1.5)


@pytest.mark.parametrize("kind", ["images", "videos", "audio"])
def test_media_that_nobody_wants_any_more(kind: str) -> None:
    media = {"images": noise(16, 16), "videos": clip(3), "audio": tone(0.2)}
    reader = MediaReader(MediaLimits())
    with pytest.raises(Cancelled):
        reader.read(media_parts(**{kind: media[kind]}), cancelled=lambda: True)


def test_sizes_are_checked_before_decoding_and_after_it_without_headers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    reader, shown = MediaReader(MediaLimits()), media_parts(noise(16, 16), audio=tone(0.2))
    reader.read(shown, fits=lambda sizes: seen.append(len(sizes)))
    monkeypatch.setattr(media_module, "audio_outline", lambda *_, **__: None)
    reader.read(shown, fits=lambda sizes: seen.append(len(sizes)))
    reader.read([], fits=lambda sizes: seen.append(len(sizes)))
    assert seen == [2, 1, 2]


def test_a_recording_that_is_read_anew_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that decode its pieces find that something is odd about the file."""
    path, right, last = write_sound(tmp_path / "a.wav", tone(41.0)), MonoPiece.of, []

    def of(piece: np.ndarray, *rest: Any) -> MonoPiece:
        if len(piece) < 10 * 16_000 and not last:
            last.append(True)
            raise RuntimeError
        return right(piece, *rest)

    monkeypatch.setattr(MonoPiece, "of", of)
    [recording] = read(audio=path, max_seconds=42.0).audio
    assert last and recording.seconds == 41.0
