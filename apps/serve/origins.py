"""Origins of web pages that may use the server (CORS)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from oscar_mm.errors import InputError

ANY = "*"
_OPAQUE = "null"
"""The origin of local files and of sandboxed frames, which any page can create."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::\d{1,5})?")


def read_origins(given: Iterable[str], *, has_key: bool) -> tuple[str, ...]:
    """Check the values of ``--allow-origin``, and return the origins without duplicates.

    Args:
        given: origins as browsers send them, or "*" for any origin.
        has_key: whether clients must send an API key.

    Raises:
        InputError: if a value is not an origin, or would let any web page use a server without
            a key.
    """
    origins = tuple(dict.fromkeys(origin.lower() for origin in given))
    for origin in origins:
        if origin in (ANY, _OPAQUE):
            if not has_key:
                raise InputError(
                    f"--allow-origin {origin}: any web page could use this server; list the "
                    "allowed origins, or require a key (--api-key-file)"
                )
        elif not _ORIGIN.fullmatch(origin):
            raise InputError(
                f"--allow-origin {origin[:200]}: must be the scheme, host and port of a page, such "
                "as http://localhost:3000"
            )
    return origins
