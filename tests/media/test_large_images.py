"""Large pictures are scaled down as they are read, and a request has bounds on all of its own."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from oscar_mm.errors import InputError
from oscar_mm.media import MediaLimits, load_image
from oscar_mm.media.image import eighth
from oscar_mm.media.media import MediaReader, media_digest
from oscar_mm.media.part import media_parts
from tests.media.test_headers import image_size
from tests.prompts import noise

SMALL = MediaLimits(max_image_pixels=2_000_000)


def third(width: int, height: int) -> tuple[int, int]:
    return width // 3, height // 3


def scene(width: int, height: int) -> Image.Image:
    """Smooth, dark on the left and bright on the right, red at the top and blue at the bottom."""
    across, down = np.linspace(0, 255, width), np.linspace(0, 255, height)[:, None]
    shape = (height, width)
    channels = [255 - down, across[None], down]
    return Image.fromarray(
        np.stack([np.broadcast_to(c, shape) for c in channels], -1).astype(np.uint8)
    )


def encoded(image: Image.Image, kind: str, orientation: int = 1, **options: object) -> bytes:
    file, exif = io.BytesIO(), Image.Exif()
    exif[274] = orientation
    image.save(file, kind, exif=exif, **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    return scene(3000, 2000)


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_jpeg_is_decoded_at_a_fraction(photo: Image.Image, orientation: int) -> None:
    data = encoded(photo, "JPEG", orientation, quality=95)
    with pytest.raises(InputError, match=r"3000x2000 pixels .*max_image_pixels"):
        load_image(data, limits=SMALL)
    image = load_image(data, limits=SMALL, fit=third)
    turns = {1: 0, 3: 2, 6: 3, 8: 1}[orientation]
    upright = Image.fromarray(np.rot90(np.asarray(photo), turns))
    assert image.size == image_size(data, limits=SMALL, fit=third) == third(*upright.size)
    expected = np.asarray(upright.resize(image.size, Image.Resampling.BICUBIC), np.int16)
    assert np.abs(np.asarray(image, np.int16) - expected).max() <= 4
    assert media_digest(image) == media_digest(load_image(data, limits=SMALL, fit=third))


@pytest.mark.parametrize("orientation", [0, 9, 49, 65535])
def test_an_orientation_that_does_not_exist_turns_nothing(
    photo: Image.Image, orientation: int
) -> None:
    data, upright = encoded(photo, "JPEG", orientation), encoded(photo, "JPEG")
    image = load_image(data, fit=third)
    assert image.size == image_size(data, limits=MediaLimits(), fit=third) == (1000, 666)
    assert media_digest(image) == media_digest(load_image(upright, fit=third))
    small = photo.resize((60, 40))
    for kind in ("PNG", "WEBP", "TIFF"):
        data = encoded(small, kind, orientation, lossless=True)
        assert np.array_equal(load_image(data), small)
        assert image_size(data, limits=MediaLimits()) == (60, 40)


def test_never_below_what_is_used(photo: Image.Image) -> None:
    """A half would be too little, so that the whole picture is needed, and refused."""
    data = encoded(photo, "JPEG")
    with pytest.raises(InputError, match="max_image_pixels"):
        load_image(data, limits=SMALL, fit=lambda width, height: (width * 2 // 3, height * 2 // 3))
    progressive = encoded(photo, "JPEG", progressive=True)
    with pytest.raises(InputError, match="max_image_pixels"):
        load_image(progressive, limits=SMALL, fit=third)
    for source in (data, progressive):
        assert load_image(source, fit=third).size == (1000, 666)
        with pytest.raises(InputError, match=r"^photo: 3000x2000 pixels .*max_"):
            load_image(
                source,
                limits=MediaLimits(max_photo_pixels=5_000_000, max_image_pixels=5_000_000),
                label="photo",
                fit=eighth,
            )


def test_a_photo_of_200_megapixels() -> None:
    """Pillow alone refuses to open more than 179 megapixels."""
    data = encoded(Image.new("L", (16_320, 12_240), 77), "JPEG", 6)
    image = load_image(data, fit=third)
    assert image.size == image_size(data, limits=MediaLimits(), fit=third) == (4080, 5440)
    assert image.getextrema() == ((77, 77),) * 3
    with pytest.raises(InputError, match=r"16320x12240 pixels are more than the limit of 50,000"):
        load_image(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_small_pictures_stay_as_they_are(kind: str) -> None:
    """Bit for bit: the model's own processor scales them, as it does in transformers."""
    data = encoded(Image.fromarray(noise(1000, 2000)), kind)
    whole = load_image(data)
    assert np.array_equal(load_image(data, fit=third), whole)
    assert image_size(data, limits=MediaLimits(), fit=third) == whole.size
    larger = encoded(Image.fromarray(noise(1800, 2600)), kind, quality=80, compress_level=1)
    used = load_image(larger, fit=lambda *size: size)
    assert np.array_equal(used, load_image(larger))


def test_sources_agree(photo: Image.Image, tmp_path: Path) -> None:
    data = encoded(photo, "PNG")
    path = tmp_path / "a.png"
    path.write_bytes(data)
    sources = [data, path, photo, np.asarray(photo), Image.open(path)]
    images = [load_image(source, fit=third) for source in sources]
    assert all(np.array_equal(image, images[0]) for image in images)
    limits = MediaLimits()
    assert {image_size(source, limits=limits, fit=third) for source in sources} == {(1000, 666)}
    assert photo.size == (3000, 2000)


def read(images: object, limits: MediaLimits) -> list[Image.Image]:
    return MediaReader(limits).read(media_parts(images)).images


def test_pixels_of_a_request(tmp_path: Path) -> None:
    """However few bytes they have: those of a blank picture are next to none."""
    blank = tmp_path / "blank.png"
    Image.new("L", (1000, 1000)).save(blank)
    limits = MediaLimits(max_request_pixels=3_500_000)
    assert len(read([blank] * 3, limits)) == 3
    mixed = [blank, noise(1000, 1000), Image.open(blank), blank.read_bytes()]
    with pytest.raises(InputError, match=r"^images\[3\]: .* 4,000,000 pixels, .* 3,500,000; send"):
        read(mixed, limits)
    clip = np.zeros((4, 1000, 1000, 3), np.uint8)
    with pytest.raises(InputError, match=r"^videos\[0\]: .* 4,000,000 pixels"):
        MediaReader(limits).read(media_parts(videos=clip))


def test_what_is_over_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    load = Image.Image.convert
    monkeypatch.setattr(
        Image.Image, "convert", lambda self, *args: decoded.append(1) or load(self, *args)
    )
    blank = encoded(Image.new("L", (1000, 1000)), "PNG")
    limits = MediaLimits(max_request_pixels=2_500_000)
    with pytest.raises(InputError, match="max_request_pixels"):
        read([blank] * 9, limits)
    assert len(decoded) == 2
    with pytest.raises(InputError, match=r"^images: .* 9,000,000 pixels, .* 2,500,000; send fewer"):
        MediaReader(limits).outline(media_parts([blank] * 9))
    assert len(decoded) == 2


def test_media_of_a_request() -> None:
    reader, names = MediaReader(MediaLimits(max_request_media=3)), ["gone.png"] * 2
    assert len(reader.outline(media_parts(names, "gone.mp4"))) == 0
    for reads in (reader.outline, reader.read):
        with pytest.raises(InputError, match=r"^4 images, videos and recordings .* limit of 3"):
            reads(media_parts(names, "gone.mp4", "gone.wav"))
