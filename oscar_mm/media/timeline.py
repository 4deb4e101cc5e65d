"""Timeline: when each picture of a file is shown and its audio is played, based on timestamps.

Pictures and audio share one clock, which never steps back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, TypeVar

from av.stream import Disposition

from oscar_mm.errors import InputError
from oscar_mm.media.resample import MIN_SHARE

T = TypeVar("T")

SLACK_S = 0.1
"""Seconds by which timestamps may be off, due to encoder delay or jitter in live recordings."""

ROUNDING_S = 0.001
"""Rounding error of timestamps in seconds: Matroska and FLV round to a millisecond."""

MPEG = ("mpegts", "mpeg")
"""Containers without a length in the header, which contain a clock value ten times a second."""

_JUMP_S = 10.0
"""Maximum jump of an MPEG clock within a recording, in seconds; after a longer jump another
recording starts, as in FFmpeg."""

_MAX_TICKS = 1 << 62


def picture_track(container: Any) -> Any | None:
    """Return the video track that players show by default, which is never cover art; None if the
    file has no such track."""
    streams = container.streams.video
    return _default([one for one in streams if not one.disposition & Disposition.attached_pic])


def sound_track(container: Any) -> Any | None:
    """Return the audio track that players play by default; None if the file has no audio."""
    return _default(container.streams.audio)


def _default(streams: Sequence[Any]) -> Any | None:
    """Return the first stream marked as default, otherwise the first stream."""
    marked = (stream for stream in streams if stream.disposition & Disposition.default)
    return next(marked, streams[0] if streams else None)


def picture_rate(track: Any) -> float:
    """Return the frame rate in the header (else 24), from which times are computed for pictures
    without timestamps."""
    return float(track.average_rate or track.guessed_rate or 24)


def header_seconds(container: Any, track: Any) -> float:
    """Return the length of a track in seconds, from the header of its file; 0 if unknown."""
    if container.format.name in MPEG:
        return 0.0
    seconds = float(track.duration * track.time_base) if track.duration else 0.0
    return seconds or (container.duration or 0) / 1e6


def time_of(timed: Any, track: Any) -> float | None:
    """Return the time of a packet or a frame, in seconds; None if it has no timestamp."""
    ticks = timed.dts if timed.pts is None else timed.pts
    return None if ticks is None else ticks * float(track.time_base)


def packets(container: Any) -> Iterator[Any]:
    """Yield packets of the default tracks in file order, on a clock without jumps.

    If timestamps step back, as in files joined by ``cat``, or the clock of an MPEG stream jumps
    ahead, the following packets are moved to the end of all earlier packets. Only keyframes are
    checked for this, because other packets may be out of order.
    """
    tracks = [track for track in (picture_track(container), sound_track(container)) if track]
    jumps = container.format.name in MPEG
    newest: dict[Any, float] = {}
    ends: dict[Any, float] = {}
    shift = 0.0
    for packet in container.demux(tracks):
        track = packet.stream
        time = time_of(packet, track)
        if time is not None and not packet.is_discard:
            time += shift
            before, end = newest.get(track, time), max(ends.values(), default=time)
            late = jumps and track in newest and time > end + _JUMP_S
            if packet.is_keyframe and (late or time < before - SLACK_S):
                # If the tracks end within SLACK_S of each other, join this track without a gap.
                joint = ends[track] if ends[track] > end - SLACK_S else end
                shift += joint - time
                time = joint
            newest[track] = max(before, time)
            ends[track] = max(ends.get(track, time), time + _duration(packet, track))
        if shift:
            _move(packet, round(shift / track.time_base))
        yield packet


def _duration(packet: Any, track: Any) -> float:
    return (packet.duration or 0) * float(track.time_base)


def _move(packet: Any, ticks: int) -> None:
    for name in ("pts", "dts"):
        if (own := getattr(packet, name)) is not None:
            setattr(packet, name, min(max(own + ticks, -_MAX_TICKS), _MAX_TICKS))


def decoded(container: Any, track: Any, decode: Callable[[Any], list[Any]]) -> Iterator[Any]:
    """Decode a default track to frames that have times on the clock of ``packets``.

    Args:
        container: PyAV container that was just opened.
        track: default track of the container.
        decode: function that decodes a packet to frames; for None, it returns the last frames. It
            is not called with empty packets, which only repeat a picture that is still shown.
    """
    for packet in packets(container):
        if packet.stream == track and packet.size:
            yield from decode(packet)
    yield from decode(None)


@dataclass(frozen=True)
class Timeline:
    """Start and length of a clip on the clock of its file.

    Attributes:
        start: time of the first picture, in seconds on the clock of ``packets``, or of the audio if
            it begins earlier by more than ``SLACK_S``.
        seconds: seconds from ``start`` to the end of the last picture, above 0.
        has_sound: whether the file has an audio track.
    """

    start: float
    seconds: float
    has_sound: bool

    @classmethod
    def of(cls, container: Any, check: Callable[[float], None], label: str) -> Timeline:
        """Read all packets of a clip without decoding them.

        Args:
            container: PyAV container with a video track that was just opened.
            check: function that raises if its argument, in seconds, is too long for a clip.
            label: name of the clip in error messages.

        Raises:
            InputError: if the clip is cut off, or too long.
        """
        pictures, sound = picture_track(container), sound_track(container)
        assert pictures is not None
        count, first, end, heard = 0, math.inf, -math.inf, math.inf
        picture_s = 1 / picture_rate(pictures)
        for packet in packets(container):
            time = time_of(packet, packet.stream)
            is_picture = packet.stream == pictures
            count += is_picture and (packet.size > 0 or time is not None)
            if time is None or packet.is_discard:
                continue
            if is_picture:
                first = min(first, time)
                end = max(end, time + (_duration(packet, pictures) or picture_s))
            else:
                heard = min(heard, time)
            check(end - min(first, heard))
        if math.isinf(first):  # no picture has a timestamp, or there is none
            first = 0.0 if math.isinf(heard) else heard
            end = first + max(count, 1) * picture_s
        promised = header_seconds(container, pictures)
        # Both must fall short, because the last picture may be shown for a long time. AVI headers
        # count repeated pictures, which FFmpeg skips, so ``check_whole`` checks AVI files instead.
        short = count < MIN_SHARE * pictures.frames and end - first < MIN_SHARE * promised
        if short and container.format.name != "avi":
            raise InputError(
                f"{label}: ends after {end - first:.1f} of {promised:.1f} s, so the file is cut "
                "off; copy or download it again"
            )
        if pictures.duration or not sound:
            end = max(end, first + promised)
        start = heard if heard < first - SLACK_S else first
        check(end - start)
        return cls(start, end - start, sound is not None)


def on_show(timed: Iterable[tuple[float, T]], times: Sequence[float]) -> Iterator[T]:
    """Yield the item that is shown at each of ``times``; yield nothing if there are no items.

    Args:
        timed: pairs (time in seconds, item). An item is shown from its time until the next item's
            time; the first item is shown before its time too.
        times: times in seconds, in ascending order.
    """
    place = 0
    ended: Iterable[tuple[float, Any]] = chain(timed, [(math.inf, None)])
    for (_, item), (until, _) in pairwise(ended):
        while place < len(times) and times[place] < until - ROUNDING_S:
            yield item
            place += 1
