"""Media of a turn: what a user may write, and how it is named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from oscar_mm.media import MediaLimits
from oscar_mm.media.media import Media, MediaReader
from oscar_mm.modality import Modality
from tests.prompts import clip, noise, tone
from tests.recordings import write_movie, write_sound


def read(images: Any = None, videos: Any = None, audio: Any = None, **options: Any) -> Media:
    sound = options.pop("sound", False)
    reader = MediaReader(**{"limits": MediaLimits()} | options)
    return reader.read(images, videos, audio, sound=sound)


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
