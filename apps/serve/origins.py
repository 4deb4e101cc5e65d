"""Origins: web pages that may ask the server."""

from __future__ import annotations

import re
from collections.abc import Iterable

from oscar_mm.errors import InputError

ANY = "*"
_OPAQUE = "null"
"""The origin of pages that are files, and of frames that any page can make."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::\d{1,5})?")


def read_origins(given: Iterable[str], *, has_key: bool) -> tuple[str, ...]:
    """Check the origins of ``--allow-origin``.

    Args:
        given: origins as browsers send them, or "*" for any.
        has_key: whether clients must send a key.

    Raises:
        InputError: one is no origin, or would let any page ask a server without a key.
    """
    origins = tuple(dict.fromkeys(origin.lower() for origin in given))
    for origin in origins:
        if origin in (ANY, _OPAQUE):
            if not has_key:
                raise InputError(
                    f"--allow-origin {origin}: any web page could ask this server: name origins, "
                    "or have clients send a key (--api-key-file)"
                )
        elif not _ORIGIN.fullmatch(origin):
            raise InputError(
                f"--allow-origin {origin[:200]}: must be scheme, host and port of a page, such as "
                "http://localhost:3000"
            )
    return origins
