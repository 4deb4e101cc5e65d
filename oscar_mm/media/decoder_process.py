"""Decodes a picture in a process of its own.

For decoders that let no other thread of Python run. The process has bounds on its memory and on its
time, which no header of a picture gets round.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable

from PIL import Image

_MAX_SECONDS = 30
"""Of a core, for one picture."""
_OWN_BYTES = 1 << 30
"""Address space of the process beside what a picture takes."""
_PIXEL_BYTES = 40
"""Most bytes that a picture takes for each pixel: OpenJPEG has 4 for each channel, twice."""
_POLL_S = 0.05
_ONE_THREAD = {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Threads for each core of a large machine would take all of the address space."""


def decoded_elsewhere(
    data: bytes,
    image: Image.Image,
    size: tuple[int, int],
    *,
    check_wanted: Callable[[], None] | None = None,
) -> Image.Image:
    """A picture in mode RGB, transparent parts on white, as it lies.

    Args:
        data: the encoded picture.
        image: opened, of its header only.
        size: width and height of the result, at most those of the picture.
        check_wanted: raises where nobody wants the picture any more.

    Raises:
        ValueError: it cannot be decoded, or not within the bounds.
    """
    most = _OWN_BYTES + _PIXEL_BYTES * image.width * image.height
    # The package may be found by the paths of this process alone.
    paths = os.pathsep.join(filter(None, sys.path))
    # Not through a pipe: after a timeout, communicate() of Python 3.11 writes no more to it.
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, *map(str, (*size, most))],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # The package may be found by the paths of this process alone.
            env={**os.environ, **_ONE_THREAD, "PYTHONPATH": paths},
        )
    try:
        pixels, said = _output(process, check_wanted)
    finally:
        process.kill()
        process.wait()
    if process.returncode < 0:
        raise ValueError(f"it takes more than {_MAX_SECONDS} s or {most:,} bytes")
    if process.returncode:
        raise ValueError(said.decode(errors="replace").strip().rpartition("\n")[2])
    return Image.frombytes("RGB", size, pixels)


def _output(
    process: subprocess.Popen[bytes], check_wanted: Callable[[], None] | None
) -> tuple[bytes, bytes]:
    """What the process writes to stdout and to stderr."""
    while True:
        try:
            return process.communicate(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            if check_wanted is not None:
                check_wanted()


def main(width: int, height: int, most: int) -> None:
    """Decode the picture of stdin to a size, in RGB on stdout."""
    try:
        import resource
    except ImportError:  # not on Windows
        pass
    else:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CPU, (_MAX_SECONDS, _MAX_SECONDS))
    from PIL import AvifImagePlugin

    from oscar_mm.media.headers import opened_image
    from oscar_mm.media.image import scaled

    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    with opened_image(io.BytesIO(sys.stdin.buffer.read())) as image:
        sys.stdout.buffer.write(scaled(image, (width, height)).tobytes())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
