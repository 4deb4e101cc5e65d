"""Compilation in tests: reports of kernels, for tests that need them to compile, and no GPU.

NVRTC takes about a second for each, and gives the same for the same texts. So a file keeps the
report under the hash of all that it depends on, for all clones of a user: kernels that have changed
are compiled again.
"""

import ctypes
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from oscar_mm.kernels import compile

FOLDER = (compile.cache_folder() or Path(__file__).parents[1] / ".cache") / "tests"
ALL = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")
_USUAL = ("sm_80", "sm_90a")


def architectures(names: Iterable[str] = ALL) -> list[object]:
    """Parameters of a test: the oldest architecture and Hopper always, the others with -m soak."""
    soak = pytest.mark.soak
    return [pytest.param(name, marks=() if name in _USUAL else soak) for name in names]


def same_struct(structure: type[ctypes.Structure], name: str = "Params") -> str:
    """Text that compiles only if a struct of csrc has the same fields at the same places.

    Args:
        structure: what the host fills; structures in it have the names that they have in csrc.
        name: of the struct in csrc.
    """
    lines = [f"static_assert(sizeof({name}) == {ctypes.sizeof(structure)});\n"]
    for field, kind, *_ in structure._fields_:
        place = getattr(structure, field)
        # NVRTC's offsetof; it has no header with the macro.
        offset = f"__INTADDR__(&(({name}*)0)->{field})"
        same = f"{offset} == {place.offset} && sizeof({name}::{field}) == {place.size}"
        lines.append(f"static_assert({same});\n")
        if issubclass(kind, ctypes.Array):
            kind = kind._type_
        if issubclass(kind, ctypes.Structure):
            lines.append(same_struct(kind, kind.__name__))
    return "".join(lines)


def compile_once(
    source: str, text: str, arch: str, macros: Mapping[str, str | int]
) -> dict[str, compile.Report]:
    """What each kernel takes, by name; an error is that of the compiler.

    Args:
        source: a file of csrc.
        text: of the file, and what a test adds to it.
        arch: as of ``oscar_mm.kernels.compile.compile_text``.
        macros: as there.
    """
    key = compile._key(compile._read_sources(source) | {source: text}, arch, macros)
    path = FOLDER / f"{Path(source).stem}-{arch}-{key}"
    found = compile._load(path, key)
    if found is None:
        found = replace(compile.compile_text(source, text, arch, macros), code=b"")
        compile._store(path, key, found)
    return found.reports


def unexpected(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return what was logged, except that kernels compile, which depends on earlier tests."""
    return [record for record in caplog.records if record.name != compile.__name__]
