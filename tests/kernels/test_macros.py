"""Macros from the fields of specializations, and structs of csrc beside those of the host."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import pytest
import torch

from oscar_mm.kernels.compile import KernelError, compile_text
from oscar_mm.kernels.launch import ints, page_macros, pointers
from oscar_mm.kernels.macros import macros_of
from oscar_mm.pages.layout import PageFormat
from oscar_mm.policy import Bits
from tests.compiled import same_struct


class Inner(NamedTuple):
    columns: int
    dtype: torch.dtype


class Outer(NamedTuple):
    inner: Inner
    gated: bool
    rows: int = 4


def test_fields_are_macros() -> None:
    found = macros_of(Outer(Inner(8, torch.float16), True), DEPTH=3, USE_TMA=False)
    assert found == {
        "COLUMNS": 8,
        "ELEMENT": "__half",
        "GATED": 1,
        "ROWS": 4,
        "DEPTH": 3,
        "USE_TMA": 0,
    }
    # The compiler and its cache take them as text.
    assert {type(value) for value in found.values()} == {int, str}


def test_a_page_format_has_several_macros() -> None:
    class Paged(NamedTuple):
        page_format: PageFormat
        rotate: bool

    form = PageFormat(Bits(2, 2), 8, 64, "channel", 64, 32, "per_head")
    assert macros_of(Paged(form, False)) == page_macros(form) | {"ROTATE": 0}


def test_a_dtype_without_a_kernel_is_refused() -> None:
    with pytest.raises(KeyError):
        macros_of(Inner(8, torch.float64))


class Part(ctypes.Structure):
    _fields_ = (*pointers("weights"), *ints("outputs"))


class Params(ctypes.Structure):
    _fields_ = (("parts", Part * 2), *ints("rows"), ("scale", ctypes.c_float))


@pytest.mark.parametrize(
    ("part", "fields", "same"),
    [
        ("const void* weights; int outputs;", "Part parts[2]; int rows; float scale;", True),
        ("const void* weights; int outputs;", "Part parts[2]; float scale; int rows;", False),
        ("const void* weights; int outputs;", "Part parts[2]; int lines; float scale;", False),
        ("const void* weights; char outputs;", "Part parts[2]; int rows; float scale;", False),
        ("const void* weights; int outputs;", "Part parts[1]; int rows; float scale;", False),
    ],
)
def test_a_struct_with_other_fields_does_not_compile(part: str, fields: str, same: bool) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    text = f"struct Part {{ {part} }};\nstruct Params {{ {fields} }};\n{same_struct(Params)}"
    text += 'extern "C" __global__ void kernel(const __grid_constant__ Params params) {}\n'
    if same:
        assert compile_text("kernel.cu", text, "sm_80", {}).code
    else:
        with pytest.raises(KernelError, match=r"static assertion|no member"):
            compile_text("kernel.cu", text, "sm_80", {})
