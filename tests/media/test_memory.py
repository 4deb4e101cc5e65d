"""Memory of decoding: one bound for the process, for which requests wait in turn."""

import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from oscar_mm.errors import Cancelled
from oscar_mm.media import MediaLimits
from oscar_mm.media import media as media_module
from oscar_mm.media.media import MediaReader
from oscar_mm.media.memory import DecodingMemory, decoding_memory
from oscar_mm.media.part import media_parts
from tests.prompts import clip, noise, tone
from tests.recordings import write_movie


def encoded(width: int, height: int, kind: str = "PNG", mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, kind)
    return file.getvalue()


def wanted() -> None:
    """Somebody wants it."""


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Requests:
    """Requests in threads of their own, which take memory until they are told to give it back."""

    def __init__(self, most: int) -> None:
        self.memory, self.most, self.begun = DecodingMemory(), most, list[str]()
        self._ends: dict[str, threading.Event] = {}
        self.threads: dict[str, threading.Thread] = {}

    def ask(self, name: str, count: int, check_wanted: Callable[[], None] = wanted) -> None:
        self._ends[name] = threading.Event()

        def work() -> None:
            with suppress(Cancelled), self.memory.taken(count, self.most, check_wanted):
                self.begun.append(name)
                self._ends[name].wait(10)

        self.threads[name] = threading.Thread(target=work, daemon=True)
        before = len(self.memory._waiting) + len(self.begun)
        self.threads[name].start()
        eventually(lambda: len(self.memory._waiting) + len(self.begun) > before)

    def end(self, name: str) -> None:
        self._ends[name].set()
        self.threads[name].join(10)


def test_the_first_to_ask_is_the_first() -> None:
    requests = Requests(100)
    requests.ask("a", 60)
    requests.ask("b", 60)
    requests.ask("c", 30)  # It would fit beside the first one, but b has asked before.
    assert requests.begun == ["a"]
    requests.ask("nothing", 0)
    eventually(lambda: requests.begun == ["a", "nothing"])
    requests.end("a")
    eventually(lambda: requests.begun == ["a", "nothing", "b", "c"])
    assert requests.memory.used == 90
    for name in ("b", "c"):
        requests.end(name)
    assert requests.memory.used == 0


def test_more_than_there_is_waits_until_it_is_alone() -> None:
    requests = Requests(100)
    requests.ask("a", 10)
    requests.ask("large", 500)
    requests.ask("b", 10)
    assert requests.begun == ["a"]
    requests.end("a")
    eventually(lambda: requests.begun == ["a", "large"])
    requests.end("large")
    eventually(lambda: requests.begun == ["a", "large", "b"])
    requests.end("b")


def test_a_cancelled_request_gives_its_place_to_the_next() -> None:
    requests, left = Requests(100), threading.Event()

    def check_wanted() -> None:
        if left.is_set():
            raise Cancelled("gone")

    requests.ask("a", 60)
    requests.ask("b", 90, check_wanted)
    requests.ask("c", 30)
    left.set()
    eventually(lambda: requests.begun == ["a", "c"])
    requests.threads["b"].join(10)
    assert requests.memory.used == 90


def max_used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes taken each time that something is decoded."""
    seen: list[int] = []
    for name in ("load_image", "load_audio", "load_video"):
        load = getattr(media_module, name)

        def noting(*args: Any, load: Any = load, **options: Any) -> Any:
            seen.append(decoding_memory.used)
            return load(*args, **options)

        monkeypatch.setattr(media_module, name, noting)
    return seen


def test_many_requests_of_several_media_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """None waits for more while it has some, so that none waits for ever."""
    seen = max_used(monkeypatch)
    pictures = [encoded(300, 200, kind) for kind in ("PNG", "WEBP", "JPEG")] * 4
    alone = MediaReader(MediaLimits()).outline(media_parts(pictures)).decoding_bytes
    limits, failed = MediaLimits(max_decoding_bytes=2 * alone), list[Exception]()

    def work() -> None:
        try:
            assert len(MediaReader(limits).read(media_parts(pictures, audio=tone(0.2)))) == 13
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failed and len(seen) == 8 * 13 and decoding_memory.used == 0
    taken = MediaReader(limits).outline(media_parts(pictures, audio=tone(0.2))).decoding_bytes
    assert set(seen) <= {taken, 2 * taken} and (taken <= alone or max(seen) == taken)


@pytest.mark.parametrize("kind", ["images", "videos", "file", "audio"])
def test_every_kind_of_media_takes_memory(kind: str, monkeypatch, tmp_path) -> None:
    seen = max_used(monkeypatch)
    movie = write_movie(tmp_path / "a.mp4", clip(8), tone(2))
    sources = {
        "images": {"images": encoded(90, 70)},
        "videos": {"videos": clip(4)},
        "file": {"videos": movie, "sound": True},
        "audio": {"audio": tone(0.5)},
    }
    reader, parts = MediaReader(MediaLimits()), media_parts(**sources[kind])
    with reader.reading(parts) as media:
        assert decoding_memory.used == seen[0] == reader.outline(parts).decoding_bytes
        decoded = [one.content for one in media]
        pixels = sum(one.width * one.height for one in decoded if isinstance(one, Image.Image))
        frames = sum(one.frames.size for one in decoded if hasattr(one, "frames"))
        samples = sum(one.samples.nbytes for one in decoded if hasattr(one, "samples"))
        assert seen[0] >= 8 * pixels + 3 * frames + samples > 0
    assert decoding_memory.used == 0
    monkeypatch.setattr(media_module, "video_outline", lambda *_, **__: None)
    monkeypatch.setattr(media_module, "audio_outline", lambda *_, **__: None)
    unknown = reader.outline(parts).decoding_bytes
    assert unknown == seen[0] if kind == "images" else unknown > seen[0]


def test_many_small_pictures_are_scaled_down_as_they_are_decoded() -> None:
    """Where they would take too much; else the model's own processor does it."""
    pictures = [encoded(300, 200, kind) for kind in ("PNG", "WEBP", "JPEG")] * 4

    def fit(width: int, height: int) -> tuple[int, int]:
        return width // 3, height // 3

    for most, size in ((2**30, (300, 200)), (3_000_000, (100, 66))):
        reader = MediaReader(MediaLimits(max_decoding_bytes=most), fit=fit)
        parts = media_parts(pictures)
        outline, media = reader.outline(parts), reader.read(parts)
        assert {one.size for one in media.images} == {size} == set(outline.images)
        assert outline.decoding_bytes < most


def test_memory_is_given_back_where_decoding_fails() -> None:
    reader = MediaReader(MediaLimits())
    for source in (encoded(900, 700)[:400], encoded(900, 700, "WEBP")[:60]):
        with pytest.raises(Exception, match="image"):
            reader.read(media_parts(source))
    with pytest.raises(ZeroDivisionError), reader.reading(media_parts(noise(20, 20))):
        _ = 1 / 0
    assert decoding_memory.used == 0


PEAKS = """
import ctypes, io, json, resource
from PIL import Image
from oscar_mm.media import MediaLimits, load_image
from oscar_mm.media.image import image_outline

def memory(name):
    with open("/proc/self/status") as file:
        [line] = [line for line in file if line.startswith(name)]
    return int(line.split()[1]) << 10

load_image(Image.new("RGB", (9, 9)))
found = {}
for kind, mode, options in KINDS:
    file = io.BytesIO()
    Image.new(mode, (2000, 1900)).save(file, kind, **options)
    said = image_outline(file.getvalue(), limits=MediaLimits()).decoding_bytes
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")
    before = memory("VmRSS")
    load_image(file.getvalue())
    elsewhere = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    found[f"{kind} {mode} {options}"] = memory("VmHWM") - before, elsewhere, said
print(json.dumps(found))
"""
KINDS = [
    *(("JPEG", mode, {"progressive": True, "subsampling": 0}) for mode in ("RGB", "CMYK")),
    *(("PNG", mode, {}) for mode in ("1", "P", "LA", "RGBA", "I;16")),
    *(("WEBP", mode, {}) for mode in ("RGB", "RGBA")),
    *(("TIFF", mode, {"compression": "tiff_lzw"}) for mode in ("RGBA", "F")),
    *(("GIF", "P", {"transparency": 0}), ("BMP", "RGB", {}), ("PPM", "L", {})),
    *(("AVIF", "RGBA", {}), ("JPEG2000", "L", {}), ("JPEG2000", "RGBA", {})),
]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_pictures_take_no_more_than_is_said() -> None:
    """In a process whose peak is that of one picture; of processes of their own, the largest."""
    program = PEAKS.replace("KINDS", repr(KINDS), 1)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    own, slack = 60 << 20, 8 << 20  # Python's own memory in a process that decodes.
    for kind, (here, elsewhere, said) in json.loads(done.stdout).items():
        there = max(0, elsewhere - own) if kind.startswith(("AVIF", "JPEG2000")) else 0
        result = 4 * 2000 * 1900
        assert here + there <= said + slack, kind
        assert here + there >= result, kind


def test_deep_gray_in_strips() -> None:
    values = np.linspace(-3, 70_000, 1100 * 1000).astype(np.float32).reshape(1000, 1100)
    scaled = (values.astype(np.float64) + 3) * (255 / (float(values.max()) + 3))
    [image] = MediaReader(MediaLimits()).read(media_parts(Image.fromarray(values))).images
    assert np.array_equal(np.asarray(image)[:, :, 0], scaled.round().astype(np.uint8))
