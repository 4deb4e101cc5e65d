"""Decode recordings to mono samples at 16 kHz, chunk by chunk and in bounded memory."""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.error import FFmpegError, InvalidDataError

from oscar_mm.errors import InputError
from oscar_mm.extras import require
from oscar_mm.media.limits import MediaCount, MediaLimits
from oscar_mm.media.resample import RATE, Audio, Mono, MonoPiece
from oscar_mm.media.source import (
    describe,
    existing_file,
    is_address,
    local_source,
    none_if_unreadable,
    read_bytes,
)
from oscar_mm.media.timeline import (
    MPEG,
    SLACK_S,
    Timeline,
    decoded,
    picture_track,
    sound_track,
    time_of,
)
from oscar_mm.media.truncation import (
    check_whole,
    is_joined_ogg,
    lacks_ogg_pages,
    mp3_seconds,
    opened_bytes,
)
from oscar_mm.thread_pool import parallel_map

# Audio formats that FFmpeg may read. Playlists (hls, concat, dash) are excluded because they open
# other files.
CONTAINERS = (
    "aac,ac3,aiff,amr,ape,asf,au,avi,caf,flac,flv,matroska,mov,mp3,mpeg,mpegts,mxf,nistsphere,"
    "ogg,opus,wav,webm,wv"
)

_LIBSNDFILE = (b"RIFF", b"fLaC", b"OggS")
"""Magic bytes of files to read with libsndfile, which is faster than FFmpeg and returns the exact
number of samples."""

_GUESSED = ("aac", "ac3", "amr", *MPEG)
"""Formats without a length in the header; FFmpeg estimates the length from the first bit rate or
the last timestamp."""

_DECODERS = {"amrnb": "libopencore_amrnb", "amrwb": "libopencore_amrwb"}
"""Decoders that support the comfort-noise frames of telephone calls; FFmpeg's own do not."""

_EXACT_PCM = ("aiff", "au", "nistsphere", "wav")
"""Formats whose headers give the exact number of samples, provided the samples are PCM."""

_PIECE_S = 10
"""Seconds of audio decoded at a time."""

_LONG_PIECES = 4
"""Minimum number of pieces for decoding a recording in several threads."""

_SEEKABLE = ("PCM", "FLOAT", "DOUBLE")
"""Prefixes of the subtypes of WAV and FLAC that allow seeking to any sample; FLAC's are PCM."""

_MAX_CHANNELS = 8

_PIECE_VALUES = 1 << 24
"""Maximum number of samples, summed over all channels, decoded at a time."""

_UNKNOWN = 1 << 62
"""libsndfile reports at least this many samples if the number is unknown (FLAC from a pipe)."""

# Options of av.open. Tags such as the title need not be UTF-8. PyAV 19 tolerates that by default
# and no longer has the argument.
LENIENT: dict[str, Any] = (
    {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
)

_DEFAULTS = MediaLimits()

AudioSource = str | Path | bytes | bytearray | memoryview | tuple[np.ndarray, int]


def load_audio(
    source: AudioSource,
    *,
    allow_remote: bool = False,
    limits: MediaLimits = _DEFAULTS,
    label: str | None = None,
    count: MediaCount | None = None,
) -> Audio:
    """Read a recording; warn if it is silent or clipped.

    Args:
        source: path of an audio file, or of a video file with audio; encoded ``bytes``; a ``data:``
            URI; an http(s) URL (only with ``allow_remote``); or a pair (samples, rate) as
            soundfile returns it or (rate, samples) as Gradio does, samples (N,), (N, channels) or
            (channels, N) of int16, int32, uint8 or floats in -1..1.
        allow_remote: whether http(s) URLs may be fetched.
        limits: media limits; ``max_audio_seconds`` is checked on the header and while decoding.
        label: name of the recording in messages; by default the path or URL.
        count: totals of the request that the recording belongs to.

    Returns:
        Mono samples at 16 kHz, about 64 KB per second whatever the source's rate and channels.
        Samples of a file are placed by their timestamps, and gaps are filled with silence. Time 0
        is where the audio of a recording begins, or the start of a video.

    Raises:
        InputError: if there is nothing to read; if the source is not a recording or has no audio;
            if the recording is damaged or cut off, contains NaN, or is too long or too short; or if
            the packages for audio are missing.
    """
    name = label or describe(source, "audio")
    _require_packages(name)
    if isinstance(source, tuple):
        return _from_array(*_pair(source, name), limits, name, count)
    if isinstance(source, np.ndarray):
        raise InputError(f"{name}: an array of samples needs a rate; pass (samples, rate)")
    if is_address(source):
        source = read_bytes(source, allow_remote=allow_remote, limits=limits, label=name)
    if isinstance(source, (str, Path)):
        return _from_file(existing_file(source, name), limits, name, count)
    if isinstance(source, (bytes, bytearray, memoryview)):
        limits.check_bytes(len(source), name)
        if not len(source):
            raise InputError(f"{name}: is empty")
        return _from_file(bytes(source), limits, name, count)
    raise InputError(
        f"{name}: {type(source).__name__} is not a recording; pass a path, bytes or a pair "
        "(samples, rate)"
    )


@none_if_unreadable
def audio_outline(source: Any, *, limits: MediaLimits) -> Audio | None:
    """Return silence of the length that ``load_audio`` would return, from the header alone.

    Returns:
        The silence; None if the header does not give the length, if the source is invalid, or if it
        is a URL.
    """
    seconds = _seconds(source)
    limits.check_audio(seconds, "")
    return silence(seconds) if seconds else None


def _seconds(source: Any) -> float:
    if isinstance(source, tuple):
        samples, rate = _pair(source, "")
        return max(samples.shape) / rate
    local = local_source(source)
    local = local if isinstance(local, Path) else local.getvalue()
    if (file := sound_file(local, "")) is None:
        return container_seconds(local)
    with file:
        return file.frames / file.samplerate


def silence(seconds: float) -> Audio:
    """Return ``seconds`` of silence, whose samples all share the memory of a single sample."""
    return Audio(np.broadcast_to(np.float32(0), round(seconds * RATE)), RATE, 1)


def clip_sound(
    file: Path | bytes, start: float, limits: MediaLimits, label: str, count: MediaCount | None
) -> Audio:
    """Read the audio of a video.

    Args:
        file: path or encoded bytes of the video.
        start: start of the video in seconds, on the clock of ``timeline.packets``.
        limits, label, count: see ``load_audio``.

    Raises:
        InputError: see ``load_audio``.
    """
    _require_packages(label)
    return _with_av(file, limits, label, count, start)


def _require_packages(label: str) -> None:
    require(f"{label}: audio", "audio", "soundfile", "soxr")


def _pair(source: tuple, label: str) -> tuple[np.ndarray, int]:
    if len(source) == 2:
        samples, rate = source if isinstance(source[0], np.ndarray) else source[::-1]
        has_rate = isinstance(rate, (int, np.integer)) and not isinstance(rate, bool)
        if isinstance(samples, np.ndarray) and has_rate:
            return samples, int(rate)
    raise InputError(
        f"{label}: a pair must be an array of samples and a rate, which must be a whole number"
    )


def _from_array(
    samples: np.ndarray, rate: int, limits: MediaLimits, label: str, count: MediaCount | None
) -> Audio:
    if samples.ndim == 1:
        samples = samples[:, None]
    elif samples.ndim == 2 and samples.shape[0] <= _MAX_CHANNELS < samples.shape[1]:
        samples = samples.T
    if samples.ndim != 2 or not 1 <= samples.shape[1] <= _MAX_CHANNELS:
        raise InputError(
            f"{label}: samples of shape {samples.shape} are not a recording; use (N,), "
            f"(N, channels) or (channels, N) with at most {_MAX_CHANNELS} channels"
        )
    zero, scale = {"int16": (0, 2**15), "int32": (0, 2**31), "uint8": (128, 2**7)}.get(
        samples.dtype.name, (0, 1)
    )
    if scale == 1 and not np.issubdtype(samples.dtype, np.floating):
        raise InputError(
            f"{label}: samples of dtype {samples.dtype} are not supported; use int16, int32, uint8 "
            "or floats in -1..1"
        )
    mono = Mono(rate, samples.shape[1], limits, label, count=count)
    limits.check_audio(len(samples) / rate, label)
    for start in range(0, len(samples), _PIECE_S * rate):
        piece = samples[start : start + _PIECE_S * rate].astype(np.float32)
        mono.push((piece - np.float32(zero)) / np.float32(scale))
    return mono.finish(0.0)


def _from_file(
    source: Path | bytes, limits: MediaLimits, label: str, count: MediaCount | None
) -> Audio:
    import soundfile

    check_whole(source, label)
    file = sound_file(source, label)
    if file is None:
        return _with_av(source, limits, label, count, _clip_start(source, limits, label))
    with file:
        seconds = file.frames / file.samplerate
        limits.check_audio(seconds, label)
        mono = _in_threads(file, source, limits, label, count)
        if mono is not None:
            return mono.finish(seconds)
        mono = Mono(file.samplerate, file.channels, limits, label, count=count)
        buffer = np.zeros((_piece_frames(file), file.channels), np.float32)
        try:
            # read() returns the part of the buffer that it filled.
            while len(piece := file.read(out=buffer)):
                mono.push(piece.copy())
        except (soundfile.LibsndfileError, RuntimeError) as error:
            raise InputError(f"{label}: the recording is damaged ({error})") from error
        return mono.finish(seconds)


def _piece_frames(file: Any) -> int:
    return min(_PIECE_S * file.samplerate, max(1, _PIECE_VALUES // file.channels))


def _in_threads(
    file: Any,
    source: Path | bytes,
    limits: MediaLimits,
    label: str,
    of_request: MediaCount | None,
) -> Mono | None:
    """Decode a long recording in several threads.

    Returns:
        The samples; None if the recording is short, or if a piece contradicts the header. In the
        latter case, decoding the recording again from the beginning reports the error.
    """
    import soundfile

    count = _piece_frames(file)
    exact = file.subtype.startswith(_SEEKABLE) and file.format != "OGG"
    if not exact or file.frames < _LONG_PIECES * count:
        return None

    whole = np.empty(file.frames, np.float32) if file.samplerate == RATE else None

    def decoded(start: int) -> MonoPiece:
        stop = min(start + count, file.frames)
        part = None if whole is None else whole[start:stop]
        own = sound_file(source, label)
        if own is None:
            raise RuntimeError
        with own:
            if (own.channels, own.samplerate) != (file.channels, file.samplerate):
                raise RuntimeError  # The file was replaced in the meantime.
            own.seek(start)
            if part is not None and file.channels == 1:
                piece = own.read(out=part[:, None])
            else:
                piece = own.read(stop - start, dtype="float32", always_2d=True)
        if len(piece) < stop - start:
            raise RuntimeError
        return MonoPiece.of(piece, label, part)

    mono = Mono(file.samplerate, file.channels, limits, label, whole, of_request)
    try:
        for piece in parallel_map(decoded, range(0, file.frames, count)):
            mono.add(piece)
    except (soundfile.LibsndfileError, RuntimeError):
        mono.begin_anew()
        return None
    return mono


def sound_file(source: Path | bytes, label: str) -> Any | None:
    """Open a WAV, FLAC or Ogg file of known length as a ``SoundFile``; return None if FFmpeg must
    read the file.

    Raises:
        InputError: if the file cannot be opened.
    """
    import soundfile

    with opened_bytes(source, label) as raw:
        if raw.read(4) not in _LIBSNDFILE:
            return None
    # libsndfile reads only the first of several joined Ogg streams, and leaves no gap where pages
    # are missing.
    if is_joined_ogg(source, label) or lacks_ogg_pages(source, label):
        return None
    try:
        # The path is passed as bytes, which the stubs do not allow: file names need not be text.
        named: Any = io.BytesIO(source) if isinstance(source, bytes) else os.fsencode(source)
        file = soundfile.SoundFile(named)
    except (soundfile.LibsndfileError, TypeError):
        return None
    if file.frames < _UNKNOWN:
        return file
    file.close()
    return None


@contextmanager
def opened(source: Path | bytes, label: str) -> Iterator[Any]:
    """Open a recording, or a video with audio, as a PyAV container within the block.

    Raises:
        InputError: if the source cannot be read; read errors within the block are converted too.
    """
    # "file:" keeps a colon in the name from being read as a protocol.
    where = io.BytesIO(source) if isinstance(source, bytes) else f"file:{source.absolute()}"
    options = {"protocol_whitelist": "file", "format_whitelist": CONTAINERS}
    try:
        with av.open(where, container_options=options, **LENIENT) as container:
            yield container
    except FFmpegError as error:
        raise InputError(
            f"{label}: is not a recording that can be read, or is damaged; convert it to WAV or "
            f"FLAC ({error.strerror})"
        ) from error


def _clip_start(source: Path | bytes, limits: MediaLimits, label: str) -> float | None:
    """Return the second at which a video starts; None for a recording, which starts with its
    audio."""
    with opened(source, label) as container:
        if not (picture_track(container) and sound_track(container)):
            return None
        return Timeline.of(container, partial(limits.check_audio, label=label), label).start


def _with_av(
    source: Path | bytes,
    limits: MediaLimits,
    label: str,
    count: MediaCount | None,
    start: float | None,
) -> Audio:
    with opened(source, label) as container:
        track = sound_track(container)
        if track is None:
            raise InputError(f"{label}: has no audio track; pass a recording")
        promised = _promised_seconds(container, track, source, label)
        limits.check_audio(promised, label)
        # Samples are packed, not planar: with eight or more planes PyAV reads past the last plane.
        packed = av.AudioResampler(format="flt")
        mono: Mono | None = None
        for frame in decoded(container, track, _decoding(container, track)):
            kind = frame.format.name, frame.layout.name, frame.sample_rate
            time = time_of(frame, track)
            if mono is None:
                first = kind
                channels = frame.layout.nb_channels
                mono = Mono(frame.sample_rate, channels, limits, label, count=count)
                start = time if start is None else start
            if kind != first:
                raise InputError(
                    f"{label}: changes its sample rate or channels midway; convert it to WAV or "
                    "FLAC"
                )
            if time is not None and start is not None and time - start > mono.seconds + SLACK_S:
                mono.add_silence(time - start)
            for part in packed.resample(frame):
                mono.push(part.to_ndarray().reshape(part.samples, -1))
        if mono is None:
            raise InputError(f"{label}: the audio cannot be decoded; convert it to WAV or FLAC")
        # The length in a header may count from 0 although the audio begins later.
        promised = max(0.0, promised - max(0.0, start or 0.0))
        return mono.finish(promised, estimated=not _is_exact(container, track))


def _decoding(container: Any, track: Any) -> Callable[[Any], list[Any]]:
    """Return a function that decodes a packet; in an MP3 it skips invalid packets, such as tags."""
    track.thread_type = "AUTO"
    context: Any = track.codec_context
    if (name := _DECODERS.get(context.name)) in av.codecs_available:
        context = av.CodecContext.create(name, "r")
        context.sample_rate, context.layout = track.sample_rate, track.layout

    def decode(packet: Any) -> list[Any]:
        try:
            return context.decode(packet)
        except InvalidDataError:
            if container.format.name != "mp3":
                raise
            return []

    return decode


def _promised_seconds(container: Any, stream: Any, source: Path | bytes, label: str) -> float:
    """Return the duration given in the header of an ``opened`` source, in seconds; 0 if unknown."""
    if container.format.name == "mp3":
        return mp3_seconds(source, label)
    if container.format.name in _GUESSED:
        return 0.0
    if container.format.name == "ogg" and is_joined_ogg(source, label):
        return 0.0  # FFmpeg reports only the length of the last stream
    seconds = float(stream.duration * stream.time_base) if stream.duration else 0.0
    if not seconds and not container.streams.video:
        seconds = (container.duration or 0) / 1e6
    return seconds


def container_seconds(source: Path | bytes) -> float:
    """Return the length of a container's audio in seconds, from its header; 0 if unknown."""
    with opened(source, "") as container:
        return _promised_seconds(container, sound_track(container), source, "")


def _is_exact(container: Any, stream: Any) -> bool:
    """Whether ``_promised_seconds`` is exact; it is not for a video, whose audio may have gaps."""
    formats = container.format.name.split(",")
    if "mov" in formats:
        return bool(stream.duration) and not container.streams.video
    pcm = formats[0] in _EXACT_PCM and stream.codec_context.name.startswith("pcm_")
    return pcm or formats[0] == "mp3"
