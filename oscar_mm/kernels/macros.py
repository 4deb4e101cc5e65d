"""Macros: compile-time parameters of a kernel, declared as fields of its specialization.

Specializations are ``NamedTuple`` classes, not dataclasses: outside CUDA graphs, one is created and
hashed before each launch, which takes less than half the time of a dataclass.
"""

from __future__ import annotations

from typing import Any

import torch

from oscar_mm.kernels.launch import ELEMENTS, page_macros
from oscar_mm.pages.layout import PageFormat

Macros = dict[str, str | int]
"""Macro values by name, as ``oscar_mm.kernels.launch.load_kernel`` takes them."""


def macros_of(specialization: Any, **more: int) -> Macros:
    """Return the macros for a NamedTuple: its fields by capitalized name, and ``more``.

    A dtype becomes the macro ELEMENT, a page format the macros for csrc/common/page.cuh, and a
    nested NamedTuple the macros for its own fields.
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
