"""Detect the kind of a media file (images, videos or audio) from its content."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from oscar_mm.media.source import existing_file, is_address

SUFFIXES = {
    "images": (
        *(".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tiff", ".tif", ".avif"),
        *(".jp2", ".ico"),
    ),
    "videos": (
        *(".mp4", ".m4v", ".webm", ".mkv", ".mov", ".avi", ".mpg", ".mpeg", ".ts", ".wmv"),
        *(".flv", ".ogv", ".3gp"),
    ),
    "audio": (
        *(".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".m4a", ".aac", ".wma", ".amr"),
        *(".aiff", ".aif", ".caf", ".weba"),
    ),
}
KIND = {suffix: kind for kind, suffixes in SUFFIXES.items() for suffix in suffixes}
"""Kind of media that a suffix suggests; a container such as MP4 may contain only audio."""
_OF_TYPE = {"image": "images", "video": "videos", "audio": "audio"}


def kind_of(source: str | Path) -> str | None:
    """Detect the kind of a file from its content, or of a data URI from its media type.

    For a file that cannot be read, and for an http(s) URL, the suffix decides.

    Returns:
        A key of SUFFIXES; None if the kind is unknown.
    """
    if isinstance(source, str) and source[:5].lower() == "data:":
        return _OF_TYPE.get(source[5:64].partition("/")[0].lower())
    if is_address(source):
        return KIND.get(PurePosixPath(urlsplit(source).path).suffix.lower())
    return _kind_of_file(source) or KIND.get(Path(source).suffix.lower())


def _kind_of_file(source: str | Path) -> str | None:
    try:
        path = existing_file(source, "")
        return "images" if _is_image(path) else _kind_of_container(path)
    except Exception:  # parsers may raise anything; reading the file later reports the error
        return None


def _is_image(path: Path) -> bool:
    from oscar_mm.media.image import image_outline  # slow to import, as are the imports below
    from oscar_mm.media.limits import MediaLimits

    return image_outline(path, limits=MediaLimits()) is not None


def _kind_of_container(path: Path) -> str | None:
    from oscar_mm.media.audio import opened
    from oscar_mm.media.timeline import picture_track, sound_track

    with opened(path, "") as container:
        if picture_track(container) is not None:
            return "videos"
        return None if sound_track(container) is None else "audio"
