"""Macros: compile-time parameters of a kernel, declared as the fields of its specialization.

A specialization is a ``NamedTuple``, not a dataclass: outside CUDA graphs one is made and hashed
before each launch, which takes less than half the time.
"""

from __future__ import annotations

from typing import Any

import torch

from oscar_mm.kernels.launch import ELEMENTS, page_macros
from oscar_mm.pages.layout import PageFormat

Macros = dict[str, str | int]
"""Values by name, as ``oscar_mm.kernels.launch.load_kernel`` takes them."""


def macros_of(specialization: Any, **more: int) -> Macros:
    """Return the macros of a NamedTuple: its fields by their names in capitals, and ``more``.

    A dtype is ELEMENT, a page format the macros of csrc/common/page.cuh; a NamedTuple in a field
    adds its own fields.
    """
    macros: Macros = {}
    for name, value in (specialization._asdict() | more).items():
        if isinstance(value, torch.dtype):
            macros["ELEMENT"] = ELEMENTS[value]
        elif isinstance(value, PageFormat):
            macros |= page_macros(value)
        elif isinstance(value, tuple):
            macros |= macros_of(value)
        else:
            macros[name.upper()] = int(value)
    return macros
