"""Other threads of Python run while a picture is decoded, whatever its format."""

import io
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from oscar_mm.errors import Cancelled, InputError
from oscar_mm.media import MediaLimits, decoder_process, load_image
from oscar_mm.media.image import eighth
from oscar_mm.media.limits import MediaCount
from tests.prompts import noise

SIDE = 4000
FORMATS = [
    *(("JPEG", "RGB", {}), ("JPEG", "CMYK", {"progressive": True})),
    *(("PNG", "RGBA", {}), ("PNG", "I;16", {}), ("GIF", "P", {"transparency": 0})),
    *(("WEBP", "RGBA", {"method": 0}), ("BMP", "RGB", {}), ("PPM", "RGB", {})),
    *(("TIFF", "RGBA", {"compression": "tiff_lzw"}), ("TIFF", "F", {})),
]


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def longest_stop(work: Callable[[], object]) -> float:
    """Most seconds for which a thread that always wants to run did not, while this one works."""
    longest, ends = 0.0, threading.Event()

    def tick() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not ends.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        work()
    finally:
        ends.set()
        thread.join()
    return longest


@pytest.mark.daily("JPEG-CMYK-options1", "PNG-RGBA-options2", "TIFF-F-options9", "GIF-P-options4")
@pytest.mark.parametrize(("kind", "mode", "options"), FORMATS)
def test_formats_that_are_decoded_here(kind: str, mode: str, options: dict[str, Any]) -> None:
    data = encoded(Image.new(mode, (SIDE, SIDE)), kind, **options)
    assert longest_stop(lambda: load_image(data, fit=eighth)) < 0.3


@pytest.mark.daily("AVIF")
@pytest.mark.parametrize("kind", ["AVIF", "JPEG2000"])
def test_formats_that_are_decoded_elsewhere(kind: str) -> None:
    tiles = 8 if kind == "AVIF" else 3
    detailed = Image.fromarray(np.tile(noise(250, 250), (tiles, tiles, 1)))
    data = encoded(detailed, kind, **({"speed": 10} if kind == "AVIF" else {}))
    here = longest_stop(lambda: Image.open(io.BytesIO(data)).load())
    assert longest_stop(lambda: load_image(data)) < here / 2


@pytest.mark.daily("RGBA-AVIF")
@pytest.mark.parametrize("kind", ["AVIF", "JPEG2000"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_pictures_are_the_same(kind: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    smooth = Image.fromarray(noise(30, 40)).resize((1200, 900), Image.Resampling.BICUBIC)
    image = smooth.convert(mode)
    if mode == "RGBA":
        image.putalpha(Image.linear_gradient("L").resize(image.size))
    exif = Image.Exif()
    exif[274] = 6
    data = encoded(image, kind, exif=exif, **({"speed": 10} if kind == "AVIF" else {}))
    found = [load_image(data), load_image(data, fit=eighth)]
    monkeypatch.setattr("oscar_mm.media.image._STOPPING", {})
    for one, same in zip(found, [load_image(data), load_image(data, fit=eighth)], strict=True):
        assert np.array_equal(one, same) and one.size == same.size
    assert found[0].size == ((900, 1200) if kind == "AVIF" else (1200, 900))


def test_a_process_that_decodes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.new("RGB", (2000, 2000)), "JPEG2000")
    detailed = encoded(Image.fromarray(noise(250, 250)), "JPEG2000")
    with pytest.raises(InputError, match=r"^a: the image is damaged or cannot be decoded \(.+\)"):
        load_image(detailed[: len(detailed) // 2], label="a")
    # A codestream that is larger than the header before it says.
    larger = data.replace(struct.pack(">II", 2000, 2000), struct.pack(">II", 40, 40), 1)
    with pytest.raises(InputError, match="cannot be decoded"):
        load_image(larger)
    monkeypatch.setattr(decoder_process, "_OWN_BYTES", 0)
    monkeypatch.setattr(decoder_process, "_PIXEL_BYTES", 1)
    with pytest.raises(InputError, match="cannot be decoded"):
        load_image(data)


def test_cancelling_ends_the_process() -> None:
    data = encoded(Image.new("RGB", (3500, 3500)), "JPEG2000")
    asked = [0]

    def cancelled() -> bool:
        asked[0] += 1
        return asked[0] > 3

    with pytest.raises(Cancelled):
        load_image(data, count=MediaCount(MediaLimits(), cancelled=cancelled))
    assert asked == [4]


def test_an_icon_is_bounded_by_what_is_in_it() -> None:
    png = encoded(Image.new("RGBA", (600, 500), (0, 0, 255, 255)), "PNG")
    entry = struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(png), 22)
    icon = struct.pack("<HHH", 0, 1, 1) + entry + png
    assert load_image(icon).size == (600, 500)
    with pytest.raises(InputError, match=r"600x500 pixels are more than the limit of 200,000"):
        load_image(icon, limits=MediaLimits(max_image_pixels=200_000))
    for kind in ("png", "bmp"):
        usual = encoded(Image.new("RGBA", (48, 48), (0, 0, 255, 255)), "ICO", bitmap_format=kind)
        assert load_image(usual).getpixel((5, 5)) == (0, 0, 255)
