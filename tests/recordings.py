"""Sound and video files of any format, written with PyAV."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from oscar_mm.media import Audio

CODECS = {
    "wav": "pcm_s16le",
    "flac": "flac",
    "mp3": "libmp3lame",
    "opus": "libopus",
    "m4a": "aac",
    "mp4": "aac",
    "webm": "libopus",
    "aac": "aac",
}


def write_sound(
    path: Path,
    recording: tuple[np.ndarray, int],
    *,
    rate: int = 48_000,
    layout: str = "stereo",
    muxer: dict[str, str] | None = None,
    encoder: dict[str, str] | None = None,
) -> Path:
    """A file of the format that its name ends on, resampled to ``rate``; both channels of (n,)
    samples are equal."""
    samples, source_rate = recording
    if layout == "stereo" and samples.ndim == 1:
        recording = np.stack([samples, samples]), source_rate
    with av.open(str(path), "w", options=muxer or {}) as container:
        sound = _Sound(container, CODECS[path.suffix[1:]], rate, layout)
        sound.stream.options = encoder or {}
        sound.write(recording)
    return path


FAST = {"libvpx": {"deadline": "realtime", "cpu-used": "8"}, "libx264": {"preset": "veryfast"}}
"""Options of encoders."""


def write_clip(
    path: Path,
    values: list[int],
    *,
    rate: int = 10,
    size: tuple[int, int] = (64, 32),
    codec: str = "mpeg4",
    times: list[float] | None = None,
    last: float = 0.0,
    rotation: int = 0,
    corner: int | None = None,
    **options: Any,
) -> Path:
    """Grey frames of the given values; frame i at times[i] seconds, else at i / rate.

    Args:
        path, values, rate, size, codec, times: of the clip.
        last: seconds for which the last frame of a clip with ``times`` is shown.
        rotation: in degrees, of the display matrix.
        corner: value of the upper left quarter of the frame, of half its width.
        options: of av.open.
    """
    with av.open(str(path), "w", **options) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = "rgb8" if codec == "gif" else "yuv420p"
        stream.options, stream.codec_context.thread_count = FAST.get(codec, {}), 1
        tick = Fraction(1, 1000 if times else rate)
        stream.codec_context.time_base = tick
        if rotation:
            stream.set_display_rotation(rotation)
        packets = []
        for index, value in enumerate(values):
            pixels = np.full((size[1], size[0], 3), value, np.uint8)
            if corner is not None:
                pixels[: size[1] // 2, : size[0] // 4] = corner
            frame = av.VideoFrame.from_ndarray(pixels)
            frame.time_base = tick
            frame.pts = round(1000 * times[index]) if times else index
            packets += stream.encode(frame)
        for packet in [*packets, *stream.encode()]:
            if times and packet.pts * packet.time_base >= times[-1] - 0.01:
                packet.duration = round(last / packet.time_base)
            container.mux(packet)
    return path


def levels(frames: np.ndarray) -> list[int]:
    """The fifth part of the value of grey frames."""
    return [round(float(frame.mean()) / 5) for frame in frames]


def write_movie(
    path: Path,
    frames: np.ndarray,
    recording: tuple[np.ndarray, int] | None,
    *,
    rate: int = 8,
    times: Sequence[float] | None = None,
    late: float = 0.0,
    codec: str = "mpeg4",
) -> Path:
    """(T, H, W, 3) frames at ``rate`` a second or at ``times`` in seconds, with sound that begins
    ``late``, or silent."""
    with av.open(str(path), "w") as container:
        video = container.add_stream(codec, rate=rate)
        video.height, video.width, video.pix_fmt = *frames.shape[1:3], "yuv420p"
        sound = recording and _Sound(container, "aac", 48_000, "mono")
        if times:
            video.codec_context.time_base = Fraction(1, 1000)
        for index, frame in enumerate(frames):
            picture = av.VideoFrame.from_ndarray(frame)
            if times:
                picture.pts, picture.time_base = round(1000 * times[index]), Fraction(1, 1000)
            container.mux(video.encode(picture))
        container.mux(video.encode())
        if sound:
            sound.write(recording, late)
    return path


class _Sound:
    def __init__(self, container: av.container.OutputContainer, codec: str, rate: int, layout: str):
        self.container = container
        self.stream = container.add_stream(codec, rate=rate, layout=layout)

    def write(self, recording: tuple[np.ndarray, int], late: float = 0.0) -> None:
        samples, rate = recording
        samples = np.ascontiguousarray(np.atleast_2d(samples), np.float32)
        channels = "mono" if len(samples) == 1 else "stereo"
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=channels)
        frame.rate = rate
        if late:
            frame.pts, frame.time_base = round(late * rate), Fraction(1, rate)
        context = self.stream.codec_context
        if not context.is_open:
            context.open()
        resampler = av.AudioResampler(
            format=context.format,
            layout=context.layout,
            rate=context.sample_rate,
            frame_size=context.frame_size or None,
        )
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            self.container.mux(self.stream.encode(part))
        self.container.mux(self.stream.encode(None))


def pitch(audio: Audio) -> float:
    """The strongest frequency, in Hz."""
    spectrum = np.abs(np.fft.rfft(audio.samples))
    return float(spectrum.argmax() / audio.seconds)
