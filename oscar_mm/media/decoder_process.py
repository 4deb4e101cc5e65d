"""Decode a picture in a separate process.

Decoders that hold the GIL would block all other Python threads of this process. The separate
process has hard limits on memory and CPU time, whatever the picture's header says.
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
"""Maximum CPU time per picture, in seconds."""
_OWN_BYTES = 1 << 30
"""Address space for the process itself, in addition to the memory for the picture."""
_PIXEL_BYTES = 40
"""Maximum memory per pixel of a picture, in bytes: OpenJPEG stores 4 bytes per channel, twice."""
_POLL_S = 0.05
_ONE_THREAD = {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment variables that limit libraries to one thread: on a large machine, one thread per core
would use up the address space."""


def decoded_elsewhere(
    data: bytes,
    image: Image.Image,
    size: tuple[int, int],
    *,
    check_wanted: Callable[[], None] | None = None,
) -> Image.Image:
    """Decode a picture in a separate process to mode RGB, with transparent parts on white.

    The orientation in the picture's metadata is not applied.

    Args:
        data: the encoded picture.
        image: the opened picture, of which only the header has been read.
        size: width and height of the result, no larger than those of the picture.
        check_wanted: function that raises if the request was cancelled.

    Raises:
        ValueError: if the picture cannot be decoded within the limits.
    """
    max_bytes = _OWN_BYTES + _PIXEL_BYTES * image.width * image.height
    # The package may be importable only through the paths of this process.
    paths = os.pathsep.join(filter(None, sys.path))
    # Use a file, not a pipe: in Python 3.11 communicate() stops writing to stdin after a timeout.
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, *map(str, (*size, max_bytes))],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **_ONE_THREAD, "PYTHONPATH": paths},
        )
    try:
        pixels, said = _output(process, check_wanted)
    finally:
        process.kill()
        process.wait()
    if process.returncode < 0:
        raise ValueError(f"decoding takes more than {_MAX_SECONDS} s or {max_bytes:,} bytes")
    if process.returncode:
        raise ValueError(said.decode(errors="replace").strip().rpartition("\n")[2])
    return Image.frombytes("RGB", size, pixels)


def _output(
    process: subprocess.Popen[bytes], check_wanted: Callable[[], None] | None
) -> tuple[bytes, bytes]:
    """Wait for the process and return its stdout and stderr."""
    while True:
        try:
            return process.communicate(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            if check_wanted is not None:
                check_wanted()


def main(width: int, height: int, max_bytes: int) -> None:
    """Decode the picture on stdin to a given size and write it to stdout as RGB."""
    try:
        import resource
    except ImportError:  # not on Windows
        pass
    else:
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
        resource.setrlimit(resource.RLIMIT_CPU, (_MAX_SECONDS, _MAX_SECONDS))
    from PIL import AvifImagePlugin

    from oscar_mm.media.headers import opened_image
    from oscar_mm.media.image import scaled

    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    with opened_image(io.BytesIO(sys.stdin.buffer.read())) as image:
        sys.stdout.buffer.write(scaled(image, (width, height)).tobytes())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
