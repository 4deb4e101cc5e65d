"""Parse and format sizes in bytes; memory of GPUs by name."""

from __future__ import annotations

import re
from typing import Any

from oscar_mm.errors import InputError, shown

GPUS = {
    "RTX 4090": 24,
    "RTX 5090": 32,
    "L40S": 48,
    "A100": 80,
    "H100": 80,
    "H200": 141,
    "B200": 180,
}
"""Memory of GPUs in units of 10^9 bytes."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(name: str, size: Any) -> int:
    """Parse a number of bytes or text such as "8GB", "512 MiB" (1 GB is 10^9, 1 GiB is 2^30).

    Args:
        name: name of the argument in error messages.
        size: whole number of bytes, or text to parse.

    Raises:
        InputError: if ``size`` is neither of these, or is less than one byte.
    """
    count: float = 0
    if isinstance(size, int) and not isinstance(size, bool):
        count = size
    elif isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if match and match[2].upper() in _UNITS:
            count = float(match[1]) * _UNITS[match[2].upper()]
    if count < 1:
        raise InputError(f'{name}={shown(size)}: must be a number of bytes, or text such as "8GB"')
    return int(count)


def format_bytes(count: float) -> str:
    """Format a number of bytes for display: "512 B", "1.50 MB" (1 MB is 10^6 bytes)."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
