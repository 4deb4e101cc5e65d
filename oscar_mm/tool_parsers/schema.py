"""Convert JSON schemas to a form that llguidance accepts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TIMES = frozenset(("date-time", "time", "date", "duration"))
_FORMATS = _TIMES | {"email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
"""String formats that llguidance supports."""
_VALUES = frozenset(("const", "enum", "default", "examples"))
"""Keywords whose values are not schemas."""


def without_unknown_formats(schema: Any) -> Any:
    """Return a schema without the string formats that llguidance rejects.

    The result accepts the same values, since implementations must ignore unknown formats (JSON
    Schema 2020-12, Validation, 7.2.3).
    """
    if isinstance(schema, list):
        return [without_unknown_formats(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: value if name in _VALUES else without_unknown_formats(value)
        for name, value in schema.items()
        if name != "format" or not isinstance(value, str) or value in _FORMATS
    }
