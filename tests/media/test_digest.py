"""The digest of a medium changes with one pixel, sample or time, and with nothing else."""

from dataclasses import replace

import numpy as np
from PIL import Image

from oscar_mm.media import Audio, load_audio, load_image, load_video, media
from oscar_mm.media.media import Media, media_digest
from oscar_mm.thread_pool import parallel_map
from tests.prompts import clip, noise, tone
from tests.recordings import write_sound


def test_images(tmp_path) -> None:
    pixels = noise(20, 30)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    digest = media_digest(load_image(pixels))
    assert len(digest) == 64 and set(digest) <= set("0123456789abcdef")
    assert media_digest(load_image(tmp_path / "a.png")) == digest
    changed = pixels.copy()
    changed[7, 11, 2] ^= 1
    others = [changed, pixels.reshape(30, 20, 3), pixels[:, ::-1], pixels[:19]]
    assert len({media_digest(load_image(other)) for other in others} - {digest}) == 4


def test_recordings(tmp_path) -> None:
    samples, rate = tone(1)
    digest = media_digest(load_audio((samples, rate)))
    assert media_digest(load_audio((samples.astype(np.float64), rate))) == digest
    changed = samples.copy()
    changed[777] = np.nextafter(changed[777], np.float32(1))
    assert media_digest(load_audio((changed, rate))) != digest
    assert media_digest(load_audio((samples[:-1], rate))) != digest
    path = write_sound(tmp_path / "a.flac", tone(1), rate=16_000, layout="mono")
    assert media_digest(load_audio(path)) == media_digest(load_audio(path.read_bytes()))


def test_videos() -> None:
    frames = clip(4)
    video = load_video(frames, fps=2)
    digest = media_digest(video)
    assert media_digest(load_video(list(frames), fps=2)) == digest
    changed = frames.copy()
    changed[3, 0, 0, 0] ^= 1
    sound = Audio(tone(1)[0], 16_000, 1)
    others = [
        load_video(changed, fps=2),
        load_video(frames, fps=4),
        load_video(frames[::-1], fps=2),
        replace(video, seconds=3.0),
        replace(video, sound=sound),
        replace(video, sound=Audio(tone(1, seed=1)[0], 16_000, 1)),
    ]
    assert len({media_digest(other) for other in others} | {digest}) == 7


def test_long_media_in_blocks(monkeypatch) -> None:
    samples, frames = tone(1)[0], clip(8)
    whole = media_digest(Audio(samples, 16_000, 1))
    monkeypatch.setattr(media, "_BLOCK_BYTES", 1 << 14)
    digest = media_digest(Audio(samples, 16_000, 1))
    assert digest != whole and media_digest(Audio(samples.copy(), 16_000, 1)) == digest
    assert [*parallel_map(media_digest, [Audio(samples, 16_000, 1)] * 2)] == [digest] * 2
    ended, swapped = samples.copy(), samples.copy()
    ended[-1] = np.nextafter(ended[-1], np.float32(1))
    swapped[: 1 << 13] = np.roll(swapped[: 1 << 13], 1 << 12)  # two blocks of floats
    others = [media_digest(Audio(one, 16_000, 1)) for one in (ended, swapped, samples[:-1])]
    assert len({digest, *others}) == 4
    changed = frames.copy()
    changed[-1, -1, -1, -1] ^= 1
    assert media_digest(load_video(frames)) != media_digest(load_video(changed))
    kinds = Media([Image.new("RGB", (99, 99))], [load_video(frames)], [Audio(samples, 16_000, 1)])
    assert [medium.in_blocks for medium in kinds] == [False, True, True]
    short = Media(audio=[Audio(samples[: 1 << 12], 16_000, 1)])
    assert [medium.in_blocks for medium in short] == [False]


def test_kinds_do_not_meet() -> None:
    """The same bytes as an image and as samples."""
    samples = np.zeros(16_000, np.float32)
    image = Image.frombytes("L", (250, 256), samples.tobytes())
    assert media_digest(image) != media_digest(Audio(samples, 16_000, 1))
