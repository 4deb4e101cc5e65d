"""csrc/common/page.cuh states the bytes of a page as pages/layout.py does."""

import re
from itertools import product

import pytest

from oscar_mm.kernels.compile import KernelError, compile_text, csrc_folder
from oscar_mm.kernels.launch import page_macros
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.policy import Bits

pytest.importorskip("cuda.core", reason="needs cuda-core")

KV_HEADS = 8
SCALINGS = (None, "per_head", "shared")
FORMATS = [
    *(
        PageFormat(bits, KV_HEADS, head_dim, "channel", key_group, value_group, scaling)
        for head_dim, key_group, value_group, scaling, bits in product(
            (64, 128), (32, 64, 128), (32, 64, 128), SCALINGS, (Bits(2, 2), Bits(4, 4))
        )
        if value_group <= head_dim
    ),
    *(
        PageFormat(Bits(*bits), KV_HEADS, head_dim, "token", head_dim, value_group, None, center)
        for head_dim, value_group, center, bits in product(
            (64, 128, 256), (32, 64, 128), (True, False), product((2, 3, 4), repeat=2)
        )
        if value_group <= head_dim
    ),
]


def page_header() -> tuple[str, str]:
    """Lines of page.cuh that include other headers, and the rest of it."""
    text = (csrc_folder() / "common/page.cuh").read_text().replace("#pragma once", "")
    includes = re.findall(r"^#include .*$", text, re.MULTILINE)
    return "\n".join(includes), re.sub(r"^#include .*$", "", text, flags=re.MULTILINE)


def claims(page: PageFormat, page_bytes: int) -> list[str]:
    """What layout.py says, as page.cuh would say it."""
    twin = f"Page<{page.bits.keys}, {page.bits.values}>"
    found = {}
    for name, field in page.fields.items():
        if name.endswith("_codes_high"):
            side = name.removesuffix("_codes_high")
            high = f"{side.capitalize()}s::HIGH"
            found[f"{twin}::{side}_codes + {twin}::{high}"] = field.offset
        elif field.per_head:
            found[f"{twin}::{name}"] = field.offset
    found[f"{twin}::head_bytes"] = page.head_bytes
    found[f"{twin}::page_bytes({page.kv_heads})"] = page_bytes
    for side in ("key", "value"):
        codes = [x.nbytes for name, x in page.fields.items() if name.startswith(f"{side}_codes")]
        found[f"{twin}::{side.capitalize()}s::ALL"] = sum(codes)
    if not page.codec.appends_tokens:
        found["KEY_GROUPS"] = page.fields["key_scales"].shape[0]
    found["VALUE_GROUPS"] = page.fields["value_scales"].shape[1]
    found["PAGE_TOKENS"] = PAGE_TOKENS
    if page.token_scaling == "shared":
        # Without a name there: the shared norms begin where the heads end.
        norms = page.fields["norms"]
        found[f"{page.kv_heads} * {twin}::head_bytes"] = norms.offset
        found[f"{twin}::shared_bytes"] = norms.nbytes
    else:
        found[f"{twin}::shared_bytes"] = 0
    return [f'static_assert({name} == {value}, "{page}, {name}");' for name, value in found.items()]


def source(formats: list[PageFormat], more: int = 0) -> str:
    """page.cuh once per format, each in a namespace, so that one compilation checks all."""
    includes, header = page_header()
    parts = [includes]
    for index, page in enumerate(formats):
        for macro, value in page_macros(page).items():
            parts += [f"#undef {macro}", f"#define {macro} {value}"]
        parts += [f"namespace format{index} {{", header, *claims(page, page.page_bytes + more), "}"]
    return "\n".join(parts)


def test_page_twin() -> None:
    assert len(FORMATS) == 90 + 144
    compile_text("page_twin.cu", source(FORMATS), "sm_80", {})


def test_a_difference_is_found() -> None:
    with pytest.raises(
        KernelError, match=r"static assertion failed.*PageFormat\(bits=Bits\(keys=4"
    ):
        compile_text("page_twin.cu", source(FORMATS[1:2], more=16), "sm_80", {})


def test_the_size_of_a_page_is_stated_once() -> None:
    texts = {path: path.read_text() for path in csrc_folder().rglob("*.cu*")}
    said = {path.name: re.findall(r"\bPAGE_TOKENS = (\d+)", text) for path, text in texts.items()}
    assert {name: sizes for name, sizes in said.items() if sizes} == {
        "page_tokens.cuh": [str(PAGE_TOKENS)]
    }
