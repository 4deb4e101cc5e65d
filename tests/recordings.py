"""Sound and video files of any format, written with PyAV."""

from pathlib import Path

import av
import numpy as np

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
    channels: bool = False,
) -> Path:
    """A file of the format that its name ends on, resampled to ``rate``.

    Both channels are equal, unless ``channels``: then the recording has them.
    """
    samples, source_rate = recording
    if layout == "stereo" and not channels:
        recording = np.stack([samples, samples]), source_rate
    with av.open(str(path), "w", options=muxer or {}) as container:
        sound = _Sound(container, CODECS[path.suffix[1:]], rate, layout)
        sound.stream.options = encoder or {}
        sound.write(recording)
    return path


def write_movie(
    path: Path, frames: np.ndarray, recording: tuple[np.ndarray, int] | None, *, rate: int = 8
) -> Path:
    """(T, H, W, 3) frames at ``rate`` a second, with sound or silent."""
    with av.open(str(path), "w") as container:
        video = container.add_stream("mpeg4", rate=rate)
        video.height, video.width, video.pix_fmt = *frames.shape[1:3], "yuv420p"
        sound = recording and _Sound(container, "aac", 48_000, "mono")
        for frame in frames:
            container.mux(video.encode(av.VideoFrame.from_ndarray(frame)))
        container.mux(video.encode())
        if sound:
            sound.write(recording)
    return path


class _Sound:
    def __init__(self, container: av.container.OutputContainer, codec: str, rate: int, layout: str):
        self.container = container
        self.stream = container.add_stream(codec, rate=rate, layout=layout)

    def write(self, recording: tuple[np.ndarray, int]) -> None:
        samples, rate = recording
        samples = np.ascontiguousarray(np.atleast_2d(samples), np.float32)
        channels = "mono" if len(samples) == 1 else "stereo"
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=channels)
        frame.rate = rate
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
