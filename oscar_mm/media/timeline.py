"""Timeline: when the pictures and the sound of a file are on, by their own timestamps.

All of a clip is on one clock, which starts where the clip does and never steps back.
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
"""Seconds by which timestamps may be off: encoders' delays, and the jitter of live recordings."""

ROUNDING_S = 0.001
"""Matroska and FLV round times to a millisecond."""

MPEG = ("mpegts", "mpeg")
"""Containers whose headers have no length. They carry a clock ten times a second."""

_JUMP_S = 10.0
"""After a longer pause of such a clock another recording begins. FFmpeg takes the same seconds."""

_MAX_TICKS = 1 << 62


def picture_track(container: Any) -> Any | None:
    """The track of pictures that players show by default, which is no cover; None without one."""
    streams = container.streams.video
    return _default([one for one in streams if not one.disposition & Disposition.attached_pic])


def sound_track(container: Any) -> Any | None:
    """The track of sound that players play by default; None without one."""
    return _default(container.streams.audio)


def _default(streams: Sequence[Any]) -> Any | None:
    """The first stream that is marked as default, or the first of all."""
    marked = (stream for stream in streams if stream.disposition & Disposition.default)
    return next(marked, streams[0] if streams else None)


def picture_rate(track: Any) -> float:
    """Pictures per second by the header, for pictures without times."""
    return float(track.average_rate or track.guessed_rate or 24)


def header_seconds(container: Any, track: Any) -> float:
    """Length of a track by the header of its file; 0 if the header does not say."""
    if container.format.name in MPEG:
        return 0.0
    seconds = float(track.duration * track.time_base) if track.duration else 0.0
    return seconds or (container.duration or 0) / 1e6


def time_of(timed: Any, track: Any) -> float | None:
    """Seconds at which a packet or a frame of a track is due; None if it has no timestamp."""
    ticks = timed.dts if timed.pts is None else timed.pts
    return None if ticks is None else ticks * float(track.time_base)


def packets(container: Any) -> Iterator[Any]:
    """Packets of the default tracks in the order of the file, on a clock that runs on.

    Where timestamps step back, as in files joined by ``cat``, what follows begins at the end of all
    that came before; likewise where the clock of an MPEG stream jumps ahead. Packets that decoding
    can begin with tell: the others are out of order anyway.
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
                # Without a gap, where the tracks end together but for what a frame of sound fills.
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
    """Frames of a default track; their times are on the clock of ``packets``.

    Args:
        container: was just opened.
        track: of the container.
        decode: makes frames of a packet, and the last ones of None. It gets no empty packets: these
            repeat a picture, which stays on anyway.
    """
    for packet in packets(container):
        if packet.stream == track and packet.size:
            yield from decode(packet)
    yield from decode(None)


@dataclass(frozen=True)
class Timeline:
    """Where a clip begins on the clock of its file, and how long it lasts.

    Attributes:
        start: seconds on the clock of ``packets`` at which its first picture is due, or its sound,
            if that begins earlier by more than ``SLACK_S``.
        seconds: from there to the end of the last picture, above 0.
        has_sound: whether the file has a track of sound.
    """

    start: float
    seconds: float
    has_sound: bool

    @classmethod
    def of(cls, container: Any, check: Callable[[float], None], label: str) -> Timeline:
        """Read all packets of a clip, without decoding them.

        Args:
            container: has a track of pictures, and was just opened.
            check: refuses a clip of so many seconds if that is too long.
            label: name of the clip in error messages.

        Raises:
            InputError: the clip is cut off, or too long.
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
        # Both must fall short, as a last slide may stay for long. AVI counts repeats that FFmpeg
        # leaves out; ``check_whole`` knows the size of its files.
        short = count < MIN_SHARE * pictures.frames and end - first < MIN_SHARE * promised
        if short and container.format.name != "avi":
            raise InputError(
                f"{label}: ends after {end - first:.1f} of {promised:.1f} s; the file is cut off, "
                "copy or download it again"
            )
        if pictures.duration or not sound:
            end = max(end, first + promised)
        start = heard if heard < first - SLACK_S else first
        check(end - start)
        return cls(start, end - start, sound is not None)


def on_show(timed: Iterable[tuple[float, T]], times: Sequence[float]) -> Iterator[T]:
    """What is on show at each of some times; nothing if there is nothing to show.

    Args:
        timed: items with the times from which on they are shown, each until the next. The first is
            shown before its time too.
        times: ascending.
    """
    place = 0
    ended: Iterable[tuple[float, Any]] = chain(timed, [(math.inf, None)])
    for (_, item), (until, _) in pairwise(ended):
        while place < len(times) and times[place] < until - ROUNDING_S:
            yield item
            place += 1
